"""What the parts of an attachment share: patches, the loss scale, the observer, the early end of a run."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.attach._recorder import EventRecorder
from narrowcast.policy import Policy
from narrowcast.scaling import LossScale, Off

# How long after ``Stopping.stop`` a script that still runs is ended by force.
_PATIENCE_S = 30.0

Call = Callable[..., Any]


class Patches:
    """Replace attributes of modules and classes; ``restore`` puts back the originals, latest first."""

    def __init__(self) -> None:
        # Callbacks that put back originals; the others run even if one fails.
        self._undo = ExitStack()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value``; a name that ``owner`` inherited is deleted again later."""
        if name in vars(owner):
            self._undo.callback(setattr, owner, name, vars(owner)[name])
        else:
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, replacement: Call) -> None:
        """Make ``owner.name(...)`` call ``replacement(original, ...)``."""
        original = getattr(owner, name)

        # A function, since it may stand for a method.
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        self.replace(owner, name, wrapper)

    def restore(self) -> None:
        self._undo.close()


class Nesting(threading.local):
    """Count the running calls of replaced functions in each thread; each call is in a ``with`` block.

    The depth is more than 1 where one replaced function calls another.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class Observer:
    """Called while an attached script runs, in the script's own thread; this base class changes nothing."""

    def attached(self, attachment: Any) -> None:
        """Called before the script starts, with its ``Attachment``."""

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called when the outermost call of a module that holds parameters begins."""

    def returned(self, module: torch.nn.Module, output: Any) -> None:
        """Called when that call ends; ``output`` is what the script receives."""

    def backward_begins(self, roots: Sequence[Any]) -> None:
        """Called when an outermost backward pass begins from ``roots``, tensors or graph edges."""

    def backward_ended(self) -> None:
        """Called when that pass has ended without an error."""

    def holds_back(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether to omit the step that ``optimizer`` begins; nothing is updated then."""
        return False

    def held_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step was omitted; its closure was evaluated once."""

    def closure_of_step(self, closure: Call) -> Call:
        """Return what to call in place of the closure of the step that begins."""
        return closure

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when a step ended: taken, skipped or omitted."""


class RunningScale:
    """Hold the loss scale of the process, and move it once for each backward that an optimizer used.

    Backwards are numbered. Several optimizers may step on the gradients of one backward: it counts as good at
    most once and lowers the scale at most once, as with ``torch.amp.GradScaler.update`` in an iteration.

    Attributes:
        value: the scale and its rule.
        backward: number of the latest backward, from 1.
    """

    def __init__(self, value: LossScale) -> None:
        self.value = value
        self.backward = 0
        # Kept apart from ``value``, which the next overflow lowers while these gradients are still used.
        self._scale_of_gradients = value.scale
        self._lock = threading.Lock()

        self._moved_for = 0  # the latest backward for which the scale has moved
        self._backed_off_for = 0  # the latest for which it has fallen

    @property
    def active(self) -> bool:
        """Whether losses are scaled and gradients checked."""
        return not isinstance(self.value, Off)

    @property
    def of_next(self) -> float | None:
        """The scale of the next backward; None if losses are not scaled."""
        return self.value.scale if self.active else None

    @property
    def of_gradients(self) -> float | None:
        """The scale of the latest backward, which may have fallen since; None if losses are not scaled."""
        return self._scale_of_gradients if self.active else None

    def next_backward(self) -> int:
        """Return the number of the outermost backward that begins now."""
        with self._lock:
            self.backward += 1
            self._scale_of_gradients = self.value.scale
            return self.backward

    def discarded(self, backward: int) -> None:
        """Back off because a step skipped the gradients of ``backward`` or the script dropped them.

        Does nothing if the scale has fallen for ``backward`` already.
        """
        with self._lock:
            if self._backed_off_for < backward:
                self.value = self.value.after_step(overflow=True)
                self._backed_off_for = backward
                # The scale may have moved for a later backward already.
                self._moved_for = max(self._moved_for, backward)

    def overflowed(self, backward: int, factor: float) -> None:
        """Back off when the check of ``backward``, run at the scale ``factor``, is read and shows overflow.

        On a GPU checks are read late, several at once: passes that ran at one scale lower it once.
        """
        with self._lock:
            if self.value.scale >= factor:  # else another pass has lowered it since
                self.value = self.value.after_step(overflow=True)
            self._backed_off_for = max(self._backed_off_for, backward)
            self._moved_for = max(self._moved_for, backward)

    def lower_to(self, value: LossScale, backward: int) -> None:
        """Continue with the scale at which ``backward``, run again, left finite gradients."""
        with self._lock:
            self.value = value
            self._scale_of_gradients = value.scale
            self._backed_off_for = self._moved_for = backward

    def after_step(self, *, overflow: bool) -> None:
        """Move the scale after an optimizer used the gradients of the latest backward, or skipped them."""
        if overflow:
            self.discarded(self.backward)
            return
        with self._lock:
            if self._moved_for < self.backward:
                self.value = self.value.after_step(overflow=False)
                self._moved_for = self.backward


class Stopping:
    """End the script after a number of steps, counted as ``Attachment`` describes.

    Args:
        after: the number of steps; 0: never.
        counts_calls: whether calls of modules are counted until there is a backward pass.
        close: writes everything that must be written, before the process is ended by force.

    Attributes:
        reached: whether the script was told to end.
        made_optimizer: whether an optimizer is known, so that backwards and calls do not count.
        traced_steps: whether compiled code steps, where steps cannot be counted.
    """

    def __init__(self, after: int, close: Callable[[], None], *, counts_calls: bool = True) -> None:
        self._after = after
        self._close = close
        self._counts_calls = counts_calls
        self._deadline: threading.Timer | None = None
        self._forwards = 0
        self._backwards = 0
        self._steps = 0
        self.reached = False
        self.made_optimizer = False
        self.traced_steps = False

    def step_ended(self) -> None:
        """Count an outermost step of an optimizer."""
        self._steps += 1
        self._stop_if_due(self._steps)

    def backward_ended(self) -> None:
        """Count an outermost backward."""
        self._backwards += 1
        hides_steps = self.traced_steps and not self._steps
        if not self.made_optimizer or hides_steps:
            self._stop_if_due(self._backwards)

    def forward_ended(self) -> None:
        """Count an outermost call of a module."""
        if self._counts_calls and not (self._backwards or self.made_optimizer):
            self._forwards += 1
            self._stop_if_due(self._forwards)

    def _stop_if_due(self, count: int) -> None:
        if 0 < self._after <= count:
            self.stop()

    def stop(self) -> None:
        """End the script here, as ``sys.exit(0)`` would; by force if it still runs half a minute later.

        Raises:
            SystemExit: always. Not a subclass, which ``threading`` would print as an error.
        """
        if not self.reached:
            self.reached = True
            # A script may catch SystemExit, and its threads and exit handlers may go on for ever.
            self._deadline = threading.Timer(_PATIENCE_S, self._end_process)
            self._deadline.daemon = True  # Python does not wait for it
            self._deadline.start()
        raise SystemExit(0)

    def cancel(self) -> None:
        """Do not end the process by force: the script has ended by itself."""
        if self._deadline is not None:
            self._deadline.cancel()

    def _end_process(self) -> None:
        # os._exit runs no exit handler and flushes nothing.
        try:
            self._close()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedRun:
    """What the parts of one attachment share. Once ``recorder.left_alone`` is set, every part does nothing.

    Attributes:
        asked_scale: the loss scale that was asked for; None: dynamic in fp16, else off.
        scale: the one in force.
        explains_skips: whether a skipped step is run again, to say where it went wrong.
        tell_story: called with what that shows.
    """

    policy: Policy
    asked_scale: LossScale | None
    scale: RunningScale
    recorder: EventRecorder
    observer: Observer
    stopping: Stopping
    explains_skips: bool
    tell_story: Callable[[str], None]

    def leave_alone(self, why: str, *, in_call: bool = False) -> None:
        """Add nothing to the script from now on: no new region, no scaling, no skipping.

        ``in_call``: whether the reason is found inside a call of a module, whose region stays until it ends.
        """
        recorder = self.recorder
        if recorder.left_alone is None:
            recorder.left_alone = why
            so_far = recorder.steps + recorder.skipped_steps
            since = ""
            if so_far:
                since = f" from step {so_far + 1} on"
            elif in_call or recorder.forwards or recorder.backwards:
                since = " from then on"
            if in_call:
                why += ", in a call of a module that ran in a region of narrowcast to its end"
            recorder.note(f"{why}, so narrowcast added nothing{since}")
            self.scale.value = Off()
