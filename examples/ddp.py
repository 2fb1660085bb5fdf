"""DistributedDataParallel in mixed precision, with one device a process and with several, beside fp32.

Both are trained in two spellings. With one device a process the region and the scaler are used as ever: DDP
averages scaled gradients, so that an overflow on one rank reaches all of them, and all skip the step. Where
a process spreads its model over several devices, or calls parts of it in threads, the region is opened
inside the model's own `forward`, which then computes by it wherever it is called from.

Run it:

    python examples/ddp.py
    python examples/ddp.py --processes 4 --policy fp16
    torchrun --nproc_per_node=2 examples/ddp.py

The first two start their processes themselves, the last leaves it to torchrun. GPUs are used where each
process can have one, and NCCL between them; else the processes share the CPU, and talk by gloo.

What to look at: an overflow is planted in the loss of the last rank only, and every rank has skipped that
step. The two spellings end with the same weights on all ranks, to the bit. `off fp32` is the largest
difference of any weight from one process that trains in fp32 on the whole batch, as a share of the largest
distance that a weight has moved.
"""

# %%
import argparse
import gc
import math
import os
import tempfile
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc

FEATURES = 16
# Sizes that fill GPUs, and ones that a processor ends within seconds.
LARGE = {"width": 2048, "batch_size": 8192}
SMALL = {"width": 64, "batch_size": 64}

Batch = tuple[torch.Tensor, torch.Tensor]


# %%
class Network(nn.Module):
    """(N, 16) to (N, 1), the first layer on one device and the second on the last.

    Args:
        devices: of this process; one, or several.
        policy: None: the region is the caller's. Else that of the region which `forward` opens itself.
    """

    def __init__(self, width: int, devices: Sequence[torch.device], policy: str | None) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width).to(devices[0])
        self.last = nn.Linear(width, 1).to(devices[-1])
        self.devices, self.policy = devices, policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device_type = self.devices[0].type
        own = nullcontext() if self.policy is None else nc.autocast(device_type, policy=self.policy)
        with own:
            hidden = self.first(x.to(self.devices[0])).tanh()
            return self.last(hidden.to(self.devices[-1])).float()


class Run(NamedTuple):
    """What a spelling came to."""

    spelling: str
    loss: float
    weights: torch.Tensor
    skipped: list[int]


class Task(NamedTuple):
    """What every spelling trains, on the devices of this process."""

    width: int
    seed: int
    devices: Sequence[torch.device]
    batches: Sequence[Batch]
    policy: str
    inside: bool
    overflow_at: int

    def network(self, policy: str | None) -> Network:
        torch.manual_seed(self.seed)
        return Network(self.width, self.devices, policy)


def make_optimizer(model: nn.Module, width: int) -> torch.optim.Optimizer:
    # The loss curves more, the more units are added up in an output.
    return torch.optim.SGD(model.parameters(), 6.4 / width)


def make_batches(steps: int, batch_size: int, seed: int, device: torch.device) -> list[Batch]:
    """Inputs (N, 16), and targets (N, 1): a smooth function of them, and noise; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        x = torch.randn(batch_size, FEATURES, generator=generator)
        noise = torch.randn(batch_size, 1, generator=generator)
        y = x[:, :4].sum(1, keepdim=True).sin() + x[:, 4:5] + 0.5 * noise
        batches.append((x.to(device), y.to(device)))
    return batches


def mine(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows, as many as every rank's."""
    return tensor[dist.get_rank() :: dist.get_world_size()]


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().cpu().reshape(-1) for parameter in model.parameters()])


def finished(spelling: str, model: Network, task: Task, skipped: list[int]) -> Run:
    model.policy = None
    x, y = task.batches[-1]
    with torch.no_grad():
        return Run(spelling, F.mse_loss(model(x), y).item(), weights_of(model), skipped)


# %%
def train_fp32(task: Task, left_out: Collection[int]) -> tuple[Run, torch.Tensor]:
    """In this process alone, on whole batches; return the weights at the start, too."""
    model = task.network(None)
    start = weights_of(model)
    optimizer = make_optimizer(model, task.width)
    for number, (x, y) in enumerate(task.batches, 1):
        if number in left_out:
            continue
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return finished("fp32", model, task, []), start


# %%
def train_drop_in(task: Task) -> Run:
    device_type = task.devices[0].type
    model = task.network(task.policy if task.inside else None)
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(model, task.width)
    scaler = nc.GradScaler(device_type)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    skipped = []
    for number, (x, y) in enumerate(task.batches, 1):
        optimizer.zero_grad()
        with nc.autocast(device_type, policy=task.policy, enabled=not task.inside):
            loss = F.mse_loss(ddp(mine(x)), mine(y))
        if number == task.overflow_at and is_last:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if scaler.step(optimizer).skipped:
            skipped.append(number)
        scaler.update()
    return finished("drop-in", model, task, skipped)


# %%
def train_stepper(task: Task) -> Run:
    model = task.network(task.policy if task.inside else None)
    ddp = DistributedDataParallel(model)
    stepper = nc.Stepper(ddp, make_optimizer(model, task.width), task.policy)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    skipped = []
    for number, (x, y) in enumerate(task.batches, 1):
        with stepper.autocast():
            loss = F.mse_loss(ddp(mine(x)), mine(y))
        if number == task.overflow_at and is_last:
            loss = loss * math.inf
        if stepper.step(loss).skipped:
            skipped.append(number)
    return finished("nc.Stepper", model, task, skipped)


# %%
def show(runs: Sequence[Run], start: torch.Tensor) -> None:
    """The first is that in fp32, the last that of nc.Stepper."""
    fp32, stepper = runs[0].weights, runs[-1].weights
    moved = (fp32 - start).abs().max()
    print(f"{'':16}{'final loss':>12}{'skipped':>12}{'off fp32':>12}{'off Stepper':>14}")
    for run in runs:
        skipped = f"{len(run.skipped)} steps" if len(run.skipped) != 1 else f"step {run.skipped[0]}"
        off, off_stepper = (((run.weights - other).abs().max() / moved).item() for other in (fp32, stepper))
        print(f"{run.spelling:16}{run.loss:12.5f}{skipped:>12}{off:12.1e}{off_stepper:14.1e}")


def compare(task: Task) -> None:
    runs = [train_drop_in(task), train_stepper(task)]
    every: list[list[Run]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, runs)
    if dist.get_rank() > 0:
        return
    fp32, start = train_fp32(task, left_out=runs[0].skipped)
    show([fp32, *runs], start)
    for index, (spelling, _, weights, skipped) in enumerate(runs):
        weigh = all(torch.equal(weights, of_rank[index].weights) for of_rank in every)
        skip = all(skipped == of_rank[index].skipped for of_rank in every)
        print(f"{spelling}: ranks hold {'the same' if weigh else 'OTHER'} weights and skipped ", end="")
        print(f"{'the same' if skip else 'OTHER'} steps")


# %%
def train(rank: int, world: int, meeting: str, arguments: argparse.Namespace) -> None:
    """What each process does."""
    device_type = arguments.device
    here, all_here = rank, world
    if dist.is_torchelastic_launched():
        here, all_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    several = device_type == "cuda" and torch.cuda.device_count() >= 2 * all_here
    if device_type == "cuda":
        torch.cuda.set_device(here)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // all_here))
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo", init_method=meeting, rank=rank, world_size=world
    )
    first = torch.device(device_type, here if device_type == "cuda" else None)
    last = torch.device("cuda", here + all_here) if several else first
    for inside, devices in ((False, (first,)), (True, (first, last))):
        batches = make_batches(arguments.steps, arguments.batch_size, arguments.seed, first)
        batches = [(x, y.to(devices[-1])) for x, y in batches]
        if rank == 0 and inside:
            where = f"{first} and {last}" if several else f"{first}, for want of more"
            print(f"\nthe region inside forward, several devices a process: {where}")
        elif rank == 0:
            print(f"{world} processes, policy {arguments.policy}, {arguments.steps} steps")
            print(f"\nthe region around the call, one device a process: {first}")
        compare(
            Task(
                width=arguments.width,
                seed=arguments.seed,
                devices=devices,
                batches=batches,
                policy=arguments.policy,
                inside=inside,
                overflow_at=arguments.overflow_at,
            )
        )
    # DDP ends before its group: one that ends with it waits, with Python's lock held, for threads that
    # may want that lock.
    gc.collect()
    dist.destroy_process_group()


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, not {text}")
    return int(text)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description="DistributedDataParallel in mixed precision, and in fp32.")
    parser.add_argument("--policy", choices=("auto", "bf16", "fp16"), default="auto")
    parser.add_argument("--steps", type=whole_number, default=20, help="batches of training (20)")
    meaning = "the step that overflows, if there are so many (5)"
    parser.add_argument("--overflow-at", type=whole_number, default=5, help=meaning)
    parser.add_argument("--width", type=whole_number, help="hidden units (2048 on CUDA, 64 elsewhere)")
    parser.add_argument(
        "--batch-size", type=whole_number, help="rows a step of all processes (8192 on CUDA, 64 elsewhere)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (0)")
    meaning = "to start where torchrun has not (as many as GPUs, 2 at least)"
    parser.add_argument("--processes", type=whole_number, default=max(2, gpus), help=meaning)
    meaning = "cuda where each process can have a GPU of its own, else cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), help=meaning)
    arguments = parser.parse_args(argv)
    world = needed = arguments.processes
    if dist.is_torchelastic_launched():
        world, needed = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if arguments.device == "cuda" and gpus < needed:
        parser.error(f"argument --device: expected a GPU for each of {needed} processes, not {gpus}")
    arguments.device = arguments.device or ("cuda" if gpus >= needed else "cpu")
    for name, size in (LARGE if arguments.device == "cuda" else SMALL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, size)
    if arguments.batch_size % world:  # each rank's mean would count alike in that of all, whatever its rows
        parser.error(f"argument --batch-size: expected a multiple of the {world} processes")
    arguments.processes = world
    return arguments


def main(arguments: argparse.Namespace) -> None:
    if dist.is_torchelastic_launched():
        train(int(os.environ["RANK"]), arguments.processes, "env://", arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        if arguments.processes == 1:
            train(0, 1, meeting, arguments)
        else:
            world = arguments.processes
            torch.multiprocessing.spawn(train, (world, meeting, arguments), nprocs=world)


# %%
if __name__ == "__main__":
    # Processes are started from a file, which a notebook is not.
    main(parse_arguments(["--processes", "1"] if "get_ipython" in globals() else None))
