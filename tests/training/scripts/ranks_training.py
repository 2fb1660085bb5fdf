"""DDP by Stepper: whole and unfinished accumulations, and master weights."""

import itertools

import torch
import torch.distributed as dist
from ranks_common import (
    Tiny,
    batches,
    digest,
    facts_of,
    make_optimizer,
    off_by,
    one_process,
    part,
    train,
    values,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.weights import lower

STEPS = 4
BUCKETS = {
    "default": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
}


class Counter:
    """Counts the all-reduces that DDP starts, one a bucket."""

    def __init__(self, module):
        self.count = 0
        module.register_comm_hook(self, Counter.reduce)

    def reduce(self, bucket):
        self.count += 1
        return allreduce_hook(None, bucket)


def whole_windows(policy, optimizer_name, accumulate, buckets):
    wide = torch.float64 if policy == "fp32" else torch.float32
    start, expected, norms = one_process(optimizer_name, STEPS, accumulate=accumulate, max_norm=0.2)
    model = Tiny(wide)
    run = DistributedDataParallel(model, **BUCKETS[buckets])
    counter = Counter(run)
    optimizer = make_optimizer(optimizer_name, model.parameters())
    scaler = nc.scaling.Static(scale=1024.0) if policy == "fp16" else None
    stepper = nc.Stepper(run, optimizer, policy, accumulate=accumulate, max_norm=0.2, scaler=scaler)
    results = train(stepper, run, batches(STEPS * accumulate, wide))
    facts = facts_of(model, results, norms, start, expected)
    return facts | {"clipped": min(norms) > 0.2, "reductions": counter.count}


def ddp():
    facts = {}
    for case in itertools.product(("fp32",), ("fused AdamW", "SGD"), (1, 4), BUCKETS):
        facts[", ".join(map(str, case))] = whole_windows(*case)
    for case in itertools.product(("bf16", "fp16"), ("SGD",), (1, 4), BUCKETS):
        facts[", ".join(map(str, case))] = whole_windows(*case)
    return facts


class Branches(torch.nn.Module):
    """Ranks take different branches; one is taken by no rank, and one where ``extra`` is set."""

    def __init__(self):
        super().__init__()
        self.trunk = Tiny(torch.float64)
        self.every = torch.nn.Linear(6, 1, dtype=torch.float64)
        self.even = torch.nn.Linear(6, 1, dtype=torch.float64)
        self.never = torch.nn.Linear(6, 1, dtype=torch.float64)
        self.rows = torch.nn.Embedding(5, 1, dtype=torch.float64)

    def forward(self, x, rank, *, extra):
        out = self.trunk(x) + self.every(x)
        if rank % 2 == 0:
            out = out + self.even(x)
        if extra:
            out = out + self.rows((x[:, 0] > 0).long())
        return out


def flushed(buckets, left, scaler=None):
    """Two whole accumulations of 4, one with ``left[rank]`` micro-batches that is flushed, and a whole one.

    After two, DDP has arranged its buckets, and no forward pass waits for ranks that have none left.
    """
    world, mine = dist.get_world_size(), dist.get_rank()
    data = batches(12 + max(left), torch.float64)
    model, alone = Branches(), Branches()
    alone.load_state_dict(model.state_dict())
    start = values(model.parameters())
    sgd, other = (torch.optim.SGD(m.parameters(), 0.05) for m in (model, alone))
    run = DistributedDataParallel(model, find_unused_parameters=True, **BUCKETS[buckets])
    stepper = nc.Stepper(run, sgd, "fp32", accumulate=4, scaler=scaler)

    def loss_of(net, x, y, rank, index, *, whole):
        extra = whole or (index == 0 and rank == 1)
        return mse_loss(net(part(x, rank, world), rank, extra=extra), part(y, rank, world))

    facts = {"complete": []}
    for counts in ([4] * world, [4] * world, left, [4] * world):
        whole, window, data = min(counts) == 4, data[: max(counts)], data[max(counts) :]
        for index, (x, y) in enumerate(window[: counts[mine]]):
            with stepper.autocast():
                loss = loss_of(run, x, y, mine, index, whole=whole)
            result = stepper.step(loss)
        if not whole:
            result = stepper.flush()
        facts["complete"].append(result.complete)
        other.zero_grad()
        for rank, count in enumerate(counts):
            for index, (x, y) in enumerate(window[:count]):
                (loss_of(alone, x, y, rank, index, whole=whole) / sum(counts)).backward()
        other.step()
    return facts | {
        "off_by": off_by(model.parameters(), values(alone.parameters()), start),
        "never_moved": bool((model.never.weight == alone.never.weight).all()),
        "empty": stepper.flush().complete,
        "digest": digest(model.parameters()),
    }


def flush():
    """Ranks have as many micro-batches left; or different numbers, and the last rank none."""
    world = dist.get_world_size()
    uneven = [*(max(2 - rank, 0) for rank in range(world - 1)), 0]
    return {
        "even": flushed("bucket views", [3] * world),
        "uneven": flushed("default", uneven),
        "uneven, scaled": flushed("default", uneven, nc.scaling.Dynamic(scale=1024.0)),
    }


def left_alone():
    """What DDP was told to ignore, flush ignores too: each rank's own."""
    model = Tiny(torch.float64)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["down.bias"])
    run = DistributedDataParallel(model)
    stepper = nc.Stepper(run, torch.optim.SGD(model.parameters(), 0.05), "fp32", accumulate=4)
    train(stepper, run, batches(1, torch.float64))
    stepper.flush()
    return {"ignored": model.down.bias.item(), "reduced": digest([model.up.weight])}


def masters(accumulate, buckets):
    def prepared():
        model = Tiny()
        lower(model, torch.bfloat16)
        return model

    def made(run, model):
        optimizer = make_optimizer("SGD", model.parameters())
        policy = nc.Policy(compute="bf16", master_weights=True)
        return nc.Stepper(run, optimizer, policy, accumulate=accumulate, max_norm=0.5), optimizer

    def of(optimizer):
        return [p for group in optimizer.param_groups for p in group["params"]]

    alone = prepared()
    start = values(alone.parameters())
    whole, theirs = made(alone, alone)
    train(whole, alone, batches(STEPS * accumulate), 0, 1)
    model = prepared()
    run = DistributedDataParallel(model, **BUCKETS[buckets])
    stepper, optimizer = made(run, model)
    train(stepper, run, batches(STEPS * accumulate))
    return {
        "off_by": off_by(of(optimizer), values(of(theirs)), [value.double() for value in start]),
        "digest": digest(of(optimizer)),
    }


def master_weights():
    facts = {}
    for case in itertools.product((1, 4), BUCKETS):
        facts[", ".join(map(str, case))] = masters(*case)
    model = Tiny()
    try:
        nc.Stepper(DistributedDataParallel(model), make_optimizer("SGD", model.parameters()), "O2")
        said = ""
    except nc.NarrowcastError as error:
        said = f"{type(error).__name__}: {error}"
    return {"cases": facts, "unlowered": said}


SCENARIOS = {
    "ddp": ddp,
    "flush": flush,
    "left alone": left_alone,
    "masters": master_weights,
}
