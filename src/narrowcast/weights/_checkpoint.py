"""Held weights as a dict of plain values and tensors, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from narrowcast.errors import SettingError
from narrowcast.weights._keepers import Kahan, Keeper, Masters, Pair, Stochastic, release
from narrowcast.weights._torch_internals import version_of

_KEYS = {"updates", "formats", "shapes", "kept", "generators"}


def saved(keeper: Keeper, pairs: Sequence[Pair]) -> dict[str, Any]:
    generators = keeper.generators if isinstance(keeper, Stochastic) else {}
    return {
        "updates": keeper.name,
        "formats": [_format(pair.low) for pair in pairs],
        "shapes": [list(pair.low.shape) for pair in pairs],
        "kept": _kept(keeper, pairs),
        "generators": {device: generator.get_state() for device, generator in generators.items()},
    }


def _format(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kept(keeper: Keeper, pairs: Sequence[Pair]) -> list[torch.Tensor]:
    if isinstance(keeper, Masters):
        return [pair.working.detach() for pair in pairs]
    return [pair.kept for pair in pairs if pair.kept is not None]


def load(keeper: Keeper, pairs: Sequence[Pair], state: dict[str, Any]) -> None:
    """Copy ``state`` in, after all of it was checked."""
    check(keeper, pairs, state)
    for pair in pairs:
        if pair.opened and keeper.releases:
            release(pair)
        pair.opened = False
    for target, source in zip(_kept(keeper, pairs), state["kept"], strict=True):
        target.copy_(source)
    if isinstance(keeper, Masters):
        keeper.write(pairs)
    for pair in pairs:
        # A residual belongs to the low value it was saved with, which may be loaded after it.
        pair.seen = None if isinstance(keeper, Kahan) else version_of(pair.low)
    if isinstance(keeper, Stochastic):
        for device, generator_state in state["generators"].items():
            keeper.generators[device].set_state(generator_state.cpu())


def check(keeper: Keeper, pairs: Sequence[Pair], state: dict[str, Any]) -> None:
    if not isinstance(state, dict) or set(state) != _KEYS:
        came = ", ".join(sorted(map(str, state))) if isinstance(state, dict) else type(state).__name__
        raise _mismatch("a dict of " + ", ".join(sorted(_KEYS)), came or "an empty dict")
    if state["updates"] != keeper.name:
        raise _mismatch(f'updates="{keeper.name}"', f'updates="{state["updates"]}"')
    if len(state["shapes"]) != len(pairs):
        raise _mismatch(f"{len(pairs)} held parameters", f"{len(state['shapes'])}")
    for position, pair in enumerate(pairs):
        here = f"{_format(pair.low)} of shape {tuple(pair.low.shape)}"
        came = f"{state['formats'][position]} of shape {tuple(state['shapes'][position])}"
        if here != came:
            raise _mismatch(f"held parameter {position} in {here}", came)
    kept = _kept(keeper, pairs)
    if len(state["kept"]) != len(kept):
        raise _mismatch(f"{len(kept)} kept tensors", f"{len(state['kept'])}")
    for position, (target, source) in enumerate(zip(kept, state["kept"], strict=True)):
        if (target.dtype, target.shape) != (source.dtype, source.shape):
            raise _mismatch(
                f"kept tensor {position} in {_format(target)} of shape {tuple(target.shape)}",
                f"{_format(source)} of shape {tuple(source.shape)}",
            )
    unknown = set(state["generators"]) - set(keeper.generators if isinstance(keeper, Stochastic) else ())
    if unknown:
        raise SettingError(
            f"the saved state has a random generator for {', '.join(sorted(unknown))}, and no held parameter "
            'is there: load on the devices that it was saved from, or set its "generators" to {} and accept '
            "another sequence of roundings"
        )


def _mismatch(expected: str, came: str) -> SettingError:
    return SettingError(
        f"this state of held weights does not belong here: expected {expected}, got {came}. Hold the same "
        "parameters of the same model with the same updates= as when it was saved"
    )
