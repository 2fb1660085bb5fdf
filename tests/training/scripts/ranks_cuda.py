"""One process with nccl: what the ranks agree on waits for no device.

torchrun --nproc-per-node 1 ranks_cuda.py
"""

import json
import math

import torch
import torch.distributed as dist
from ranks_common import Tiny, batches, make_optimizer, same, values
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc


def skipping(kind):
    model = Tiny().cuda()
    run = DistributedDataParallel(model) if kind == "ddp" else model
    if kind == "fsdp2":
        fully_shard(model)
    optimizer = make_optimizer("fused AdamW", model.parameters())
    group = None if kind == "fsdp2" else dist.group.WORLD
    scaler = nc.GradScaler(init_scale=1024.0, process_group=group)
    results, unchanged = [], []
    for number, (x, y) in enumerate(batches(3)):
        with nc.autocast("cuda", torch.float16):
            loss = mse_loss(run(x.cuda()), y.cuda())
        optimizer.zero_grad()
        scaler.scale(loss * (math.inf if number == 1 else 1.0)).backward()
        before = values(model.parameters())
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        scaler.clip_grad_norm_(optimizer, 0.5)
        results.append(scaler.step(optimizer))
        scaler.update()
        torch.cuda.set_sync_debug_mode("default")
        unchanged.append(same(before, values(model.parameters())))
    return {
        "skipped": [result.skipped for result in results],
        "unchanged": unchanged,
        "scale": scaler.get_scale(),
    }


def main():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    for kind in ("ddp", "fsdp2", "plain"):
        print(json.dumps({"kind": kind, **skipping(kind)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
