"""The usual training loop in mixed precision, in two spellings, beside the same loop in fp32.

The first spelling is that of `torch.amp`: a region around forward and loss, and a scaler for the backward
pass and the step. The second is `nc.Stepper`, which does all parts of a step in the right order. Both train
the same network on the same batches, and both skip a step in which an overflow is planted.

Run it:

    python examples/typical.py
    python examples/typical.py --policy fp16 --steps 30

What to look at: the two spellings end with the same weights, to the bit, and have skipped the same step.
The column `off fp32` is the largest difference of any weight from fp32 training, as a share of the largest
distance that a weight has moved: about a roundoff of the format, 2**-8 in bf16 and 2**-11 in fp16.
"""

# %%
import argparse
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

FEATURES = 16
# Sizes that fill a GPU, and ones that a processor ends within seconds.
LARGE = {"width": 2048, "batch_size": 8192}
SMALL = {"width": 64, "batch_size": 64}

Batch = tuple[torch.Tensor, torch.Tensor]


# %%
class Run(NamedTuple):
    """What a spelling came to."""

    spelling: str
    loss: float
    weights: torch.Tensor
    skipped: list[int]


def make_model(width: int, seed: int, device: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1)).to(device)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # The loss curves more, the more units are added up in an output.
    return torch.optim.SGD(model.parameters(), 6.4 / model[0].out_features)


def make_batches(steps: int, batch_size: int, seed: int, device: torch.device) -> list[Batch]:
    """Inputs (N, 16), and targets (N, 1): a smooth function of them, and noise."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        x = torch.randn(batch_size, FEATURES, generator=generator)
        noise = torch.randn(batch_size, 1, generator=generator)
        y = x[:, :4].sum(1, keepdim=True).sin() + x[:, 4:5] + 0.5 * noise
        batches.append((x.to(device), y.to(device)))
    return batches


def weights_of(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def finished(spelling: str, model: nn.Module, batches: Sequence[Batch], skipped: list[int]) -> Run:
    x, y = batches[-1]
    with torch.no_grad():
        return Run(spelling, F.mse_loss(model(x), y).item(), weights_of(model), skipped)


# %%
def train_fp32(model: nn.Module, batches: Sequence[Batch], left_out: Collection[int]) -> Run:
    optimizer = make_optimizer(model)
    for number, (x, y) in enumerate(batches, 1):
        if number in left_out:
            continue
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return finished("fp32", model, batches, [])


# %%
def train_drop_in(model: nn.Module, batches: Sequence[Batch], policy: str, overflow_at: int) -> Run:
    device_type = batches[0][0].device.type
    optimizer = make_optimizer(model)
    # bf16 has the range of fp32: a power of two changes nothing there, and the check is still of use.
    scaler = nc.GradScaler(device_type)
    skipped = []
    for number, (x, y) in enumerate(batches, 1):
        optimizer.zero_grad()
        with nc.autocast(device_type, policy=policy):
            loss = F.mse_loss(model(x), y)
        if number == overflow_at:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        result = scaler.step(optimizer)
        scaler.update()
        if result.skipped:
            skipped.append(number)
    return finished("drop-in", model, batches, skipped)


# %%
def train_stepper(model: nn.Module, batches: Sequence[Batch], policy: str, overflow_at: int) -> Run:
    optimizer = make_optimizer(model)
    stepper = nc.Stepper(model, optimizer, policy)
    skipped = []
    for number, (x, y) in enumerate(batches, 1):
        with stepper.autocast():
            loss = F.mse_loss(model(x), y)
        if number == overflow_at:
            loss = loss * math.inf
        if stepper.step(loss).skipped:
            skipped.append(number)
    return finished("nc.Stepper", model, batches, skipped)


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


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, not {text}")
    return int(text)


def device_here(text: str) -> torch.device:
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError):
        raise argparse.ArgumentTypeError(f"expected a device of this machine, as cpu, not {text}") from None


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train in mixed precision in two spellings, and in fp32.")
    parser.add_argument("--policy", choices=("auto", "bf16", "fp16"), default="auto")
    parser.add_argument("--steps", type=whole_number, default=20, help="batches of training (20)")
    parser.add_argument("--overflow-at", type=whole_number, default=5, help="the step that overflows (5)")
    parser.add_argument("--width", type=whole_number, help="hidden units (2048 on CUDA, 64 elsewhere)")
    parser.add_argument("--batch-size", type=whole_number, help="rows a step (8192 on CUDA, 64 elsewhere)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (0)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device_here, default=default)
    arguments = parser.parse_args(argv)
    for name, size in (LARGE if arguments.device.type == "cuda" else SMALL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, size)
    return arguments


def main(arguments: argparse.Namespace) -> None:
    device, policy, overflow_at = arguments.device, arguments.policy, arguments.overflow_at
    batches = make_batches(arguments.steps, arguments.batch_size, arguments.seed, device)
    models = [make_model(arguments.width, arguments.seed, device) for _ in range(3)]
    start = weights_of(models[0])
    print(f"policy {policy}, {arguments.steps} steps, width {arguments.width}, device {device}")
    drop_in = train_drop_in(models[1], batches, policy, overflow_at)
    stepper = train_stepper(models[2], batches, policy, overflow_at)
    fp32 = train_fp32(models[0], batches, left_out=drop_in.skipped)
    show([fp32, drop_in, stepper], start)


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
