"""One rank of two on gloo: apex's levels under DDP, with an overflow on one rank; one JSON line."""

import gc
import json
import math
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive
from torch.nn.parallel import DistributedDataParallel

from narrowcast.apex import amp

# Exact in float16, times the scale too, and in the mean over the ranks.
X = torch.tensor([[0.1875, 0.125, -0.0625, 0.15625]])


def numbers(tensor):
    return None if tensor is None else tensor.flatten().tolist()


def train(level, rank, *, delayed, views):
    """Accumulated gradients, then a step after an overflow on rank 1, then one that is made."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.5), opt_level=level, verbosity=0
    )
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)

    def backward(share=1.0, *, bad=False, wrapped=wrapped, **options):
        loss = wrapped(8 * (rank + 1) * share * X).float().sum() / 8
        with amp.scale_loss(loss, optimizer, **options) as scaled:
            (scaled * math.inf if bad else scaled).backward()

    if delayed:
        with wrapped.no_sync():
            backward(delay_unscale=True)
    else:
        backward()
    backward(0.5)
    (parameter,) = amp.master_params(optimizer)
    accumulated = numbers(parameter.grad)
    optimizer.step()
    first = numbers(parameter)
    optimizer.zero_grad()
    backward(bad=rank == 1)
    optimizer.step()
    left_out = numbers(parameter)
    scale = amp._amp_state.loss_scalers[0].loss_scale()
    optimizer.zero_grad()
    backward()
    optimizer.step()
    last = numbers(model.weight)
    # DDP keeps Python objects of the model alive until its reducer goes.
    del wrapped
    amp.shutdown()
    return {"accumulated": accumulated, "first": first, "left out": left_out, "scale": scale, "last": last}


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {
        f"{level} {'delayed' if delayed else 'unscaled'} {'views' if views else 'copies'}": train(
            level, rank, delayed=delayed, views=views
        )
        for level in ("O1", "O2")
        for delayed in (False, True)
        for views in (False, True)
    }
    gc.collect()  # DDP ends before its group, which else would wait, with Python's lock held, for its threads
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
