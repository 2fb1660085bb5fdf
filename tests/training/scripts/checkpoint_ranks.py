"""Runs on several ranks that are saved after three steps, and go on in other processes.

    torchrun ... checkpoint_ranks.py save FOLDER      trains, saves, and trains on
    torchrun ... checkpoint_ranks.py resume FOLDER    loads, with as many ranks or others, and trains on

Run by python itself, one process without ``torch.distributed`` loads. Rank 0 prints a line of JSON a case.
"""

import json
import os
import random
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive
from ranks_common import full, gathered
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.training import load_checkpoint, save_checkpoint

STEPS = 3
ALONE = "RANK" not in os.environ
CASES = ["ddp fp16", "ddp masters", "fsdp bf16", "fsdp O2", "fsdp kahan", "fsdp stochastic"]
FEW = ["ddp fp16", "fsdp O2"]


class Run:
    def __init__(self, case, seed):
        wrapper, self.kind = case.split()
        rank = 0 if ALONE else dist.get_rank()
        torch.manual_seed(seed)
        # Statistics, of which each rank has its own; fully_shard wants weights of one format.
        middle = nn.BatchNorm1d(7) if wrapper == "ddp" else nn.GELU()
        model = nn.Sequential(nn.Linear(6, 7), middle, nn.Dropout(0.25), nn.Linear(7, 3))
        low = self.kind in ("masters", "kahan", "stochastic")
        if low or self.kind == "O2":
            nc.weights.lower(model, torch.bfloat16)
        self.model = model
        if not ALONE and wrapper == "ddp":
            self.model = DistributedDataParallel(model)
        elif not ALONE:
            fully_shard(model[0])
            fully_shard(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        if low:
            nc.weights.hold(self.optimizer, self.kind)
            self.kept = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        else:
            policy = nc.Policy(compute="bf16", master_weights=True) if self.kind == "O2" else self.kind
            self.stepper = nc.Stepper(self.model, self.optimizer, policy, scheduler=self.scheduler)
            self.kept = {"stepper": self.stepper}
        torch.manual_seed(seed + rank)
        random.seed(seed + rank)

    def train(self, steps):
        for _ in range(steps):
            x = torch.randn(4, 6)
            if "stepper" in self.kept:
                with self.stepper.autocast():
                    loss = self.model(x).float().square().mean()
                self.stepper.step(loss)
                continue
            loss = self.model(x.bfloat16()).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def state(self):
        """Model, optimizer and what is held, whole, under names without wrappers; without generators."""
        held = nc.weights.held_by(self.optimizer)
        model = {n.removeprefix("module."): whole(v) for n, v in self.model.state_dict().items()}
        kept = {} if held is None else {"kept": [whole(one) for one in held.state_dict()["kept"]]}
        optimizer = {
            f"{index} {name}": whole(value)
            for index, one in self.optimizer.state_dict()["state"].items()
            for name, value in one.items()
        }
        return {**model, **optimizer, **{f"kept {i}": one for i, one in enumerate(kept.get("kept", []))}}

    def ending(self):
        """Parts of this rank, what is next at random, and the scheduler, as numbers."""
        parts = [v.to_local() if hasattr(v, "to_local") else v for v in self.model.state_dict().values()]
        return [
            [float(part.double().sum()) for part in parts],
            [float(part.double().square().sum()) for part in parts],
            torch.rand(2).tolist(),
            random.random(),
            self.scheduler.get_last_lr(),
        ]


def whole(value):
    return full(value).clone()


def say(case, facts):
    """Print the facts of all ranks."""
    ranks = gathered(facts)
    if ALONE or dist.get_rank() == 0:
        print(json.dumps({"case": case, "ranks": ranks}), flush=True)


def same(one, other):
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def save(folder, case):
    run = Run(case, 0)
    run.train(STEPS)
    path = folder / f"{case}.ckpt"
    rank = dist.get_rank()
    save_checkpoint(path, run.model, **run.kept, position={"rank": rank, "row": torch.arange(3) + rank})
    saved = run.state()
    if rank == 0:
        torch.save(saved, folder / f"{case}.saved.pt")
    run.train(STEPS)
    return {"end": run.ending()}


def resume(folder, name, case):
    run = Run(case, 50)
    run.train(1)
    found = load_checkpoint(folder / f"{name}.ckpt", run.model, **run.kept)
    saved = torch.load(folder / f"{name}.saved.pt", weights_only=True)
    facts = {
        "exact": same(run.state(), saved),
        "notes": list(found.notes),
        "position": [found.position["rank"], found.position["row"].tolist()],
    }
    run.train(STEPS)
    return {**facts, "end": run.ending()}


def alone(folder):
    """One process saves one file, for several to load."""
    run = Run("fsdp bf16", 0)
    run.train(STEPS)
    save_checkpoint(folder / "alone.ckpt", run.model, **run.kept, position={"rank": 7, "row": torch.zeros(1)})
    torch.save(run.state(), folder / "alone.saved.pt")


def refuse(folder):
    """What one rank cannot save or load stops every rank, and nothing is changed."""
    run = Run("ddp fp16", 0)
    rank = dist.get_rank()
    path = folder / "ddp fp16.ckpt"
    before = (path / "checkpoint.narrowcast").read_bytes()
    told = []
    try:
        save_checkpoint(path, run.model, **run.kept, position=object() if rank == 1 else None)
    except nc.NarrowcastError as error:
        told.append(str(error))
    try:
        load_checkpoint(path, run.model, **run.kept, scheduler=Odd() if rank == 0 else None)
    except nc.NarrowcastError as error:
        told.append(str(error))
    unchanged = (path / "checkpoint.narrowcast").read_bytes() == before
    dist.barrier()
    return {"told": told, "unchanged": unchanged, "entries": len(list(path.iterdir()))}


class Odd:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise AssertionError("nothing of the sort was saved")


def checkpoints():
    """A few cases, saved and resumed by the same processes, and what one rank cannot save or load."""
    folder = Path(gathered(tempfile.mkdtemp() if dist.get_rank() == 0 else "")[0])
    facts = {"saved": {}, "resumed": {}}
    for case in FEW:
        facts["saved"][case] = save(folder, case)
        dist.barrier()
        facts["resumed"][case] = resume(folder, case, case)
    facts["refused"] = refuse(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return facts


SCENARIOS = {"checkpoints": checkpoints}


def main(phase, folder):
    if not ALONE:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in CASES:
        say(case, save(folder, case) if phase == "save" else resume(folder, case, case))
    if phase == "resume" and ALONE:
        alone(folder)
    elif phase == "resume" and dist.get_world_size() == 4:
        say("alone", resume(folder, "alone", "fsdp bf16"))
    if not ALONE:
        dist.barrier()
        sys.stdout.flush()
        # gloo's threads of meshes that were never destroyed may abort an interpreter that shuts down.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
