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
from narrowcast.attach._regions import ScriptRegions
from narrowcast.attach._run import AttachedRun, Call, Nesting, Patches
from narrowcast.attach._unread_steps import UnreadStep, UnreadSteps, must_wait
from narrowcast.errors import NarrowcastError, ScaleCollapseError, UnsupportedError, few
from narrowcast.gradients import (
    SkipsInARow,
    SkipStep,
    check_gradients,
    closure_of,
    collapse_message,
    is_capturing,
    is_torchs_own,
    known_to_be_finite,
    needs_closure,
    norm_of_gradients,
    parameters_of,
    step_or_restore,
    untraced,
)
from narrowcast.policy import format_name
from narrowcast.weights import held_by

PATIENCE = 25
"""Skipped steps of one optimizer in a row after which the loss scale is not the cause."""

_WARN_AT = 20
_TOLD_SKIPS = 5  # skipped steps of one optimizer that get a note where no loss is scaled
_LOW_DTYPES = {torch.bfloat16, torch.float16}
_LOW_WEIGHTS = (
    "{} trains weights that are stored in {}, without fp32 masters: small updates are rounded away "
    "(nc.weights.UpdateMeter measures how many). Load the model in fp32 (dtype=torch.float32); run computes "
    "in the low format all the same"
)
_WRAPPED_BEFORE = (
    "the step of {} was wrapped before narrowcast was attached (a scheduler does that), so it cannot be "
    "skipped where gradients overflow in fp16: make the optimizer and its scheduler inside the attachment"
)
_MOVED = (
    "a step of {} moved parameters before it evaluated its closure for the last time, whose gradients are "
    "not finite, and its first step did not: it can be neither skipped nor undone. Use --policy fp32"
)
_USED = (
    "step {}, of {}, used gradients of {} that are not finite, and they hold NaN or infinity now. On a GPU "
    "only the step of a fused optimizer can be skipped without waiting for the device: make it with "
    "fused=True. narrowcast run --policy fp32 SCRIPT shows whether FP32 has such gradients too"
)


@dataclass(slots=True)
class _OptimizerRecord:
    """What is known of one optimizer.

    Attributes:
        name: its class.
        number: in the order of first steps, from 0; None before the first.
        taken: steps taken.
        skips: steps skipped.
        skips_in_a_row: steps skipped since the last one taken.
        evaluates_again: whether a closure whose gradients overflowed is evaluated again at a lower loss
            scale: of optimizers that need a closure, as LBFGS and SAM do.
        moves_first: whether a step moves parameters before the last evaluation of its closure; None: not
            known before the first step.
        grad_norm: of the gradients that the present step uses; None unless the run writes norms.
    """

    name: str
    number: int | None = None
    taken: int = 0
    skips: int = 0
    skips_in_a_row: int = 0
    evaluates_again: bool = False
    moves_first: bool | None = None
    grad_norm: torch.Tensor | None = None


class Steps:
    """Wrap the ``step`` of every optimizer class, where torch itself wraps it to call step hooks.

    torch's public step hooks can neither omit a step nor see one that raises; a wrapper around the whole
    step can.
    """

    def __init__(self, run: AttachedRun, leaves: Leaves, regions: ScriptRegions) -> None:
        self._scale = run.scale
        self._recorder = run.recorder
        self._stopping = run.stopping
        self._observer = run.observer
        self._leaves = leaves
        self._regions = regions
        self._nesting = Nesting()
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._records: weakref.WeakKeyDictionary[Optimizer, _OptimizerRecord] = weakref.WeakKeyDictionary()
        self._all_records: list[_OptimizerRecord] = []  # also of optimizers that are gone
        self._numbers = itertools.count()
        self._skips = SkipsInARow(PATIENCE)
        self._unread = UnreadSteps()
        self._installed = False

    # ---- wrapping

    def install(self, patches: Patches) -> None:
        self._installed = True
        hook_step = Optimizer.profile_hook_step

        @functools.wraps(hook_step)
        def wrapping(step: Call) -> Call:
            return self._wrap(hook_step(step))

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
        """Forget the overflows of gradients that are zeroed, which may happen in place."""
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
            raise UnsupportedError(_WRAPPED_BEFORE.format(type(optimizer).__name__))

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

    # ---- one step

    def _step(self, hooked: Call, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._recorder.left_alone is not None:
            return hooked(optimizer, *args, **kwargs)
        closure = closure_of(args, kwargs)
        if self._nesting.depth == 1 and self._observer.holds_back(optimizer):
            return self._hold_back(optimizer, closure)
        self._record_of(optimizer)  # its note on low weights comes before the first step
        self._read_flags()
        if closure is not None:
            closure = self._observer.closure_of_step(closure)
            # It may make the first call of a model, and so open the first region.
            self._regions.expect_on(p.device.type for p in parameters_of(optimizer))
        if self._scale.active:
            self._leaves.step_begins(optimizer)
        try:
            if closure is None:
                self._measure_norm(optimizer)
                bad = self._nonfinite(optimizer)
                result = None if bad else hooked(optimizer, *args, **kwargs)
            else:
                result, bad = self._step_with_closure(hooked, optimizer, args, kwargs, closure)
        finally:
            if self._scale.active:
                self._leaves.step_ended()
            number = self._recorder.steps + self._recorder.skipped_steps + 1
            unread = self._unread.end(optimizer, number, counts=self._nesting.depth == 1)
        self._ended(optimizer, bad, unread=unread)
        return result

    def _measure_norm(self, optimizer: Optimizer) -> None:
        """Measure the norm of the gradients that an outermost step uses, if the run writes norms."""
        if self._recorder.keeps_norms and self._nesting.depth == 1:
            self._record_of(optimizer).grad_norm = norm_of_gradients(parameters_of(optimizer))

    def _nonfinite(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Return the parameters whose gradient is not finite; a step that uses them must be skipped.

        Without a loss scale this waits for a GPU only if the step cannot begin before its flag is known.
        Otherwise the optimizer gets the flag, or the next step reads it.
        """
        if self._scale.active:
            return self._leaves.nonfinite_among(parameters_of(optimizer))
        if not self._regions.opens_regions or known_to_be_finite(optimizer) or not _can_check(optimizer):
            return []
        check = check_gradients(optimizer)
        found = check.overflowed  # None: only the GPU knows
        if found is None and (must_wait(optimizer) or self._record_of(optimizer).evaluates_again):
            found = bool(check.found_inf)
        if found is None:
            self._unread.begin(optimizer, check)
        if not found:
            return []
        parameters = check.gradients.parameters
        flags = check.nonfinite().read()
        bad = [parameter for parameter, flag in zip(parameters, flags, strict=True) if flag]
        return bad or parameters  # if none is bad here, the overflow is on another rank

    def _step_with_closure(
        self, hooked: Call, optimizer: Optimizer, args: Any, kwargs: Any, closure: Call
    ) -> tuple[Any, list[torch.Tensor]]:
        """Step with a closure; return what the step returned, and the parameters for which it was skipped.

        The optimizer decides how often its closure is evaluated. Optimizers that need a closure, such as
        LBFGS, would lose many evaluations with a skipped step, so an evaluation that overflowed is repeated
        at a lower loss scale.
        """
        record = self._record_of(optimizer)
        # A step may move parameters before it evaluates its closure for the last time, as that of SAM does. A
        # copy of the parameters then undoes a skipped step. Where moves_first is still None, take a copy, and
        # see in this step whether it does so.
        takes_copy = record.moves_first is not False
        before = None
        if record.moves_first is None:
            before = list(map(leaf_sample, parameters_of(optimizer)))
        evaluations = 0
        moved = False  # whether the step moved parameters before the latest evaluation
        own_skip: SkipStep | None = None  # raised below, where gradients overflowed

        @functools.wraps(closure)
        def evaluate() -> Any:
            nonlocal evaluations, moved, own_skip
            evaluations += 1
            if not takes_copy:
                if evaluations > 1:
                    # Earlier steps evaluated the closure once, and this one does so again after it may have
                    # moved parameters. From the next step on there is a copy.
                    record.moves_first = moved = True
            elif before is not None and not moved:
                moved = evaluations > 1 or _differ(before, parameters_of(optimizer))
            loss, bad = self._evaluated(closure, optimizer, record)
            self._measure_norm(optimizer)  # that of the last evaluation stays
            if bad:
                own_skip = SkipStep(loss, bad)
                raise own_skip
            return loss

        step = functools.partial(hooked, optimizer)
        result, skip = step_or_restore(optimizer, step, args, kwargs, evaluate, moves_first=takes_copy)
        if skip is not None and moved and not takes_copy:
            raise UnsupportedError(_MOVED.format(record.name))
        if skip is not own_skip:
            # The closure belongs to an optimizer whose step has called this step: that one is skipped too.
            assert skip is not None
            raise skip
        if skip is not None:
            return result, skip.nonfinite
        if before is not None and evaluations:
            record.moves_first = moved
        return result, []

    def _evaluated(
        self, closure: Call, optimizer: Optimizer, record: _OptimizerRecord
    ) -> tuple[Any, list[torch.Tensor]]:
        """Evaluate a closure; if the optimizer needs one, at lower loss scales while gradients overflow."""
        for _ in range(PATIENCE):
            scale = self._scale.value
            loss = closure()
            bad = self._nonfinite(optimizer)
            if not bad or not record.evaluates_again:
                break
            if isinstance(loss, torch.Tensor) and not bool(torch.isfinite(loss.detach()).all()):
                break  # no loss scale changes that
            self._scale.after_step(overflow=True)
            if self._scale.value == scale:
                break  # a fixed scale, or none
            # This drops the gradients, and not the script: no overflow must count as unused.
            self._leaves.skipped(bad)
            for parameter in parameters_of(optimizer):
                parameter.grad = None
        return loss, bad

    def _hold_back(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Omit a step for the observer, which can read the gradients that it would have used."""
        if self._scale.active:
            self._leaves.step_begins(optimizer)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        bad = []
        if self._scale.active:
            bad = self._leaves.nonfinite_among(parameters_of(optimizer))
            self._leaves.step_ended()
        self._observer.held_back(optimizer)
        self._ended(optimizer, bad)
        return loss

    # ---- counting

    def _record_of(self, optimizer: Optimizer) -> _OptimizerRecord:
        """Return the record of ``optimizer``; the first time, make it and note weights in a low format."""
        record = self._records.get(optimizer)
        if record is not None:
            return record
        record = _OptimizerRecord(type(optimizer).__name__)
        self._records[optimizer] = record
        self._all_records.append(record)

        low = {parameter.dtype for parameter in parameters_of(optimizer)} & _LOW_DTYPES
        if low and held_by(optimizer) is None:
            stored = few([format_name(dtype) for dtype in low])
            self._recorder.note(_LOW_WEIGHTS.format(record.name, stored), at_once=True)
        record.evaluates_again = needs_closure(optimizer)
        if record.evaluates_again or is_torchs_own(optimizer):
            # Optimizers of torch that need no closure evaluate one once, before they move parameters.
            record.moves_first = record.evaluates_again
        return record

    def _ended(self, optimizer: Optimizer, bad: list[torch.Tensor], *, unread: bool = False) -> None:
        """Record a step that was taken, or skipped because the gradients of ``bad`` are not finite."""
        self._saw_step(optimizer, skipped=bool(bad), unread=unread)
        if unread:
            self._regions.explainer.step_ended()
            return
        scaled = self._scale.active
        if scaled:
            self._leaves.forget_gradients()
        if not bad:
            # Other optimizers may step on gradients of the same pass.
            self._regions.explainer.step_ended(may_step_again=len(self.optimizers) > 1)
            self._skips.took(optimizer)
            self._scale.after_step(overflow=False)
            return
        number = self._recorder.steps + self._recorder.skipped_steps
        scale = self._scale.of_gradients or 1.0
        if scaled:
            self._lower_the_scale(optimizer, bad)
        else:
            self._tell_of_skip(optimizer, bad, number)
        self._explain(optimizer, bad, number, scale)
        self._refuse_collapse(optimizer, bad, number)

    def _explain(self, optimizer: Optimizer, bad: list[torch.Tensor], number: int, scale: float) -> None:
        """Run a step that was skipped at ``scale`` again, and note where it went wrong."""
        explainer = self._regions.explainer
        is_recorded = explainer.recording.records and self._regions.in_main_thread
        if not is_recorded or self._record_of(optimizer).evaluates_again:
            explainer.step_ended()
            return
        module_calls = self._recorder.module_calls  # the calls that are made again do not count
        explainer.explain(
            self._regions.surroundings(),
            number=number,
            scale=scale,
            lower_scale=self._scale.of_next or 1.0,
            names=tuple(self._names_of(bad)),
        )
        self._recorder.module_calls = module_calls

    def _saw_step(self, optimizer: Optimizer, *, skipped: bool, unread: bool) -> None:
        """Record a step; whether it was skipped is not known yet if its flag is ``unread``."""
        if self._nesting.depth != 1:
            return
        record = self._record_of(optimizer)
        if record.number is None:
            record.number = next(self._numbers)
        self._recorder.saw_step(
            optimizer=record.number,
            skipped=skipped,
            scale=self._scale.of_gradients,
            grad_norm=record.grad_norm,
        )
        record.grad_norm = None
        if not unread:
            self._count(record, skipped=skipped)

    def _count(self, record: _OptimizerRecord, *, skipped: bool) -> None:
        if not skipped:
            record.taken += 1
            record.skips_in_a_row = 0
            return
        record.skips += 1
        record.skips_in_a_row += 1
        if record.skips_in_a_row == _WARN_AT:
            note = (
                f"{_WARN_AT} steps of {record.name} in a row were skipped: nothing is trained while that "
                "lasts, as gradients are not finite"
            )
            if self._scale.active:
                note += f", now at a loss scale of {self._scale.value.scale:g}"
            self._recorder.note(note, at_once=True)

    def _refuse_collapse(self, optimizer: Optimizer, bad: list[torch.Tensor], number: int) -> None:
        """Count a skip; raise ScaleCollapseError once too many in a row were of one optimizer."""
        since = self._skips.skipped(optimizer, number)
        if since is None:
            return
        names = self._names_of(bad)
        scale = self._scale.value.scale
        advice = f"{self._how_to_tell()}."
        raise ScaleCollapseError(collapse_message(optimizer, PATIENCE, since, names, scale, advice))

    def _lower_the_scale(self, optimizer: Optimizer, bad: list[torch.Tensor]) -> None:
        site = self._leaves.bad_loss(bad)
        if site is not None:  # the loss scale has no part in it
            what = f"the loss at {site} was NaN or infinite itself"
            self._recorder.note(f"{what}; the step was skipped, and no loss scale mends that", at_once=True)
        self._leaves.skipped(parameters_of(optimizer))
        # For an overflow that a backward pass left, the scale fell when that was read, and discarded() does
        # nothing. For any other it falls now.
        number = self._leaves.latest_overflow(bad)
        if number is None:
            number = self._scale.backward
        self._scale.discarded(number)

    # ---- what is said

    def _tell_of_skip(self, optimizer: Optimizer, bad: list[torch.Tensor], number: int) -> None:
        """Say which gradients were not finite, at the first few skipped steps without a loss scale."""
        record = self._record_of(optimizer)
        if record.skips > _TOLD_SKIPS:
            return
        names = few(self._names_of(bad), 5)
        note = f"step {number}, of {record.name}, was skipped: the gradients of {names} are not finite"
        if record.skips == _TOLD_SKIPS:
            note += "; further ones are only counted"
        self._recorder.note(note, at_once=True)

    def note_what_was_lost(self) -> None:
        """Note, at the end, each optimizer whose steps were all skipped."""
        try:
            self._read_flags()
        except NarrowcastError as error:  # too late to stop the script
            self._recorder.note(str(error))
        if self._scale.active:
            self._leaves.note_unused()
        for record in self._all_records:
            if record.skips_in_a_row and not record.taken:
                skips = record.skips_in_a_row
                self._recorder.note(
                    f"{record.name} took no step, so what it optimizes is untrained: all {skips} were "
                    f"skipped, as gradients were not finite. {self._how_to_tell()}"
                )

    def _how_to_tell(self) -> str:
        """Return advice on gradients that are not finite: what tells more about them."""
        if self._regions.explainer.told:
            return "What was found of a skipped step is told above"
        in_fp32 = "narrowcast run --policy fp32 SCRIPT shows whether FP32 has them too"
        if any(device["format"] == "bf16" for device in self._recorder.devices.values()):
            return in_fp32
        return f"{in_fp32}, and narrowcast compare --policy bf16 SCRIPT whether bf16 trains as FP32 does"

    def _names_of(self, parameters: list[torch.Tensor]) -> list[str]:
        names = self._regions.parameter_names()
        return [names.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in parameters]

    # ---- steps on a GPU whose flag is read when the next step begins

    def _read_flags(self) -> None:
        """Do for earlier steps on a GPU what ``_ended`` does for others, now that their flags are known."""
        for step, found in self._unread.read():
            optimizer = step.optimizer()
            if optimizer is None:
                continue
            if found:
                self._saw_late(step, optimizer)
            else:
                self._skips.took(optimizer)
            if step.counts:
                self._count(self._record_of(optimizer), skipped=found and step.skips)
            if found and step.skips:
                self._tell_of_skip(optimizer, step.bad(), step.number)
                if self._regions.explainer.recording.records:
                    self._regions.explainer.tell_of_late_flags()
                self._refuse_collapse(optimizer, step.bad(), step.number)

    def _saw_late(self, step: UnreadStep, optimizer: Optimizer) -> None:
        """Correct the count of a step that was skipped; refuse to go on after one that was not."""
        if step.skips:
            if step.counts:
                self._recorder.saw_skip_late()
            return
        bad = step.bad()
        if not all(bool(torch.isfinite(parameter.detach()).all()) for parameter in bad):
            names = few(self._names_of(bad), 5)
            raise UnsupportedError(_USED.format(step.number, type(optimizer).__name__, names))


def _can_check(optimizer: Optimizer) -> bool:
    """Return whether ``check_gradients`` supports these devices; False while a CUDA graph is captured."""
    if is_capturing():
        return False
    first_parameters = [group["params"][0] for group in optimizer.param_groups if group["params"]]
    return all(parameter.device.type in ("cpu", "cuda") for parameter in first_parameters)


def _differ(before: list[torch.Tensor | None], parameters: list[torch.Tensor]) -> bool:
    """Return whether values of parameters differ from samples of them."""
    for sample, parameter in zip(before, parameters, strict=True):
        now = leaf_sample(parameter)
        if sample is not None and now is not None and not torch.equal(sample, now):
            return True
    return False


def _subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = kind.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)
