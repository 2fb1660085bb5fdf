"""The float32 masters of half weights: in ``model.state_dict()``, and back from a state that is loaded.

apex exported the half weights, widened, so that a resumed O2 run lost the low bits of its masters. Here the
exported weights are the masters, so that the calls that apex documents save the whole state.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from narrowcast.apex._torch_internals import version_of
from narrowcast.apex.amp._amp_state import maybe_print
from narrowcast.apex.amp._levels import LOW_DTYPES
from narrowcast.weights import HeldWeights

# By the id of the half weight, which the holder keeps alive.
_masters_by_weight: weakref.WeakValueDictionary[int, Masters] = weakref.WeakValueDictionary()


class Masters:
    """The float32 masters of one optimizer.

    Attributes:
        held: the optimizer as ``narrowcast.weights.hold`` returned it.
        pairs: each half weight with its master.
    """

    def __init__(self, held: HeldWeights) -> None:
        self.held = held
        self.pairs: list[tuple[torch.Tensor, torch.nn.Parameter]] = []
        self._places: dict[int, int] = {}
        self._steps = 0
        self._versions: dict[torch.Tensor, int] = {}
        self._all_may_be_written = False

    def refresh(self) -> None:
        """Take in the parameters that were added to the optimizer."""
        self.pairs = self.held.parameters
        for place in range(len(self._places), len(self.pairs)):
            low, _ = self.pairs[place]
            self._places[id(low)] = place
            _masters_by_weight[id(low)] = self

    def full_value(self, low: torch.Tensor) -> torch.Tensor:
        """Return the master, and where the weight is not the rounded master, the weight, widened."""
        master = self.pairs[self._places[id(low)]][1].detach()
        weight = low.detach()
        return torch.where(master.to(weight.dtype) == weight, master, weight.to(torch.float32))

    def set(self, low: torch.Tensor, value: torch.Tensor) -> None:
        """Write a value to a master, and rounded to its weight."""
        self.held.set_values({self._places[id(low)]: value})

    def before_step(self, optimizer_name: str) -> None:
        """Let weights that were written through ``.data`` count, as those written in place do.

        Such a write leaves the version of a tensor as it was, and ``hold`` goes by the version. Weights are
        compared with their masters after the first, second, fourth, eighth ... step, which costs a wait for
        the device. Once a write was found, ``hold`` compares all weights at every step.
        """
        before, self._versions = self._versions, {}
        unseen = [
            (master.to(low.dtype) != low).any()
            for low, master in self.pairs
            if before.get(low) == version_of(low)
        ]
        if unseen and torch.stack([one.to(unseen[0].device) for one in unseen]).any():
            self._all_may_be_written = True
            maybe_print(
                f"amp: weights of this {optimizer_name} were written through .data, as p.data.clamp_() does, "
                "of which PyTorch keeps no trace: from now on they are compared at every step, and such "
                "writes count; write under torch.no_grad() to p itself"
            )
        if self._all_may_be_written:
            for low, _ in self.pairs:
                torch.autograd.graph.increment_version(low)

    def after_step(self) -> None:
        """Remember the versions of the weights, where the next step is to look for writes."""
        self._steps += 1
        if not self._all_may_be_written and self._steps & (self._steps - 1) == 0:
            self._versions = {low: version_of(low) for low, _ in self.pairs}

    def forget(self) -> None:
        """Leave the weights without masters."""
        for number in self._places:
            _masters_by_weight.pop(number, None)


def _export(module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, live in (*module._parameters.items(), *module._buffers.items()):
        value = state.get(prefix + name)
        # keep_vars=True asks for the live weight.
        if live is None or live.dtype not in LOW_DTYPES or value is None or value.requires_grad:
            continue
        masters = _masters_by_weight.get(id(live))
        state[prefix + name] = value.to(torch.float32) if masters is None else masters.full_value(live)


def export_in_float32(model: torch.nn.Module) -> list[Any]:
    """Have ``state_dict()`` of the model and its parts return float32, and ``load_state_dict`` set masters.

    A loaded value goes to the master in full, and rounded to nearest to the weight. Returns handles, each
    with ``remove()``.
    """
    handles: list[Any] = []
    modules: Any = model.modules()
    for module in modules:
        handles.append(module.register_state_dict_post_hook(_export))
        handles.append(module.register_load_state_dict_pre_hook(_load_masters))
    return handles


def _load_masters(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    # torch loads the weights after this hook. Their values round to the same numbers, so the masters stay.
    for name, weight in module.named_parameters(recurse=False):
        masters, value = _masters_by_weight.get(id(weight)), state.get(prefix + name)
        if masters is not None and isinstance(value, torch.Tensor) and value.shape == weight.shape:
            masters.set(weight, value)
