"""The leaves that scaled backward passes reach: their gradients are unscaled, checked and remembered.

Nothing sees the gradients of most passes until the pass has ended. Then one operator unscales and checks them
together. Where something may see a gradient earlier, a hook on each leaf unscales it as it arrives.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.attach._recorder import Recorder
from narrowcast.attach._run import RunningScale
from narrowcast.attach._torch_internals import (
    NO_GRAPH_TASK,
    graph_task_id,
    leaves_and_functions,
    register_hook_first,
)
from narrowcast.errors import UnsupportedError
from narrowcast.gradients import (
    NonfiniteFlags,
    by_device_and_dtype,
    multiply_and_check,
    nonfinite_flags,
    parameters_of,
)

_READ_EVERY = 64  # backwards without a step between them
_SAMPLES = 16_384  # values compared of a tensor, evenly spaced

# A pass may reach hundreds of leaves. ``map`` with these reads an attribute of all of them at the speed of C.
_GRADIENT = attrgetter("grad")
_VERSION = attrgetter("_version")
_LAYOUT = attrgetter("layout")
_NBYTES = attrgetter("nbytes")
_HOOKS = attrgetter("_backward_hooks")
_POST_HOOKS = attrgetter("_post_accumulate_grad_hooks")
_NONE = {type(None)}
_PLAIN = {torch.Tensor, torch.nn.Parameter}


@dataclass(slots=True)
class _Hook:
    """A leaf that has the unscaling hook."""

    leaf: weakref.ref[torch.Tensor]


@dataclass(slots=True)
class PassGradients:
    """What a backward pass left in its leaves.

    Attributes:
        leaves: those that hold a gradient.
        gradients: theirs, in the same order.
        check: whether each gradient is not finite; or, for each device, whether one of its gradients is not,
            as a 0-dim tensor above 0. It stays on the device until it is read.
    """

    leaves: list[torch.Tensor]
    gradients: list[torch.Tensor]
    check: NonfiniteFlags | list[torch.Tensor]

    def are_finite(self) -> bool | None:
        """Return whether all are finite; None where reading that would wait for a device."""
        if isinstance(self.check, NonfiniteFlags):
            on_host = all(norms.device.type == "cpu" for _, norms in self.check.norms_by_group)
            return not any(self.check.read()) if on_host else None
        on_host = all(found_inf.device.type == "cpu" for found_inf in self.check)
        return not any(map(bool, self.check)) if on_host else None

    def wait_if_finite(self) -> bool:
        """Return whether all are finite; waits for the device."""
        flags = self.check.read() if isinstance(self.check, NonfiniteFlags) else map(bool, self.check)
        return not any(flags)


@dataclass(slots=True)
class _Unread:
    """The check of a pass, which has not been read yet. It keeps no gradient alive.

    Attributes:
        backward: number of the pass.
        factor: its loss scale.
        site: the line of the script that called it.
        loss: its loss, and the version of that; None unless it is one number.
        leaves: those that hold a gradient.
        gradients: theirs, in the same order.
        versions: those of the gradients.
        check: as in ``PassGradients``.
    """

    backward: int
    factor: float
    site: str
    loss: tuple[torch.Tensor, int] | None
    leaves: list[weakref.ref[torch.Tensor]]
    gradients: list[weakref.ref[torch.Tensor]]
    versions: list[int]
    check: NonfiniteFlags | list[torch.Tensor]

    def leaves_that_overflowed(self) -> list[torch.Tensor]:
        """Return the leaves whose gradient was not finite; waits for the device."""
        if isinstance(self.check, NonfiniteFlags):
            flags = self.check.read()
        elif any(map(bool, self.check)):
            flags = self._flags_now()
        else:
            return []
        bad = [leaf() for leaf, flag in zip(self.leaves, flags, strict=True) if flag]
        return [leaf for leaf in bad if leaf is not None]

    def _flags_now(self) -> list[bool]:
        """Look for gradients that are not finite. One that is gone or has changed counts as one of them."""
        flags = [True] * len(self.gradients)
        unchanged: dict[int, torch.Tensor] = {}
        for position, reference in enumerate(self.gradients):
            gradient = reference()
            if gradient is not None and gradient._version == self.versions[position]:
                unchanged[position] = gradient
        now = nonfinite_flags(list(unchanged.values())).read()
        for position, flag in zip(unchanged, now, strict=True):
            flags[position] = flag
        return flags

    def loss_was_finite(self) -> bool:
        """Return False if the loss is known to have been NaN or infinite."""
        if self.loss is None:
            return True
        loss, version = self.loss
        return loss._version != version or bool(torch.isfinite(loss))


@dataclass(slots=True)
class _Overflow:
    """A gradient of ``leaf`` was not finite, and has not been dropped since.

    Attributes:
        backward: number of the first backward pass that left such a gradient.
        site: the line of the script that called it.
        skipped: whether an optimizer skipped a step because of it.
    """

    leaf: weakref.ref[torch.Tensor]
    backward: int
    site: str
    skipped: bool = False


@dataclass(slots=True)
class _Watched:
    """A parameter in no optimizer, as it was when a backward pass ended.

    Attributes:
        version: its version.
        values: some of its values; None where only versions are compared.
        gradient: its gradient and the version of that; None if it had none.
    """

    leaf: weakref.ref[torch.Tensor]
    version: int
    values: torch.Tensor | None
    gradient: tuple[weakref.ref[torch.Tensor], int] | None


class Leaves:
    """The leaves that scaled backward passes reach.

    Attributes:
        factors: number of each backward pass of the autograd engine that runs now -> its loss scale.
        optimizers: those that are known: made, stepped or zeroed since the attachment was entered.
    """

    def __init__(self, scale: RunningScale, recorder: Recorder) -> None:
        self._scale = scale
        self._recorder = recorder
        self.factors: dict[int, float] = {}
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._lock = threading.RLock()

        # By the id of a leaf.
        self._hooks: dict[int, _Hook] = {}
        self._overflows: dict[int, _Overflow] = {}
        self._watched: dict[int, _Watched] = {}
        self._in_optimizers: dict[int, weakref.ref[torch.Tensor]] = {}
        self._owned_leaves: list[int] = []  # ids of the leaves of a pass that optimizers have, all of them
        self._an_optimizer_steps = False

        self._unread: list[_Unread] = []
        # The gradients that the latest pass left, and their versions: until a step has used them, or one of
        # them turns out not to be finite. A script may give them to other parameters.
        self._checked: tuple[list[torch.Tensor], list[int]] = ([], [])
        self._bad_loss = (0, "")  # the latest backward whose loss was not finite itself, and its line

        # Leaves of the running pass whose gradients are unscaled together when it ends.
        self._together: list[torch.Tensor] = []
        self._together_factor = 1.0
        self._pass_together = threading.Lock()
        self._passes_elsewhere = False  # in other threads than the main one

    # ---- finding leaves

    def reached_from(self, roots: Iterable[Any]) -> tuple[list[torch.Tensor], bool]:
        """Return the leaves below graph nodes ``roots``, and whether the graph runs code written in Python.

        The graph has to be walked: a leaf that is in no module and in no optimizer is known to nobody else.
        """
        leaves, functions = leaves_and_functions(roots)
        for function in functions:
            if not function.__module__.startswith("torch."):
                self._recorder.note(_OF_FUNCTION.format(function.__name__))
        return leaves, bool(functions)

    # ---- unscaling as each gradient arrives

    def hook(self, leaves: Iterable[torch.Tensor]) -> None:
        """Unscale each gradient of ``leaves`` as it arrives, in this pass and in later ones."""
        with self._lock:
            for leaf in leaves:
                if not self.is_hooked(leaf):
                    # In this order a Ctrl-C between the two leaves no hook that nobody removes.
                    self._hooks[id(leaf)] = _Hook(weakref.ref(leaf))
                    register_hook_first(leaf, self.unscale)

    def is_hooked(self, leaf: torch.Tensor) -> bool:
        hooks = leaf._backward_hooks
        return hooks is not None and self.unscale in hooks.values()

    def unscale(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Divide a gradient by the scale of the running pass: the hook of each leaf."""
        factor = self.factors.get(graph_task_id())
        # torch.autograd.grad(allow_unused=True) calls hooks of leaves that the pass does not reach with None.
        if factor is None or gradient is None or self._together:
            return None
        return true_gradient(gradient, factor)

    # ---- unscaling all gradients of a pass together

    @contextmanager
    def unscaled(
        self, leaves: list[torch.Tensor], factor: float, seen_early: bool
    ) -> Iterator[list[PassGradients]]:
        """Unscale what ``leaves`` get from the pass in this block: together when it ends, or one by one.

        Args:
            leaves: all that the pass reaches.
            factor: the loss scale of the pass.
            seen_early: whether something may see a gradient before the end of the pass.

        Yields:
            a list. If the gradients were unscaled together, it holds them when the block has ended.
        """
        together: list[PassGradients] = []
        with self._alone_if(not seen_early and self._are_unseen(leaves)) as alone:
            if alone:
                self._together = leaves
                self._together_factor = factor
            else:
                self.hook(leaves)
            try:
                yield together
            finally:
                # Also after an error: gradients that arrived before it stay.
                if self._together is leaves:
                    together.append(self._unscale_together())

    @contextmanager
    def _alone_if(self, together: bool) -> Iterator[bool]:
        """Run a block in which gradients are scaled until its end, while no other thread runs a pass.

        Yields:
            ``together``; False from the first pass in another thread on.
        """
        if threading.current_thread() is not threading.main_thread():
            # First a pass of the main thread ends; it runs no other like that from now on.
            self._passes_elsewhere = True
            with self._pass_together:
                pass
        if not together or self._passes_elsewhere:
            yield False
            return
        with self._pass_together:
            yield not self._passes_elsewhere

    def unscale_arrived(self) -> None:
        """Unscale what has arrived, where something interrupts a pass; hooks unscale the rest."""
        inside_of_a_pass = graph_task_id() != NO_GRAPH_TASK  # not in another thread meanwhile
        if self._together and inside_of_a_pass:
            leaves = self._together
            self._unscale_together()
            self.hook(leaves)

    def _unscale_together(self) -> PassGradients:
        """Unscale and check the gradients that have arrived."""
        leaves, self._together = self._together, []
        gradients = list(map(_GRADIENT, leaves))
        if not _NONE.isdisjoint(map(type, gradients)):
            leaves = [leaf for leaf in leaves if leaf.grad is not None]
            gradients = list(map(_GRADIENT, leaves))

        # One operator cannot write to all where kinds differ, or where two lie in one memory.
        found_inf = []
        groups = by_device_and_dtype(gradients) if gradients else []
        in_fp32 = all(dtype is torch.float32 for _, dtype, _, _ in groups)
        if not (in_fp32 and _are_dense_and_apart(gradients)):
            in_place = _dense_and_apart(gradients)
            groups = by_device_and_dtype(in_place) if in_place else []
            kept = set(map(id, in_place))
            for leaf, gradient in zip(leaves, gradients, strict=True):
                if id(gradient) not in kept:
                    unscaled = true_gradient(gradient, self._together_factor)
                    leaf.grad = unscaled
                    found_inf.append(nonfinite_flags([unscaled]).any(unscaled.device))
            gradients = list(map(_GRADIENT, leaves))

        inverse = 1.0 / self._together_factor
        for device, _, _, members in groups:
            bad = torch.zeros((), device=device)
            multiply_and_check(members, bad, torch.full((), inverse, device=device))
            found_inf.append(bad)
        return PassGradients(leaves, gradients, found_inf)

    def _are_unseen(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Return whether nothing sees gradients of ``leaves`` before the pass ends, and none has one yet."""
        # Libraries that average gradients over processes may read each as it arrives.
        if _averages_over_processes():
            return False
        # torch calls the methods of a subclass.
        plain = _PLAIN.issuperset(map(type, leaves))
        if not plain or not _NONE.issuperset(map(type, map(_GRADIENT, leaves))):
            return False
        if any(map(_POST_HOOKS, leaves)):
            return False
        return _NONE.issuperset(map(type, map(_HOOKS, leaves))) or all(map(self._is_hooked_alone, leaves))

    def _is_hooked_alone(self, leaf: torch.Tensor) -> bool:
        """Return whether a leaf has no hook but that of this class, from a pass that something saw early."""
        hooks = leaf._backward_hooks
        return not hooks or (len(hooks) == 1 and self.is_hooked(leaf))

    # ---- before and after a pass

    def backward_begins(self, leaves: Sequence[torch.Tensor]) -> None:
        """Forget overflows of gradients that the script dropped; refuse updates that it made by hand."""
        self.forget_gradients()
        if self._unread and any(leaf.grad is None for leaf in leaves):
            self.read()
        if self._watched:
            self._refuse_updates_by_hand(leaves)
        if self._overflows:
            self._forget_dropped(leaves)

    def backward_ended(
        self,
        leaves: Sequence[torch.Tensor],
        backward: int,
        factor: float,
        loss: torch.Tensor | None,
        site: str,
        left: PassGradients | None,
    ) -> None:
        """Remember what the leaves hold, before the script can change it.

        Args:
            leaves: all that the pass reached.
            backward: number of the pass.
            factor: its loss scale.
            loss: its loss, if that is one number.
            site: the line of the script that called it.
            left: what was unscaled together; None: gradients were unscaled as they arrived.
        """
        self._watch_parameters_without_optimizer(leaves)
        if left is None:
            left = gradients_left_in(leaves)
        versions = list(map(_VERSION, left.gradients))
        self._checked = (left.gradients, versions)

        finite = left.are_finite()
        if finite:
            return
        unread = _Unread(
            backward=backward,
            factor=factor,
            site=site,
            loss=None if loss is None else (loss.detach(), loss._version),
            leaves=list(map(weakref.ref, left.leaves)),
            gradients=list(map(weakref.ref, left.gradients)),
            versions=versions,
            check=left.check,
        )
        with self._lock:
            self._unread.append(unread)
            # Where this waits for nothing, it is done now, before the script can change the gradients.
            if finite is not None or len(self._unread) >= _READ_EVERY:
                self.read()

    # ---- overflows

    def nonfinite_among(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those whose gradient overflowed or is not finite now; waits for the device."""
        self.read()
        if not self._overflows and self._are_as_checked(map(_GRADIENT, parameters)):
            return []
        holders = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = list(map(_GRADIENT, holders))
        bad = set()
        if not self._are_as_checked(gradients):
            flags = nonfinite_flags(gradients).read()
            bad = {id(parameter) for parameter, flag in zip(holders, flags, strict=True) if flag}
        return [p for p in parameters if id(p) in bad or self._overflow_of(p) is not None]

    def _are_as_checked(self, gradients: Iterable[torch.Tensor | None]) -> bool:
        """Return whether the latest backward pass left exactly these gradients, and found them finite."""
        checked, versions = self._checked
        known = set(map(id, checked))
        known.add(id(None))
        return known.issuperset(map(id, gradients)) and list(map(_VERSION, checked)) == versions

    def forget_gradients(self) -> None:
        """Let the gradients of the latest pass go; a step checks its gradients anew."""
        self._checked = ([], [])

    def bad_loss(self, parameters: Iterable[torch.Tensor]) -> str | None:
        """Return the line of a backward whose loss was not finite, if these gradients came from it."""
        backward, site = self._bad_loss
        for parameter in parameters:
            overflow = self._overflow_of(parameter)
            if overflow is not None and overflow.backward <= backward:
                return site
        return None

    def latest_overflow(self, parameters: Iterable[torch.Tensor]) -> int | None:
        """Return the number of the latest pass that left an overflow in these; None: none did."""
        overflows = map(self._overflow_of, parameters)
        return max((overflow.backward for overflow in overflows if overflow is not None), default=None)

    def skipped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that an optimizer skipped its step on these gradients, which are still there."""
        for parameter in parameters:
            overflow = self._overflow_of(parameter)
            if overflow is not None:
                overflow.skipped = True

    def zeroed(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that gradients of these parameters became zero or None."""
        self.forget_gradients()
        if self._overflows:
            for parameter in parameters:
                self._forget_overflow(parameter)

    def read(self) -> None:
        """Read which gradients overflowed; waits for the device if a pass has ended since the last time."""
        if not self._unread:
            return
        with self._lock:
            unread, self._unread = self._unread, []
            for one in unread:
                overflowed = one.leaves_that_overflowed()
                if not overflowed:
                    continue
                self.forget_gradients()
                if one.loss_was_finite():
                    self._scale.overflowed(one.backward, one.factor)
                else:
                    self._bad_loss = (one.backward, one.site)
                for leaf in overflowed:
                    if self._overflow_of(leaf) is None:
                        self._overflows[id(leaf)] = _Overflow(weakref.ref(leaf), one.backward, one.site)
            self._forget_what_is_gone()

    def _forget_what_is_gone(self) -> None:
        """Keep the tables from growing where each pass has leaves of its own."""
        for table in (self._hooks, self._overflows, self._watched):
            if len(table) > 2 * len(self._in_optimizers) + _READ_EVERY:
                for key in [key for key, entry in table.items() if entry.leaf() is None]:
                    del table[key]

    def _overflow_of(self, leaf: torch.Tensor) -> _Overflow | None:
        overflow = self._overflows.get(id(leaf))
        return overflow if overflow is not None and overflow.leaf() is leaf else None

    def _forget_dropped(self, leaves: Sequence[torch.Tensor]) -> None:
        """Forget the overflows of gradients that are gone, or that the script zeroed after a skipped step."""
        skipped = []
        for leaf in leaves:
            overflow = self._overflow_of(leaf)
            if overflow is None:
                continue
            if leaf.grad is None:
                self._forget_overflow(leaf)
            elif overflow.skipped:
                skipped.append(leaf)
        still = nonfinite_flags([leaf.grad for leaf in skipped if leaf.grad is not None]).read()
        for leaf, flag in zip(skipped, still, strict=True):
            if not flag:
                self._forget_overflow(leaf)

    def _forget_overflow(self, leaf: torch.Tensor) -> None:
        overflow = self._overflow_of(leaf)
        if overflow is None:
            return
        if not overflow.skipped:
            # Where the loss was finite, so was the tensor: what it holds now came from its gradient.
            loss_was_finite = overflow.backward != self._bad_loss[0]
            if loss_was_finite and not bool(torch.isfinite(leaf.detach()).all()):
                raise UnsupportedError(_OVERFLOW_BY_HAND.format(shape=tuple(leaf.shape)))
            self._recorder.note(_UNUSED.format(overflow.site), at_once=True)
            self._scale.discarded(overflow.backward)
        del self._overflows[id(leaf)]

    def note_unused(self) -> None:
        """Note, at the end, overflows that no optimizer has met and that the script has not dropped."""
        self.read()
        for overflow in self._overflows.values():
            if not overflow.skipped and overflow.leaf() is not None:
                self._recorder.note(_UNUSED.format(overflow.site))

    # ---- gradients that are set aside while a pass may run again

    def may_run_again(self, leaves: Sequence[torch.Tensor], *, retained: bool) -> bool:
        """Return whether a pass may be run again if its gradients overflow, as far as leaves are concerned.

        Until the first step of an optimizer; later only if the script itself retains the graph.
        """
        if self._an_optimizer_steps and not retained:
            return False
        if threading.current_thread() is not threading.main_thread() or self._passes_elsewhere:
            return False
        # Other processes do not run it again.
        if _averages_over_processes() or not _PLAIN.issuperset(map(type, leaves)):
            return False
        return not any(map(_POST_HOOKS, leaves))

    def put_together(
        self, aside: Sequence[tuple[torch.Tensor, torch.Tensor | None]], *, makes_graph: bool
    ) -> None:
        """Add what a pass left to the gradients that were set aside, as the autograd engine adds them."""
        for tensor, before in aside:
            new = gradient_of(tensor)
            if before is None:
                continue
            if new is None:
                tensor.grad = before
            elif makes_graph or (before.layout is not torch.strided and new.layout is torch.strided):
                tensor.grad = before + new
            else:
                with torch.no_grad():
                    tensor.grad = before.add_(new)

    # ---- updates by hand

    def _own(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that these are parameters of optimizers, or follow some."""
        for parameter in parameters:
            key = id(parameter)
            if key not in self._in_optimizers:
                self._in_optimizers[key] = weakref.ref(parameter, functools.partial(self._disown, key))
                self._watched.pop(key, None)

    def _own_what_optimizers_have(self) -> None:
        """Look again at the optimizers: a script may make one, or add parameters to one, at any time."""
        for optimizer in self.optimizers:
            self._own(parameters_of(optimizer))

    def _disown(self, key: int, _: Any) -> None:
        """Forget a parameter that is gone: another tensor may get its id."""
        self._in_optimizers.pop(key, None)
        self._owned_leaves = []

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer begins a step."""
        self.optimizers.add(optimizer)  # perhaps made before the attachment
        self.unscale_arrived()

    def step_ended(self) -> None:
        """Record that a step has ended: a closure runs inside, and its pass may still be run again."""
        self._an_optimizer_steps = True

    def _watch_parameters_without_optimizer(self, leaves: Sequence[torch.Tensor]) -> None:
        """Remember parameters that no optimizer has, to refuse an update of them by hand."""
        # Mostly all leaves are parameters of optimizers, and the same as in the pass before.
        ids = list(map(id, leaves))
        if ids == self._owned_leaves:
            return
        self._own_what_optimizers_have()
        if self._in_optimizers.keys() >= set(ids):
            self._owned_leaves = ids
            return
        for leaf in leaves:
            if id(leaf) not in self._in_optimizers and isinstance(leaf, torch.nn.Parameter):
                # Writes through ``.data`` keep the version. To compare values waits for the device, so it is
                # done only while no optimizer is known to update parameters.
                values = None if self._an_optimizer_steps else leaf_sample(leaf)
                gradient = None if leaf.grad is None else (weakref.ref(leaf.grad), leaf.grad._version)
                self._watched[id(leaf)] = _Watched(weakref.ref(leaf), leaf._version, values, gradient)

    def _refuse_updates_by_hand(self, leaves: Sequence[torch.Tensor]) -> None:
        """Refuse parameters in no optimizer that changed after they had got a gradient from a scaled pass."""
        changed = [leaf for leaf in leaves if self._was_changed(leaf)]
        if not changed:
            return
        self._own_what_optimizers_have()  # one may have been made since, after a trial run
        changed = [leaf for leaf in changed if id(leaf) not in self._in_optimizers]
        if changed and not self._follow_an_optimizer(changed):
            raise UnsupportedError(_BY_HAND.format(shape=tuple(changed[0].shape)))

    def _was_changed(self, leaf: torch.Tensor) -> bool:
        before = self._watched.get(id(leaf))
        if before is None or before.leaf() is not leaf:
            return False
        # After an update a script drops or changes the gradient; an embedding that was renormalised in place
        # in a forward (``max_norm``) keeps it.
        if leaf.grad is not None and before.gradient is not None:
            gradient, version = before.gradient
            if gradient() is leaf.grad and leaf.grad._version == version:
                return False
        if leaf._version != before.version:
            return True
        if self._an_optimizer_steps or before.values is None:
            return False
        now = leaf_sample(leaf)
        return now is not None and not torch.allclose(now, before.values, 0.0, 0.0, equal_nan=True)

    def _follow_an_optimizer(self, changed: Sequence[torch.Tensor]) -> bool:
        """Return whether parameters are a worker's copy of those that an optimizer updates, as in A3C."""
        updated = [tensor for kept in self._in_optimizers.values() if (tensor := kept()) is not None]
        for copy in changed:
            for tensor in updated:
                alike = (copy.shape, copy.device) == (tensor.shape, tensor.device)
                if alike and bool((copy == tensor).all()):
                    self._own(changed)
                    return True
        return False

    def remove_hooks(self) -> None:
        for hook in self._hooks.values():
            leaf = hook.leaf()
            if leaf is not None and leaf._backward_hooks:
                ours = [key for key, function in leaf._backward_hooks.items() if function == self.unscale]
                for key in ours:
                    del leaf._backward_hooks[key]
        for table in (self._hooks, self._overflows, self._watched, self._in_optimizers):
            table.clear()
        self._unread.clear()
        self.forget_gradients()


def gradients_left_in(leaves: Iterable[torch.Tensor]) -> PassGradients:
    """Return the gradients of ``leaves``, and check them."""
    holders = [leaf for leaf in leaves if leaf.grad is not None]
    gradients = list(map(_GRADIENT, holders))
    return PassGradients(holders, gradients, nonfinite_flags(gradients))


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return ``tensor.grad`` without torch's warning about tensors in the middle of a graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.grad


def _averages_over_processes() -> bool:
    return "horovod" in sys.modules or (dist.is_available() and dist.is_initialized())


def true_gradient(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """Divide by the loss scale, as torch does: by a product with the inverse."""
    return gradient * (1.0 / factor)


def _are_dense_and_apart(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether all are dense, and have memory of their own."""
    if not {torch.strided}.issuperset(map(_LAYOUT, gradients)):
        return False
    # The engine leaves dense gradients without gaps. They are apart if each ends before the next one starts.
    addresses = list(map(torch.Tensor.data_ptr, gradients))
    starts = sorted(addresses)
    ends = sorted(map(operator.add, addresses, map(_NBYTES, gradients)))
    return all(map(operator.le, ends, starts[1:]))


def _dense_and_apart(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those that are dense, in fp32, and have a memory of their own.

    Gradients of two leaves may lie in one memory, as those of ``a`` and ``b`` in ``torch.cat([a, b])``.
    """
    dense = [g for g in gradients if g.layout is torch.strided]
    in_memory = Counter(gradient.untyped_storage().data_ptr() for gradient in dense)
    apart = [g for g in dense if in_memory[g.untyped_storage().data_ptr()] == 1]
    return [gradient for gradient in apart if gradient.dtype is torch.float32]


def leaf_sample(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy of some values, evenly spaced; None of a sparse tensor and of None."""
    if tensor is None or tensor.layout != torch.strided:
        return None
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    values = values.reshape(-1)
    return values[:: max(1, values.numel() // _SAMPLES)].clone()


_UNUSED = (
    "gradients of the backward pass at {} were not finite, and no optimizer used them. That is harmless "
    "where nothing reads them, as those that the loss of an actor leaves in its critic. What the script "
    "computed from them may be wrong: narrowcast compare --policy bf16 SCRIPT sets bf16 beside FP32"
)
_BY_HAND = (
    "a tensor of shape {shape} was updated by hand: it changed after a backward pass, and no "
    "torch.optim.Optimizer has it. In fp16 a step whose gradients overflow must be skipped, and only "
    "Optimizer.step can be. Use --policy bf16, which scales no loss, or put the update into a "
    "torch.optim.Optimizer."
)
_OVERFLOW_BY_HAND = (
    "a tensor of shape {shape} was updated by hand with a gradient that had overflowed: it holds NaN or "
    "infinity now. In fp16 a step whose gradients overflow must be skipped, and only Optimizer.step can be "
    "(SAM's first step is an update by hand too). Use --policy bf16, which scales no loss."
)
_OF_FUNCTION = (
    "the backward of {} sees gradients times the loss scale; that is right where it is linear in them (no "
    "clamp, no norm), and wrong otherwise"
)
