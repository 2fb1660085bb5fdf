"""Why fp16 needs a loss scale: gradients that vanish without one, and explode under one that is too large.

The same small network is trained on the same batch four times: in FP32, and in fp16 without a scale, under
a fixed scale that is far too large, and under a dynamic one. The loss has a small weight, as one term of
several may have, so that its gradients lie where fp16 has hardly any numbers.

Run it:

    python examples/loss_scaling.py
    python examples/loss_scaling.py --steps 400 --growth-interval 50
    python examples/loss_scaling.py --fixed-scale 4096

What to look at: the table. Without a scale gradients are zero and the loss stays where it was; under too
large a scale every step is skipped; under the dynamic scale a few are, and the loss falls as in FP32. The
last line is the same training by `nc.Stepper`: the same scale and the same loss. `loss_scaling.png` shows
scale and skipped steps over time: the scale halves at each overflow and doubles after enough good steps. It
goes to the folder that the environment variable NARROWCAST_RUN_DIR names, or to the current one.
"""

# %% What is needed
import argparse
import copy
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import narrowcast as nc

PICTURE = "loss_scaling.png"
STYLES = {  # of lines that others would hide
    "FP32": {"linewidth": 4, "alpha": 0.45},
    "fp16, no scale": {"linewidth": 4, "linestyle": ":"},
}
LEARNING_RATE = 3e-3
WEIGHT_OF_LOSS = 2.0**-21


# %% What is kept of a training
@dataclass
class Record:
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    zeros: list[float] = field(default_factory=list)


def share_of_zeros(model: nn.Module) -> float:
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return (gradients == 0).float().mean().item()


def task(device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A network, inputs (64, 16), and what it should make of them (64, 1)."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(64, 16)
    return model.to(device), x.to(device), torch.sin(2 * x[:, :1]).to(device)


def loss_of(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return WEIGHT_OF_LOSS * nn.functional.mse_loss(prediction, target)


# %% A training under a scaler: `nc.GradScaler` with any loss scale of `nc.scaling`
def train(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, loss_scale, *, half: bool = True
) -> Record:
    record = Record()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, eps=1e-16)
    scaler = nc.GradScaler(x.device.type, loss_scale=loss_scale, patience=None)
    for _ in range(steps):
        with nc.autocast(x.device.type, torch.float16 if half else torch.float32):
            loss = loss_of(model(x), y)
        scaler.scale(loss).backward()
        result = scaler.step(optimizer)  # unscales, and skips the step if a gradient is not finite
        scaler.update()
        record.zeros.append(share_of_zeros(model))
        optimizer.zero_grad()
        record.losses.append(loss.item())
        record.scales.append(result.scale)
        record.skipped.append(result.skipped)
    return record


# %% The same by a Stepper, which zeroes the gradients too
def train_by_stepper(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, loss_scale) -> Record:
    record = Record()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, eps=1e-16)
    stepper = nc.Stepper(model, optimizer, "fp16", scaler=loss_scale)
    for _ in range(steps):
        with stepper.autocast():
            loss = loss_of(model(x), y)
        result = stepper.step(loss)
        record.losses.append(loss.item())
        record.scales.append(result.scale)
        record.skipped.append(result.skipped)
    return record


# %% The table and the picture
def print_row(name: str, record: Record, before: float) -> None:
    zeros = [share for share, skip in zip(record.zeros, record.skipped, strict=False) if not skip]
    share = f"{sum(zeros) / len(zeros):.4f}" if zeros else "-"
    skips = f"{sum(record.skipped)} of {len(record.skipped)}"
    print(f"{name:<26}{record.losses[-1] / before:>12.3g}{share:>16}{skips:>14}{record.scales[-1]:>14.3g}")


def draw(records: dict[str, Record], dynamic: str, path: Path) -> None:
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    record = records[dynamic]
    steps = range(1, len(record.scales) + 1)
    above.step(steps, record.scales, where="mid", color="#30708f", label="loss scale")
    skipped = [
        (step, scale) for step, scale, skip in zip(steps, record.scales, record.skipped, strict=True) if skip
    ]
    above.plot(
        *zip(*skipped, strict=True) if skipped else ([], []), "x", color="#b3282d", label="skipped step"
    )
    above.set_yscale("log", base=2)
    above.set_ylabel("loss scale")
    above.set_title("The dynamic scale: halved at an overflow, doubled after enough good steps", size=10)
    above.legend(fontsize=8, loc="lower right")
    for name, each in records.items():
        style = STYLES.get(name, {"linewidth": 1.3})
        below.plot(steps, each.losses, label=name, **style)
    below.set_yscale("log")
    below.set_xlabel("step")
    below.set_ylabel("loss")
    below.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=150)


# %% The options
def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {text}")
    return number


def whole_number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, not {text}")
    return number


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train in fp16 under no scale, one too large, and a dynamic one."
    )
    parser.add_argument("--steps", type=whole_number, default=200, help="training steps (200)")
    parser.add_argument("--init-scale", type=positive, default=2.0**40, help="dynamic: at the start (2**40)")
    parser.add_argument(
        "--growth-interval", type=whole_number, default=10, help="dynamic: good steps before it grows (10)"
    )
    parser.add_argument("--fixed-scale", type=positive, default=2.0**60, help="the fixed scale (2**60)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


# %% Four trainings from the same weights, and the Stepper's
def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    model, x, y = task(arguments.device)
    dynamic = nc.scaling.Dynamic(scale=arguments.init_scale, growth_interval=arguments.growth_interval)
    settings = {
        "FP32": (nc.scaling.Off(), False),
        "fp16, no scale": (nc.scaling.Off(), True),
        f"fp16, scale {arguments.fixed_scale:.2g}": (nc.scaling.Static(scale=arguments.fixed_scale), True),
        "fp16, dynamic scale": (dynamic, True),
    }
    records = {
        name: train(copy.deepcopy(model), x, y, arguments.steps, loss_scale, half=half)
        for name, (loss_scale, half) in settings.items()
    }
    by_stepper = train_by_stepper(copy.deepcopy(model), x, y, arguments.steps, dynamic)

    print(f"{arguments.steps} steps on {x.device.type}\n")
    print(f"{'':<26}{'loss left':>12}{'gradients zero':>16}{'skipped':>14}{'last scale':>14}")
    before = records["FP32"].losses[0]
    for name, record in records.items():
        print_row(name, record, before)
    print_row("fp16, by a Stepper", by_stepper, before)

    folder = Path(os.environ.get("NARROWCAST_RUN_DIR") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    draw(records, "fp16, dynamic scale", folder / PICTURE)
    print(f"\npicture {folder / PICTURE}")


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
