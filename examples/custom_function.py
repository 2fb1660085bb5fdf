"""Custom autograd functions under mixed precision, in two spellings, beside fp32.

A small network is made of three kinds of `torch.autograd.Function`:

- `Product` multiplies matrices: `nc.custom_fwd` and `nc.custom_bwd` run its backward in the region of its
  forward;
- `LogCosh` needs fp32: `nc.custom_fwd(cast_inputs=torch.float32)` casts its inputs, and it runs uncast;
- `Imported` is of a library, without decorators, and nobody here can change it: it is called in a region that
  is off, with its inputs cast by hand.

Run it:

    python examples/custom_function.py
    python examples/custom_function.py --policy fp16

What to look at: the first table says in which format each function was given its inputs, returned its output
and got its gradient: only products are in the low one. The spelling of the loop changes nothing inside the
model, and the two end with the same weights, to the bit. `off fp32` is the largest difference of any weight
from fp32 training, as a share of the largest distance that a weight has moved.
"""

# %%
import argparse
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

FEATURES = 16
# Sizes that fill a GPU, and ones that a processor ends within seconds.
LARGE = {"width": 2048, "batch_size": 8192}
SMALL = {"width": 64, "batch_size": 64}
DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"

Batch = tuple[torch.Tensor, torch.Tensor]
formats: dict[str, dict[str, torch.dtype]] = {}


def note(function: str, **seen: torch.Tensor) -> None:
    """Remember in which format the tensors of a function were when it was called last."""
    formats.setdefault(function, {}).update({name: tensor.dtype for name, tensor in seen.items()})


# %%
class Product(torch.autograd.Function):
    """A product of matrices (N, K) and (K, M); in a region both passes are in its format."""

    @staticmethod
    @nc.custom_fwd(device_type=DEVICE_TYPE)
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        product = a.mm(b)
        note("Product", output=product)
        return product

    @staticmethod
    @nc.custom_bwd(device_type=DEVICE_TYPE)
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        note("Product", gradient=gradient)
        return gradient.mm(b.t()), a.t().mm(gradient)


# %%
class LogCosh(torch.autograd.Function):
    """log(cosh(x)), elementwise, for fp32 alone: in fp16 cosh is infinite from 12 on."""

    @staticmethod
    @nc.custom_fwd(device_type=DEVICE_TYPE, cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError(f"expected float32, got {x.dtype}")
        ctx.save_for_backward(x)
        output = x.cosh().log()
        note("LogCosh", output=output)
        return output

    @staticmethod
    @nc.custom_bwd(device_type=DEVICE_TYPE)
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        note("LogCosh", gradient=gradient)
        return gradient * x.tanh()


# %%
class Imported(torch.autograd.Function):
    """Stands for a function of a library: a product of (N, K) and (K, 1) that knows nothing of regions."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        product = a.mm(b)
        note("Imported", output=product)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        note("Imported", gradient=gradient)
        return gradient.mm(b.t()), a.t().mm(gradient)


def imported_in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # Called as it is, its forward would be cast and its backward not: an error of formats, or worse.
    with nc.autocast(a.device.type, enabled=False):
        return Imported.apply(a.float(), b.float())


# %%
class Network(nn.Module):
    """(N, 16) to (N, 1), by one function after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shapes = (FEATURES + 1, width), (width, width), (width, 1)
        self.weights = nn.ParameterList([torch.randn(shape) / math.sqrt(shape[0]) for shape in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.weights
        with_one = F.pad(x, (0, 1), value=1.0)  # so that the first product has a shift
        hidden = Product.apply(with_one, first)
        note("Product", given=with_one)
        note("LogCosh", given=hidden)
        hidden = Product.apply(LogCosh.apply(hidden), second)
        note("Imported", given=hidden)
        return imported_in_fp32(hidden, third)


class Run(NamedTuple):
    """What a spelling came to."""

    spelling: str
    loss: float
    weights: torch.Tensor
    skipped: list[int]


def make_model(width: int, seed: int, device: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    return Network(width).to(device)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # The loss curves more, the more units are added up in an output.
    return torch.optim.SGD(model.parameters(), 0.64 / model.weights[2].numel())


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
def show_formats(model: nn.Module, batch: Batch, policy: str) -> None:
    """Of one forward and one backward pass."""
    x, y = batch
    with nc.autocast(x.device.type, policy=policy):
        loss = F.mse_loss(model(x), y)
    loss.backward()
    print(f"{'':12}{'given':>12}{'output':>12}{'gradient':>12}")
    for function, seen in formats.items():
        dtypes = (str(seen[name]).removeprefix("torch.") for name in ("given", "output", "gradient"))
        print(f"{function:12}" + "".join(f"{dtype:>12}" for dtype in dtypes))
    print()


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
    parser = argparse.ArgumentParser(description="Custom autograd functions in mixed precision, and in fp32.")
    parser.add_argument("--policy", choices=("auto", "bf16", "fp16"), default="auto")
    parser.add_argument("--steps", type=whole_number, default=20, help="batches of training (20)")
    parser.add_argument("--overflow-at", type=whole_number, default=5, help="the step that overflows (5)")
    parser.add_argument("--width", type=whole_number, help="hidden units (2048 on CUDA, 64 elsewhere)")
    parser.add_argument("--batch-size", type=whole_number, help="rows a step (8192 on CUDA, 64 elsewhere)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (0)")
    parser.add_argument("--device", type=device_here, default=DEVICE_TYPE)
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
    show_formats(models[0], batches[0], policy)
    drop_in = train_drop_in(models[1], batches, policy, overflow_at)
    stepper = train_stepper(models[2], batches, policy, overflow_at)
    fp32 = train_fp32(models[0], batches, left_out=drop_in.skipped)
    show([fp32, drop_in, stepper], start)


# %%
if __name__ == "__main__":
    main(parse_arguments([] if "get_ipython" in globals() else None))
