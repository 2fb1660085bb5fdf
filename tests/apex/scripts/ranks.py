"""One rank of two on gloo: apex's data parallelism in each of its options; one JSON line."""

import gc
import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive

from narrowcast.apex.parallel import (
    DistributedDataParallel,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from narrowcast.errors import NarrowcastError

RANKS = 2
OPTIONS = {
    "defaults": {},
    "delayed": {"delay_allreduce": True},
    "small buckets": {"message_size": 1},
    "when, not what": {"num_allreduce_streams": 3, "allreduce_trigger_params": [], "prof": True},
}


class TwoParts(torch.nn.Module):
    """Whose second part is not used where ``both`` is False."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
        self.both = True
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.second(self.first(x)) if self.both else self.first(x)


def model_of(rank):
    torch.manual_seed(rank)  # rank 0's parameters are broadcast
    return TwoParts()


def numbers(model):
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def gradients(options, rank):
    model = model_of(rank)
    wrapped = DistributedDataParallel(model, **options)
    generator = torch.Generator().manual_seed(10 + rank)
    wrapped(torch.randn(4, 3, generator=generator)).square().sum().backward()
    return numbers(model)


def unused(rank):
    model = model_of(rank)
    model.both = False
    wrapped = DistributedDataParallel(model, delay_allreduce=True)
    wrapped(torch.full((1, 3), rank + 1.0)).sum().backward()
    return numbers(model)


def accumulated(rank):
    model = model_of(rank)
    wrapped = DistributedDataParallel(model)
    wrapped.disable_allreduce()
    wrapped(torch.full((1, 3), rank + 1.0)).sum().backward()
    alone = numbers(model)
    wrapped.enable_allreduce()
    wrapped(torch.full((1, 3), rank + 1.0)).sum().backward()
    return alone, numbers(model)


def buffer_of(rank):
    """Of a rank that changes it after the model was wrapped, after another forward pass."""
    model = model_of(rank)
    wrapped = DistributedDataParallel(model)
    model.seen.fill_(rank - 1.0)
    wrapped(torch.ones(1, 3)).sum().backward()
    return model.seen.item()


def refused(call):
    try:
        call()
    except NarrowcastError as error:
        return f"{type(error).__name__}: {error}"
    return None


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    print(
        json.dumps(
            {
                "gradients": {name: gradients(options, rank) for name, options in OPTIONS.items()},
                "unused": unused(rank),
                "accumulated": accumulated(rank),
                "buffer": buffer_of(rank),
                "syncbn": refused(lambda: convert_syncbn_model(torch.nn.BatchNorm1d(3))),
                "groups": [create_syncbn_process_group(1).size(), create_syncbn_process_group(2).size()],
                "group of all": create_syncbn_process_group(0),
            }
        )
    )
    gc.collect()  # DDP ends before its group, which else would wait, with Python's lock held, for its threads
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
