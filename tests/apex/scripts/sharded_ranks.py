"""One rank of two on gloo: ``fully_shard`` after ``amp.initialize``, and DDP beside it; one JSON line."""

import copy
import gc
import json
import sys
import weakref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from narrowcast.apex import amp

RANK, STORE = int(sys.argv[1]), sys.argv[2]
STEPS, OVERFLOW = 4, 2


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(start, level, wrapped):
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-6)
    before = set(vars(optimizer))
    scale = {"loss_scale": 2.0**10} if level == "O0" else {}
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, half_type=torch.bfloat16, verbosity=0, **scale
    )
    whole_ones = [weakref.ref(p) for p in (*model.parameters(), *amp.master_params(optimizer))]
    if wrapped == "fully_shard":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    losses = []
    for step in range(STEPS):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + RANK))
        optimizer.zero_grad()
        loss = model(x).float().square().mean() * (float("inf") if step == OVERFLOW and RANK else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if step == 0:
            del scaled
            gc.collect()
            left = sum(one() is not None for one in whole_ones)
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 2.0**-4)
        optimizer.step()
        losses.append(loss.item())
    found = {
        "losses": losses,
        "whole tensors left": left,
        "masters": [whole(p.detach()).tolist() for p in amp.master_params(optimizer)],
        "weights": [whole(p.detach()).tolist() for p in model.parameters()],
        "exported": [whole(value).tolist() for value in model.state_dict().values()],
        "scale": amp._amp_state.loss_scalers[0].loss_scale(),
    }
    amp.shutdown()
    found["attributes left"] = sorted((set(vars(optimizer)) ^ before) - {"_opt_called"})
    return found


def refused(start, level):
    """What blocks raise where ``fully_shard`` comes after a step, and the types of what is stepped on."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, half_type=torch.bfloat16, verbosity=0)
    model(torch.ones(1, 8)).float().sum().backward()
    optimizer.step()
    fully_shard(model)
    raised = []
    for _ in range(2):
        try:
            with amp.scale_loss(model(torch.ones(1, 8)).float().sum(), optimizer) as scaled:
                scaled.backward()
        except RuntimeError as error:
            raised.append(str(error))
    dtypes = {str(p.dtype) for group in optimizer.param_groups for p in group["params"]}
    amp.shutdown()
    return raised, sorted(dtypes)


def main():
    dist.init_process_group("gloo", init_method=f"file://{STORE}", rank=RANK, world_size=2)
    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    found = {
        level: {wrapped: trained(start, level, wrapped) for wrapped in ("fully_shard", "ddp")}
        for level in ("O0", "O1", "O2")
    }
    found["late"] = {level: refused(start, level) for level in ("O1", "O2")}
    print(json.dumps(found))
    gc.collect()  # DDP ends before its group, which else would wait, with Python's lock held, for its threads
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
