"""The float32 masters of half weights: in ``model.state_dict()``, and back from one that is loaded.

apex exported the half weights, widened, so that a resumed O2 run had lost what its masters had beyond them.
Here the exported weights are the masters, which makes a checkpoint by apex's documented calls whole.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from narrowcast.apex._sharding import is_sharded
from narrowcast.apex._state import say
from narrowcast.apex._torch_internals import version_of
from narrowcast.weights import HeldWeights, set_values

# By the id of the half weight, which the holder keeps alive.
_HOLDERS: weakref.WeakValueDictionary[int, Masters] = weakref.WeakValueDictionary()


class _Seen(NamedTuple):
    """What tells whether a weight was written: how often it was, and a checksum of its bits."""

    version: int
    bits: int


class Masters:
    """The masters of one optimizer."""

    def __init__(self, held: HeldWeights) -> None:
        self.held = held
        self.pairs: list[tuple[torch.Tensor, torch.nn.Parameter]] = []
        self._places: dict[int, int] = {}
        self._steps = 0
        self._always = False  # whether writes through .data are looked for at every step
        self._seen: dict[torch.Tensor, _Seen] = {}

    def refresh(self) -> None:
        """Know the parameters that came since."""
        self.pairs = self.held.parameters
        for place in range(len(self._places), len(self.pairs)):
            low, _ = self.pairs[place]
            self._places[id(low)] = place
            _HOLDERS[id(low)] = self

    def full_value(self, low: torch.Tensor) -> torch.Tensor:
        """The master where it rounds to its weight; the weight, widened, where something else wrote to it."""
        master = self.pairs[self._places[id(low)]][1].detach()
        weight = low.detach()
        return torch.where(master.to(weight.dtype) == weight, master, weight.to(torch.float32))

    def set(self, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Other values for some of the weights and their masters."""
        set_values(self.held, {self._places[id(low)]: value for low, value in values.items()})

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Around a step of the optimizer of this ``name``: what was written through ``.data`` counts too.

        PyTorch keeps no trace of such a write. It is looked for after the first, second, fourth, eighth ...
        step, and from the first one that was found after every step.
        """
        before, self._seen = self._seen, {}
        now = _seen(before)
        written = [
            low for low in before if before[low] != now[low] and before[low].version == now[low].version
        ]
        for low in written:
            torch.autograd.graph.increment_version(low)
        if written and not self._always:
            self._always = True
            say(
                f"amp: weights of this {name} were written through .data, as p.data.clamp_() does, of which "
                "PyTorch keeps no trace: from now on they are compared at every step, and such writes count; "
                "write under torch.no_grad() to p itself"
            )
        yield
        self._steps += 1
        if self._always or self._steps & (self._steps - 1) == 0:
            self._seen = _seen(low for low, _ in self.pairs if not is_sharded(low))

    def forget(self) -> None:
        """From now on the weights have no masters."""
        for number in self._places:
            _HOLDERS.pop(number, None)


def _seen(lows: Iterable[torch.Tensor]) -> dict[torch.Tensor, _Seen]:
    """Each with what it is now; waits for the device."""
    sums = {low: _checksum(_integers(low.detach().reshape(-1))) for low in lows}
    if not sums:
        return {}
    device = next(iter(sums)).device
    bits = torch.stack([one.to(device) for one in sums.values()]).tolist()
    return {low: _Seen(version_of(low), one) for low, one in zip(sums, bits, strict=True)}


_AT_ONCE = 2**18


def _integers(low: torch.Tensor) -> torch.Tensor:
    """The bits of a flat tensor in a low format, four values in an integer where they fit."""
    fits = len(low) % 4 == 0 and low.storage_offset() % 4 == 0
    return low.view(torch.int64 if fits else torch.int16)


def _checksum(numbers: torch.Tensor) -> torch.Tensor:
    """Of integers in their order, modulo 2**64; 0-dim, int64.

    Each is multiplied by a random factor of its place: multiples of the place itself would add up alike for
    many a permutation.
    """
    factors = _factors(numbers.device)
    while True:
        # In pieces, for the products take four times the memory.
        sums = [(piece * factors[: len(piece)]).sum() for piece in torch.split(numbers, _AT_ONCE)]
        if len(sums) == 1:
            return sums[0]
        numbers = torch.stack(sums)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(-(2**63), 2**63 - 1, (_AT_ONCE,), generator=generator, device="cpu")
    return (found | 1).to(device)  # an even one would lose the first bits of what it multiplies


def masters_of(weight: torch.Tensor) -> Masters | None:
    """Who holds the master of this half weight."""
    return _HOLDERS.get(id(weight))


def keep_masters(model: torch.nn.Module) -> list[Any]:
    """Let ``state_dict()`` of the model and of its parts hand out masters, and ``load_state_dict`` take them.

    In ``state_dict()`` the value of a half weight whose optimizer has a master is that master, a copy, in
    float32. What is loaded counts for the master in full, and for the weight rounded to nearest. Where all
    that is loaded into a model is exact in half, masters were not in it, which is said.

    Returns:
        Handles, each with ``remove()``.
    """
    root: Any = model
    handles: list[Any] = [root.register_load_state_dict_pre_hook(_say_without_masters)]
    modules: Any = model.modules()
    for module in modules:
        handles += [
            module.register_state_dict_post_hook(_export),
            module.register_load_state_dict_pre_hook(_remember),
            module.register_load_state_dict_post_hook(_take),
        ]
    return handles


def _export(module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, weight in module.named_parameters(recurse=False):
        masters = masters_of(weight)
        value = state.get(prefix + name)
        # keep_vars=True asks for the live weight.
        if masters is not None and value is not None and not value.requires_grad:
            state[prefix + name] = masters.full_value(weight)


# What modules in the course of loading will give their masters; apart by module, so threads do not mix.
_coming: dict[int, dict[torch.Tensor, torch.Tensor]] = {}


def _loaded(parameters: Any, state: Mapping[str, Any], prefix: str) -> dict[torch.Tensor, torch.Tensor]:
    """The values in ``state`` for those weights that have masters."""
    found = {}
    for name, weight in parameters:
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and value.shape == weight.shape and masters_of(weight) is not None:
            found[weight] = value
    return found


def _remember(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    found = _loaded(module.named_parameters(recurse=False), state, prefix)
    if found:
        _coming[id(module)] = found


def _take(module: torch.nn.Module, _keys: Any) -> None:
    for weight, value in _coming.pop(id(module), {}).items():
        masters = masters_of(weight)
        if masters is not None:
            masters.set({weight: value})


def _say_without_masters(model: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    found = _loaded(model.named_parameters(), state, prefix)
    if found and all(_is_exact(value, weight.dtype) for weight, value in found.items()):
        dtype = str(next(iter(found)).dtype).removeprefix("torch.")
        say(
            f"amp: the loaded weights are {dtype} numbers, as apex saved them: what its float32 masters had "
            "beyond is not there, so training goes on from rounded weights"
        )


def _is_exact(value: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((value.to(dtype).to(value.dtype) == value).all())
