"""Optimizer steps of a script: counted, and skipped when a gradient overflowed."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from narrowcast.attach._leaves import Leaves, leaf_sample
from narrowcast.attach._regions import Regions
from narrowcast.attach._run import Call, Nesting, Patches, Run
from narrowcast.errors import ScaleCollapseError, UnsupportedError, few
from narrowcast.gradients import (
    SkipsInARow,
    SkipStep,
    closure_of,
    collapse_message,
    parameters_of,
    step_or_restore,
    untraced,
)
from narrowcast.policy import format_name
from narrowcast.weights import held_by

PATIENCE = 25
"""Skipped steps of one optimizer in a row after which the loss scale is not the cause."""

_WARN_AT = 20
_MEASURED = 10  # steps in which updates of low weights are counted
_LOW_WEIGHTS = (
    "{} trains weights that are stored in {}, without fp32 masters: small updates are rounded away. Load the "
    "model in fp32 (dtype=torch.float32); run computes in the low format all the same"
)


@dataclass(slots=True)
class _LowWeights:
    """Values in a low format that had a gradient, and those of them that their steps left as they were."""

    name: str
    steps: int = 0
    updates: int = 0
    swallowed: int = 0

    def text(self) -> str:
        share = self.swallowed / max(1, self.updates)
        return f"rounding swallowed {share:.0%} of the updates of {self.name} in its first {self.steps} steps"


@dataclass(slots=True)
class _Record:
    """What is known of one optimizer.

    Attributes:
        name: its class.
        low_weights: None if none of its weights is stored in a low format without a master.
        number: in the order of first steps, from 0; None before the first.
        taken: steps taken.
        skips_in_a_row: steps skipped since the last one taken.
    """

    name: str
    low_weights: _LowWeights | None
    number: int | None = None
    taken: int = 0
    skips_in_a_row: int = 0


class Steps:
    """Wrap the ``step`` of every optimizer class, where torch itself wraps it to call step hooks.

    torch's public step hooks can neither omit a step nor see one that raises; a wrapper around the whole
    step can.
    """

    def __init__(self, run: Run, leaves: Leaves, regions: Regions) -> None:
        self._scale = run.scale
        self._recorder = run.recorder
        self._stopping = run.stopping
        self._observer = run.observer
        self._leaves = leaves
        self._regions = regions
        self._nesting = Nesting()
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._records: weakref.WeakKeyDictionary[Optimizer, _Record] = weakref.WeakKeyDictionary()
        self._all_records: list[_Record] = []  # also of optimizers that are gone
        self._numbers = itertools.count()
        self._skips = SkipsInARow(PATIENCE)
        self._installed = False

    def install(self, patches: Patches) -> None:
        self._installed = True
        hook_step = Optimizer.profile_hook_step
        wrapping = functools.wraps(hook_step)(lambda step: self._wrap(hook_step(step)))
        patches.replace(Optimizer, "profile_hook_step", staticmethod(wrapping))
        self._backstop = register_optimizer_step_pre_hook(self._before_unwrapped_step)
        patches.wrap(Optimizer, "__init__", self._init)
        patches.wrap(Optimizer, "zero_grad", self._zero_grad)
        patches.wrap(torch.nn.Module, "zero_grad", self._zero_grad)
        for kind in _subclasses(Optimizer):
            step = vars(kind).get("step")
            if step is not None and getattr(step, "hooked", False):
                patches.replace(kind, "step", self._wrap(step))

    def uninstall(self) -> None:
        """Restore torch's own ``step`` on optimizer classes that were first used during the attachment."""
        self._installed = False
        self._backstop.remove()
        for kind in _subclasses(Optimizer):
            wrapped = getattr(vars(kind).get("step"), "narrowcast_wraps", None)
            if wrapped is not None:
                kind.step = wrapped  # type: ignore[attr-defined]

    def _init(self, original: Call, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self.optimizers.add(optimizer)
        self._leaves.optimizers.add(optimizer)
        self._stopping.made_optimizer = True

    @untraced
    def _zero_grad(self, original: Call, owner: Any, *args: Any, **kwargs: Any) -> None:
        """Notice gradients zeroed in place: their overflow is gone, though the tensor is the same."""
        if not self._scale.active:
            original(owner, *args, **kwargs)
            return
        self._leaves.read()  # before gradients are lost
        original(owner, *args, **kwargs)
        if isinstance(owner, Optimizer):
            self._leaves.optimizers.add(owner)  # perhaps made before the attachment
            self._leaves.zeroed(parameters_of(owner))
        else:
            self._leaves.zeroed(owner.parameters())

    def _before_unwrapped_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Step hook of torch: refuse a ``step`` that a scheduler wrapped before the attachment.

        Such a step cannot be skipped: a hook cannot omit it.
        """
        if self._scale.active and not self._nesting.depth:
            raise UnsupportedError(
                f"the step of {type(optimizer).__name__} was wrapped before narrowcast was attached (a "
                "scheduler does that), so it cannot be skipped where gradients overflow in fp16: make the "
                "optimizer and its scheduler inside the attachment"
            )

    def _wrap(self, hooked: Call) -> Call:
        @functools.wraps(hooked)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._installed:
                return hooked(optimizer, *args, **kwargs)
            if torch.compiler.is_dynamo_compiling() and not self._scale.active:
                self._stopping.traced_steps = True
                return hooked(optimizer, *args, **kwargs)
            return counted(optimizer, args, kwargs)

        @untraced
        def counted(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            self._stopping.made_optimizer = True  # perhaps before the attachment
            with self._nesting:
                result = self._step(hooked, optimizer, args, kwargs)
            if not self._nesting.depth:
                self._observer.stepped(optimizer)
                self._stopping.step_ended()
            return result

        # torch reads and sets ``hooked`` on the class's step to wrap it only once.
        hooked.hooked = step.hooked = True  # type: ignore[attr-defined]
        step.narrowcast_wraps = hooked  # type: ignore[attr-defined]
        return step

    def _step(self, hooked: Call, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._recorder.left_alone is not None:
            return hooked(optimizer, *args, **kwargs)
        closure = closure_of(args, kwargs)
        if self._nesting.depth == 1 and self._observer.holds_back(optimizer):
            return self._hold_back(optimizer, closure)
        if closure is not None:  # which may make the first call of a model, and so open the first region
            self._regions.expect_on(p.device.type for p in parameters_of(optimizer))
        if not self._scale.active:
            result = self._call(hooked, optimizer, args, kwargs)
            self._saw_step(optimizer, skipped=False)
            return result
        self._leaves.step_begins(optimizer)
        if closure is None:
            bad = self._leaves.nonfinite_among(parameters_of(optimizer))
            result = None if bad else self._call(hooked, optimizer, args, kwargs)
        else:
            step, evaluate = functools.partial(hooked, optimizer), self._checked(closure, optimizer)
            result, skip = step_or_restore(optimizer, step, args, kwargs, evaluate)
            bad = [] if skip is None else skip.nonfinite
        self._ended(optimizer, bad)
        return result

    def _call(self, hooked: Call, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Step; in a few steps, count the updates of low weights that rounding swallows."""
        counts = self._record_of(optimizer).low_weights
        if counts is None or counts.steps == _MEASURED or closure_of(args, kwargs) is not None:
            return hooked(optimizer, *args, **kwargs)
        trained = [p for g in optimizer.param_groups if g.get("lr") != 0 for p in g["params"]]
        before = [(p, leaf_sample(p), leaf_sample(p.grad)) for p in trained if p.element_size() < 4]
        result = hooked(optimizer, *args, **kwargs)
        counts.steps += 1
        for p, values, gradient in before:
            if values is not None and gradient is not None:
                counts.updates += int((gradient != 0).sum())
                counts.swallowed += int(((gradient != 0) & (leaf_sample(p) == values)).sum())
        if counts.steps == _MEASURED:
            self._recorder.note(counts.text(), at_once=True)
        return result

    def _record_of(self, optimizer: Optimizer) -> _Record:
        record = self._records.get(optimizer)
        if record is not None:
            return record
        name, low_weights = type(optimizer).__name__, None
        low = {p.dtype for p in parameters_of(optimizer)} & {torch.bfloat16, torch.float16}
        if low and held_by(optimizer) is None:
            low_weights = _LowWeights(name)
            stored = few([*map(format_name, low)])
            self._recorder.note(_LOW_WEIGHTS.format(name, stored), at_once=True)
        record = self._records[optimizer] = _Record(name, low_weights)
        self._all_records.append(record)
        return record

    def _hold_back(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Omit a step for the observer, which can read the gradients that it would have used."""
        if self._scale.active:
            self._leaves.step_begins(optimizer)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        bad = self._leaves.nonfinite_among(parameters_of(optimizer)) if self._scale.active else []
        self._observer.held_back(optimizer)
        self._ended(optimizer, bad)
        return loss

    def _saw_step(self, optimizer: Optimizer, *, skipped: bool) -> None:
        if self._nesting.depth != 1:
            return
        record = self._record_of(optimizer)
        if record.number is None:
            record.number = next(self._numbers)
        scale = self._scale.value.scale if self._scale.active else None
        self._recorder.saw_step(optimizer=record.number, skipped=skipped, scale=scale)
        if not skipped:
            record.taken += 1
            record.skips_in_a_row = 0
            return
        record.skips_in_a_row += 1
        if record.skips_in_a_row == _WARN_AT:
            self._recorder.note(
                f"{_WARN_AT} steps of {record.name} in a row were skipped: nothing is trained while that "
                f"lasts, as gradients are not finite, now at a loss scale of {scale:g}",
                at_once=True,
            )

    def note_what_was_lost(self) -> None:
        """Note each optimizer that took no step, though another may have, and updates that rounding lost."""
        for record in self._all_records:
            counts = record.low_weights
            if counts is not None and 0 < counts.steps < _MEASURED:
                self._recorder.note(counts.text())
        for record in self._all_records:
            if record.skips_in_a_row and not record.taken:
                self._recorder.note(
                    f"{record.name} took no step, so what it optimizes is untrained: all "
                    f"{record.skips_in_a_row} were skipped, as gradients were not finite. Try --policy bf16, "
                    "and fp32 to see whether it has them too"
                )

    def _ended(self, optimizer: Optimizer, bad: list[torch.Tensor]) -> None:
        """Record a step that was taken, or skipped because the gradients of ``bad`` are not finite."""
        self._saw_step(optimizer, skipped=bool(bad))
        self._leaves.forget_gradients()
        if not bad:
            self._skips.took(optimizer)
            self._scale.after_step(overflow=False)
            return
        site = self._leaves.bad_loss(bad)
        if site is not None:  # the loss scale has no part in it
            kind = self._regions.bad_input()
            source = f", and so was an input of {kind}" if kind else ""
            self._recorder.note(
                f"the loss at {site} was NaN or infinite itself{source}; the step was skipped, and no loss "
                "scale mends that",
                at_once=True,
            )
        self._leaves.skipped(parameters_of(optimizer))
        self._scale.after_step(overflow=True)
        since = self._skips.skipped(optimizer, self._recorder.steps + self._recorder.skipped_steps)
        if since is None:
            return
        names = self._regions.parameter_names()
        known = [names.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in bad]
        advice = "try --policy bf16, and --policy fp32 to see whether it happens there too."
        scale = self._scale.value.scale
        raise ScaleCollapseError(collapse_message(optimizer, PATIENCE, since, known, scale, advice))

    def _checked(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """Evaluate a closure again at a lower scale while its gradients overflow."""

        @functools.wraps(closure)
        def evaluate() -> Any:
            for _ in range(PATIENCE):
                loss = closure()
                bad = self._leaves.nonfinite_among(parameters_of(optimizer))
                if not bad:
                    return loss
                if isinstance(loss, torch.Tensor) and not bool(torch.isfinite(loss.detach()).all()):
                    break  # the forward pass overflowed: no loss scale changes that
                scale = self._scale.value
                self._scale.after_step(overflow=True)
                if self._scale.value == scale:
                    break  # a fixed scale
                self._leaves.skipped(bad)  # not dropped by the script
                for parameter in parameters_of(optimizer):
                    parameter.grad = None
            raise SkipStep(loss, bad)

        return evaluate


def _subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = kind.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)
