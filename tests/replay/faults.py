"""Sixty models with a planted fault, four of each of fifteen kinds, and what is known of each.

Each line that makes the first value that is not finite is marked ``# here``. All are trained in fp16 unless
another policy is given, with gradients of about 1 at the output of the faulty module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, SAMPLES = 8, 4


@dataclass(frozen=True)
class Fault:
    """A model with a fault.

    Attributes:
        verdict: ``precision`` (fp32 is finite), ``model`` (fp32 is not) or ``data``.
        module: path of the module in which the first value arises that is not finite.
        line: its line in this file; 0 if no line of a module makes it.
        calls: returns the output for each micro-batch from the model and the batch.
    """

    name: str
    kind: str
    verdict: str
    direction: str
    module: str
    line: int
    model: Callable[[], nn.Module]
    batches: Callable[[], list[torch.Tensor]]
    policy: str = "fp16"
    scale: float = float(SAMPLES)
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = field(default=lambda model, x: model(x))


FAULTS: dict[str, Fault] = {}


class Net(nn.Module):
    """A layer that passes its input on, the faulty module, and a layer that adds up."""

    def __init__(self, fault: nn.Module, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.fault = fault
        self.leave = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)  # enter
        return self.leave(self.fault(x))


def net(fault: nn.Module, width: int = WIDTH) -> nn.Module:
    """Make a ``Net`` with outer weights of 1; ``width`` is that of the faulty module's output."""
    model = Net(fault, width)
    with torch.no_grad():
        model.enter.weight.copy_(torch.eye(WIDTH))
        model.enter.bias.zero_()
        model.leave.weight.fill_(1.0)
        model.leave.bias.zero_()
    return model


def filled(value: float) -> torch.Tensor:
    return torch.full((SAMPLES, WIDTH), value)


def line_of(module: type, mark: str = "# here") -> int:
    lines, first = inspect.getsourcelines(module)
    marked = [number for number, line in enumerate(lines) if line.rstrip().endswith(mark)]
    return first + marked[0] if marked else 0


def planted(
    kind: str,
    verdict: str,
    direction: str,
    x: float | torch.Tensor,
    *,
    module: str = "fault",
    width: int = WIDTH,
    **more: Any,
) -> Callable[[type], type]:
    """Register a class of modules as a fault, called in a ``Net`` with ``x``."""
    batch = x if isinstance(x, torch.Tensor) else filled(x)

    def register(module_type: type) -> type:
        add(
            name=module_type.__name__,
            kind=kind,
            verdict=verdict,
            direction=direction,
            module=module,
            line=line_of(module_type),
            model=lambda: net(module_type(), width),
            batches=lambda: [batch.clone()],
            **more,
        )
        return module_type

    return register


def add(**facts: Any) -> None:
    FAULTS[facts["name"]] = Fault(**facts)


# ---- 1: an operator overflows in the forward pass


@planted("forward overflow", "precision", "forward", 100.0)
class Matmul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.T  # here
        return scores @ x


@planted("forward overflow", "precision", "forward", 300.0)
class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x  # here


@planted("forward overflow", "precision", "forward", 12.0)
class Exp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()  # here


@planted("forward overflow", "precision", "forward", 200.0, module="fault.conv", width=WIDTH - 2)
class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, bias=False)
        nn.init.constant_(self.conv.weight, 200.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x[:, None])[:, 0]  # here


# ---- 2: an operator overflows in the backward pass


@planted("backward overflow", "precision", "backward", 1e-4)
class Rsqrt(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.rsqrt()  # here


@planted("backward overflow", "precision", "backward", 1e-3)
class Reciprocal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reciprocal()  # here


@planted("backward overflow", "precision", "backward", 1.0 - 1e-6, policy="bf16")
class Acos(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-1 + 1e-6, 1 - 1e-6).acos()  # here


@planted("backward overflow", "precision", "backward", 1e-3, scale=SAMPLES * 1024.0, module="fault.linear")
class LinearGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.linear.weight, 200.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # here


# ---- 3: an infinity that a later operator hides, until the backward pass multiplies it by zero


@planted("hidden", "precision", "forward", 12.0)
class ExpTanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown = x.exp()  # here
        return grown.tanh()


@planted("hidden", "precision", "forward", 12.0)
class ExpClamp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown = x.exp()  # here
        return grown.clamp(max=100.0)


@planted("hidden", "precision", "forward", 1e-6)
class ReciprocalClamp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inverse = x.reciprocal()  # here
        return inverse.clamp(max=100.0)


@planted("hidden", "precision", "forward", 12.0)
class ExpSigmoid(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown = x.exp()  # here
        return grown.sigmoid()


# ---- 4: division by zero


@planted("division by zero", "model", "forward", 1.0)
class DivideByDifference(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x - x)  # here


ONE_ROW_OF_ZEROS = filled(1.0)
ONE_ROW_OF_ZEROS[2] = 0.0


@planted("division by zero", "model", "forward", ONE_ROW_OF_ZEROS)
class DivideByNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.norm(dim=1, keepdim=True)
        return x / length  # here


@planted("division by zero", "precision", "forward", 1.0)
class DivideByRoundedDifference(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = (x + 1e-4) - x
        return x / step  # here


@planted("division by zero", "model", "forward", ONE_ROW_OF_ZEROS)
class DivideBySum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().sum(1, keepdim=True)  # here


# ---- 5: logarithm of zero


@planted("log of zero", "precision", "forward", -18.0)
class LogOfUnderflow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = x.exp()
        return small.log()  # here


@planted("log of zero", "model", "forward", -1.0)
class LogOfRelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu().log()  # here


@planted("log of zero", "precision", "forward", 12.0)
class LogOfComplement(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probability = x.sigmoid()
        return (1 - probability).log()  # here


@planted("log of zero", "model", "forward", -0.5)
class LogOfClamp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probability = x.clamp(0.0, 1.0)
        return -(probability.log() * 0.5)  # here


# ---- 6: an eps that fp16 rounds to zero


@planted("flushed eps", "precision", "forward", ONE_ROW_OF_ZEROS)
class NormEps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.abs().sum(1, keepdim=True)
        return x / (length + 1e-8)  # here


@planted("flushed eps", "precision", "forward", 3.0)
class LayerNormEps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(1, keepdim=True)
        variance = centered.square().mean(1, keepdim=True)
        return centered / (variance + 1e-8).sqrt()  # here


@planted("flushed eps", "precision", "forward", 0.0)
class LogEps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1e-8).log()  # here


@planted("flushed eps", "precision", "forward", 0.0)
class RmsEps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x.square().mean(1, keepdim=True)
        return x * torch.rsqrt(square + 1e-9)  # here


# ---- 7: attention masks; the last query sees nothing

VISIBLE = torch.ones(SAMPLES, SAMPLES)
VISIBLE[-1] = 0.0


@planted("attention mask", "model", "forward", 0.5)
class MaskOfInfinity(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x @ x.T).masked_fill(VISIBLE == 0, -torch.inf)
        return scores.softmax(-1) @ x  # here


@planted("attention mask", "precision", "forward", 0.5)
class MaskOfBillion(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.T
        scores = scores + (1 - VISIBLE).to(scores.dtype) * -1e9  # here
        return scores.softmax(-1) @ x


@planted("attention mask", "precision", "forward", 0.5)
class MaskOfLowest(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (1 - VISIBLE) * torch.finfo(torch.float32).min
        scores = x @ x.T
        scores = scores + mask.to(scores.dtype)  # here
        return scores.softmax(-1) @ x


@planted("attention mask", "model", "forward", 0.5)
class EntropyOfAttention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(SAMPLES, SAMPLES).tril()
        attention = (x @ x.T).masked_fill(causal == 0, -torch.inf).softmax(-1)
        entropy = -(attention * attention.log()).sum(-1, keepdim=True)  # here
        return x + entropy


# ---- 8: normalization over one value


ONE_SAMPLE = torch.linspace(-1.0, 1.0, WIDTH)[None]


@planted("one sample", "model", "forward", ONE_SAMPLE)
class StandardDeviationOfOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / x.std(0)  # here


@planted("one sample", "model", "forward", ONE_SAMPLE)
class VarianceOfOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.var(0)  # here
        return x / (variance + 1e-5).sqrt()


@planted("one sample", "model", "forward", 2.0, module="fault.norm")
class GroupNormWithoutEps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH, eps=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)  # here


@planted("one sample", "model", "forward", 2.0, module="fault.norm")
class LayerNormOfOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(1, eps=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x[:, :, None])[:, :, 0]  # here


# ---- 9: sums in fp16


@planted("accumulation", "precision", "forward", 1e4)
class Cumsum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)  # here


@planted("accumulation", "precision", "forward", 1e4, width=1)
class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x[:, :1]
        for column in range(1, WIDTH):
            total = total + x[:, column : column + 1]  # here
        return total


@planted("accumulation", "precision", "forward", 200.0, width=1)
class SumOfSquares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = x * x
        return squares.sum(1, keepdim=True)  # here


@planted("accumulation", "precision", "forward", 1e4, width=1)
class MeanBySum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True) / WIDTH  # here


# ---- 10: gradients of gradients


@planted("double backward", "model", "backward", 1.0, width=1)
class PenaltyOfConstant(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distance = (x - x.detach()).square().sum()
        (gradient,) = torch.autograd.grad(distance, x, create_graph=True)
        return gradient.square().sum(1, keepdim=True).sqrt()  # here


@planted("double backward", "precision", "backward", 0.02)
class ReciprocalTwice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x.reciprocal().sum(), x, create_graph=True)[0]  # here


@planted("double backward", "precision", "forward", 0.02)
class PenaltyOverflows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(x.reciprocal().sum(), x, create_graph=True)
        return gradient * gradient  # here


@planted("double backward", "precision", "backward", 0.003)
class LogTwice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x.log().sum(), x, create_graph=True)[0]  # here


# ---- 11: functions with a backward pass of their own


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x  # here

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class _DividedByZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x / x.abs()  # here


class _Amplified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1e6  # here


class _LogBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.log()  # here


class Applied(nn.Module):
    """Calls a function with a backward pass of its own."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x)


def add_function(function: type[torch.autograd.Function], verdict: str, direction: str, value: float) -> None:
    add(
        name=function.__name__.strip("_"),
        kind="custom function",
        verdict=verdict,
        direction=direction,
        module="fault",
        line=line_of(function),
        model=lambda: net(Applied(function)),
        batches=lambda: [filled(value)],
    )


add_function(_Squared, "precision", "forward", 300.0)
add_function(_DividedByZero, "model", "backward", 0.0)
add_function(_Amplified, "precision", "backward", 1.0)
add_function(_LogBackward, "model", "backward", 0.0)


# ---- 12: data that is not finite, or beyond fp16, in one sample


class Passed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0


def add_data(name: str, sample: int, value: float, verdict: str, module: str) -> None:
    batch = filled(1.0)
    batch[sample, 3] = value
    add(
        name=name,
        kind="data",
        verdict=verdict,
        direction="forward",
        module=module,
        line=line_of(Net, "# enter") if module else 0,
        model=lambda: net(Passed()),
        batches=lambda: [batch.clone()],
    )


add_data("NanInSample", 3, torch.nan, "data", "")
add_data("InfinityInSample", 1, torch.inf, "data", "")
add_data("NegativeInfinityInSample", 0, -torch.inf, "data", "")
add_data("SampleBeyondFp16", 2, 1e5, "precision", "enter")


# ---- 13: weights that have grown


def add_weights(name: str, verdict: str, change: Callable[[Net], Any], x: float = 1.0) -> None:
    def model() -> nn.Module:
        grown = net(Passed())
        with torch.no_grad():
            change(grown)
        return grown

    add(
        name=name,
        kind="weights",
        verdict=verdict,
        direction="forward",
        module="enter",
        line=line_of(Net, "# enter"),
        model=model,
        batches=lambda: [filled(x)],
    )


add_weights("InfiniteWeight", "model", lambda grown: grown.enter.weight[0, 0].fill_(torch.inf))
add_weights("WeightBeyondFp16", "precision", lambda grown: grown.enter.weight[0, 0].fill_(1e5), 0.1)
add_weights("WeightBeyondFp32", "model", lambda grown: grown.enter.weight[0, 0].fill_(1e38), 100.0)
add_weights("BiasBeyondFp16", "precision", lambda grown: grown.enter.bias[0].fill_(7e4))


# ---- 14: two faults at once, and one of two models


@planted("two", "precision", "forward", 12.0)
class ExpThenLog(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown = x.exp()  # here
        return (1 / grown).log()


@planted("two", "model", "forward", 300.0)
class OverflowAndDivision(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = x * x
        return squares + x / (x - x)  # here


class Pair(nn.ModuleDict):
    """Two models that are called one after the other."""


def add_pair(name: str, g: type[nn.Module], d: type[nn.Module], at_fault: str, value: float) -> None:
    fault = {"g": g, "d": d}[at_fault]
    add(
        name=name,
        kind="two",
        verdict="precision",
        direction="forward",
        module=f"{at_fault}.fault",
        line=line_of(fault),
        model=lambda: Pair({"g": Wide(g()), "d": net(d())}),
        batches=lambda: [filled(value)],
        call=lambda model, x: model["d"](model["g"](x)),
    )


class Wide(nn.Module):
    """A layer that passes its input on, and a module after it."""

    def __init__(self, fault: nn.Module) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.enter.weight)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fault(self.enter(x))


add_pair("SecondOfTwoModels", nn.Identity, Exp, "d", 12.0)
add_pair("FirstOfTwoModels", Square, nn.Identity, "g", 300.0)


# ---- 15: accumulation, activation checkpoints, compiled code

LARGE_IN_FIFTH = [1.0, 1.0, 1.0, 1.0, 12.0, 1.0, 1.0, 1.0]
add(
    name="FifthOfEight",
    kind="surroundings",
    verdict="precision",
    direction="forward",
    module="fault",
    line=line_of(Exp),
    model=lambda: net(Exp()),
    batches=lambda: [filled(value) for value in LARGE_IN_FIFTH],
    scale=SAMPLES * 8.0,
)
SMALL_IN_LAST = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e-3]
add(
    name="LastOfEightBackward",
    kind="surroundings",
    verdict="precision",
    direction="backward",
    module="fault",
    line=line_of(Reciprocal),
    model=lambda: net(Reciprocal()),
    batches=lambda: [filled(value) for value in SMALL_IN_LAST],
    scale=SAMPLES * 8.0,
)


@planted("surroundings", "precision", "backward", 1e-3, module="fault.inner")
class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Reciprocal()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def compiled() -> nn.Module:
    model = net(Exp())
    model.compile(backend="eager")
    return model


add(
    name="Compiled",
    kind="surroundings",
    verdict="precision",
    direction="forward",
    module="fault",
    line=line_of(Exp),
    model=compiled,
    batches=lambda: [filled(12.0)],
)

# The line is in the module inside.
FAULTS["Checkpointed"] = replace(FAULTS["Checkpointed"], line=line_of(Reciprocal))
