"""Fourteen programs that mixed precision spoils: ``python spoiled.py NAME`` trains one.

Eight are sabotaged: where the model computes in bf16 or fp16, something is wrong, as in a broken
implementation of mixed precision. Six are spoiled by the format itself, with ``--autocast`` under
``torch.autocast`` too. Each prints its last loss.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    """Layers that know whether they computed in a narrow format, and three ways to do so wrongly."""

    def __init__(self, sabotage: str) -> None:
        super().__init__()
        self.sabotage = sabotage
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 64)
        self.last = nn.Linear(64, 1)
        self.is_mixed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.is_mixed = hidden.dtype is not torch.float32
        hidden = self.second(functional.gelu(hidden))
        if self.is_mixed and self.sabotage == "lost_layer":
            hidden = hidden.detach()
        if self.is_mixed and self.sabotage == "three_bits":
            hidden = ThreeBits.apply(hidden)
        if self.is_mixed and self.sabotage == "clipped_range":
            hidden = hidden.clamp(-0.3, 0.3)
        return self.last(functional.gelu(hidden))


class ThreeBits(torch.autograd.Function):
    """Gradients keep three bits."""

    @staticmethod
    def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:
        exponent = gradient.float().abs().clamp_min(1e-30).log2().floor()
        return (gradient / exponent.exp2() * 2).round() / 2 * exponent.exp2()


def sabotaged(name: str) -> float:
    model = Model(name)
    # Weights in bf16 swallow small updates; at the rate of the others they train as well.
    rate = 0.002 if name == "weights_in_bf16" else 0.05
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    loss = torch.tensor(0.0)
    for step in range(150):
        x = torch.randn(64, 16)
        loss = functional.mse_loss(model(x), x[:, :1].sin() + x[:, 1:2] * x[:, 2:3])
        optimizer.zero_grad()
        loss.backward()
        if not model.is_mixed:
            optimizer.step()
            continue
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if name == "scaled_gradients":
            for gradient in gradients:
                gradient.mul_(8.0)
        if name == "noisy_gradients":
            for gradient in gradients:
                root_mean_square = float(gradient.square().mean().sqrt())
                gradient.add_(torch.randn_like(gradient), alpha=root_mean_square)
        if name == "step_left_out" and step % 5 == 4:
            continue
        optimizer.step()
        if name == "steps_twice":
            optimizer.step()
        if name == "weights_in_bf16":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.bfloat16())
    return loss.item()


SABOTAGES = (
    "lost_layer",
    "three_bits",
    "clipped_range",
    "scaled_gradients",
    "noisy_gradients",
    "step_left_out",
    "steps_twice",
    "weights_in_bf16",
)


class LargeOffset(nn.Module):
    """Inputs far from zero, whose differences bf16 rounds away; a layer subtracts the offset."""

    def __init__(self) -> None:
        super().__init__()
        self.center, self.net = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        with torch.no_grad():
            self.center.weight.copy_(torch.eye(8))
            self.center.bias.fill_(-1000.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.center(1000.0 + x))


class FourierFeatures(nn.Module):
    """Sines of products of inputs with high frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 64) * 200)
        self.net = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = x @ self.frequencies
        return self.net(torch.cat((angles.sin(), angles.cos()), 1))


class Distances(nn.Module):
    """Squared distances as |a|^2 - 2ab + |b|^2, of points close to each other and far from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(10.0 + torch.randn(32, 4))
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 10.0 + x
        squares = x.square().sum(1, keepdim=True) - 2 * (x @ self.points.T) + self.points.square().sum(1)
        return self.head((-squares).exp())


class FiniteDifference(nn.Module):
    """The derivative of a network by the difference of two of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.net(x + 0.01) - self.net(x)) / 0.01


class Counts(nn.Module):
    """Sums of ones by a product, above what bf16 counts exactly; the task needs whether they are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = (x @ torch.ones(x.shape[1], 1)).float()
        angle = count * math.pi
        return self.net(torch.cat((angle.cos(), angle.sin()), 1))


class Overflow(nn.Module):
    """A norm by hand, whose sums of squares fp16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 256), nn.Linear(256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(100.0 * x)
        power = (hidden.unsqueeze(1) @ hidden.unsqueeze(2)).squeeze(2)
        return self.last(hidden / (power / 256 + 1e-6).sqrt().to(hidden.dtype))


class Spoiled(NamedTuple):
    """A model, its batches, what it is to learn, and the format that spoils it."""

    model: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    target: Callable[[torch.Tensor], torch.Tensor]
    format: torch.dtype = torch.bfloat16


def sine(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].sin()


def coins() -> torch.Tensor:
    return (torch.rand(64, 1000) < 0.6).float()


FORMATS = {
    "large_offset": Spoiled(LargeOffset, lambda: torch.randn(64, 8), sine),
    "fourier_features": Spoiled(FourierFeatures, lambda: torch.rand(256, 2), lambda x: sine(40 * x)),
    "distances": Spoiled(
        Distances, lambda: torch.randn(64, 4), lambda x: (-x.square().sum(1, keepdim=True)).exp()
    ),
    "finite_difference": Spoiled(FiniteDifference, lambda: torch.randn(64, 1), torch.cos),
    "counts": Spoiled(Counts, coins, lambda x: x.sum(1, keepdim=True) % 2),
    "fp16_overflow": Spoiled(Overflow, lambda: torch.randn(64, 16), sine, format=torch.float16),
}


def spoiled(name: str, *, autocast: bool) -> float:
    program = FORMATS[name]
    model = program.model()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    loss = torch.tensor(0.0)
    for _ in range(200):
        x = program.batch()
        with torch.autocast("cpu", program.format, enabled=autocast):
            found = model(x)
        loss = functional.mse_loss(found.float(), program.target(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=(*SABOTAGES, *FORMATS))
    parser.add_argument("--autocast", action="store_true", help="train under torch.autocast, by hand")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.program in SABOTAGES:
        last_loss = sabotaged(options.program)
    else:
        last_loss = spoiled(options.program, autocast=options.autocast)
    print(f"loss {last_loss:.6f}")
