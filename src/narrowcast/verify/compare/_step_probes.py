"""What observes single steps of a script, to explain them or to show where their time goes, and ends it."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.attach import NAMED_NOTHING, call_site
from narrowcast.errors import UnsupportedError
from narrowcast.machine import versions
from narrowcast.observe.capture import EXPLANATION, CaptureWriter, start_event
from narrowcast.observe.op_trace import OpTrace, together, trace_events
from narrowcast.observe.profiling import HostReads, StepProfiler, read_rows, seconds_between, stamp, summarize
from narrowcast.policy import Policy, as_policy, format_name, resolve
from narrowcast.verify.compare._probes import Probe
from narrowcast.verify.compare._runs import RunSettings, write_result

_FIRST_ONLY = "the script ended before its second {unit}: what is shown is the first, in which much is set up"
_COMPILED = "torch.compile was set aside while watching; compiled code fuses operators and makes fewer casts"


class StepProbe(Probe):
    """Call ``boundary`` where a step ends, until ``done`` is set.

    A step is what lies between two steps of the optimizer that stepped first: loading and evaluation too. In
    a script that makes no optimizer it is what lies between two calls of the outermost module that was
    called twice first.

    Attributes:
        by_calls: whether steps are counted by calls.
        pace: the optimizer that stepped first.
    """

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        super().__init__(settings, argv)
        self.done = False
        self.by_calls = False
        self.pace: torch.optim.Optimizer | None = None
        self._pacing_module: weakref.ref[torch.nn.Module] | None = None
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    @property
    def unit(self) -> str:
        """What is counted: ``"step"`` or ``"call"``."""
        return "call" if self.by_calls else "step"

    def returned(self, module: torch.nn.Module, output: Any) -> None:
        if self.done or self.attachment.optimizers:
            return
        self.by_calls = True
        if self._pacing_module is None and module in self._called:
            self._pacing_module = weakref.ref(module)
        self._called.add(module)
        if self._pacing_module is not None and self._pacing_module() is module:
            self.boundary()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self.done:
            return
        if self.by_calls:  # it called modules before it made its optimizer
            self.by_calls = False
            self.restart()
        if self.pace is None:
            self.pace = optimizer
        if optimizer is self.pace:
            self.boundary()

    def boundary(self) -> None:
        """Called where a step ends."""

    def restart(self) -> None:
        """Drop what was seen: the calls so far were no steps."""


# ---- what ran in which format


class ExplainProbe(StepProbe):
    """Watch every operator of a few steps.

    The first step, in which much is set up, is left out if there are others; times are the mean of those that
    are counted.
    """

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        super().__init__(settings, argv)
        self._device = "cpu"
        self._trace: OpTrace | None = None
        self._parts: list[Any] = []
        self._events: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._compiled = False

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.done:
            return
        if self._trace is None:
            parameter = next(module.parameters(), None)
            self._device = "cpu" if parameter is None else parameter.device.type
            self._trace = OpTrace(as_policy(self.settings.policy), self._device)
            self._trace.__enter__()
        if "torch._dynamo" in sys.modules and not self._compiled:  # else nothing is compiled
            torch.compiler.set_stance("force_eager")
            self._compiled = "OptimizedModule" in {type(part).__name__ for part in module.modules()}
        self._trace.paths.add_model(module)

    def holds_back(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._trace is not None:
            self._trace.paths.in_optimizer = True
        return False

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._trace is not None:
            self._trace.paths.in_optimizer = False
        super().stepped(optimizer)

    def restart(self) -> None:
        self._parts.clear()

    def boundary(self) -> None:
        if self._trace is None:
            return
        self._parts.append(self._trace.take())
        if len(self._parts) > self.settings.watched_steps:
            self._end()
            self.attachment.stop()

    def _end(self) -> None:
        """Stop watching, while the models still exist whose names the rules are compared with."""
        if self.done or self._trace is None:
            return
        self.done = True
        self._trace.__exit__(None, None, None)
        rest = self._trace.take()
        first, others = self._parts[:1], self._parts[1:]
        if others:
            seen = together(others, also=first[0] if self.by_calls else None)
        else:
            seen = together([*first, *([rest] if self.by_calls or not first else [])])
        if not others:
            self._notes.append(_FIRST_ONLY.format(unit=self.unit))
        if self._compiled:
            self._notes.append(_COMPILED)
        facts = {"unit": self.unit, "steps": max(1, len(others)), "complete": bool(others)}
        policy = as_policy(self.settings.policy)
        self._events = explanation_events(self._trace, seen, policy, self._device, facts)

    def finish(self) -> None:
        self._end()
        if not self._events:
            return
        # A rule that names no module is listed already, among the rules that no call reached.
        notes = [*self._notes, *(text for text in self.attachment.notes if NAMED_NOTHING not in text)]
        start = start_event(self.argv, self.settings.policy, kind="explain")
        with CaptureWriter(self.folder / EXPLANATION) as writer:
            writer.write(start, *self._events, *note_events(notes))


def explanation_events(
    trace: OpTrace, seen: Any, policy: Policy, device: str, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the events of an explanation, between its start and its notes.

    Args:
        trace: which watched.
        seen: what was taken from it.
        policy: in force.
        device: device type of the model.
        facts: ``unit``, ``steps`` and ``complete`` of the event ``watched``.
    """
    more = {
        "device": device,
        "format": format_name(resolve(policy, device)),
        "rules": [str(rule) for rule in policy.rules],
        "versions": versions(),
    }
    return trace_events(seen, trace.unreached(), facts | more)


def note_events(notes: Iterable[str]) -> list[dict[str, Any]]:
    """Return an event for each note."""
    return [{"event": "note", "text": text} for text in notes]


# ---- where the time goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A few steps for one purpose: it ends after ``steps``, or after ``fewest`` once ``seconds`` are over."""

    name: str
    steps: int
    fewest: int
    seconds: float


WARM_UP, PLAIN, PROFILED, READS = "warm-up", "plain", "profiled", "reads"
PHASES = (
    Phase(name=WARM_UP, steps=3, fewest=1, seconds=20.0),
    Phase(name=PLAIN, steps=10, fewest=3, seconds=20.0),
    Phase(name=PROFILED, steps=8, fewest=1, seconds=20.0),
    Phase(name=READS, steps=10, fewest=1, seconds=10.0),
)
# A phase in which each step evaluates too does not wait for one that does not.
_MOST_TIMES = 3


class ProfileProbe(StepProbe):
    """Time a few steps as they are, record the ops of some, and count the reads of others.

    A step with an evaluation in it is left out if there are others.
    """

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        super().__init__(settings, argv)
        self._problem: str | None = None
        self._device = "cpu"
        self._weights: set[int] = set()
        self._known: set[int] = set()
        self._profiler: StepProfiler | None = None
        self._reads: HostReads | None = None
        self._begin()

    def _begin(self) -> None:
        self._facts: dict[str, Any] = {"profile": None, "reads": None, "plain": None}
        self._boundaries = 0
        self._evaluates = False
        self._at = 0
        self._begun = time.perf_counter()
        self._flags: list[bool] = []
        self._counted: list[Counter[tuple[str, str, str]]] = []
        self._stamps: list[Any] = []

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._evaluates |= not torch.is_grad_enabled()
        if id(module) not in self._known:
            self._known.add(id(module))
            for parameter in module.parameters():
                if parameter.layout == torch.strided and not parameter.is_meta:
                    self._device = parameter.device.type
                    self._weights.add(parameter.untyped_storage().data_ptr())

    def restart(self) -> None:
        if self._boundaries:
            self._leave()
        self._begin()

    def boundary(self) -> None:
        self._boundaries += 1
        evaluates, self._evaluates = self._evaluates and not self.by_calls, False
        if self._boundaries == 1:  # what lies before the first step is no step
            self._enter()
            return
        self._flags.append(evaluates)
        if self._reads is not None:
            self._counted.append(self._reads.take())
        if self._profiler is not None:
            self._profiler.mark()
        self._stamps.append(stamp(self._device))
        if not self._is_over(PHASES[self._at]):
            return
        self._leave()
        self._at += 1
        if self._at == len(PHASES) or self._problem is not None:
            self.done = True
            self.attachment.stop()
        self._enter()

    def _is_over(self, phase: Phase) -> bool:
        usual = self._flags.count(False)
        if usual >= phase.steps or len(self._flags) >= _MOST_TIMES * phase.steps:
            return True
        enough = usual >= phase.fewest or len(self._flags) >= _MOST_TIMES * phase.fewest
        return enough and time.perf_counter() - self._begun > phase.seconds

    def _enter(self) -> None:
        name = PHASES[self._at].name
        self._flags, self._counted = [], []
        if name == PROFILED:
            self._profiler = StepProfiler()
            try:
                self._profiler.start()
            except UnsupportedError as error:
                self._problem, self._profiler = str(error), None
        elif name == READS:
            self._reads = HostReads(call_site)
            self._reads.__enter__()
        self._begun = time.perf_counter()
        self._stamps = [stamp(self._device)]

    def _leave(self) -> None:
        """End the phase that is on, and keep what it showed; it may have come to no step."""
        name = PHASES[self._at].name
        if name == PLAIN and self._flags:
            self._facts["plain"] = self._plain()
        if self._profiler is not None:
            self._keep_profile(self._profiler)
            self._profiler = None
        if self._reads is not None:
            self._reads.__exit__(None, None, None)
            self._reads = None
            if self._flags:
                counted = self._usual(self._counted)
                self._facts["reads"] = {"steps": len(counted), "sites": read_rows(sum(counted, Counter()))}

    def _usual(self, of_steps: list[Any]) -> list[Any]:
        """Return those of steps without an evaluation, or all if there are none."""
        flagged = zip(of_steps, self._flags, strict=False)
        return [one for one, evaluates in flagged if not evaluates] or of_steps

    def _plain(self) -> dict[str, Any]:
        usual = self._usual([seconds_between(a, b) for a, b in itertools.pairwise(self._stamps)])
        low, middle, high = statistics.quantiles([*usual, *usual], n=4, method="inclusive")
        return {"steps": len(usual), "step_s": middle, "step_s_low": low, "step_s_high": high}

    def _keep_profile(self, profiler: StepProfiler) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        left_out = [number for number, evaluates in enumerate(self._flags) if evaluates]
        try:
            recording = profiler.recording()
            if self._flags:
                self._facts["profile"] = summarize(
                    recording, device=self._device, left_out=left_out, weights=self._weights
                )
        except UnsupportedError as error:
            self._problem = str(error)

    def finish(self) -> None:
        if not self.done and self._boundaries:
            self._leave()
        self.done = True
        needed = 2 + sum(phase.steps for phase in PHASES if phase.name in (WARM_UP, PLAIN))
        write_result(
            self.folder,
            self._facts
            | {
                "unit": self.unit,
                "seen": self._boundaries + self.by_calls,  # the first call ends no step
                "needed": needed + self.by_calls,
                "device": self._device,
                "fused": None if self.pace is None else _is_fused(self.pace),
                "problem": self._problem,
            },
        )


def _is_fused(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether its step is one op; None: it has no such choice."""
    if "fused" not in optimizer.defaults:
        return None
    return all(bool(group.get("fused")) for group in optimizer.param_groups)
