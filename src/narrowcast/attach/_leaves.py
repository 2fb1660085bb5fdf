"""The leaves that scaled backwards reach: their unscaling hooks, overflow flags and updates."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.attach._recorder import Recorder
from narrowcast.attach._run import Call, RunningScale
from narrowcast.attach._torch_internals import graph_task_id, register_hook_first
from narrowcast.errors import UnsupportedError
from narrowcast.gradients import (
    NonfiniteFlags,
    by_device_and_dtype,
    leaf_of,
    multiply_and_check,
    nodes_below,
    nonfinite_flags,
)

_READ_EVERY = 64  # backwards without a step between them
_SAMPLES = 16_384  # values compared of a tensor, evenly spaced
# Values that changed, of which a share moved along the gradient, or against it (SAM): by chance 2 * 2**-25.
_ENOUGH = 25
_ALONG = 0.9


@dataclass(slots=True, eq=False)
class Leaf:
    """State of one tensor in which gradients accumulate.

    Attributes:
        overflow: number of the first backward that left a gradient in it that was not finite; 0: none.
        skipped: an optimizer has skipped a step because of it.
        clean_since: the first backward whose overflow still counts; earlier gradients were dropped.
        owned: an optimizer has stepped on it, or has skipped; or its changes are no updates.
        checked: the gradient that the last check read, and its version.
        before: its version, some of its values and of its gradient when a backward ended, to detect updates
            that no optimizer made.
        moves: of the values that changed since, how many, and the sum of their signs times the gradient's.
    """

    tensor: weakref.ref[torch.Tensor]
    remove_hook: Callable[[], None]
    overflow: int = 0
    skipped: bool = False
    clean_since: int = 0
    owned: bool = False
    checked: tuple[weakref.ref[torch.Tensor], int] | None = None
    before: tuple[int, torch.Tensor | None, torch.Tensor | None] | None = None
    moves: tuple[int, int] = (0, 0)


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
        # With the number and the line of the backward; None stands for its loss.
        self._unread: list[tuple[int, str, list[Leaf | None], NonfiniteFlags]] = []
        self._bad_loss = (0, "")  # the latest backward whose loss was not finite itself, and its line
        self._an_optimizer_steps = False
        self._lock = threading.RLock()
        self._late: list[torch.Tensor] = []  # to be unscaled when the pass ends
        self._late_factor = 1.0
        self._late_pass = threading.Lock()
        self._passes_elsewhere = False  # in other threads than the main one

    def reached_from(self, roots: Iterable[Any], passed_on: Call | None) -> tuple[list[Leaf], bool]:
        """Return the leaves below graph nodes ``roots``, and whether the graph runs code written in Python.

        Each leaf has its unscaling hook from now on. ``passed_on`` selects leaves to ignore: those that stand
        for other tensors of an enclosing pass.
        """
        nodes = nodes_below(roots)
        functions = {
            t for t in set(map(type, nodes)) if issubclass(t, torch.autograd.function.BackwardCFunction)
        }
        for kind in (getattr(function, "_forward_cls", function) for function in functions):
            if not kind.__module__.startswith("torch."):
                self._recorder.note(_OF_FUNCTION.format(kind.__name__))
        tensors = [tensor for node in nodes if (tensor := leaf_of(node)) is not None]
        return [self._hooked(t) for t in tensors if passed_on is None or not passed_on(t)], bool(functions)

    def _hooked(self, tensor: torch.Tensor) -> Leaf:
        if (leaf := self.find(tensor)) is not None:
            return leaf
        with self._lock:
            if (leaf := self.find(tensor)) is None:
                handle = register_hook_first(tensor, self._unscale)
                leaf = self._by_id[id(tensor)] = Leaf(weakref.ref(tensor), handle.remove)
            return leaf

    def _unscale(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Divide a gradient by the scale of the running pass: the hook of each leaf."""
        factor = self.factors.get(graph_task_id())
        # torch.autograd.grad(allow_unused=True) calls hooks of leaves that the pass does not reach with None.
        if factor is None or gradient is None or self._late:
            return None
        return true_gradient(gradient, factor)

    @contextmanager
    def unscaled_late(
        self, leaves: Sequence[Leaf], factor: float, late: bool
    ) -> Iterator[list[torch.Tensor]]:
        """Unscale what ``leaves`` get from the pass in this block in one operation when it ends, if ``late``.

        A product for each leaf costs a tenth of a step of many small layers. The hooks do it all the same
        where somebody may see a gradient before the end: another library (``torch.distributed``) or thread.

        Yields:
            filled in the end: gradients that the operation found to be finite.
        """
        tensors = [tensor for leaf in leaves if (tensor := leaf.tensor()) is not None]
        late = late and not self._passes_elsewhere and not _other_libraries_look()
        late = late and all(map(_is_unseen_until_the_end, tensors))
        if threading.current_thread() is not threading.main_thread():
            self._passes_elsewhere = True
            with self._late_pass:  # one of the main thread ends first, and there is no other from now on
                late = False
        finite: list[torch.Tensor] = []
        with self._late_pass if late else nullcontext():
            if late and not self._passes_elsewhere:
                self._late, self._late_factor = tensors, factor
            try:
                yield finite
            finally:
                finite += self.unscale_arrived() if late else []

    def unscale_arrived(self) -> list[torch.Tensor]:
        """Unscale what has arrived in the leaves of ``unscaled_late``; hooks unscale what comes later."""
        late, self._late = self._late, []
        arrived = [(tensor, gradient) for tensor in late if (gradient := tensor.grad) is not None]
        # Gradients of two leaves may lie in one memory, as those of ``a`` and ``b`` in ``torch.cat([a, b])``.
        memory = [g.untyped_storage().data_ptr() if g.layout is torch.strided else -1 for _, g in arrived]
        lying = Counter(memory)
        alone, finite = [], []
        for (tensor, gradient), where in zip(arrived, memory, strict=True):
            if where != -1 and lying[where] == 1 and gradient.dtype is torch.float32:
                alone.append(gradient)
            else:
                tensor.grad = true_gradient(gradient, self._late_factor)
        for device, _, _, members in by_device_and_dtype(alone) if alone else ():
            bad = torch.zeros((), device=device)
            multiply_and_check(members, bad, torch.full((), 1.0 / self._late_factor, device=device))
            finite += members if device.type == "cpu" and not bad else []  # elsewhere reading it would wait
        return finite

    def find(self, tensor: torch.Tensor) -> Leaf | None:
        leaf = self._by_id.get(id(tensor))
        return leaf if leaf is not None and leaf.tensor() is tensor else None

    def _found(self, tensors: Iterable[torch.Tensor]) -> list[tuple[Leaf, torch.Tensor]]:
        return [(leaf, tensor) for tensor in tensors if (leaf := self.find(tensor)) is not None]

    def backward_begins(self, leaves: Sequence[Leaf], backward: int) -> None:
        """Forget overflows of dropped gradients; refuse leaves that were updated without an optimizer."""
        pairs = [(leaf, tensor) for leaf in leaves if (tensor := leaf.tensor()) is not None]
        gone = [(leaf, tensor) for leaf, tensor in pairs if tensor.grad is None]
        if gone and self._unread:
            self._read()
        changed = [(leaf, t) for leaf, t in pairs if leaf.before and self._changed(t, *leaf.before)]
        # After an update a script drops or changes the gradient; an embedding that was renormalised in place
        # in a forward (``max_norm``) keeps it.
        moved = [(leaf, t) for leaf, t in changed if t.grad is None or self._changed_since_check(t)]
        if moved:
            self._refuse_updates(moved)
        for leaf, tensor in gone:
            self._discard(leaf, tensor, backward)
        skipped = [(leaf, t, t.grad) for leaf, t in pairs if leaf.skipped and t.grad is not None]
        still = nonfinite_flags([gradient for _, _, gradient in skipped]).read()
        for (leaf, tensor, _), flag in zip(skipped, still, strict=True):
            if not flag:
                self._discard(leaf, tensor, backward)

    def _changed(self, tensor: torch.Tensor, version: int, values: torch.Tensor | None, *_: object) -> bool:
        """Return whether a leaf has other values; a write through ``.data`` keeps the version.

        Comparing values waits for the device: only while no optimizer is known to update parameters.
        """
        if tensor._version != version or self._an_optimizer_steps or values is None:
            return tensor._version != version
        now = leaf_sample(tensor)
        return now is not None and not torch.allclose(now, values, 0.0, 0.0, equal_nan=True)

    def _refuse_updates(self, moved: Sequence[tuple[Leaf, torch.Tensor]]) -> None:
        """Refuse changes along or against the gradient: updates by hand.

        Loaded weights, new ones, and a buffer with the next batch change in directions of their own. A
        worker's copy of weights that an optimizer updates follows them.
        """
        updated = [t for one in self._by_id.values() if one.owned and (t := one.tensor()) is not None]
        pairs = [(t, u) for _, t in moved for u in updated if (t.shape, t.device) == (u.shape, u.device)]
        if any(bool((t == u).all()) for t, u in pairs):
            for leaf, _ in moved:
                leaf.owned, leaf.before = True, None
            return
        for leaf, tensor in moved:
            assert leaf.before is not None
            _, values, gradient = leaf.before
            leaf.before = None
            now = leaf_sample(tensor)
            if now is not None and values is not None and gradient is not None:
                signs = ((now - values).sign() * gradient.sign()).nan_to_num(0.0)
                count, along = leaf.moves
                leaf.moves = count + int(signs.count_nonzero()), along + int(signs.sum())
        together = [sum(counts) for counts in zip(*(leaf.moves for leaf, _ in moved), strict=True)]
        for leaf, tensor in moved:
            for count, along in (leaf.moves, together):
                if count >= _ENOUGH and abs(along) > _ALONG * count:
                    raise UnsupportedError(_BY_HAND.format(shape=tuple(tensor.shape)))
            if leaf.moves[0] >= _ENOUGH:
                leaf.owned = True
                self._recorder.note(_OTHER_CHANGES)

    def _discard(self, leaf: Leaf, tensor: torch.Tensor, clean_since: int) -> None:
        if leaf.overflow and not leaf.skipped:
            # Where the loss was finite, so was the tensor: what it holds now came from its gradient.
            if leaf.overflow != self._bad_loss[0] and not bool(torch.isfinite(tensor.detach()).all()):
                raise UnsupportedError(_BY_HAND.format(shape=tuple(tensor.shape)))
            self._recorder.note(
                "the script dropped gradients that had overflowed; the loss scale was lowered"
            )
            self._scale.discarded(leaf.overflow)
        leaf.overflow, leaf.skipped, leaf.clean_since = 0, False, clean_since

    def backward_ended(
        self,
        leaves: list[Leaf],
        backward: int,
        loss: torch.Tensor | None,
        site: str,
        finite: Sequence[torch.Tensor],
    ) -> None:
        """Check what the leaves accumulated, before the script can clamp it; the result is read later."""
        known = set(map(id, finite))
        gradients = [] if loss is None else [loss]
        holding: list[Leaf | None] = [None for _ in gradients]
        for leaf in leaves:
            tensor = leaf.tensor()
            if tensor is None:
                continue
            if not leaf.owned:
                # Once an optimizer steps, only leaves that change beside it are copied.
                quiet = self._an_optimizer_steps and leaf.before is not None
                samples = (None, None) if quiet else (leaf_sample(tensor), leaf_sample(tensor.grad))
                leaf.before = (tensor._version, *samples)
            if (gradient := tensor.grad) is not None:
                leaf.checked = (weakref.ref(gradient), gradient._version)
                if id(gradient) not in known:
                    holding.append(leaf)
                    gradients.append(gradient)
        flags = nonfinite_flags(gradients)
        with self._lock:
            self._unread.append((backward, site, holding, flags))
            if len(self._unread) >= _READ_EVERY:
                self._read()

    def nonfinite_among(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those whose gradient overflowed or is not finite now; waits for the device."""
        self._read()
        changed = [p for p in parameters if p.grad is not None and self._changed_since_check(p)]
        now = nonfinite_flags([p.grad for p in changed if p.grad is not None]).read()
        bad = {id(p) for p, flag in zip(changed, now, strict=True) if flag}
        bad |= {id(p) for leaf, p in self._found(parameters) if leaf.overflow}
        return [p for p in parameters if id(p) in bad]

    def bad_loss(self, parameters: Sequence[torch.Tensor]) -> str | None:
        """Return the line of a backward whose loss was not finite, if these gradients came from it."""
        backward, site = self._bad_loss
        return site if any(0 < leaf.overflow <= backward for leaf, _ in self._found(parameters)) else None

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
        self.unscale_arrived()  # an optimizer may step in the middle of a pass
        for parameter in parameters:
            if parameter.requires_grad:  # torch refuses hooks on a frozen one
                leaf = self._hooked(parameter)
                leaf.owned, leaf.before = True, None

    def skipped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that an optimizer skipped its step on these gradients, which are still there."""
        for leaf, _ in self._found(parameters):
            leaf.skipped = leaf.skipped or leaf.overflow > 0

    def zeroed(self, parameters: Iterable[torch.Tensor], backward: int) -> None:
        """Record that gradients of these parameters, up to those of ``backward``, became zero or None."""
        if self._unread:
            self._read()
        for leaf, parameter in self._found(parameters):
            self._discard(leaf, parameter, backward + 1)

    def _read(self) -> None:
        with self._lock:
            unread, self._unread = self._unread, []
            for backward, site, leaves, flags in unread:
                for leaf, flag in zip(leaves, flags.read(), strict=True):
                    if flag and leaf is None:
                        self._bad_loss = (backward, site)
                    elif flag and leaf is not None and backward >= leaf.clean_since:
                        leaf.overflow = leaf.overflow or backward
            self._by_id = {key: leaf for key, leaf in self._by_id.items() if leaf.tensor() is not None}

    def remove_hooks(self) -> None:
        for leaf in self._by_id.values():
            leaf.remove_hook()
        self._by_id.clear()
        self._unread.clear()


def true_gradient(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """Divide by the loss scale, as torch does: by a product with the inverse."""
    return gradient * (1.0 / factor)


def _other_libraries_look() -> bool:
    """Return whether a library that averages gradients over processes may read each as it arrives."""
    return "horovod" in sys.modules or (dist.is_available() and dist.is_initialized())


def _is_unseen_until_the_end(tensor: torch.Tensor) -> bool:
    """Return whether only ``run`` learns when the gradient of a leaf arrives, and it gets no earlier one."""
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.grad is None and len(hooks[0] or ()) == 1 and not hooks[1]


def leaf_sample(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy of some values, evenly spaced; None of a sparse tensor and of None."""
    if tensor is None or tensor.layout != torch.strided:
        return None
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    values = values.reshape(-1)
    return values[:: max(1, values.numel() // _SAMPLES)].clone()


_BY_HAND = (
    "a tensor of shape {shape} was updated by hand: it changed by its gradient and no torch.optim.Optimizer "
    "has stepped on it. In fp16 a step whose gradients overflow must be skipped, and only "
    "Optimizer.step can be. Use --policy bf16, which needs no skipping, or put the update into a "
    "torch.optim.Optimizer (SAM's first step is such an update too)."
)
_OF_FUNCTION = (
    "the backward of {} sees gradients times the loss scale; that is right where it is linear in them (no "
    "clamp, no norm), and wrong otherwise"
)
_OTHER_CHANGES = (
    "tensors changed after backward, without an optimizer and not along their gradients: taken for loaded "
    "weights or data. If these are updates, use --policy bf16: in fp16 they would need to be skipped"
)
