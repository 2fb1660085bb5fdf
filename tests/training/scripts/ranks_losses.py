"""Several losses with names under DDP, by hand and by Stepper."""

import itertools
import math

import torch
import torch.distributed as dist
from ranks_common import Tiny, batches, digest, is_last, off_by, part, same, values
from torch.nn.functional import l1_loss, mse_loss
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc

STEPS = 3
BUCKETS = {
    "default": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


class Heads(torch.nn.Module):
    """A shared trunk, and two outputs of which each loss uses one, or both."""

    def __init__(self):
        super().__init__()
        self.trunk = Tiny(torch.float64)
        self.other = torch.nn.Linear(1, 1, dtype=torch.float64)

    def forward(self, x):
        shared = self.trunk(x)
        return shared, self.other(shared)


def losses_of(outputs, y, *, apart):
    one, other = outputs
    if not apart:
        one = one + other
    return {"square": mse_loss(one, y), "absolute": 0.5 * l1_loss(other, y)}


def one_process(accumulate, *, apart):
    torch.manual_seed(0)
    model = Heads()
    start = values(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data, world = batches(STEPS * accumulate, torch.float64), dist.get_world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in data[step * accumulate : (step + 1) * accumulate]:
            for rank in range(world):
                found = losses_of(model(part(x, rank, world)), part(y, rank, world), apart=apart)
                (sum(found.values()) / (world * accumulate)).backward()
        optimizer.step()
    return start, values(model.parameters())


def by_stepper(buckets, accumulate, *, apart):
    start, expected = one_process(accumulate, apart=apart)
    torch.manual_seed(0)
    model = Heads()
    run = DistributedDataParallel(model, **BUCKETS[buckets])
    scaler = nc.GradScaler(init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stepper = nc.Stepper(run, optimizer, "fp32", scaler=scaler, accumulate=accumulate)
    for x, y in batches(STEPS * accumulate, torch.float64):
        with stepper.autocast():
            losses = losses_of(run(part(x)), part(y), apart=apart)
        stepper.step(losses)
    return {
        "off_by": off_by(model.parameters(), expected, start),
        "digest": digest(model.parameters()),
        "scales": {name: scaler.get_scale(name) for name in losses},
    }


def by_hand():
    """As torch's documentation of no_sync has it: one forward pass a loss, and the last reduces."""
    start, expected = one_process(1, apart=False)
    torch.manual_seed(0)
    model = Heads()
    run = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = nc.GradScaler(init_scale=1024.0)
    scaler.scale(torch.ones((), requires_grad=True) * 1, name="square")
    for number, (x, y) in enumerate(batches(STEPS, torch.float64)):
        optimizer.zero_grad()
        if number:
            scaler.update(float(2**number), name="absolute")
        with run.no_sync():
            first = losses_of(run(part(x)), part(y), apart=False)["square"]
            scaler.scale(first, name="square").backward()
        second = losses_of(run(part(x)), part(y), apart=False)["absolute"]
        scaler.scale(second, name="absolute").backward()
        scaler.step(optimizer)
        scaler.update()
    return {
        "off_by": off_by(model.parameters(), expected, start),
        "digest": digest(model.parameters()),
        "scales": {name: scaler.get_scale(name) for name in ("square", "absolute")},
    }


def one_overflows():
    torch.manual_seed(0)
    model = Heads()
    run = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = nc.GradScaler(init_scale=1024.0)
    stepper = nc.Stepper(run, optimizer, "fp32", scaler=scaler)
    facts = {"skipped": [], "unchanged": [], "scales": []}
    for number, (x, y) in enumerate(batches(3, torch.float64)):
        with stepper.autocast():
            losses = losses_of(run(part(x)), part(y), apart=True)
        if number == 1 and is_last():
            losses["absolute"] = losses["absolute"] * math.inf
        before = values(model.parameters())
        facts["skipped"].append(stepper.step(losses).skipped)
        facts["unchanged"].append(same(before, values(model.parameters())))
        facts["scales"].append(scaler.get_scale("absolute"))
    return facts | {"digest": digest(model.parameters())}


def named():
    facts = {"by hand": by_hand()}
    for buckets, accumulate, apart in itertools.product(BUCKETS, (1, 3), (False, True)):
        facts[f"{buckets}, {accumulate}, {apart}"] = by_stepper(buckets, accumulate, apart=apart)
    return facts


SCENARIOS = {"named losses": named, "a named loss overflows": one_overflows}
