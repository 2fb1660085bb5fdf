"""A language model with memories, at toy size, trained in chunks of a batch with apex.

Prints each loss and norm of the gradients exactly, so that two runs can be compared bit for bit.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from apex import amp

CHARACTERS, WIDTH, HEADS, MEMORY = 16, 32, 2, 8
SEED, CHUNKS = 1111, 2


class Block(nn.Module):
    """Attention to the memory and to what came before, then a feed-forward network; norms behind."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, x, memory):
        """Positions first: (T, N, D)."""
        seen = torch.cat([memory, x], dim=0)
        query = self.query(x).view(len(x), -1, HEADS, WIDTH // HEADS)
        key, value = self.key_value(seen).view(len(seen), -1, HEADS, 2 * WIDTH // HEADS).chunk(2, dim=3)
        scores = torch.einsum("ibnd,jbnd->bnij", query, key) / (WIDTH // HEADS) ** 0.5
        future = torch.ones(len(x), len(seen), device=x.device).triu(1 + len(memory)).bool()
        weights = F.softmax(scores.float().masked_fill(future, float("-inf")), dim=3).type_as(scores)
        attended = torch.einsum("bnij,jbnd->ibnd", weights, value).reshape(x.shape)
        x = self.attention_norm(x + self.output(attended))
        return self.norm(x + self.feed_forward(x))


class MemoryTransformer(nn.Module):
    """Returns the loss of each position and the memory for the next segment."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.logits = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, data, target, mems):
        x = self.embedding(data)
        if mems is None:
            mems = [x.new_zeros(MEMORY, data.shape[1], WIDTH) for _ in self.blocks]
        new_mems = []
        for block, memory in zip(self.blocks, mems):
            new_mems.append(torch.cat([memory.type_as(x), x], dim=0)[-MEMORY:].detach())
            x = block(x, memory.type_as(x))
        loss = F.cross_entropy(self.logits(x).flatten(0, 1), target.flatten(), reduction="none")
        return loss.view(target.shape), new_mems


def segments(seed, length, batch_size):
    """Data and target, (T, N), of a text in which each character says what the next may be."""
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randint(CHARACTERS, (CHARACTERS, 2), generator=generator)
    last = torch.randint(CHARACTERS, (batch_size,), generator=generator)
    while True:
        text = [last]
        for _ in range(length):
            choice = torch.randint(2, (batch_size,), generator=generator)
            text.append(follows[text[-1], choice])
        last = text[-1]
        yield torch.stack(text[:-1]), torch.stack(text[1:])


def train_iteration(model, i, mems, data_chunks, target_chunks, optimizer, delay_unscale, args):
    data_i = data_chunks[i].contiguous()
    target_i = target_chunks[i].contiguous()

    loss, mems[i] = model(data_i, target_i, mems[i])
    loss = loss.float().mean().type_as(loss) / CHUNKS

    if args.fp16:
        with amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()

    return loss.float().item()


def parse_args():
    parser = argparse.ArgumentParser(description="Language model at toy size")
    parser.add_argument("--fp16", action="store_true", help="mixed precision")
    parser.add_argument("--opt_level", default="O2", choices=["O0", "O1", "O2", "O3"])
    parser.add_argument("--max_step", type=int, default=12)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = MemoryTransformer().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)  # 1e-8 is 0 in float16
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_step)

    mems = [None for _ in range(CHUNKS)]
    model.train()
    for train_step, (data, target) in zip(range(args.max_step), segments(SEED, 8, 4)):
        for param in model.parameters():
            param.grad = None

        data_chunks = torch.chunk(data.to(device), CHUNKS, 1)
        target_chunks = torch.chunk(target.to(device), CHUNKS, 1)

        train_loss = 0.0
        for i in range(CHUNKS):
            delay_unscale = i < CHUNKS - 1
            train_loss += train_iteration(
                model, i, mems, data_chunks, target_chunks, optimizer, delay_unscale, args
            )

        if args.fp16:
            norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.25)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)

        optimizer.step()
        scheduler.step()
        print(f"step {train_step} loss {train_loss.hex()} norm {norm.item().hex()}")

    total = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
    print(f"parameters {total.hex()}")


if __name__ == "__main__":
    main()
