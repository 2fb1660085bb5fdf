"""One weight that is stored in a low format, and what is kept of its fp32 values.

The ``Parameter`` stays the object that it is, so that optimizers, tied layers and hooks go on seeing it; its
memory is exchanged. What is written to it lands in the low values, which win: the kept fp32 values count as
long as the low ones are, bit for bit, what they round to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from narrowcast.errors import UnsupportedError

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def apart_from_the_model() -> Iterator[None]:
    """For what is done to weights themselves: nothing is recorded, and no inference tensors are made."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class StoredWeight:
    """A parameter whose memory is in ``dtype``.

    Attributes:
        name: its path in the model.
        dtype: the format that it is stored in.
        kept: its fp32 values; None where they are not kept.
        widened: whether it has its fp32 values for the moment, while its uses are watched.
        incoming: what is being loaded into it.
        lent: whether a state dict has the kept values, to which somebody may write.
    """

    def __init__(self, name: str, parameter: torch.nn.Parameter, dtype: torch.dtype, keep: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.dtype = dtype
        self.kept: torch.Tensor | None = None
        self.widened = False
        self.lent = False
        self.incoming: object = None
        self._seen = self._seen_kept = -1
        self._low: torch.Tensor | None = None
        with apart_from_the_model():
            if keep:
                self.kept = parameter.data
            parameter.data = parameter.data.to(dtype)
        self._agreed()
        self._guard: Any = None
        self.guard()
        _refusals.add(self)

    # ---- fp32 and back

    def widen(self) -> None:
        """Have the parameter hold its fp32 values, until ``narrow``."""
        if self.widened:
            return
        with apart_from_the_model():
            full = self._full()
            self._low, self.parameter.data = self.parameter.data, full
        self.widened = True

    def narrow(self) -> None:
        """Have it hold the low values again, rounded anew, in the memory where they were."""
        if not self.widened:
            return
        with apart_from_the_model():
            full, low = self.parameter.data, self._low
            assert low is not None
            if (low.shape, low.device, low.dtype) == (full.shape, full.device, self.dtype):
                low.copy_(full)
            else:
                low = full.to(self.dtype)
            if self.kept is not None and not _is_one_memory(self.kept, full):
                self.kept = full
            self.parameter.data = low
        self._low, self.widened = None, False
        self._agreed()

    def restore(self) -> None:
        """Have it hold its fp32 values for good."""
        self.widen()
        self._low = self.kept = None
        _refusals.discard(self)
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def handed_out(self) -> torch.Tensor:
        """The kept fp32 values, for a state dict: what is written to them is taken over by ``take_over``."""
        with apart_from_the_model():
            full = self._full()
        if self.kept is None or not _is_one_memory(self.kept, full):
            self.kept = full
        self.lent = True
        return self.kept.detach()

    def take_over(self) -> None:
        """Round the kept values anew where somebody wrote to them, and not to the parameter."""
        if not self.lent or self.kept is None or self.kept._version == self._seen_kept:
            return
        if self.parameter._version == self._seen:
            with apart_from_the_model():
                self.parameter.copy_(self.kept)
        self._seen_kept = self.kept._version
        self._seen = self.parameter._version

    def load(self) -> None:
        """Keep ``incoming`` in fp32, if ``load_state_dict`` has rounded it into the parameter."""
        value, self.incoming = self.incoming, None
        if self.kept is None or self.widened:
            return
        if not isinstance(value, torch.Tensor) or value.shape != self.kept.shape:
            return
        with apart_from_the_model():
            value = value.detach().to(self.parameter.device)
            if _is_same(self.parameter.data, value.to(self.dtype)):
                self.kept = self.kept.to(value.device).copy_(value)
                self.parameter.copy_(self.kept)  # by way of fp32, as each cast of a region would
                self._agreed()

    def _full(self) -> torch.Tensor:
        """The fp32 values that count."""
        self.take_over()
        stored = self.parameter.data
        if self.widened:
            return stored
        if self.kept is None:
            return stored.to(torch.float32)
        kept = self.kept.to(stored.device)
        if not _is_same(stored, kept.to(self.dtype).to(stored.dtype)):
            if kept.shape == stored.shape:
                kept.copy_(stored)
            else:
                kept = stored.to(torch.float32)
        self.kept = kept
        self._agreed()
        return kept

    def _agreed(self) -> None:
        """Low and kept values belong together now."""
        self._seen = self.parameter._version
        self._seen_kept = -1 if self.kept is None else self.kept._version

    # ---- gradients

    def guard(self) -> None:
        """See that a gradient that reaches the parameter is an error."""
        if self._guard is None and self.parameter.requires_grad:
            reference = weakref.ref(self)

            def refuse(_gradient: torch.Tensor) -> None:
                stored = reference()
                if stored is not None and not stored.widened:
                    raise UnsupportedError(_no_training(stored, "backward reached"))

            self._guard = self.parameter.register_hook(refuse)  # type: ignore[no-untyped-call]

    @property
    def is_guarded(self) -> bool:
        return self._guard is not None

    # ---- copies: hooks of parameters are not copied

    def __getstate__(self) -> dict[str, Any]:
        self.take_over()
        return {**vars(self), "_guard": None, "_low": None, "incoming": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.widened:
            self._low = self.parameter.data
        else:
            self._agreed()
        _refusals.add(self)


def _is_same(stored: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors of one format are the same to the bit; any NaN is the same as another."""
    if stored.shape != expected.shape or stored.dtype != expected.dtype:
        return False
    integers = _INTEGERS[stored.element_size()]
    same = stored.contiguous().view(integers) == expected.contiguous().view(integers)
    return bool((same | (stored.isnan() & expected.isnan())).all())


def _is_one_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


def _no_training(stored: StoredWeight, what: str) -> str:
    short = str(stored.dtype).removeprefix("torch.")
    return (
        f"{what} {stored.name!r}, which nc.bake stores in {short} for inference, where small updates are "
        "lost: call restore() on its handle before training; with frozen_only=True only weights that do not "
        "require gradients are stored so, and the others train"
    )


class _Refusals:
    """Every stored weight of the process, looked up where an optimizer steps, as long as there is one."""

    def __init__(self) -> None:
        self._by_parameter: dict[int, weakref.ref[StoredWeight]] = {}
        self._hook: Any = None

    def add(self, stored: StoredWeight) -> None:
        key = id(stored.parameter)
        self._by_parameter[key] = weakref.ref(stored, lambda _: self._forget(key))
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._check)

    def discard(self, stored: StoredWeight) -> None:
        self._forget(id(stored.parameter))

    def _forget(self, key: int) -> None:
        self._by_parameter.pop(key, None)
        if not self._by_parameter and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _check(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                reference = self._by_parameter.get(id(parameter))
                stored = None if reference is None else reference()
                if stored is None or stored.parameter is not parameter or parameter.grad is None:
                    continue
                raise UnsupportedError(
                    _no_training(stored, f"{type(optimizer).__name__}.step() would update")
                )


_refusals = _Refusals()
