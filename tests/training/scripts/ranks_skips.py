"""An infinity on one rank only: in its loss, or in its gradients after the backward pass."""

import contextlib
import functools
import itertools
import math
import warnings

import torch
import torch.distributed as dist
from ranks_common import Tiny, batches, digest, is_last, local, make_optimizer, part, same, values
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc

WAYS = ("step", "clip", "unscale_ and clip", "fused", "fused and clip", "clamp")
BAD_STEP = 1


def wrapped(kind, model):
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        fully_shard(model)
    return model


def batches_for(kind, count):
    """This rank's part of each batch; the whole one for "plain", where nothing averages over ranks."""
    if kind == "plain":
        return batches(count)
    return [(part(x), part(y)) for x, y in batches(count)]


def facts_of_skip(results, scales, before, after, model):
    return {
        "skipped": [result.skipped for result in results],
        "scales": scales,
        "unchanged": same(before, after),
        "names": list(results[BAD_STEP].nonfinite),
        "norm_finite": results[BAD_STEP].grad_norm is not None and math.isfinite(results[BAD_STEP].grad_norm),
        "digest": digest(model.parameters()),
    }


def state_values(model, optimizer):
    """Parameters and what the optimizer keeps, whole."""
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return values([*model.parameters(), *kept])


@contextlib.contextmanager
def no_waiting(device):
    """On CUDA: an error if the host waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
        with warnings.catch_warnings(action="ignore"):  # torch warns that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
    yield
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")


def by_hand(kind, where, way, dtype, device="cpu"):
    model = Tiny().to(device)
    run = wrapped(kind, model)
    fused = way.startswith("fused")
    optimizer = make_optimizer("fused AdamW" if fused else "SGD", model.named_parameters())
    # On a CPU a fused step divides by the scale itself only if that is no power of two.
    init_scale = 768.0 if fused else 1024.0
    # The gradients of fully_shard are DTensors, whose ranks agree without a group. DDP needs one where the
    # infinity comes after the backward pass, in which it averages.
    group = None if kind == "fsdp2" else dist.group.WORLD
    scaler = nc.GradScaler(init_scale=init_scale, process_group=group)
    results, scales, before, after = [], [scaler.get_scale()], [], []
    for number, (x, y) in enumerate(batches_for(kind, 3)):
        with nc.autocast(device, dtype):
            loss = mse_loss(run(x.to(device)), y.to(device))
        planted = number == BAD_STEP and is_last()
        if planted and where == "loss":
            loss = loss * math.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if planted and where == "grad":
            local(model.up.weight.grad)[0, 0] = math.inf
        if number == BAD_STEP:
            before = state_values(model, optimizer)
        with no_waiting(device):
            if way.startswith("unscale_"):
                scaler.unscale_(optimizer)
            if way.endswith("clip"):
                scaler.clip_grad_norm_(optimizer, 0.5)
            if way == "clamp":
                scaler.clip_grad_value_(optimizer, 0.1)
            results.append(scaler.step(optimizer))
            scaler.update()
        scales.append(scaler.get_scale())
        if number == BAD_STEP:
            after = state_values(model, optimizer)
    return facts_of_skip(results, scales, before, after, model)


def by_stepper(kind, policy):
    model = Tiny()
    run = wrapped(kind, model)
    optimizer = make_optimizer("SGD", model.parameters())
    group = dist.group.WORLD if kind == "plain" else None
    scaler = nc.GradScaler(init_scale=1024.0, process_group=group)
    stepper = nc.Stepper(run, optimizer, policy, scaler=scaler, max_norm=0.5, accumulate=2)
    results, scales, before, after = [], [scaler.get_scale()], [], []
    data = batches_for(kind, 6)
    for number in range(3):
        for half in range(2):
            x, y = data[2 * number + half]
            with stepper.autocast():
                loss = mse_loss(run(x), y)
            if number == BAD_STEP and half == 0 and is_last():
                loss = loss * math.inf
            if number == BAD_STEP:
                before = state_values(model, optimizer)
            result = stepper.step(loss)
        results.append(result)
        scales.append(scaler.get_scale())
        if number == BAD_STEP:
            after = state_values(model, optimizer)
    return facts_of_skip(results, scales, before, after, model)


def by_function(kind):
    """The loss of one rank is infinite, and a step by a function would try again on the others."""
    model = Tiny()
    run = wrapped(kind, model)
    optimizer = make_optimizer("SGD", model.parameters())
    group = dist.group.WORLD if kind == "plain" else None
    scaler = nc.GradScaler(init_scale=1024.0, process_group=group)
    stepper = nc.Stepper(run, optimizer, "fp16", scaler=scaler)
    calls, skipped = [], []

    def loss_of(number, x, y):
        calls.append(number)
        loss = mse_loss(run(x), y)
        return loss * math.inf if number == BAD_STEP and is_last() else loss

    for number, (x, y) in enumerate(batches_for(kind, 3)):
        skipped.append(stepper.step(functools.partial(loss_of, number, x, y)).skipped)
    return {"calls": calls, "skipped": skipped, "digest": digest(model.parameters())}


def by_functions():
    return {kind: by_function(kind) for kind in KINDS}


def every_skip(kind, where):
    facts = {}
    for way, dtype in itertools.product(WAYS, (torch.bfloat16, torch.float16)):
        facts[f"{way}, {dtype}"] = by_hand(kind, where, way, dtype)
    if where == "loss":
        facts |= {f"Stepper, {policy}": by_stepper(kind, policy) for policy in ("bf16", "fp16")}
    return facts


def on_cuda(kind):
    """With nccl: the host waits for the device neither to share the flag among ranks nor to step."""
    return {"fused and clip": by_hand(kind, "loss", "fused and clip", torch.float16, "cuda")}


KINDS = ("ddp", "fsdp2", "plain")
ON_CUDA = {f"skip: {kind}, loss on cuda": functools.partial(on_cuda, kind) for kind in KINDS}
SCENARIOS = {
    f"skip: {kind}, {where}": functools.partial(every_skip, kind, where)
    for kind in KINDS
    for where in ("loss", "grad")
}
SCENARIOS["function"] = by_functions
