"""Parameters in parts: fully_shard over one mesh or two, beside tensor parallelism, and resuming."""

import io
import itertools

import torch
import torch.distributed as dist
from ranks_common import Tiny, batches, facts_of, is_last, make_optimizer, one_process, part, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

import narrowcast as nc

STEPS = 3


def sharded(layout, dtype):
    """(model, which part of the batch this rank has, of how many)."""
    model = Tiny(dtype, width_of(layout))
    if layout == "beside tensor parallelism":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        return model, mesh["data"].get_local_rank(), 2
    mesh = None
    if layout == "replicas of shards":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if layout == "two groups":
        fully_shard(model.up)
    fully_shard(model, mesh=mesh)
    return model, dist.get_rank(), dist.get_world_size()


def layouts():
    more = ("replicas of shards", "beside tensor parallelism") if dist.get_world_size() == 4 else ()
    return ("one mesh", "two groups", *more)


def width_of(layout):
    return 8 if layout == "beside tensor parallelism" else 7


def by_hand(layout, optimizer_name, way):
    start, expected, norms = one_process(optimizer_name, STEPS, max_norm=0.5, width=width_of(layout))
    model, rank, of = sharded(layout, torch.float64)
    optimizer = make_optimizer(optimizer_name, model.parameters())
    scaler = nc.GradScaler(init_scale=768.0)
    results = []
    for x, y in batches(STEPS, torch.float64):
        optimizer.zero_grad()
        scaler.scale(mse_loss(model(part(x, rank, of)), part(y, rank, of))).backward()
        if way == "after unscale_":
            scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 0.5)
        results.append(scaler.step(optimizer))
        scaler.update()
    return facts_of(model, results, norms, start, expected)


def by_stepper(layout, policy, accumulate, *, several=False):
    """With one optimizer, or with several that step together and share one norm."""
    wide = torch.float64 if policy == "fp32" else torch.float32
    start, expected, norms = one_process(
        "SGD", STEPS, accumulate=accumulate, max_norm=0.5, width=width_of(layout)
    )
    model, rank, of = sharded(layout, wide)
    optimizer = [
        make_optimizer("SGD", m.parameters()) for m in ([model.up, model.down] if several else [model])
    ]
    scaler = nc.scaling.Static(scale=1024.0) if policy == "fp16" else None
    stepper = nc.Stepper(model, optimizer, policy, accumulate=accumulate, max_norm=0.5, scaler=scaler)
    results = train(stepper, model, batches(STEPS * accumulate, wide), rank, of)
    return facts_of(model, results, norms, start, expected)


def training():
    facts = {}
    for layout in layouts():
        for name, way in itertools.product(("SGD", "fused AdamW"), ("clip", "after unscale_")):
            facts[f"{layout}, by hand, {name}, {way}"] = by_hand(layout, name, way)
        for policy, accumulate in itertools.product(("fp32", "bf16", "fp16"), (1, 4)):
            facts[f"{layout}, Stepper, {policy}, {accumulate}"] = by_stepper(layout, policy, accumulate)
    facts["one mesh, Stepper, fp32, several optimizers"] = by_stepper("one mesh", "fp32", 1, several=True)
    return facts


def norms():
    """Each order of the norm, enabled or not, of parts of which some are empty; and the largest magnitude."""
    facts = {}
    for layout, order, enabled in itertools.product(layouts(), (1.0, 2.0, 3.0, float("inf")), (True, False)):
        if order == float("inf") and not enabled:
            continue  # torch itself does this one, and raises where a part is empty
        model, rank, of = sharded(layout, torch.float64)
        alone = Tiny(torch.float64, width_of(layout))
        optimizer = make_optimizer("SGD", model.parameters())
        scaler = nc.GradScaler(enabled=enabled)
        ((x, y),) = batches(1, torch.float64)
        scaler.scale(mse_loss(model(part(x, rank, of)), part(y, rank, of))).backward()
        mse_loss(alone(x), y).backward()
        norm = scaler.clip_grad_norm_(optimizer, 0.5, order)
        expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5, order)
        facts[f"{layout}, {order}, {enabled}"] = {
            "off": abs(float(norm) / float(expected) - 1),
            "type": type(norm).__name__,
        }
    return facts


def resume():
    """The states of torch.distributed.checkpoint, whole, go on in another model and Stepper."""

    def fresh(seed):
        model = Tiny(seed=seed)
        fully_shard(model)
        optimizer = make_optimizer("fused AdamW", model.parameters())
        scaler = nc.scaling.Dynamic(scale=64.0 if seed else 1024.0, growth_interval=2)
        return model, optimizer, nc.Stepper(model, optimizer, "fp16", scaler=scaler)

    def go_on(model, stepper, numbers):
        data = batches(6)
        for number in numbers:
            x, y = data[number]
            with stepper.autocast():
                loss = mse_loss(model(part(x)), part(y))
            stepper.step(loss * (float("inf") if number == 1 and is_last() else 1.0))

    model, optimizer, stepper = fresh(0)
    go_on(model, stepper, range(3))
    whole, state = get_state_dict(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": whole, "optimizer": state, "scaler": stepper.scaler.state_dict()}, file)
    go_on(model, stepper, range(3, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, optimizer, resumed = fresh(5)
    set_state_dict(other, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    resumed.scaler.load_state_dict(saved["scaler"])
    go_on(other, resumed, range(3, 6))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return {
        "same": all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs),
        "scales": [stepper.scaler.get_scale(), resumed.scaler.get_scale()],
    }


SCENARIOS = {
    "fsdp2": training,
    "norms of parts": norms,
    "resume": resume,
}
