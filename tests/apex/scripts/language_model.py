"""A recurrent-memory transformer of toy size and a text for it, for the scripts beside it."""

import torch
import torch.nn.functional as F
from torch import nn

CHARACTERS, WIDTH, HEADS, MEMORY = 16, 32, 2, 8


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
