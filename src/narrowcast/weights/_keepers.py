"""What is kept of a float32 parameter between two steps, and how it is rebuilt: the three ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from narrowcast.errors import SettingError
from narrowcast.weights._rounding import round_stochastically
from narrowcast.weights._torch_internals import copy_all, local, version_of

# In float16 a residual would soon be subnormal. A residual is at most half a unit of a number with 11
# significant bits, so that 2**11 times it is in range for every number, and no longer subnormal for any.
_RESIDUAL_SCALE = {torch.bfloat16: 1.0, torch.float16: 2.0**11}

# Generators start from one number everywhere, so that replicas of a parameter round alike on every rank.
_SEED = 0x5EED


@dataclass(slots=True, eq=False)
class Pair:
    """A parameter in a low format, and the float32 parameter that the optimizer has in its place.

    ``kept`` is the Kahan residual, of the low dtype. ``lent`` is a gradient of the low parameter that was
    set aside for the time of a step. ``seen`` is the version of the low parameter when it was last in
    accord with what is kept, or None where that has to be looked at. ``opened`` says that the working
    parameter holds the value, from the start of a step to its end. ``memory`` is that of the last float32
    gradient, where it is to be used again.
    """

    low: torch.Tensor
    working: torch.nn.Parameter
    kept: torch.Tensor | None = None
    lent: torch.Tensor | None = None
    seen: int | None = None
    opened: bool = False
    memory: torch.UntypedStorage | None = None

    @property
    def written_by_others(self) -> bool:
        return self.seen != version_of(self.low)


class Keeper(Protocol):
    """One way to keep updates. Called under ``no_grad``; tensors of a DTensor are this rank's part."""

    name: str
    releases: bool

    def start(self, pair: Pair, full: torch.Tensor) -> None:
        """Take ``full``, float32, as the value that the pair has from now on; ``low`` stays as it is."""

    def value(self, pair: Pair) -> torch.Tensor:
        """The float32 value of a pair between two steps: a new tensor, or the parameter's own memory."""

    def write(self, pairs: Sequence[Pair]) -> None:
        """Bring what is kept up to date with the working parameters, the low parameters included."""


class Masters:
    """The float32 parameters stay in memory: 4 bytes an element."""

    name = "masters"
    releases = False

    def start(self, pair: Pair, full: torch.Tensor) -> None:
        local(pair.working).copy_(full)

    def value(self, pair: Pair) -> torch.Tensor:
        return local(pair.working)

    def write(self, pairs: Sequence[Pair]) -> None:
        copy_all([local(pair.low) for pair in pairs], [local(pair.working) for pair in pairs])


class Kahan:
    """A residual in the low format stays: 2 bytes an element."""

    name = "kahan"
    releases = True

    def start(self, pair: Pair, full: torch.Tensor) -> None:
        pair.kept = torch.zeros_like(pair.low).detach()
        self._keep(local(pair.low), local(pair.kept), full)

    def value(self, pair: Pair) -> torch.Tensor:
        assert pair.kept is not None
        return _rebuilt(local(pair.low), local(pair.kept))

    def write(self, pairs: Sequence[Pair]) -> None:
        copy_all([local(pair.low) for pair in pairs], [local(pair.working) for pair in pairs])
        for pair in pairs:
            assert pair.kept is not None
            self._keep(local(pair.low), local(pair.kept), local(pair.working))

    @staticmethod
    def _keep(low: torch.Tensor, residual: torch.Tensor, full: torch.Tensor) -> None:
        # The difference of a float32 and the number that it rounds to is a float32. Taken this way round, no
        # difference is -0.0, which added to either zero leaves it; 0.0 would turn -0.0 into 0.0.
        difference = low.to(torch.float32, copy=True).sub_(full).mul_(-_RESIDUAL_SCALE[low.dtype])
        residual.copy_(difference.nan_to_num_(0.0, 0.0, 0.0))
        # A residual that was itself rounded up to half a unit would move the parameter when rebuilt.
        codes = residual.view(torch.int16)
        moved = _rebuilt(low, residual).to(low.dtype).view(torch.int16) != low.view(torch.int16)
        # Sign and magnitude: one code less is the next number towards zero, whatever the sign.
        codes.sub_((moved & (codes & 0x7FFF != 0)).to(torch.int16))


def _rebuilt(low: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    # Widened first: torch adds tensors of one dtype ten times as fast on a CPU.
    return low.to(torch.float32, copy=True).add_(
        residual.to(torch.float32), alpha=1 / _RESIDUAL_SCALE[low.dtype]
    )


class Stochastic:
    """Nothing but the low parameter stays."""

    name = "stochastic"
    releases = True

    def __init__(self, generator: torch.Generator | None) -> None:
        self._given = generator
        self.generators: dict[str, torch.Generator] = {}

    def start(self, pair: Pair, full: torch.Tensor) -> None:
        self.generator_for(local(pair.low).device)

    def value(self, pair: Pair) -> torch.Tensor:
        return local(pair.low).to(torch.float32, copy=True)

    def write(self, pairs: Sequence[Pair]) -> None:
        lows = [local(pair.low) for pair in pairs]
        rounded = [
            round_stochastically(local(pair.working), low.dtype, self.generator_for(low.device))
            for pair, low in zip(pairs, lows, strict=True)
        ]
        copy_all(lows, rounded)

    def generator_for(self, device: torch.device) -> torch.Generator:
        name = str(device)
        if name not in self.generators:
            generator = self._given
            if generator is None:
                generator = torch.Generator(device)
                generator.manual_seed(_SEED)
            elif generator.device.type != device.type or generator.device.index not in (None, device.index):
                raise SettingError(
                    f"the generator is on {generator.device}, and a held parameter is on {device}: pass one "
                    "of that device, or None, which gives every device one of its own"
                )
            self.generators[name] = generator
        return self.generators[name]


def release(pair: Pair) -> None:
    """Give the memory of the working parameter back; its shape stays, and what is read from it is NaN."""
    working = local(pair.working)
    nan = torch.full((), math.nan, dtype=torch.float32, device=working.device)
    working.data = nan.expand(working.shape)
