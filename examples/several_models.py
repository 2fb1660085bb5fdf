"""Two models and two optimizers under mixed precision, in two spellings, beside fp32.

Two losses reach both models. Their mean is scaled and goes backward; then each optimizer steps on its own
model's gradients. Where those of one are not finite, it can skip alone ("each for itself"), or both can skip
so that the models stay in step ("together"). In the fifth step an overflow is planted in the second model's
gradients only.

Run it:

    python examples/several_models.py
    python examples/several_models.py --policy fp16 --overflow-at 3

What to look at: each for itself, only the second model skips a step; together, both do. Either way the two
spellings end with the same weights, to the bit. `off fp32` is the largest difference of any weight from fp32
training that leaves the same steps out, as a share of the largest distance that a weight has moved.
"""

# %%
import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

FEATURES = 16
MODELS = ("first", "second")
# Sizes that fill a GPU, and ones that a processor ends within seconds.
LARGE = {"width": 2048, "batch_size": 8192}
SMALL = {"width": 64, "batch_size": 64}

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# %%
class Run(NamedTuple):
    """What a spelling came to; skipped steps by model."""

    spelling: str
    loss: float
    weights: torch.Tensor
    skipped: dict[str, list[int]]


def make_models(width: int, seed: int, device: torch.device) -> nn.ModuleDict:
    torch.manual_seed(seed)
    layers = {name: [nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1)] for name in MODELS}
    return nn.ModuleDict({name: nn.Sequential(*layers[name]) for name in MODELS}).to(device)


def make_optimizers(models: nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
    # The loss curves more, the more units are added up in an output.
    return {
        name: torch.optim.SGD(model.parameters(), 6.4 / model[0].out_features)
        for name, model in models.items()
    }


def make_batches(steps: int, batch_size: int, seed: int, device: torch.device) -> list[Batch]:
    """Inputs (N, 16), and two targets (N, 1): smooth functions of them, and noise."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        x = torch.randn(batch_size, FEATURES, generator=generator)
        noise = torch.randn(batch_size, 2, generator=generator)
        for_sum, for_difference = (x[:, :2].sin() + x[:, 2:4] + 0.5 * noise).split(1, dim=1)
        batches.append((x.to(device), for_sum.to(device), for_difference.to(device)))
    return batches


def loss_of(models: nn.ModuleDict, batch: Batch, *, overflow: bool = False) -> torch.Tensor:
    """One half wants the sum of the two outputs right, the other their difference."""
    x, for_sum, for_difference = batch
    first, second = models["first"](x), models["second"](x)
    if overflow:
        second.register_hook(lambda gradient: gradient * math.inf)
    return (F.mse_loss(first + second, for_sum) + F.mse_loss(first - second, for_difference)) / 2


def finished(spelling: str, models: nn.ModuleDict, batch: Batch, skipped: dict[str, list[int]]) -> Run:
    with torch.no_grad():
        loss = loss_of(models, batch).item()
    return Run(spelling, loss, weights_of(models), skipped)


def weights_of(models: nn.ModuleDict) -> torch.Tensor:
    return nn.utils.parameters_to_vector(models.parameters()).detach().clone()


# %%
def train_fp32(models: nn.ModuleDict, batches: Sequence[Batch], left_out: dict[str, list[int]]) -> Run:
    optimizers = make_optimizers(models)
    for number, batch in enumerate(batches, 1):
        loss = loss_of(models, batch)
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss.backward()
        for name, optimizer in optimizers.items():
            if number not in left_out[name]:
                optimizer.step()
    return finished("fp32", models, batches[-1], {name: [] for name in MODELS})


# %%
def train_drop_in(
    models: nn.ModuleDict, batches: Sequence[Batch], policy: str, overflow_at: int, *, together: bool
) -> Run:
    device_type = batches[0][0].device.type
    optimizers = make_optimizers(models)
    scaler = nc.GradScaler(device_type)
    skipped: dict[str, list[int]] = {name: [] for name in MODELS}
    for number, batch in enumerate(batches, 1):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        with nc.autocast(device_type, policy=policy):
            loss = loss_of(models, batch, overflow=number == overflow_at)
        scaler.scale(loss).backward()
        if together:
            results = scaler.step_together(optimizers.values())
        else:
            results = [scaler.step(optimizer) for optimizer in optimizers.values()]
        scaler.update()  # once, after the steps of all
        for name, result in zip(MODELS, results, strict=True):
            if result.skipped:
                skipped[name].append(number)
    return finished("drop-in", models, batches[-1], skipped)


# %%
def train_stepper_together(
    models: nn.ModuleDict, batches: Sequence[Batch], policy: str, overflow_at: int
) -> Run:
    stepper = nc.Stepper(models, list(make_optimizers(models).values()), policy)
    skipped: list[int] = []
    for number, batch in enumerate(batches, 1):
        with stepper.autocast():
            loss = loss_of(models, batch, overflow=number == overflow_at)
        if stepper.step(loss).skipped:
            skipped.append(number)
    return finished("nc.Stepper", models, batches[-1], dict.fromkeys(MODELS, skipped))


def train_stepper_each(models: nn.ModuleDict, batches: Sequence[Batch], policy: str, overflow_at: int) -> Run:
    """Optimizers with names have turns, scales and decisions of their own, and a graph each."""
    stepper = nc.Stepper(models, make_optimizers(models), policy)
    skipped: dict[str, list[int]] = {name: [] for name in MODELS}
    for number, batch in enumerate(batches, 1):
        losses = {}
        for name in MODELS:  # both from the weights before the step
            with stepper.autocast(name):
                losses[name] = loss_of(models, batch, overflow=number == overflow_at)
        for name in MODELS:
            if stepper.step(losses[name], name=name).skipped:
                skipped[name].append(number)
    return finished("nc.Stepper", models, batches[-1], skipped)


# %%
def show(runs: Sequence[Run], start: torch.Tensor) -> None:
    """The first is that in fp32, the last that of nc.Stepper."""
    fp32, stepper = runs[0].weights, runs[-1].weights
    moved = (fp32 - start).abs().max()
    heads = "".join(f"{f'skips {name}':>14}" for name in MODELS)
    print(f"{'':12}{'final loss':>12}{heads}{'off fp32':>12}{'off Stepper':>14}")
    for run in runs:
        steps = (f"{len(one)} steps" if len(one) != 1 else f"step {one[0]}" for one in run.skipped.values())
        skipped = "".join(f"{one:>14}" for one in steps)
        off, off_stepper = (((run.weights - other).abs().max() / moved).item() for other in (fp32, stepper))
        print(f"{run.spelling:12}{run.loss:12.5f}{skipped}{off:12.1e}{off_stepper:14.1e}")


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
    parser = argparse.ArgumentParser(description="Two models and optimizers in mixed precision, and in fp32.")
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
    print(f"policy {policy}, {arguments.steps} steps, width {arguments.width}, device {device}")
    for together in (False, True):
        fresh = [make_models(arguments.width, arguments.seed, device) for _ in range(3)]
        start = weights_of(fresh[0])
        drop_in = train_drop_in(fresh[1], batches, policy, overflow_at, together=together)
        train_stepper = train_stepper_together if together else train_stepper_each
        stepper = train_stepper(fresh[2], batches, policy, overflow_at)
        fp32 = train_fp32(fresh[0], batches, left_out=drop_in.skipped)
        print(f"\n{'together' if together else 'each for itself'}")
        show([fp32, drop_in, stepper], start)


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
