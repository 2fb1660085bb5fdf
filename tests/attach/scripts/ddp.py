"""Plain FP32 training under DistributedDataParallel on gloo, in several bucket modes; one JSON line each."""

import argparse
import gc
import json

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

CASES = {
    "default": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "no_sync": {},
    "clip value": {},
}


def train(case, arguments):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
    model = DistributedDataParallel(model, **CASES[case])
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(12):
        x = torch.randn(16, 12, generator=generator)
        y = x[:, :1].tanh()
        optimizer.zero_grad()
        if case == "no_sync":
            with model.no_sync():
                (F.mse_loss(model(x), y) / 2).backward()
        factor = 1e7 if step == 5 and rank == arguments.overflow_on_rank else 1.0
        (F.mse_loss(model(x), y) * factor).backward()
        if case == "clip value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(both, flat)
    return {
        "case": case,
        "ranks_agree": all(torch.equal(both[0], other) for other in both),
        "finite": bool(torch.isfinite(flat).all()),
        "norm": float(flat.double().norm()),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--overflow-on-rank", type=int, default=-1)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    for case in CASES:
        result = train(case, arguments)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    gc.collect()  # DDP ends before its group, which else would wait, with Python's lock held, for its threads
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
