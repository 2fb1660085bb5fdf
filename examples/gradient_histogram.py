"""Where activation gradients lie, and what of them fits into fp16: a histogram over powers of two.

A small convolutional classifier goes backward in FP32, and the gradient of every layer's output is counted by
its exponent while it passes. Drawn over the counts is the window of fp16: what lies left of it becomes zero,
what lies in its shaded part loses digits, and what lies right of it becomes infinite. A loss scale of 2**k
moves the whole histogram k steps to the right.

Run it:

    python examples/gradient_histogram.py
    python examples/gradient_histogram.py --scale 1024 --steps 200
    python examples/gradient_histogram.py --normal -24

What to look at: `gradient_histogram.png`, and in the table the shares of the numbers that are not zero. The
first line is fp16 without a scale, the others what scales would save; where `overflow` begins, a scale is
too large. With `--normal K` normal deviates of the size 2**K are counted instead, for which the share that
becomes zero is known: erf(2**-25 / (2**K sqrt 2)). The picture goes to the folder that the environment
variable NARROWCAST_RUN_DIR names, or to the current one.
"""

# %% What is needed
import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from sklearn.datasets import load_digits
from torch import nn

import narrowcast as nc
from narrowcast.formats import FLOAT16

PICTURE = "gradient_histogram.png"
COLOURS = {"flushed": "#b3282d", "subnormal": "#e0a030", "normal": "#30708f", "overflowed": "#7b3f98"}
DEVIATES = 1 << 20


# %% The network, and its data: real handwritten digits of 8 by 8 pixels
def network() -> nn.Sequential:
    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32),
        *block(32, 64),
        *block(64, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def data(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    return images.to(device), torch.tensor(digits.target).to(device)


# %% Counting: every layer's output hands its gradient to the histogram, which stays on the device
def watch(model: nn.Module, histogram: nc.observe.ExponentHistogram) -> None:
    def after_forward(_: nn.Module, __: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(histogram.add)

    for layer in model.modules():
        if not list(layer.children()):
            layer.register_forward_hook(after_forward)


def train_and_count(steps: int, device: str) -> nc.observe.ExponentHistogram:
    histogram = nc.observe.ExponentHistogram()
    images, labels = data(device)
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    watch(model, histogram)
    for _ in range(steps):
        batch = torch.randint(len(labels), (64,), device=device)
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{steps} steps on real digits, loss {loss.item():.4f} in the end")
    return histogram


def normal_deviates(exponent: int, device: str) -> nc.observe.ExponentHistogram:
    histogram = nc.observe.ExponentHistogram()
    histogram.add(torch.randn(DEVIATES, device=device) * 2.0**exponent)
    share = math.erf(2.0**-25 / (2.0**exponent * math.sqrt(2)))
    print(f"normal deviates of size 2**{exponent}: {share:.4f} of them should become zero")
    return histogram


# %% The table: what each scale would do
def print_table(histogram: nc.observe.ExponentHistogram, scale: float) -> None:
    print(histogram)
    largest = histogram.largest_scale(FLOAT16)
    scales = {1.0, 2.0**5, 2.0**10, 2.0**15, 2.0**20, scale} | ({largest} if largest else set())
    print(f"{'scale':>12}{'zero':>10}{'subnormal':>12}{'normal':>10}{'overflow':>11}")
    for each in sorted(scales):
        told = histogram.cast_to(FLOAT16, scale=each)
        cells = [f"{share:.4f}" for share in told.shares.values()] or ["-"] * 4
        mark = "  the largest that overflows nothing here" if each == largest else ""
        text = f"2**{round(math.log2(each))}"
        print(f"{text:>12}{cells[0]:>10}{cells[1]:>12}{cells[2]:>10}{cells[3]:>11}{mark}")


# %% The picture
def draw(histogram: nc.observe.ExponentHistogram, scale: float, what: str, path: Path) -> None:
    counts, total = histogram.exponents, histogram.total
    moved = FLOAT16.min_exponent - round(math.log2(scale))  # in the numbers as they are before the scale
    edges = {
        "flushed": (-math.inf, moved - 11),
        "subnormal": (moved - 11, moved),
        "normal": (moved, moved + 30),
        "overflowed": (moved + 30, math.inf),
    }
    told = histogram.cast_to(FLOAT16, scale=scale)
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    left, right = min([*counts, moved - 12]) - 1, max([*counts, moved + 31]) + 2
    entries = []
    for name, (low, high) in edges.items():
        within = {e: n / total for e, n in counts.items() if low <= e < high}
        label = f"{name}: {100 * told.shares.get(name, 0):.2f} %"
        axes.bar(list(within), list(within.values()), 0.9, align="edge", color=COLOURS[name])
        entries.append(Patch(color=COLOURS[name], label=label))
        axes.axvspan(max(low, left), min(high, right), color=COLOURS[name], alpha=0.1, linewidth=0)
    axes.set_xlim(left, right)
    axes.set_yscale("log")
    axes.set_xlabel("power of two, before the scale")
    axes.set_ylabel("share of all numbers")
    zeros = f"{100 * told.zeros / max(total, 1):.1f} % of all numbers are zero already"
    axes.set_title(f"{what} and the window of fp16, at a loss scale of {scale:g} ({zeros})", size=10)
    axes.legend(
        handles=entries, title="of those that are not zero", loc="upper left", fontsize=8, title_fontsize=8
    )
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


def power_of_two(text: str) -> float:
    number = float(text)
    if not 2.0**-100 <= number <= 2.0**100 or math.frexp(number)[0] != 0.5:
        raise argparse.ArgumentTypeError(f"expected a power of two, not {text}")
    return number


def exponent(text: str) -> int:
    number = int(text)
    if not -120 <= number <= 100:
        raise argparse.ArgumentTypeError(f"expected a whole number from -120 to 100, not {text}")
    return number


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw activation gradients over the window of fp16.")
    parser.add_argument("--steps", type=whole_number_from(1), default=20, help="training steps counted (20)")
    parser.add_argument("--scale", type=power_of_two, default=1.0, help="the loss scale that is drawn (1)")
    parser.add_argument("--normal", type=exponent, metavar="K", help="count normal deviates of the size 2**K")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and deviates (0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


# %% Count, print, draw
def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    if arguments.normal is None:
        histogram = train_and_count(arguments.steps, arguments.device)
    else:
        histogram = normal_deviates(arguments.normal, arguments.device)
    print_table(histogram, arguments.scale)
    folder = Path(os.environ.get("NARROWCAST_RUN_DIR") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    what = "Activation gradients" if arguments.normal is None else "Normal deviates"
    draw(histogram, arguments.scale, what, folder / PICTURE)
    print(f"picture {folder / PICTURE}")


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
