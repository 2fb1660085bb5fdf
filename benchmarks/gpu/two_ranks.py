"""Two processes on one device, over gloo: DDP and FSDP2 under Stepper, against torch's own pieces."""

import gc
import os
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn

WIDTH, STEPS, BAD_STEP = 64, 6, 2


def figures(kind: str, device: str) -> dict[str, object]:
    """Return what both ranks found, once they agree.

    Raises:
        AssertionError: ranks differ, a step was skipped by one alone, or torch's pieces end elsewhere.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (kind, device, folder), nprocs=2)
        first, second = (torch.load(Path(folder) / f"{rank}.pt") for rank in range(2))
    for side in ("torch", "narrowcast"):
        for a, b in zip(first[side], second[side], strict=True):
            assert torch.equal(a, b), f"the ranks' weights differ after training by {side}"
    assert first["skipped"] == second["skipped"], (first["skipped"], second["skipped"])
    differences = [
        ((a - b).norm() / b.norm()).item() for a, b in zip(first["narrowcast"], first["torch"], strict=True)
    ]
    # Both round to the same formats in the same operators: what is left is the order of sums.
    assert max(differences) < 2**-7, differences
    return {"skipped": first["skipped"], "largest_relative_difference_from_torch": max(differences)}


def _rank(rank: int, kind: str, device: str, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {side: _trained(kind, device, rank, side) for side in ("torch", "narrowcast")}
    (torchs, _), (ours, skipped) = found["torch"], found["narrowcast"]
    torch.save({"torch": torchs, "narrowcast": ours, "skipped": skipped}, Path(folder) / f"{rank}.pt")
    dist.barrier()
    gc.collect()  # models end before their group
    dist.destroy_process_group()


def _trained(kind: str, device: str, rank: int, side: str) -> tuple[list[torch.Tensor], list[bool]]:
    """Train with an infinity in the data of rank 1 at BAD_STEP in fp16 (DDP), without one in bf16 (FSDP2)."""
    import narrowcast as nc

    policy, dtype = ("fp16", torch.float16) if kind == "DDP" else ("bf16", torch.bfloat16)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8)).to(device)
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh(device, (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, enabled=policy == "fp16")
    stepper = None
    if side == "narrowcast":
        ours = nc.GradScaler(device, 2.0**10) if policy == "fp16" else None
        stepper = nc.Stepper(model, optimizer, policy, scaler=ours)
    skipped = []
    drawn = torch.Generator().manual_seed(1 + rank)
    for number in range(STEPS):
        x = torch.randn(16, WIDTH, generator=drawn).to(device)
        y = torch.randint(8, (16,), generator=drawn).to(device)
        if policy == "fp16" and rank == 1 and number == BAD_STEP:
            x = x * 1e30
        with torch.autocast(device, dtype) if stepper is None else stepper.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        if stepper is None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        else:
            skipped.append(bool(stepper.step(loss).skipped))
    expected = [policy == "fp16" and number == BAD_STEP for number in range(STEPS)]
    assert stepper is None or skipped == expected, skipped
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in model.parameters()]
    return weights, skipped
