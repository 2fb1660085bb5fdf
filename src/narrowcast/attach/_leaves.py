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
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from narrowcast.attach._recorder import EventRecorder
from narrowcast.attach._run import RunningScale
from narrowcast.attach._torch_internals import (
    NO_GRAPH_TASK,
    graph_task_id,
    leaves_and_functions,
    register_hook_first,
)
from narrowcast.errors import UnsupportedError
from narrowcast.gradients import by_device_and_dtype, multiply_and_check, nonfinite_flags, parameters_of

# Passes whose checks stay unread. With so many they are read, though that waits for the device.
_READ_EVERY = 64
# Of a larger tensor at least this many values are compared, and fewer than twice as many; of others all.
_SAMPLES = 16_384

# A pass may reach hundreds of leaves. ``map`` with these reads an attribute of all of them at the speed of C,
# and ``_NONE.issuperset(map(type, values))`` tells at that speed whether all values are None.
_GRADIENT = attrgetter("grad")
_VERSION = attrgetter("_version")
_LAYOUT = attrgetter("layout")
_NBYTES = attrgetter("nbytes")
_HOOKS = attrgetter("_backward_hooks")
_POST_HOOKS = attrgetter("_post_accumulate_grad_hooks")
_NONE = {type(None)}
_PLAIN = {torch.Tensor, torch.nn.Parameter}


@dataclass(slots=True)
class PassGradients:
    """What a backward pass left in its leaves.

    Attributes:
        leaves: those that hold a gradient.
        gradients: theirs, in the same order.
        found_inf: 0-dim tensors, at least one for each device, above 0 if a gradient there is not finite.
            They stay on the device until they are read.
    """

    leaves: list[torch.Tensor]
    gradients: list[torch.Tensor]
    found_inf: list[torch.Tensor]

    def are_finite(self) -> bool | None:
        """Return whether all are finite; None where reading that would wait for a device."""
        if any(flag.device.type != "cpu" for flag in self.found_inf):
            return None
        return self.are_finite_after_waiting()

    def are_finite_after_waiting(self) -> bool:
        """Return whether all are finite; waits for the device."""
        return not any(map(bool, self.found_inf))


@dataclass(slots=True, kw_only=True)
class PassFacts:
    """What is known of a backward pass before it runs.

    Attributes:
        number: in the order of outermost passes.
        factor: its loss scale.
        site: the line of the script that called it.
        loss: its loss; None unless it is one number.
        loss_version: the version of the loss at that time.
    """

    number: int
    factor: float
    site: str
    loss: torch.Tensor | None
    loss_version: int

    def loss_was_finite(self) -> bool:
        """Return False if the loss is known to have been NaN or infinite."""
        if self.loss is None:
            return True
        return self.loss._version != self.loss_version or bool(torch.isfinite(self.loss))


@dataclass(slots=True)
class _UnreadPass:
    """A pass whose check has not been read yet. It keeps no gradient alive.

    Attributes:
        facts: of the pass.
        leaves: those that hold a gradient.
        gradients: theirs, in the same order.
        versions: those of the gradients.
        found_inf: as in ``PassGradients``.
    """

    facts: PassFacts
    leaves: list[weakref.ref[torch.Tensor]]
    gradients: list[weakref.ref[torch.Tensor]]
    versions: list[int]
    found_inf: list[torch.Tensor]

    def leaves_that_overflowed(self) -> list[torch.Tensor]:
        """Return the leaves whose gradient was not finite; waits for the device.

        If the pass overflowed at all, a gradient that is gone or has changed since counts as overflowed.
        """
        if not any(map(bool, self.found_inf)):
            return []
        overflowed = []
        unchanged_leaves = []
        unchanged_gradients = []
        for leaf_ref, gradient_ref, version in zip(self.leaves, self.gradients, self.versions, strict=True):
            leaf = leaf_ref()
            gradient = gradient_ref()
            if leaf is None:
                continue
            if gradient is None or gradient._version != version:
                overflowed.append(leaf)
            else:
                unchanged_leaves.append(leaf)
                unchanged_gradients.append(gradient)
        flags = nonfinite_flags(unchanged_gradients).read()
        overflowed += [leaf for leaf, flag in zip(unchanged_leaves, flags, strict=True) if flag]
        return overflowed


@dataclass(slots=True)
class _Overflow:
    """A gradient of a leaf was not finite, and has not been dropped since.

    Attributes:
        number: of the first backward pass that left such a gradient.
        site: the line of the script that called it.
        loss_was_finite: whether the loss of that pass was finite.
        skipped: whether an optimizer skipped a step because of it.
    """

    number: int
    site: str
    loss_was_finite: bool
    skipped: bool = False


@dataclass(slots=True)
class _WatchedParameter:
    """A parameter in no optimizer, as it was when a backward pass ended.

    Attributes:
        version: its version.
        values: some of its values; None where only versions are compared.
        gradient: its gradient, with the version of the gradient; None if it had none.
    """

    version: int
    values: torch.Tensor | None
    gradient: tuple[weakref.ref[torch.Tensor], int] | None


class Leaves:
    """The leaves that scaled backward passes reach.

    Attributes:
        factors: graph task id of each backward pass that the autograd engine runs now -> its loss scale.
        optimizers: those that are known: made, stepped or zeroed since the attachment was entered.
    """

    def __init__(self, scale: RunningScale, recorder: EventRecorder) -> None:
        self._scale = scale
        self._recorder = recorder
        self.factors: dict[int, float] = {}
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._lock = threading.RLock()

        # By leaf; an entry goes with its leaf.
        self._hooked: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary()
        self._overflows: MutableMapping[torch.Tensor, _Overflow] = WeakIdKeyDictionary()
        self._watched: MutableMapping[torch.Tensor, _WatchedParameter] = WeakIdKeyDictionary()

        # By the id of a leaf, since each pass compares the ids of all of its leaves with them.
        self._in_optimizers: dict[int, weakref.ref[torch.Tensor]] = {}
        # Ids of the leaves of the latest pass in which every leaf belonged to an optimizer.
        self._owned_leaves: list[int] = []
        self._an_optimizer_steps = False

        self._unread: list[_UnreadPass] = []
        # The gradients that the latest pass left, and their versions. They are dropped once a step has used
        # them, or one of them turns out not to be finite. Not kept by leaf: a script may move a gradient to
        # another parameter.
        self._checked: tuple[list[torch.Tensor], list[int]] = ([], [])

        # Leaves of the running pass whose gradients are unscaled together when it ends.
        self._together: list[torch.Tensor] = []
        self._together_factor = 1.0
        # Held by the main thread during a pass that unscales together.
        self._pass_together = threading.Lock()
        self._passes_elsewhere = False  # in other threads than the main one

    # ---- finding leaves

    def reached_from(self, roots: Iterable[Any]) -> tuple[list[torch.Tensor], bool]:
        """Return the leaves below graph nodes ``roots``, and whether the graph runs code written in Python.

        The graph has to be walked, since a leaf may be in no module and in no optimizer.
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
                    self._hooked[leaf] = None
                    register_hook_first(leaf, self.unscale)

    def is_hooked(self, leaf: torch.Tensor) -> bool:
        hooks = leaf._backward_hooks
        return hooks is not None and self.unscale in hooks.values()

    def unscale(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Divide a gradient by the scale of the running pass: the hook of each leaf."""
        factor = self.factors.get(graph_task_id())
        # torch.autograd.grad(allow_unused=True) passes None to the hooks of leaves that the pass does not
        # reach. Leaves may have this hook from an earlier pass; in one that unscales together it must not
        # act.
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
                # Also after an error: gradients that arrived before it stay. Not if ``unscale_arrived`` has
                # done it during the pass.
                if self._together is leaves:
                    together.append(self._unscale_together())

    @contextmanager
    def _alone_if(self, together: bool) -> Iterator[bool]:
        """Keep passes of other threads out of a block in which gradients stay scaled until it ends.

        Args:
            together: whether they should stay scaled, so that they are unscaled together.

        Yields:
            whether they may: ``together`` is set, and only the main thread has begun passes so far.
        """
        if threading.current_thread() is not threading.main_thread():
            # From now on the main thread unscales none together. Wait for the pass that may be running.
            self._passes_elsewhere = True
            with self._pass_together:
                pass
        if not together or self._passes_elsewhere:
            yield False
            return
        with self._pass_together:
            # Another thread may have begun one before the lock was taken.
            yield not self._passes_elsewhere

    def unscale_arrived(self) -> None:
        """Unscale what has arrived, where something interrupts a pass; hooks unscale the rest."""
        # False in another thread, while the main one runs the pass.
        inside_of_a_pass = graph_task_id() != NO_GRAPH_TASK
        if self._together and inside_of_a_pass:
            leaves = self._together
            self._unscale_together()
            self.hook(leaves)

    def _unscale_together(self) -> PassGradients:
        """Unscale and check the gradients that have arrived."""
        leaves = self._together
        self._together = []
        gradients = list(map(_GRADIENT, leaves))
        # Some leaves got no gradient.
        if not _NONE.isdisjoint(map(type, gradients)):
            leaves = _with_gradients(leaves)
            gradients = list(map(_GRADIENT, leaves))

        # One operator unscales all in place, if they are dense, in fp32 and share no memory. Otherwise it
        # gets those of which that is true, and the others are replaced one by one.
        found_inf = []
        groups = []
        if gradients:
            groups = by_device_and_dtype(gradients)
        in_fp32 = all(dtype is torch.float32 for _, dtype, _, _ in groups)
        if not (in_fp32 and _are_dense_without_overlap(gradients)):
            in_place = _writable_in_place(gradients)
            groups = []
            if in_place:
                groups = by_device_and_dtype(in_place)
            found_inf = _replace_all_but(in_place, leaves, gradients, self._together_factor)
            gradients = list(map(_GRADIENT, leaves))

        inverse = 1.0 / self._together_factor
        for device, _, _, members in groups:
            bad = torch.zeros((), dtype=torch.float32, device=device)
            inverse_there = torch.full((), inverse, dtype=torch.float32, device=device)
            multiply_and_check(members, bad, inverse_there)
            found_inf.append(bad)
        return PassGradients(leaves, gradients, found_inf)

    def _are_unseen(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Return whether nothing sees gradients of ``leaves`` before the pass ends, and none has one yet."""
        # Libraries that average gradients over processes may read each as it arrives.
        if _averages_over_processes():
            return False
        # A subclass may define operators itself (``__torch_dispatch__``). The backward of an operator that
        # saved such a leaf calls them with the gradient that arrives.
        if not _PLAIN.issuperset(map(type, leaves)):
            return False
        # torch would add a scaled gradient to an earlier one, which is unscaled.
        if not _NONE.issuperset(map(type, map(_GRADIENT, leaves))):
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
        # Read now, before the pass leaves new gradients: later, the overflow of a gradient that was dropped
        # would be taken for one of the new gradient.
        if self._unread and any(leaf.grad is None for leaf in leaves):
            self.read()
        if self._watched:
            self._refuse_updates_by_hand(leaves)
        if self._overflows:
            self._forget_dropped(leaves)

    def backward_ended(
        self, leaves: Sequence[torch.Tensor], facts: PassFacts, left: PassGradients | None
    ) -> None:
        """Remember what the leaves hold, before the script can change it.

        Args:
            leaves: all that the pass reached.
            facts: of the pass.
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
        if facts.loss is not None:
            facts.loss = facts.loss.detach()  # it is kept without its graph
        unread = _UnreadPass(
            facts=facts,
            leaves=list(map(weakref.ref, left.leaves)),
            gradients=list(map(weakref.ref, left.gradients)),
            versions=versions,
            found_inf=left.found_inf,
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

        holders = _with_gradients(parameters)
        gradients = list(map(_GRADIENT, holders))
        bad = set()
        # The script has changed or replaced some, as a clip does: they may be infinite only now.
        if not self._are_as_checked(gradients):
            flags = nonfinite_flags(gradients).read()
            bad = {id(parameter) for parameter, flag in zip(holders, flags, strict=True) if flag}
        if not bad and not self._overflows:
            return []
        return [p for p in parameters if id(p) in bad or p in self._overflows]

    def _are_as_checked(self, gradients: Iterable[torch.Tensor | None]) -> bool:
        """Return whether each of these is None or was left by the latest pass, whose gradients are unchanged.

        Call ``read`` first: it forgets those of a pass that overflowed.
        """
        checked, versions = self._checked
        known = set(map(id, checked))
        known.add(id(None))
        return known.issuperset(map(id, gradients)) and list(map(_VERSION, checked)) == versions

    def forget_gradients(self) -> None:
        """Let the gradients of the latest pass go; a step checks its gradients anew."""
        self._checked = ([], [])

    def bad_loss(self, parameters: Iterable[torch.Tensor]) -> str | None:
        """Return the line of a backward whose loss was not finite, if these gradients came from it."""
        for parameter in parameters:
            overflow = self._overflows.get(parameter)
            if overflow is not None and not overflow.loss_was_finite:
                return overflow.site
        return None

    def latest_overflow(self, parameters: Iterable[torch.Tensor]) -> int | None:
        """Return the number of the latest pass that left an overflow in one of these; None: none did.

        Of the passes that left one in the same parameter, the first counts.
        """
        numbers = [self._overflows[p].number for p in parameters if p in self._overflows]
        return max(numbers, default=None)

    def skipped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that an optimizer skipped its step on these gradients, which are still there."""
        for parameter in parameters:
            overflow = self._overflows.get(parameter)
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
            passes = self._unread
            self._unread = []
            for unread in passes:
                overflowed = unread.leaves_that_overflowed()
                if not overflowed:
                    continue
                self.forget_gradients()
                facts = unread.facts
                loss_was_finite = facts.loss_was_finite()
                if loss_was_finite:
                    self._scale.overflowed(facts.number, facts.factor)
                for leaf in overflowed:
                    if leaf not in self._overflows:
                        self._overflows[leaf] = _Overflow(facts.number, facts.site, loss_was_finite)

    def _forget_dropped(self, leaves: Sequence[torch.Tensor]) -> None:
        """Forget the overflows of gradients that are gone, or that the script zeroed after a skipped step."""
        skipped = []
        for leaf in leaves:
            overflow = self._overflows.get(leaf)
            if overflow is None:
                continue
            if leaf.grad is None:
                self._forget_overflow(leaf)
            elif overflow.skipped:
                skipped.append(leaf)
        # A skipped step left its gradients, and zero_grad(set_to_none=False) keeps the tensors.
        still_bad = nonfinite_flags(list(map(_GRADIENT, skipped))).read()
        for leaf, flag in zip(skipped, still_bad, strict=True):
            if not flag:
                self._forget_overflow(leaf)

    def _forget_overflow(self, leaf: torch.Tensor) -> None:
        """Forget an overflow. If no optimizer has skipped a step for it, note that and lower the scale.

        Raises:
            UnsupportedError: the script has updated the leaf with the gradient by hand.
        """
        overflow = self._overflows.get(leaf)
        if overflow is None:
            return
        if not overflow.skipped:
            # The loss of that pass was finite, so the leaf was finite too. If it is not finite now, the
            # script has updated it with the overflowed gradient since.
            if overflow.loss_was_finite and not bool(torch.isfinite(leaf.detach()).all()):
                raise UnsupportedError(_OVERFLOW_BY_HAND.format(shape=tuple(leaf.shape)))
            self._recorder.note(_UNUSED.format(overflow.site), at_once=True)
            self._scale.discarded(overflow.number)
        del self._overflows[leaf]

    def note_unused(self) -> None:
        """Note, at the end, overflows that no optimizer has met and that the script has not dropped."""
        self.read()
        for overflow in self._overflows.values():
            if not overflow.skipped:
                self._recorder.note(_UNUSED.format(overflow.site))

    # ---- passes that are run again

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

    # ---- updates by hand

    def _own(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that these are parameters of optimizers."""
        for parameter in parameters:
            key = id(parameter)
            if key not in self._in_optimizers:
                self._in_optimizers[key] = weakref.ref(parameter, functools.partial(self._disown, key))
                self._watched.pop(parameter, None)

    def _own_what_optimizers_have(self) -> None:
        """Look again at the optimizers: a script may make one, or add parameters to one, at any time."""
        for optimizer in self.optimizers:
            self._own(parameters_of(optimizer))

    def _disown(self, key: int, _: Any) -> None:
        """Forget a parameter that is gone: another tensor may get its id."""
        self._in_optimizers.pop(key, None)
        self._owned_leaves = []

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer begins a step; unscale what it would use, if a pass still runs."""
        self.optimizers.add(optimizer)  # perhaps made before the attachment
        self.unscale_arrived()  # an optimizer may step in the middle of a pass, from a hook

    def step_ended(self) -> None:
        """Record that a step has ended. Not when it begins: a pass in its closure may still be run again."""
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
                values = None
                if not self._an_optimizer_steps:
                    values = leaf_sample(leaf)
                gradient = None
                if leaf.grad is not None:
                    gradient = (weakref.ref(leaf.grad), leaf.grad._version)
                self._watched[leaf] = _WatchedParameter(leaf._version, values, gradient)

    def _refuse_updates_by_hand(self, leaves: Sequence[torch.Tensor]) -> None:
        """Refuse parameters in no optimizer that changed after they had got a gradient from a scaled pass."""
        changed = [leaf for leaf in leaves if self._was_changed(leaf)]
        if not changed:
            return
        self._own_what_optimizers_have()  # one may have been made since, after a trial run
        for leaf in changed:
            if id(leaf) not in self._in_optimizers:
                raise UnsupportedError(_BY_HAND.format(shape=tuple(leaf.shape)))

    def _was_changed(self, leaf: torch.Tensor) -> bool:
        before = self._watched.get(leaf)
        if before is None:
            return False
        # After an update by hand, a script drops or changes the gradient. If that is the same, something else
        # wrote to the leaf, as a forward does that renormalises an embedding (``max_norm``).
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

    def remove_hooks(self) -> None:
        """Remove our hooks from leaves, and forget everything that was remembered of leaves."""
        for leaf in self._hooked:
            hooks = leaf._backward_hooks or {}
            ours = [key for key, function in hooks.items() if function == self.unscale]
            for key in ours:
                del hooks[key]
        for table in (self._hooked, self._overflows, self._watched):
            table.clear()
        self._in_optimizers.clear()
        self._unread.clear()
        self.forget_gradients()


def gradients_left_in(leaves: Iterable[torch.Tensor]) -> PassGradients:
    """Return the gradients of ``leaves``, and check them."""
    holders = _with_gradients(leaves)
    gradients = list(map(_GRADIENT, holders))
    return PassGradients(holders, gradients, _found_inf(gradients))


def _with_gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.grad is not None]


def _replace_all_but(
    in_place: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    factor: float,
) -> list[torch.Tensor]:
    """Replace the gradients that are not in ``in_place`` by true ones, and check these; does not wait."""
    kept = set(map(id, in_place))
    found_inf = []
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if id(gradient) not in kept:
            unscaled = true_gradient(gradient, factor)
            leaf.grad = unscaled
            found_inf += _found_inf([unscaled])
    return found_inf


def _found_inf(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return for each device and dtype of ``gradients`` whether one of them is not finite; does not wait."""
    norms_by_dtype = nonfinite_flags(gradients).norms_by_dtype
    return [torch.isfinite(norms).logical_not().any() for _, norms in norms_by_dtype]


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return ``tensor.grad`` without torch's warning about tensors in the middle of a graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.grad


def add_to_earlier(earlier: Sequence[tuple[torch.Tensor, torch.Tensor | None]], *, makes_graph: bool) -> None:
    """Add what a pass left in tensors to the gradients that they held before, as the autograd engine does.

    Args:
        earlier: the tensors, each with the gradient that it held before the pass.
        makes_graph: whether the pass ran with ``create_graph=True``.
    """
    for tensor, before in earlier:
        if before is None:
            continue
        new = gradient_of(tensor)
        if new is None:
            tensor.grad = before
        elif before.layout is not torch.strided and new.layout is torch.strided:
            tensor.grad = new + before  # in this order: torch raises for sparse + dense
        elif makes_graph:
            tensor.grad = before + new
        else:
            with torch.no_grad():
                tensor.grad = before.add_(new)


def _averages_over_processes() -> bool:
    return "horovod" in sys.modules or (dist.is_available() and dist.is_initialized())


def true_gradient(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """Divide by the loss scale, as torch does: by a product with the inverse."""
    return gradient * (1.0 / factor)


def _are_dense_without_overlap(gradients: Sequence[torch.Tensor]) -> bool:
    """Tell quickly whether all may be written in place; if not, ``_writable_in_place`` finds those that may.

    The dtype is not looked at.
    """
    if not {torch.strided}.issuperset(map(_LAYOUT, gradients)):
        return False
    # The engine leaves dense gradients without gaps. They are apart if each ends before the next one starts.
    addresses = list(map(torch.Tensor.data_ptr, gradients))
    starts = sorted(addresses)
    ends = sorted(map(operator.add, addresses, map(_NBYTES, gradients)))
    return all(map(operator.le, ends, starts[1:]))


def _writable_in_place(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those that are dense, in fp32, and share no memory with another one.

    Gradients of two leaves may lie in one memory, as those of ``a`` and ``b`` in ``torch.cat([a, b])``.
    """
    dense = [gradient for gradient in gradients if gradient.layout is torch.strided]
    in_memory = Counter(gradient.untyped_storage().data_ptr() for gradient in dense)
    apart = []
    for gradient in dense:
        alone = in_memory[gradient.untyped_storage().data_ptr()] == 1
        if alone and gradient.dtype is torch.float32:
            apart.append(gradient)
    return apart


def leaf_sample(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy of some values, evenly spaced; None of a sparse tensor and of None."""
    if tensor is None or tensor.layout != torch.strided:
        return None
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
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
