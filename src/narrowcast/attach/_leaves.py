"""The leaves that scaled backwards reach: their unscaling hooks, overflow flags and updates."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.attach._recorder import Recorder
from narrowcast.attach._run import RunningScale
from narrowcast.attach._torch_internals import graph_task_id, register_hook_first
from narrowcast.errors import UnsupportedError
from narrowcast.gradients import NonfiniteFlags, leaf_of, nodes_below, nonfinite_flags

_READ_EVERY = 64  # backwards without a step between them
_SAMPLES = 16_384  # values compared of a tensor, evenly spaced


@dataclass(slots=True, eq=False)
class Leaf:
    """State of one tensor in which gradients accumulate.

    Attributes:
        overflow: number of the backward that left a gradient in it that was not finite; 0: none.
        skipped: an optimizer has skipped a step because of it.
        clean_since: the first backward whose overflow still counts; earlier gradients were dropped.
        owned: an optimizer has stepped on it, or has skipped.
        checked: the gradient that the last check read, and its version.
        before: its version and some of its values when a backward ended, to detect updates that no
            optimizer made.
    """

    tensor: weakref.ref[torch.Tensor]
    remove_hook: Callable[[], None]
    overflow: int = 0
    skipped: bool = False
    clean_since: int = 0
    owned: bool = False
    checked: tuple[weakref.ref[torch.Tensor], int] | None = None
    before: tuple[int, torch.Tensor | None] | None = None


class Leaves:
    """Every leaf that a scaled backward reached, found by walking its graph.

    Attributes:
        factors: number of each backward pass of the autograd engine that runs now -> its loss scale.
    """

    def __init__(self, scale: RunningScale, recorder: Recorder) -> None:
        self._scale = scale
        self._recorder = recorder
        self.factors: dict[int, float] = {}
        self._by_id: dict[int, Leaf] = {}
        self._unread: list[tuple[int, list[Leaf], NonfiniteFlags]] = []  # with the number of the backward
        self._an_optimizer_steps = False
        self._lock = threading.RLock()

    def reached_from(
        self, roots: Iterable[Any], *, passed_on: Callable[[torch.Tensor], bool] | None = None
    ) -> list[Leaf]:
        """Return the leaves below graph nodes ``roots``; each has its unscaling hook from now on.

        ``passed_on`` selects leaves to ignore: those that stand for other tensors of an enclosing pass.
        """
        leaves = []
        for node in nodes_below(roots):
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                self._note_function(node)
            tensor = leaf_of(node)
            if tensor is not None and (passed_on is None or not passed_on(tensor)):
                leaves.append(self._hooked(tensor))
        return leaves

    def _note_function(self, node: Any) -> None:
        """Note that a custom Function's backward receives scaled gradients."""
        kind = getattr(type(node), "_forward_cls", type(node))
        if not kind.__module__.startswith("torch."):
            self._recorder.note(
                f"the backward of {kind.__name__} sees gradients times the loss scale; that is right where "
                "it is linear in them (no clamp, no norm), and wrong otherwise"
            )

    def _hooked(self, tensor: torch.Tensor) -> Leaf:
        with self._lock:
            leaf = self.find(tensor)
            if leaf is None:
                handle = register_hook_first(tensor, self._unscale)
                leaf = self._by_id[id(tensor)] = Leaf(weakref.ref(tensor), handle.remove)
            return leaf

    def _unscale(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Divide a gradient by the scale of the running pass: the hook of each leaf."""
        factor = self.factors.get(graph_task_id())
        # torch.autograd.grad(allow_unused=True) calls hooks of leaves that the pass does not reach with None.
        return None if factor is None or gradient is None else true_gradient(gradient, factor)

    def find(self, tensor: torch.Tensor) -> Leaf | None:
        leaf = self._by_id.get(id(tensor))
        return leaf if leaf is not None and leaf.tensor() is tensor else None

    def backward_begins(self, leaves: Sequence[Leaf], backward: int) -> None:
        """Forget overflows of dropped gradients; refuse leaves that were updated without an optimizer."""
        pairs = [(leaf, tensor) for leaf in leaves if (tensor := leaf.tensor()) is not None]
        gone = [(leaf, tensor) for leaf, tensor in pairs if tensor.grad is None]
        if gone and self._unread:
            self._read()
        for leaf, tensor in pairs:
            if leaf.before is not None and _changed(tensor, leaf.before) and self._moved_on(leaf, tensor):
                raise UnsupportedError(_BY_HAND.format(shape=tuple(tensor.shape)))
        for leaf, tensor in gone:
            self._discard(leaf, tensor, backward)
        skipped = [(leaf, t, t.grad) for leaf, t in pairs if leaf.skipped and t.grad is not None]
        still = nonfinite_flags([gradient for _, _, gradient in skipped]).read()
        for (leaf, tensor, _), flag in zip(skipped, still, strict=True):
            if not flag:
                self._discard(leaf, tensor, backward)

    def _moved_on(self, leaf: Leaf, tensor: torch.Tensor) -> bool:
        """Return whether the script dropped or changed a leaf's gradient, as it does after an update; an
        embedding renormalised in place in a forward (``max_norm``) keeps its gradient.
        """
        return tensor.grad is None or self._changed_since_check(tensor)

    def _discard(self, leaf: Leaf, tensor: torch.Tensor, clean_since: int) -> None:
        if leaf.overflow:
            if not bool(torch.isfinite(tensor.detach()).all()):
                raise UnsupportedError(_BY_HAND.format(shape=tuple(tensor.shape)))
            if not leaf.skipped:
                self._recorder.note(
                    "the script dropped gradients that had overflowed; the loss scale was lowered"
                )
                self._scale.discarded(leaf.overflow)
        leaf.overflow, leaf.skipped, leaf.clean_since = 0, False, clean_since

    def backward_ended(self, leaves: Sequence[Leaf], backward: int) -> None:
        """Check what the leaves accumulated, before the script can clamp it; the result is read later."""
        holding, gradients = [], []
        for leaf in leaves:
            tensor = leaf.tensor()
            if tensor is None:
                continue
            if not leaf.owned:
                # A write through ``.data`` does not change the version. Comparing values costs a copy and a
                # wait for the device: only while no optimizer is known to update parameters.
                sample = None if self._an_optimizer_steps else _sample(tensor).clone()
                leaf.before = (tensor._version, sample)
            if tensor.grad is not None:
                holding.append(leaf)
                gradients.append(tensor.grad)
                leaf.checked = (weakref.ref(tensor.grad), tensor.grad._version)
        unread = (backward, holding, nonfinite_flags(gradients))
        with self._lock:
            self._unread.append(unread)
            if len(self._unread) >= _READ_EVERY:
                self._read()

    def nonfinite_among(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those whose gradient overflowed or is not finite now; waits for the device."""
        self._read()
        changed = [p for p in parameters if p.grad is not None and self._changed_since_check(p)]
        now = nonfinite_flags([p.grad for p in changed if p.grad is not None]).read()
        bad = {id(p) for p, flag in zip(changed, now, strict=True) if flag}
        bad |= {id(p) for p in parameters if (leaf := self.find(p)) is not None and leaf.overflow}
        return [p for p in parameters if id(p) in bad]

    def _changed_since_check(self, parameter: torch.Tensor) -> bool:
        leaf, gradient = self.find(parameter), parameter.grad
        assert gradient is not None
        if leaf is None or leaf.checked is None:
            return True
        checked, version = leaf.checked
        return checked() is not gradient or version != gradient._version

    def own(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that an optimizer begins a step on these parameters."""
        self._an_optimizer_steps = True
        for parameter in parameters:
            if parameter.requires_grad:  # torch refuses hooks on a frozen one
                leaf = self._hooked(parameter)
                leaf.owned, leaf.before = True, None

    def skipped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that an optimizer skipped its step on these gradients, which are still there."""
        for parameter in parameters:
            leaf = self.find(parameter)
            if leaf is not None and leaf.overflow:
                leaf.skipped = True

    def zeroed(self, parameters: Iterable[torch.Tensor], backward: int) -> None:
        """Record that gradients of these parameters, up to those of ``backward``, became zero or None."""
        if self._unread:
            self._read()
        for parameter in parameters:
            leaf = self.find(parameter)
            if leaf is not None:
                self._discard(leaf, parameter, backward + 1)

    def _read(self) -> None:
        with self._lock:
            unread, self._unread = self._unread, []
            for backward, leaves, flags in unread:
                for leaf, flag in zip(leaves, flags.read(), strict=True):
                    if flag and backward >= leaf.clean_since:
                        leaf.overflow = backward
            self._by_id = {key: leaf for key, leaf in self._by_id.items() if leaf.tensor() is not None}

    def remove_hooks(self) -> None:
        for leaf in self._by_id.values():
            leaf.remove_hook()
        self._by_id.clear()
        self._unread.clear()


def true_gradient(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """Divide by the loss scale, as torch does: by a product with the inverse."""
    return gradient * (1.0 / factor)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().reshape(-1)
    return values[:: max(1, values.numel() // _SAMPLES)]


def _changed(tensor: torch.Tensor, before: tuple[int, torch.Tensor | None]) -> bool:
    version, sample = before
    if tensor._version != version:
        return True
    return sample is not None and not torch.allclose(_sample(tensor), sample, 0.0, 0.0, equal_nan=True)


_BY_HAND = (
    "a tensor of shape {shape} was updated by hand: it changed after backward and no torch.optim.Optimizer "
    "has stepped on it. In fp16 a step whose gradients overflow must be skipped, and only "
    "Optimizer.step can be. Use --policy bf16, which needs no skipping, or put the update into a "
    "torch.optim.Optimizer (SAM's first step is such an update too)."
)
