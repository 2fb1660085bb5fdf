"""Speech synthesis at toy size, trained with apex O1 and an edited list of functions.

Prints each loss and norm of the gradients exactly, so that two runs can be compared bit for bit.
"""

import argparse

import torch
import torch.nn.functional as F
from apex.parallel import DistributedDataParallel as DDP
from torch import nn

from apex import amp

amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
amp.lists.functional_overrides.FP16_FUNCS.append("softmax")

TOKENS, WIDTH, BINS, SEED = 12, 16, 6, 1234


class Synthesizer(nn.Module):
    """Tokens to frames: an encoder, attention over its states, and a recurrent decoder."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 5, padding=2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decoder = nn.LSTMCell(BINS + WIDTH, WIDTH)
        self.projection = nn.Linear(2 * WIDTH, BINS)
        self.gate = nn.Linear(2 * WIDTH, 1)

    def forward(self, inputs):
        tokens, frames = inputs
        encoded = F.relu(self.norm(self.convolution(self.embedding(tokens).transpose(1, 2))))
        hidden = cell = frames.new_zeros(len(tokens), WIDTH)
        context = frames.new_zeros(len(tokens), WIDTH)
        made, ends = [], []
        for frame in F.pad(frames, (0, 0, 1, 0))[:, :-1].unbind(dim=1):
            hidden, cell = self.decoder(torch.cat([frame, context], dim=1), (hidden, cell))
            scores = torch.bmm(self.query(hidden).unsqueeze(1), encoded).squeeze(1)
            weights = F.softmax(scores, dim=1)
            context = torch.bmm(encoded, weights.unsqueeze(2)).squeeze(2)
            state = torch.cat([hidden, context], dim=1)
            made.append(self.projection(state))
            ends.append(self.gate(state))
        return torch.stack(made, dim=1), torch.cat(ends, dim=1)


class SpeechLoss(nn.Module):
    def forward(self, prediction, target):
        frames, gate = prediction
        true_frames, true_gate = target
        return nn.MSELoss()(frames, true_frames) + nn.BCEWithLogitsLoss()(gate, true_gate)


def batch_to_device(batch, device):
    tokens, frames, gate = (part.to(device) for part in batch)
    return (tokens, frames), (frames, gate)


def batches():
    """The same utterances in every run."""
    generator = torch.Generator().manual_seed(SEED)
    sounds = torch.randn(TOKENS, BINS, generator=generator)
    while True:
        tokens = torch.randint(TOKENS, (4, 8), generator=generator)
        gate = torch.zeros(4, 8)
        gate[:, -1] = 1.0
        yield tokens, sounds[tokens], gate


def reduce_tensor(tensor, world_size):
    reduced = tensor.clone()
    torch.distributed.all_reduce(reduced)
    return reduced / world_size


def parse_args():
    parser = argparse.ArgumentParser(description="Speech synthesis at toy size")
    parser.add_argument("--amp", action="store_true", help="mixed precision")
    parser.add_argument("--distributed", action="store_true", help="started by torchrun")
    parser.add_argument("--iterations", type=int, default=12)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    distributed_run = args.distributed
    if distributed_run:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    world_size = torch.distributed.get_world_size() if distributed_run else 1

    model = Synthesizer().to(device)
    if not args.amp and distributed_run:
        model = DDP(model)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-6)

    if args.amp:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        if distributed_run:
            model = DDP(model)

    criterion = SpeechLoss()
    model.train()
    for iteration, batch in zip(range(args.iterations), batches()):
        model.zero_grad()
        x, y = batch_to_device(batch, device)

        y_pred = model(x)
        loss = criterion(y_pred, y)

        if distributed_run:
            reduced_loss = reduce_tensor(loss.data, world_size).item()
        else:
            reduced_loss = loss.item()

        if args.amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        else:
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        optimizer.step()
        print(f"iteration {iteration} loss {reduced_loss.hex()} norm {grad_norm.item().hex()}")

    total = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
    print(f"parameters {total.hex()}")
    if distributed_run:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
