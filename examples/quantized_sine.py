"""Teach a network of 1x1 convolutions a picture: a sum of two cosines, cut into a few flat levels.

The input is a picture too, of two channels: at every pixel its own coordinates, from 0 to 1. Seeing nothing
but where it is, the network has to say how bright the pixel should be. The jumps between the levels are what
makes it hard. The whole picture is one batch, so an epoch is a step. After the experiment in Logan Grado's
article on AMD's ROCm blog, 29 March 2024, whose sizes are the defaults on a CUDA device.

Run it:

    python examples/quantized_sine.py
    python examples/quantized_sine.py --size 512 --hidden 256 --layers 2 --epochs 512
    python examples/quantized_sine.py --levels 2 --frequency 1 3
    python examples/quantized_sine.py --inference

What to look at: the last line, `final loss 0.0094`, is the mean squared error over the picture; one colour
everywhere would get 0.11. `quantized_sine.png` shows the target beside the prediction: the longer the
training, the flatter its levels and the sharper their edges. It goes to the folder that the environment
variable NARROWCAST_RUN_DIR names, or to the current one. With `--inference` the network is not trained but
only asked, as often as there would be epochs, for what it makes of the picture at the start.
"""

# %% What is needed
import argparse
import math
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

PICTURE = "quantized_sine.png"
LEARNING_RATE = 1e-3
# The article's experiment, and one that a processor ends within thirty seconds.
FULL_SIZES = {"size": 512, "hidden": 256, "layers": 2, "epochs": 512}
SMALL_SIZES = {"size": 64, "hidden": 128, "layers": 2, "epochs": 256}


# %% The picture and its coordinates
def coordinate_grid(size: int) -> torch.Tensor:
    """Return the coordinates (2, size, size), float64: x grows along the last axis, y down."""
    axis = torch.linspace(0, 1, size, dtype=torch.float64)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x, y])


def quantized_cosines(grid: torch.Tensor, frequency: tuple[float, float], levels: int) -> torch.Tensor:
    """Return cos(2 pi fx x) + cos(2 pi fy y) on a grid (2, H, W), cut into equal levels from 0 to 1: (H, W).

    The range that the sum spans on this grid is divided into `levels` intervals of equal length. Interval k
    (counted from 0, its lower end belongs to it) becomes k / (levels - 1).

    Raises ValueError where the sum is the same at every point of the grid: it has no range to divide.
    """
    wave = torch.cos(2 * math.pi * frequency[0] * grid[0]) + torch.cos(2 * math.pi * frequency[1] * grid[1])
    lowest, highest = wave.min().item(), wave.max().item()
    if highest - lowest < 1e-9:
        raise ValueError(f"frequency {frequency} is constant on this grid: expected one that varies on it")
    edges = torch.linspace(lowest, highest, levels + 1, dtype=wave.dtype)
    return torch.bucketize(wave, edges[1:-1], right=True) / (levels - 1)


# %% The network
class PixelNet(nn.Module):
    """The same small network at every pixel: (N, 2, H, W) coordinates to (N, 1, H, W) brightness."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        widths = [2] + [hidden] * (layers + 1)
        blocks = []
        for channels_in, channels_out in pairwise(widths):
            blocks += [nn.Conv2d(channels_in, channels_out, 1), nn.BatchNorm2d(channels_out), nn.ReLU()]
        self.layers = nn.Sequential(*blocks, nn.Conv2d(hidden, 1, 1))

    def forward(self, coordinates: torch.Tensor) -> torch.Tensor:
        return self.layers(coordinates)


# %% Training, or predicting alone
def train(
    model: nn.Module, inputs: torch.Tensor, target: torch.Tensor, epochs: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Train on the one picture; yield each epoch's prediction and loss before its step is taken."""
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for epoch in range(1, epochs + 1):
        optimizer.zero_grad()
        prediction = model(inputs)
        loss = loss_fn(prediction, target)
        yield prediction.detach(), loss.detach()
        loss.backward()
        optimizer.step()
        if epoch % max(1, epochs // 8) == 0:
            print(f"epoch {epoch}/{epochs}  loss {loss.item():.4f}")


@torch.inference_mode()
def infer(
    model: nn.Module, inputs: torch.Tensor, target: torch.Tensor, times: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ask the network for its picture so many times; yield each, and how far it is from the target."""
    model.eval()
    for _ in range(times):
        prediction = model(inputs)
        yield prediction, nn.functional.mse_loss(prediction, target)


# %% The picture that is written
def draw(target: torch.Tensor, prediction: torch.Tensor, path: Path) -> None:
    """Write both pictures (1, 1, H, W) side by side, on one scale of colour, as a PNG."""
    figure = Figure(figsize=(8, 4.3), layout="constrained")
    for axes, title, picture in zip(
        figure.subplots(1, 2), ("Target", "Prediction"), (target, prediction), strict=True
    ):
        axes.imshow(picture.squeeze().cpu().numpy(), cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(title)
        axes.set_axis_off()
    figure.savefig(path, dpi=150)


# %% The options
def whole_number_from(smallest: int):
    def convert(text: str) -> int:
        number = int(text)
        if number < smallest:
            raise argparse.ArgumentTypeError(f"expected a whole number from {smallest} up, not {text}")
        return number

    convert.__name__ = "whole number"  # argparse names the type by it when int() refuses the text
    return convert


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit a quantized sum of cosines with 1x1 convolutions.")
    for name, smallest, meaning in (
        ("size", 2, "pixels a side"),
        ("hidden", 1, "channels of the hidden layers"),
        ("layers", 0, "hidden layers after the first convolution"),
        ("epochs", 1, "steps"),
    ):
        sizes = f"{FULL_SIZES[name]} on a CUDA device, {SMALL_SIZES[name]} elsewhere"
        parser.add_argument(f"--{name}", type=whole_number_from(smallest), help=f"{meaning} ({sizes})")
    parser.add_argument("--levels", type=whole_number_from(2), default=4, help="values in the target (4)")
    parser.add_argument(
        "--frequency",
        type=float,
        nargs=2,
        default=(4.0, 2.0),
        metavar=("FX", "FY"),
        help="periods across and down (4 2)",
    )
    parser.add_argument("--inference", action="store_true", help="do not train: only predict, once an epoch")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    defaults = FULL_SIZES if torch.device(arguments.device).type == "cuda" else SMALL_SIZES
    for name, number in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, number)
    return arguments


# %% The run
def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    folder = Path(os.environ.get("NARROWCAST_RUN_DIR") or ".")
    folder.mkdir(parents=True, exist_ok=True)

    grid = coordinate_grid(arguments.size)
    try:
        picture = quantized_cosines(grid, tuple(arguments.frequency), arguments.levels)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    inputs = grid.to(device, torch.float32)[None]
    target = picture.to(device, torch.float32)[None, None]
    model = PixelNet(arguments.hidden, arguments.layers).to(device)

    print(
        f"{arguments.size} by {arguments.size} pixels, {arguments.levels} levels, {arguments.layers} hidden "
        f"layers of {arguments.hidden}, {arguments.epochs} epochs, device {device}, seed {arguments.seed}"
    )
    start = time.perf_counter()
    latest = torch.zeros_like(target), torch.tensor(math.nan)
    epochs = (infer if arguments.inference else train)(model, inputs, target, arguments.epochs)
    try:
        for prediction, loss in epochs:
            latest = prediction, loss
    finally:  # one that is interrupted shows how far it came
        draw(target, latest[0], folder / PICTURE)
    print(f"picture {folder / PICTURE}")
    print(f"{'inference' if arguments.inference else 'training'} took {time.perf_counter() - start:.1f} s")
    print(f"final loss {latest[1].item():.4f}")


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
