"""Three ways to keep float32 values between two steps, their saved states, and the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.errors import SettingError
from narrowcast.weights._lower import LOW_DTYPES, round_stochastically
from narrowcast.weights._torch_internals import copy_all, local, version_of

# In float16 a residual would soon be subnormal. It is at most half a unit of a number with 11 significant
# bits, so 2**11 times the residual is in range for every number and never subnormal.
_RESIDUAL_SCALE = {torch.bfloat16: 1.0, torch.float16: 2.0**11}

# One seed everywhere, so that replicas of a parameter round alike on every rank.
_SEED = 0x5EED


@dataclass(slots=True, eq=False)
class Pair:
    """A parameter in a low format, and the float32 parameter that the optimizer has in its place.

    Attributes:
        kept: the Kahan residual, of the low dtype.
        low_grad: the gradient that a step took from the low parameter and puts back at its end.
        seen: the version of the low parameter when it last agreed with what is kept; None: unknown.
        opened: whether the working parameter holds the value, from the start of a step to its end.
        memory: the memory of the last float32 gradient, for the next one.
    """

    low: torch.Tensor
    working: torch.nn.Parameter
    kept: torch.Tensor | None = None
    low_grad: torch.Tensor | None = None
    seen: int | None = None
    opened: bool = False
    memory: torch.UntypedStorage | None = None

    @property
    def written_by_others(self) -> bool:
        return self.seen != version_of(self.low)


# Update methods have these attributes and methods; of a DTensor they handle this rank's part:
#   frees_working   the working parameters have memory only during a step
#   start           set the float32 value of a pair; ``low`` does not change
#   value           return the float32 value between two steps: a new tensor, or the working parameter itself
#   write           update the low parameters and what is kept from the working parameters


class Masters:
    """Keep the float32 parameters: 4 bytes an element."""

    name = "masters"
    frees_working = False

    def start(self, pair: Pair, full: torch.Tensor) -> None:
        local(pair.working).copy_(full)

    def value(self, pair: Pair) -> torch.Tensor:
        return local(pair.working)

    def write(self, pairs: Sequence[Pair]) -> None:
        copy_all([local(pair.low) for pair in pairs], [local(pair.working) for pair in pairs])


class Kahan:
    """Keep a residual in the low format: 2 bytes an element."""

    name = "kahan"
    frees_working = True

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
        # The difference of a float32 and the number that it rounds to is exact in float32. In this order a
        # difference of zero is -0.0, which keeps the sign of a zero that it is added to; 0.0 would not.
        difference = low.to(torch.float32, copy=True).sub_(full).mul_(-_RESIDUAL_SCALE[low.dtype])
        residual.copy_(difference.nan_to_num_(0.0, 0.0, 0.0))
        # A residual that was rounded up to half a unit would change the parameter when it is rebuilt.
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
    """Keep nothing but the low parameter, rounded stochastically."""

    name = "stochastic"
    frees_working = True

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


UpdateMethod = Masters | Kahan | Stochastic


def release(pair: Pair) -> None:
    """Free the memory of the working parameter; it keeps its shape and reads as NaN."""
    working = local(pair.working)
    nan = torch.full((), math.nan, dtype=torch.float32, device=working.device)
    working.data = nan.expand(working.shape)


# ---- saved states

_KEYS = {"updates", "formats", "shapes", "kept", "generators"}


def saved_state(method: UpdateMethod, pairs: Sequence[Pair]) -> dict[str, Any]:
    generators = method.generators if isinstance(method, Stochastic) else {}
    return {
        "updates": method.name,
        "formats": [str(pair.low.dtype).removeprefix("torch.") for pair in pairs],
        "shapes": [list(pair.low.shape) for pair in pairs],
        "kept": _kept(method, pairs),
        "generators": {device: generator.get_state() for device, generator in generators.items()},
    }


def _kept(method: UpdateMethod, pairs: Sequence[Pair]) -> list[torch.Tensor]:
    if isinstance(method, Masters):
        return [pair.working.detach() for pair in pairs]
    return [pair.kept for pair in pairs if pair.kept is not None]


def load_state(method: UpdateMethod, pairs: Sequence[Pair], state: dict[str, Any]) -> None:
    """Check ``state``, then copy it in."""
    check_state(method, pairs, state)
    for pair in pairs:
        if pair.opened and method.frees_working:
            release(pair)
        pair.opened = False
    for target, source in zip(_kept(method, pairs), state["kept"], strict=True):
        target.copy_(source)
    if isinstance(method, Masters):
        method.write(pairs)
    for pair in pairs:
        # A residual belongs to the low value it was saved with, which may be loaded later.
        pair.seen = None if isinstance(method, Kahan) else version_of(pair.low)
    if isinstance(method, Stochastic):
        for device, generator_state in state["generators"].items():
            method.generators[device].set_state(generator_state.cpu())


def check_state(method: UpdateMethod, pairs: Sequence[Pair], state: dict[str, Any]) -> None:
    if not isinstance(state, dict) or set(state) != _KEYS:
        came = ", ".join(sorted(map(str, state))) if isinstance(state, dict) else type(state).__name__
        raise _mismatch("a dict of " + ", ".join(sorted(_KEYS)), came or "an empty dict")
    mine = saved_state(method, pairs)
    for name in ("updates", "formats", "shapes"):
        if state[name] != mine[name]:
            raise _mismatch(f"{name} {mine[name]}", f"{state[name]}")
    wanted, found = ([(t.dtype, t.shape) for t in kept] for kept in (mine["kept"], state["kept"]))
    if wanted != found:
        raise _mismatch(f"kept tensors {wanted}", f"{found}")
    unknown = set(state["generators"]) - set(method.generators if isinstance(method, Stochastic) else ())
    if unknown:
        raise SettingError(
            f"the saved state has a random generator for {', '.join(sorted(unknown))}, where no parameter is "
            'held: load on the devices that it was saved from, or set its "generators" to {} and accept '
            "another sequence of roundings"
        )


def _mismatch(expected: str, came: str) -> SettingError:
    return SettingError(
        f"this state of held weights does not fit: expected {expected}, got {came}. Hold the same parameters "
        "of the same model with the same updates= as when it was saved"
    )


# ---- optimizer state, which moves between a low parameter and its working parameter

# Counts and coefficients that torch's optimizers keep as tensors of a dtype of their own.
_SCALARS = {"step", "mu_product", "eta", "mu"}


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bfloat16 or float16 tensor as float32, any other tensor unchanged."""
    return tensor.detach().to(torch.float32) if tensor.dtype in LOW_DTYPES else tensor


def widen_state(optimizer: torch.optim.Optimizer, low: torch.Tensor, working: torch.Tensor) -> None:
    """Move the state of ``low`` to the float32 parameter ``working``."""
    if low in optimizer.state:
        optimizer.state[working] = _with_tensors(optimizer.state.pop(low), lambda _, t: widened(t))


def narrow_state(optimizer: torch.optim.Optimizer, working: torch.Tensor, low: torch.Tensor) -> None:
    """Move the state of ``working`` back to ``low``, rounded to nearest, as torch loads it."""

    def narrowed(key: Any, tensor: torch.Tensor) -> torch.Tensor:
        counts = key in _SCALARS if low.dim() == 0 else tensor.dim() == 0
        return tensor if counts or tensor.dtype != torch.float32 else tensor.to(low.dtype)

    if working in optimizer.state:
        optimizer.state[low] = _with_tensors(optimizer.state.pop(working), narrowed)


def _with_tensors(value: Any, change: Callable[[Any, torch.Tensor], torch.Tensor], key: Any = None) -> Any:
    if isinstance(value, torch.Tensor):
        return change(key, value)
    if isinstance(value, dict):
        # In place: an optimizer may refer to the dict elsewhere too.
        for name, item in value.items():
            value[name] = _with_tensors(item, change, name)
        return value
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, change, key) for item in value)
    return value
