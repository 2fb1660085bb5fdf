"""Twenty steps by all ranks, by DDP and by fully_shard, beside those of one process on all rows."""

import itertools
import math

import torch
from ranks_common import Tiny, batches, digest, is_last, off_by, part, same, values
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc

STEPS = 20
BAD_STEP = 7
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def wrapped(kind, model):
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        fully_shard(model)
    return model


def optimizer_of(model):
    # Without momentum a step is a gradient times a rate, so that what it is off by can be counted.
    return torch.optim.SGD(model.parameters(), 0.05)


def by_scaler(run, optimizer, policy, rows):
    """(a step, the scaler): the loop of torch.amp."""
    scaler = nc.GradScaler("cpu", init_scale=1024.0, growth_interval=5)

    def step(x, y, factor):
        optimizer.zero_grad()
        with nc.autocast("cpu", DTYPES[policy]):
            loss = mse_loss(run(rows(x)), rows(y))
        scaler.scale(loss * factor).backward()
        result = scaler.step(optimizer)
        scaler.update()
        return result

    return step, scaler


def by_stepper(run, optimizer, policy, rows):
    scaler = nc.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    stepper = nc.Stepper(run, optimizer, policy, scaler=scaler)

    def step(x, y, factor):
        with stepper.autocast():
            loss = mse_loss(run(rows(x)), rows(y))
        return stepper.step(loss * factor)

    return step, scaler


def train(kind, way, policy, *, bad, rows=part):
    """(weights at the start, at the end, facts); ``bad``: whether this process has the overflow."""
    model = Tiny()
    start = values(model.parameters())
    run = wrapped(kind, model)
    step, scaler = way(run, optimizer_of(model), policy, rows)
    skipped, unchanged = [], True
    for number, (x, y) in enumerate(batches(STEPS)):
        before = values(model.parameters())
        result = step(x, y, math.inf if bad and number == BAD_STEP else 1.0)
        if result.skipped:
            skipped.append(number)
            unchanged = unchanged and same(before, values(model.parameters()))
    facts = {"skipped": skipped, "unchanged": unchanged, "scale": scaler.get_scale()}
    return start, values(model.parameters()), facts


def reference():
    """Plain torch in fp64 on all rows, without the step of the overflow."""
    model = Tiny(torch.float64)
    optimizer = optimizer_of(model)
    for number, (x, y) in enumerate(batches(STEPS, torch.float64)):
        if number != BAD_STEP:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    return values(model.parameters())


def twenty_steps():
    exact, facts = reference(), {}
    for way, policy in itertools.product((by_scaler, by_stepper), DTYPES):
        start, alone, facts_alone = train("one", way, policy, bad=True, rows=lambda tensor: tensor)
        for kind in ("ddp", "fsdp2"):
            _, ended, found = train(kind, way, policy, bad=is_last())
            facts[f"{policy}, {kind}, {way.__name__}"] = found | {
                "off_one_process": off_by(ended, [value.double() for value in alone], start),
                "off_fp64": off_by(ended, exact, start),
                "one_process": facts_alone,
                "digest": digest(ended),
            }
    return facts


SCENARIOS = {"twenty steps": twenty_steps}
