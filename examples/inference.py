"""What mixed precision gains in training and in inference, beside each other, in time and in memory.

A network of 1x1 convolutions learns a picture of flat levels from the coordinates of its pixels: once in
FP32, once with `nc.Stepper`. The FP32 network then predicts in three ways: as it is, inside an autocast
region, which casts the weights in every call, and baked, with its weights stored in the short format.

Run it:

    python examples/inference.py
    python examples/inference.py --size 512 --hidden 256 --epochs 256
    python examples/inference.py --policy fp16 --device cuda

What to look at: the last column of each table. It holds the measured ratio to FP32, and says "no gain on this
machine" where there is none: a GPU or a CPU with instructions for the short format gains most in training,
whose backward pass is two thirds of the work; small networks, and others, may not gain at all. Times are
medians over runs that take turns. `inference.png` shows target, FP32 and mixed prediction beside each other:
the same picture, so that only the cost differs. It goes to the folder that the environment variable
NARROWCAST_RUN_DIR names, or to the current one.
"""

# %% What is needed
import argparse
import copy
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import narrowcast as nc

PICTURE = "inference.png"
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
FULL_SIZES = {"size": 512, "hidden": 256, "epochs": 256, "passes": 20}
SMALL_SIZES = {"size": 48, "hidden": 96, "epochs": 120, "passes": 10}
LEARNING_RATE = 2e-3
GAIN_FROM = 1.05  # a ratio that a busy machine does not make by itself


# %% The picture: two cosines in four levels, (1, 2, size, size) coordinates to (1, 1, size, size) brightness
def task(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    axis = torch.linspace(0, 1, size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    wave = torch.cos(8 * math.pi * x) + torch.cos(4 * math.pi * y)
    target = ((wave + 2).clamp(max=3.999).floor() / 3)[None, None]
    return torch.stack([x, y])[None].to(device), target.to(device)


def network(hidden: int) -> nn.Sequential:
    def block(channels: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, hidden, 1), nn.BatchNorm2d(hidden), nn.ReLU()]

    return nn.Sequential(*block(2), *block(hidden), *block(hidden), nn.Conv2d(hidden, 1, 1))


# %% Training: a step in FP32, and the same step by a Stepper
def training_step(model: nn.Module, policy: str | None, x: torch.Tensor, target: torch.Tensor) -> Callable:
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    stepper = None if policy is None else nc.Stepper(model, optimizer, policy)

    def step() -> torch.Tensor:
        if stepper is None:
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with stepper.autocast():
                loss = nn.functional.mse_loss(model(x), target)
            stepper.step(loss)
        return loss.detach()

    return step


# %% Inference: the same network in three ways
def predictors(model: nn.Module, policy: str, x: torch.Tensor) -> dict[str, Callable]:
    model.eval()
    baked = copy.deepcopy(model)
    nc.bake(baked, policy)

    @torch.inference_mode()
    def in_region() -> torch.Tensor:
        with nc.autocast(x.device.type, FORMATS[policy]):
            return model(x)

    plain = torch.inference_mode()(lambda: model(x))
    return {
        "FP32": plain,
        f"autocast {policy}": in_region,
        f"baked {policy}": torch.no_grad()(lambda: baked(x)),
    }


# %% Measuring: the ways take turns; memory has calls of its own, since recording it takes time on a CPU
def median_seconds(ways: dict[str, Callable], times: int, device: str) -> dict[str, float]:
    seconds = {name: [] for name in ways}
    for turn in range(times + 1):
        for name, call in ways.items():
            with nc.observe.profile(device, memory=False) as profile:
                call()
            if turn:  # the first turn warms up
                seconds[name].append(profile.duration_s)
    return {name: statistics.median(each) for name, each in seconds.items()}


def bytes_of(call: Callable, device: str) -> int:
    with nc.observe.profile(device) as profile:
        call()
    return profile.added_bytes


def verdict(ratio: float) -> str:
    if ratio >= GAIN_FROM:
        return f"{ratio:.2f} times as fast"
    return f"no gain on this machine ({ratio:.2f})"


def print_table(title: str, seconds: dict[str, float], memory: dict[str, int], note: dict[str, str]) -> None:
    print(f"\n{title:<15}{'time':>10}{'memory':>12}  {'':<22}against FP32")
    base_s, base_bytes = seconds["FP32"], memory["FP32"]
    for name, each in seconds.items():
        line = f"{name:<15}{each * 1e3:>7.2f} ms{memory[name] / 2**20:>8.1f} MiB  {note[name]:<22}"
        if name != "FP32":
            line += f"{verdict(base_s / each)}, {memory[name] / base_bytes:.2f} of the memory"
        print(line.rstrip())


# %% The picture
def draw(pictures: dict[str, torch.Tensor], path: Path) -> None:
    figure = Figure(figsize=(11, 4.1), layout="constrained")
    for axes, (title, picture) in zip(figure.subplots(1, len(pictures)), pictures.items(), strict=True):
        image = picture.float().squeeze().cpu().numpy()
        axes.imshow(image, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(title)
        axes.set_axis_off()
    figure.savefig(path, dpi=150)


# %% The options
def whole_number_from(smallest: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text)
        if number < smallest:
            raise argparse.ArgumentTypeError(f"expected a whole number from {smallest} up, not {text}")
        return number

    convert.__name__ = "whole number"  # argparse names the type by it when int() refuses the text
    return convert


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare training and inference in FP32 and mixed precision."
    )
    for name, smallest, meaning in (
        ("size", 4, "pixels a side"),
        ("hidden", 1, "channels of the hidden layers"),
        ("epochs", 1, "training steps"),
        ("passes", 1, "timed passes of inference"),
    ):
        sizes = f"{FULL_SIZES[name]} on a CUDA device, {SMALL_SIZES[name]} elsewhere"
        parser.add_argument(f"--{name}", type=whole_number_from(smallest), help=f"{meaning} ({sizes})")
    parser.add_argument("--policy", choices=FORMATS, default="bf16", help="the short format (bf16)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    defaults = FULL_SIZES if torch.device(arguments.device).type == "cuda" else SMALL_SIZES
    for name, number in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, number)
    return arguments


# %% The two trainings alternate their steps; then the three ways to predict
def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    device, policy = arguments.device, arguments.policy
    x, target = task(arguments.size, device)
    models = {"FP32": network(arguments.hidden).to(device)}
    models[policy] = copy.deepcopy(models["FP32"])
    print(
        f"{arguments.size} by {arguments.size} pixels, {arguments.hidden} channels, "
        f"{arguments.epochs} steps, {device}, torch {torch.__version__}"
    )

    steps = {
        name: training_step(model, None if name == "FP32" else policy, x, target)
        for name, model in models.items()
    }
    seconds = median_seconds(steps, arguments.epochs, device)
    memory = {name: bytes_of(step, device) for name, step in steps.items()}
    losses = {name: f"loss {step().item():.4f}" for name, step in steps.items()}
    print_table("training", seconds, memory, losses)

    ways = predictors(models["FP32"], policy, x)
    answers = {name: call() for name, call in ways.items()}
    seconds = median_seconds(ways, arguments.passes, device)
    memory = {name: bytes_of(call, device) for name, call in ways.items()}
    errors = {name: (answer.float() - answers["FP32"]).abs().max().item() for name, answer in answers.items()}
    print_table("inference", seconds, memory, {n: f"largest error {e:.4f}" for n, e in errors.items()})

    folder = Path(os.environ.get("NARROWCAST_RUN_DIR") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    mixed = models[policy].eval()
    with torch.no_grad(), nc.autocast(torch.device(device).type, FORMATS[policy]):
        prediction = mixed(x)
    draw({"Target": target, "FP32": answers["FP32"], f"Mixed, {policy}": prediction}, folder / PICTURE)
    print(f"\npicture {folder / PICTURE}")


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
