"""Plain tensors and a process group: parts of one model, copies that differ, and how many collectives."""

import math

import torch
import torch.distributed as dist
from ranks_common import Tiny, batches, digest, gathered, is_last, make_optimizer, part, same, train, values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast._files import cache_folder
from narrowcast.machine import best_format
from narrowcast.machine._auto import choice_by_rates


def part_of_model(way, order, *, without_gradient):
    """Each rank has layers of its own; rank 0 perhaps none that the loss reaches."""
    model = Tiny(torch.float64, seed=dist.get_rank())
    start = values(model.parameters())
    none_here = without_gradient and dist.get_rank() == 0
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    if way == "fused":
        optimizers = [torch.optim.AdamW(model.parameters(), 0.01, fused=True)]
    if way == "Stepper, two optimizers":
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model.up, model.down)]
    scaler = nc.GradScaler(init_scale=768.0, process_group=dist.group.WORLD, sharded=True)
    ((x, y),) = batches(1, torch.float64)
    elsewhere = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def loss_of(model):
        return elsewhere * 2 if none_here else mse_loss(model(x), y)

    alone = Tiny(torch.float64, seed=dist.get_rank())
    loss_of(alone).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    total = float(torch.linalg.vector_norm(torch.cat(gathered(flat)), order))
    kept = min(1.0, 0.5 / (total + 1e-6))  # as torch clips
    if way.startswith("Stepper"):
        given = optimizers if len(optimizers) > 1 else optimizers[0]
        stepper = nc.Stepper(model, given, "fp32", max_norm=0.5, scaler=scaler)
        with stepper.autocast():
            loss = loss_of(model)
        result = stepper.step(loss)
    else:
        (optimizer,) = optimizers
        scaler.scale(loss_of(model)).backward()
        if way == "after unscale_":
            scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 0.5, order)
        result = scaler.step(optimizer)
        scaler.update()
    expected = [begin - 0.1 * kept * g for begin, g in zip(start, gradients, strict=True)]
    pairs = zip(values(model.parameters()), expected, strict=True)
    return {
        "norm_off": abs(result.grad_norm / total - 1),
        "clipped": kept < 1,
        "off": 0.0 if way == "fused" else max(float((a - b).abs().max()) for a, b in pairs),
        "skipped": result.skipped,
        "moved": not same(start, values(model.parameters())),
    }


def parts():
    facts = {}
    for without in (False, True):
        for way in ("clip", "after unscale_", "fused", "Stepper", "Stepper, two optimizers"):
            orders = (2.0,) if way.startswith("Stepper") else (1.0, 2.0, 3.0, math.inf)
            if without and way == "Stepper, two optimizers":
                continue
            for order in orders:
                # A plain optimizer without any gradient steps on none.
                facts[f"{way}, {order}, {without}"] = part_of_model(way, order, without_gradient=without)
    return facts


def large_norms():
    """Finite gradients whose squares overflow fp32, on the last rank alone."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], 1.0)
    scaler = nc.GradScaler(init_scale=1.0, process_group=dist.group.WORLD, sharded=True)
    scaler.scale(weight.sum()).backward()
    weight.grad.fill_(3e38 if is_last() else 1.0)
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)
    result = scaler.step(optimizer)
    scaler.update()
    return {"skipped": result.skipped, "moved": bool(weight.detach().any()), "scale": scaler.get_scale()}


def copies_that_differ():
    facts = {}
    for way in ("clip", "after unscale_", "Stepper", "order 0"):
        model = Tiny()
        start = values(model.parameters())
        optimizer = make_optimizer("SGD", model.parameters())
        ((x, y),) = batches(1)
        said = ""
        try:
            if way == "Stepper":
                stepper = nc.Stepper(model, optimizer, "bf16", max_norm=0.5, process_group=dist.group.WORLD)
                with stepper.autocast():
                    loss = mse_loss(model(part(x)), part(y))
                stepper.step(loss)
            else:
                scaler = nc.GradScaler(process_group=dist.group.WORLD)
                scaler.scale(mse_loss(model(part(x)), part(y))).backward()
                if way == "after unscale_":
                    scaler.unscale_(optimizer)
                scaler.clip_grad_norm_(optimizer, 0.5, 0.0 if way == "order 0" else 2.0)
                scaler.step(optimizer)
        except nc.NarrowcastError as error:
            said = f"{type(error).__name__}: {error}"
        facts[way] = {"said": said, "unchanged": same(start, values(model.parameters()))}
    return facts


def counted(kind, way):
    """Collectives from the end of backward to the end of update, by name."""
    model = Tiny()
    run, group = model, dist.group.WORLD
    ((x, y),) = batches(1)
    if kind == "none":
        group = None
    elif kind == "ddp":
        run, group = DistributedDataParallel(model), None
    elif kind == "fsdp2":
        fully_shard(model)
        group = None
    elif kind == "fsdp2 and its group":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        group = mesh.get_group()
    elif kind == "replicas of shards":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        group = None
    optimizer = make_optimizer("fused AdamW" if way.startswith("fused") else "SGD", model.parameters())
    scaler = nc.GradScaler(init_scale=768.0, process_group=group)
    scaler.scale(mse_loss(run(x), y)).backward()
    with CommDebugMode() as seen:
        if way.startswith("unscale_"):
            scaler.unscale_(optimizer)
        if way.endswith("clip"):
            scaler.clip_grad_norm_(optimizer, 0.5)
        if way.endswith("clamp"):
            scaler.clip_grad_value_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
    return {str(operation): count for operation, count in seen.get_comm_counts().items() if count}


def collectives():
    kinds = ["none", "ddp", "group", "fsdp2", "fsdp2 and its group"]
    if dist.get_world_size() == 4:
        kinds.append("replicas of shards")
    ways = ("step", "clip", "fused", "fused and clip", "unscale_ and clip", "clamp")
    return {f"{kind}, {way}": counted(kind, way) for kind in kinds for way in ways}


def auto():
    """Each rank has other rates."""
    model = Tiny()
    stepper = nc.Stepper(DistributedDataParallel(model), make_optimizer("SGD", model.parameters()), "auto")
    train(stepper, stepper.model, batches(2))
    alone = choice_by_rates("cpu", cache_folder()).format
    formats = {device: str(dtype) for device, dtype in stepper.formats.items()}
    because = best_format("cpu").because
    return {"formats": formats, "alone": alone, "because": because, "digest": digest(model.parameters())}


SCENARIOS = {
    "auto": auto,
    "parts": parts,
    "large norms": large_norms,
    "copies that differ": copies_that_differ,
    "collectives": collectives,
}
