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

# In float16 a residual would soon be subnormal. It is at most half a unit in the last place of a number with
# 11 significant bits. Times 2**11, that half unit is in range for every number and never subnormal. Much
# smaller residuals may still be subnormal.
_RESIDUAL_SCALE = {torch.bfloat16: 1.0, torch.float16: 2.0**11}

# One seed everywhere, so that replicas of a parameter round alike on every rank.
_SEED = 0x5EED


@dataclass(slots=True, eq=False)
class Pair:
    """A parameter in a low format, and the float32 parameter that the optimizer has in its place.

    Attributes:
        residual: what Kahan summation keeps, of the low dtype.
        low_grad: the gradient that a step took from the low parameter and puts back at its end.
        seen_version: of the low parameter when it last agreed with what is kept; None: unknown.
        opened: whether the working parameter holds the value, from the start of a step to its end.
        gradient_memory: of the last float32 gradient, for the next one.
    """

    low: torch.Tensor
    working: torch.nn.Parameter
    residual: torch.Tensor | None = None
    low_grad: torch.Tensor | None = None
    seen_version: int | None = None
    opened: bool = False
    gradient_memory: torch.UntypedStorage | None = None

    @property
    def written_by_others(self) -> bool:
        return self.seen_version != version_of(self.low)


class UpdateMethod:
    """A way to keep the float32 values of parameters between two steps.

    Of a DTensor, each rank keeps those of its own part.
    """

    name: str
    frees_working = True
    """Whether the working parameters have memory only during a step."""

    def __init__(self) -> None:
        self.generators: dict[str, torch.Generator] = {}

    def start(self, pair: Pair, full: torch.Tensor) -> None:
        """Set the float32 value of a pair; ``low`` does not change."""
        raise NotImplementedError

    def value(self, pair: Pair) -> torch.Tensor:
        """Return the float32 value between two steps: a new tensor, or the working parameter itself."""
        raise NotImplementedError

    def write(self, pairs: Sequence[Pair]) -> None:
        """Write the values of the working parameters into the low parameters and into what is kept."""
        raise NotImplementedError

    def kept(self, pairs: Sequence[Pair]) -> list[torch.Tensor]:
        """Return the tensors that a saved state holds."""
        return []


def _round_to_nearest(pairs: Sequence[Pair]) -> None:
    lows = [local(pair.low) for pair in pairs]
    copy_all(lows, [local(pair.working) for pair in pairs])


class MastersMethod(UpdateMethod):
    """Keep the float32 parameters: 4 bytes an element."""

    name = "masters"
    frees_working = False

    def start(self, pair: Pair, full: torch.Tensor) -> None:
        local(pair.working).copy_(full)

    def value(self, pair: Pair) -> torch.Tensor:
        return local(pair.working)

    def write(self, pairs: Sequence[Pair]) -> None:
        _round_to_nearest(pairs)

    def kept(self, pairs: Sequence[Pair]) -> list[torch.Tensor]:
        return [pair.working.detach() for pair in pairs]


class KahanMethod(UpdateMethod):
    """Keep a residual in the low format: 2 bytes an element."""

    name = "kahan"

    def start(self, pair: Pair, full: torch.Tensor) -> None:
        pair.residual = torch.zeros_like(pair.low).detach()
        self._keep(local(pair.low), local(pair.residual), full)

    def value(self, pair: Pair) -> torch.Tensor:
        return _low_plus_residual(local(pair.low), local(_residual_of(pair)))

    def write(self, pairs: Sequence[Pair]) -> None:
        _round_to_nearest(pairs)
        for pair in pairs:
            self._keep(local(pair.low), local(_residual_of(pair)), local(pair.working))

    def kept(self, pairs: Sequence[Pair]) -> list[torch.Tensor]:
        return list(map(_residual_of, pairs))

    @staticmethod
    def _keep(low: torch.Tensor, residual: torch.Tensor, full: torch.Tensor) -> None:
        # The difference of a float32 and the number that it rounds to is exact in float32. In this order a
        # difference of zero is -0.0, which keeps the sign of a zero that it is added to; 0.0 would not.
        difference = low.to(torch.float32, copy=True).sub_(full).mul_(-_RESIDUAL_SCALE[low.dtype])
        residual.copy_(difference.nan_to_num_(0.0, 0.0, 0.0))

        # A residual that was rounded up to half a unit would change the parameter when it is added again.
        codes = residual.view(torch.int16)
        moved = _low_plus_residual(low, residual).to(low.dtype).view(torch.int16) != low.view(torch.int16)
        is_not_zero = (codes & 0x7FFF) != 0
        # Sign and magnitude: one code less is the next number towards zero, whatever the sign.
        codes.sub_((moved & is_not_zero).to(torch.int16))


def _residual_of(pair: Pair) -> torch.Tensor:
    assert pair.residual is not None
    return pair.residual


def _low_plus_residual(low: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    # Widened first: torch adds tensors of one dtype ten times as fast on a CPU.
    full = low.to(torch.float32, copy=True)
    return full.add_(residual.to(torch.float32), alpha=1 / _RESIDUAL_SCALE[low.dtype])


class StochasticMethod(UpdateMethod):
    """Keep nothing but the low parameter, rounded stochastically."""

    name = "stochastic"

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self._user_generator = generator

    def start(self, pair: Pair, full: torch.Tensor) -> None:
        self._generator_for(local(pair.low).device)

    def value(self, pair: Pair) -> torch.Tensor:
        return local(pair.low).to(torch.float32, copy=True)

    def write(self, pairs: Sequence[Pair]) -> None:
        lows = [local(pair.low) for pair in pairs]
        rounded = []
        for pair, low in zip(pairs, lows, strict=True):
            generator = self._generator_for(low.device)
            rounded.append(round_stochastically(local(pair.working), low.dtype, generator))
        copy_all(lows, rounded)

    def _generator_for(self, device: torch.device) -> torch.Generator:
        name = str(device)
        if name not in self.generators:
            self.generators[name] = self._new_generator(device)
        return self.generators[name]

    def _new_generator(self, device: torch.device) -> torch.Generator:
        generator = self._user_generator
        if generator is None:
            return torch.Generator(device).manual_seed(_SEED)
        if generator.device.type != device.type or generator.device.index not in (None, device.index):
            raise SettingError(
                f"the generator is on {generator.device}, and a held parameter is on {device}: pass one "
                "of that device, or None, which gives every device one of its own"
            )
        return generator


def release(pair: Pair) -> None:
    """Free the memory of the working parameter; it keeps its shape and reads as NaN."""
    working = local(pair.working)
    nan = torch.full((), math.nan, dtype=torch.float32, device=working.device)
    working.data = nan.expand(working.shape)


# ---- saved states

_KEYS = {"updates", "formats", "shapes", "kept", "generators"}


def saved_state(method: UpdateMethod, pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        "updates": method.name,
        "formats": [str(pair.low.dtype).removeprefix("torch.") for pair in pairs],
        "shapes": [list(pair.low.shape) for pair in pairs],
        "kept": method.kept(pairs),
        "generators": {device: generator.get_state() for device, generator in method.generators.items()},
    }


def load_state(method: UpdateMethod, pairs: Sequence[Pair], state: dict[str, Any]) -> None:
    """Check ``state``, then copy it in."""
    check_state(method, pairs, state)
    for pair in pairs:
        if pair.opened and method.frees_working:
            release(pair)
        pair.opened = False
    for target, source in zip(method.kept(pairs), state["kept"], strict=True):
        target.copy_(source)
    for device, generator_state in state["generators"].items():
        method.generators[device].set_state(generator_state.cpu())

    if isinstance(method, MastersMethod):
        method.write(pairs)
    for pair in pairs:
        if isinstance(method, KahanMethod):
            # A residual belongs to the low value it was saved with, which may be loaded later.
            pair.seen_version = None
        else:
            pair.seen_version = version_of(pair.low)


def check_state(method: UpdateMethod, pairs: Sequence[Pair], state: dict[str, Any]) -> None:
    expected_keys = "a dict of " + ", ".join(sorted(_KEYS))
    if not isinstance(state, dict):
        raise _mismatch(expected_keys, type(state).__name__)
    if set(state) != _KEYS:
        raise _mismatch(expected_keys, ", ".join(sorted(map(str, state))) or "an empty dict")

    own = saved_state(method, pairs)
    for name in ("updates", "formats", "shapes"):
        if state[name] != own[name]:
            raise _mismatch(f"{name} {own[name]}", f"{state[name]}")
    expected_forms = _forms_of(own["kept"])
    forms = _forms_of(state["kept"])
    if forms != expected_forms:
        raise _mismatch(f"kept tensors {expected_forms}", f"{forms}")
    other_devices = set(state["generators"]) - set(method.generators)
    if other_devices:
        raise SettingError(
            f"the saved state has a random generator for {', '.join(sorted(other_devices))}, where no "
            'parameter is held: load on the devices that it was saved from, or set its "generators" to {} '
            "and accept another sequence of roundings"
        )


def _forms_of(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def _mismatch(expected: str, got: str) -> SettingError:
    return SettingError(
        f"this state of held weights does not fit: expected {expected}, got {got}. Hold the same parameters "
        "of the same model with the same updates= as when it was saved"
    )


# ---- optimizer state, which moves between a low parameter and its working parameter

# Counts and coefficients that torch's optimizers keep as tensors of a dtype of their own.
_SCALARS = {"step", "mu_product", "eta", "mu"}


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bfloat16 or float16 tensor as float32, any other tensor unchanged."""
    if tensor.dtype in LOW_DTYPES:
        return tensor.detach().to(torch.float32)
    return tensor


def widen_state(optimizer: torch.optim.Optimizer, low: torch.Tensor, working: torch.Tensor) -> None:
    """Move the state of ``low`` to the float32 parameter ``working``."""
    if low in optimizer.state:
        state = optimizer.state.pop(low)
        optimizer.state[working] = _with_tensors(state, lambda _key, tensor: widened(tensor))


def narrow_state(optimizer: torch.optim.Optimizer, working: torch.Tensor, low: torch.Tensor) -> None:
    """Move the state of ``working`` back to ``low``, rounded to nearest, as torch loads it."""

    def narrowed(key: Any, tensor: torch.Tensor) -> torch.Tensor:
        # Counts have no dimensions. If the parameter has none, its moments have none either: then counts are
        # known by their names.
        is_scalar = tensor.dim() == 0
        if low.dim() == 0:
            is_scalar = key in _SCALARS
        if is_scalar or tensor.dtype != torch.float32:
            return tensor
        return tensor.to(low.dtype)

    if working in optimizer.state:
        optimizer.state[low] = _with_tensors(optimizer.state.pop(working), narrowed)


def _with_tensors(value: Any, change: Callable[[Any, torch.Tensor], torch.Tensor], key: Any = None) -> Any:
    """Replace every tensor in a state by ``change(key, tensor)``."""
    if isinstance(value, torch.Tensor):
        return change(key, value)
    if isinstance(value, dict):
        # In place: an optimizer may refer to the dict elsewhere too.
        for name, item in value.items():
            value[name] = _with_tensors(item, change, name)
        return value
    if type(value) in (list, tuple):
        return type(value)([_with_tensors(item, change, key) for item in value])
    return value
