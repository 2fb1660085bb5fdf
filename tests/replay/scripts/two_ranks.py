"""200 steps on ranks of gloo, 20 of them skipped and each run again; prints a digest of every bit."""

import argparse
import gc
import hashlib
import json
import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.attach import Attachment
from narrowcast.scaling import Static

STEPS = 200


class Net(torch.nn.Module):
    """Dropout, a batch norm, and an exponential that overflows fp16 where an input is 12."""

    def __init__(self):
        super().__init__()
        self.enter = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.leave = torch.nn.Linear(8, 1)
        with torch.no_grad():
            self.enter.weight.copy_(torch.eye(8))
            self.enter.bias.zero_()

    def forward(self, x):
        grown = self.enter(x).exp()
        return self.leave(torch.nn.functional.dropout(self.norm(grown), 0.5))


def told_again(explainer):
    """Have every skip told, also of a kind that was; return how many were since the last time."""
    stories = explainer._stories
    told = len(stories.told)
    stories.told.clear()
    stories._kinds.clear()
    stories._attempts = 0
    return told


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stepper", action="store_true")
    parser.add_argument("--no-replay", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(1 + rank)
    random.seed(rank)
    told = 0
    if arguments.stepper:
        scaler = nc.GradScaler("cpu", loss_scale=Static(scale=8.0))
        explains = not arguments.no_replay
        stepper = nc.Stepper(model, optimizer, "fp16", scaler=scaler, explain_skips=explains)
        explainer = stepper._explainer
    else:
        explainer = Attachment._in_force._regions.explainer
    for step in range(STEPS):
        x = torch.rand(4, 8, generator=generator)
        if step % 10 == 5 and rank == 1:
            x[0] = 12.0
        if arguments.stepper:
            with stepper.autocast():
                loss = model(x).float().square().mean()
            stepper.step(loss)
        else:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        told += told_again(explainer)

    digest = hashlib.sha256()
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    for tensor in [*model.state_dict().values(), *states, torch.get_rng_state()]:
        digest.update(tensor.detach().numpy().tobytes())
    digest.update(repr(random.getstate()).encode())
    print(json.dumps({"rank": rank, "told": told, "digest": digest.hexdigest()}), flush=True)
    gc.collect()  # DDP ends before its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
