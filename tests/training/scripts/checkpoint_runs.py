"""Runs that are saved at their fifth step, and go on in a process of their own, to the bit.

python checkpoint_runs.py save FOLDER CASE...      the whole runs, and their checkpoints
python checkpoint_runs.py resume FOLDER CASE...    from the checkpoints to the end, and a full disk
"""

import contextlib
import random
import resource
import sys
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import narrowcast as nc

STEPS, HALF, BATCHES = 10, 5, 4
OVERFLOWS = (3, 7)
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Run:
    """Training that draws from every source of random numbers; each case builds its own optimizer side."""

    def __init__(self, case, seed):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 3)
        )
        self.kind, _, self.format = case.partition(" ")
        self.order = torch.Generator().manual_seed(seed)
        data = torch.randn(BATCHES * 4, 8, generator=torch.Generator().manual_seed(1))
        self.loader = DataLoader(TensorDataset(data), batch_size=4, shuffle=True, generator=self.order)
        self.position = {"epoch": 0, "batch": 0, "order": self.order.get_state()}
        self.kept = {}
        self.build()

    def build(self):
        if self.kind in ("masters", "kahan", "stochastic"):
            nc.weights.lower(self.model, LOW[self.format])
        fused = self.kind == "fused"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=40)
        self.kept = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        if self.kind in ("stepper", "O2"):
            policy = nc.Policy(compute=self.format, master_weights=True) if self.kind == "O2" else self.format
            self.stepper = nc.Stepper(
                self.model, self.optimizer, policy, accumulate=2, max_norm=1.0, scheduler=self.scheduler
            )
            self.kept = {"stepper": self.stepper}
            return
        if self.kind in ("masters", "kahan", "stochastic"):
            nc.weights.hold(self.optimizer, self.kind)
        scalers = {"torch": torch.amp.GradScaler, "fused": nc.GradScaler}
        if self.format == "fp16":
            make = scalers.get(self.kind, nc.GradScaler)
            self.scaler = make("cpu", init_scale=2.0**10, growth_interval=3)
            self.kept["scaler"] = self.scaler

    def batches(self):
        """From the position on, for ever."""
        while True:
            self.order.set_state(self.position["order"])
            done = self.position["batch"]
            for index, (x,) in enumerate(self.loader):
                if index >= done:
                    self.position["batch"] = index + 1
                    yield x
            self.position = {
                "epoch": self.position["epoch"] + 1,
                "batch": 0,
                "order": self.order.get_state(),
            }

    def train(self, begin, end):
        source = self.batches()
        for step in range(begin, end):
            for _ in range(2 if self.kind in ("stepper", "O2") else 1):
                x = next(source) * random.uniform(0.5, 1.5) + float(numpy.random.normal(0, 0.1))
                overflows = self.format == "fp16" and step in OVERFLOWS
                self.step(x, torch.inf if overflows else 1.0)

    def step(self, x, factor):
        if self.kind in ("stepper", "O2"):
            with self.stepper.autocast():
                loss = self.model(x).float().square().mean() * factor
            self.stepper.step(loss)
            return
        x = x.to(next(self.model.parameters()).dtype)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.format)
        with nc.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext():
            loss = self.model(x).float().square().mean() * factor
        if self.format == "fp16":
            self.scaler.scale(loss).backward()
            held = nc.weights.held_by(self.optimizer)
            if held is not None:
                held.take_gradients()
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            skipped = self.scaler.get_scale() < scale
        else:
            loss.backward()
            self.optimizer.step()
            skipped = False
        self.optimizer.zero_grad()
        if not skipped:
            self.scheduler.step()

    def ending(self):
        """Everything that training has changed, and what would be drawn next."""
        held = nc.weights.held_by(self.optimizer)
        return {
            "model": self.model.state_dict(),
            "kept": {name: one.state_dict() for name, one in self.kept.items()},
            "held": None if held is None else held.state_dict(),
            "draws": [torch.rand(3), random.random(), float(numpy.random.rand())],
            "epoch": self.position["epoch"],
        }


def save(folder, cases):
    for case in cases:
        whole = Run(case, 0)
        whole.train(0, STEPS)
        torch.save(whole.ending(), folder / f"{case}.whole.pt")
        half = Run(case, 0)
        half.train(0, HALF)
        nc.training.save_checkpoint(folder / f"{case}.ckpt", half.model, **half.kept, position=half.position)


def resume(folder, cases):
    for case in cases:
        run = Run(case, 99)
        run.train(0, 1)  # every state is another one
        found = nc.training.load_checkpoint(folder / f"{case}.ckpt", run.model, **run.kept)
        assert found.notes == (), found.notes
        run.position = found.position
        run.train(HALF, STEPS)
        torch.save(run.ending(), folder / f"{case}.resumed.pt")
    full(folder)


def full(folder):
    path = folder / "full.ckpt"
    model = nn.Linear(100, 100)
    nc.training.save_checkpoint(path, model, position="good")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    for target in (path, folder / "folder.ckpt"):
        try:
            nc.training.save_checkpoint(target, model, position="too large")
        except nc.NarrowcastError as error:
            print(f"{target.name}: {type(error).__name__}: {error}")
    print(nc.training.load_checkpoint(path, model).position)
    print(sorted(one.name for one in folder.iterdir() if one.name.startswith((".full", ".folder"))))


if __name__ == "__main__":
    {"save": save, "resume": resume}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:])
