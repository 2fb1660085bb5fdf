"""What is measured inside a script's own process to say where the time of its steps goes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowcast.attach import Attachment, Observer, call_site
from narrowcast.errors import UnsupportedError
from narrowcast.observe.profiling import HostReads, StepProfiler, read_rows, seconds_between, stamp, summarize
from narrowcast.verify.compare._probes import write_result


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


class ProfileProbe(Observer):
    """Times a few steps as they are, records the ops of some and counts the reads of others, and stops.

    A step is what lies between two steps of the optimizer that stepped first: loading and evaluation too,
    but a step with an evaluation in it is left out where there are others. In a script that makes no
    optimizer it is what lies between two outermost calls of modules.

    Args:
        folder: where to keep what was seen.
    """

    def __init__(self, folder: Path, phases: tuple[Phase, ...] = PHASES) -> None:
        self._folder = folder
        self._phases = list(phases)
        self._problem: str | None = None
        self._pace: torch.optim.Optimizer | None = None
        self._by_calls = False
        self._boundaries = 0
        self._evaluates = False
        self._device = "cpu"
        self._weights: set[int] = set()
        self._known: set[int] = set()
        self._profiler: StepProfiler | None = None
        self._reads: HostReads | None = None
        self._facts: dict[str, Any] = {"profile": None, "reads": None, "plain": None}
        self._done = False
        self._begin_phases()

    def _begin_phases(self) -> None:
        self._at = 0
        self._begun = time.perf_counter()
        self._flags: list[bool] = []
        self._counted: list[Counter[tuple[str, str, str]]] = []
        self._stamps: list[Any] = []

    def attached(self, attachment: Attachment) -> None:
        self._attachment = attachment

    # ---- what the script does

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            self._evaluates = True
        if id(module) not in self._known:
            self._known.add(id(module))
            for parameter in module.parameters():
                if parameter.layout == torch.strided and not parameter.is_meta:
                    self._device = parameter.device.type
                    self._weights.add(parameter.untyped_storage().data_ptr())

    def returned(self, module: torch.nn.Module, output: Any) -> None:
        if not self._attachment.optimizers:
            self._by_calls = True
            self._evaluates = False  # the only kind of step there is
            self._boundary()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._by_calls:  # it called modules before it made its optimizer
            self._abandon()
            self._by_calls, self._boundaries = False, 0
            self._begin_phases()
        if self._pace is None:
            self._pace = optimizer
        if optimizer is self._pace:
            self._boundary()

    # ---- phases

    def _boundary(self) -> None:
        if self._done:
            return
        self._boundaries += 1
        if self._boundaries == 1:  # what lies before the first step is no step
            self._evaluates = False
            self._enter()
            return
        self._flags.append(self._evaluates)
        if self._reads is not None:
            self._counted.append(self._reads.take())
        self._evaluates = False
        if self._profiler is not None:
            self._profiler.mark()
        self._stamps.append(stamp(self._device))
        if not self._is_over(self._phases[self._at]):
            return
        self._leave()
        self._at += 1
        if self._at == len(self._phases) or self._problem is not None:
            self._done = True
            self._write()
            self._attachment.stop()
        self._enter()

    def _is_over(self, phase: Phase) -> bool:
        usual = self._flags.count(False)
        if usual >= phase.steps or len(self._flags) >= _MOST_TIMES * phase.steps:
            return True
        enough = usual >= phase.fewest or len(self._flags) >= _MOST_TIMES * phase.fewest
        return enough and time.perf_counter() - self._begun > phase.seconds

    def _enter(self) -> None:
        name = self._phases[self._at].name
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
        name = self._phases[self._at].name
        if name == PLAIN and self._flags:
            self._facts["plain"] = self._plain()
        if self._profiler is not None:
            self._keep_profile(self._profiler)
            self._profiler = None
        if self._reads is not None:
            self._reads.__exit__(None, None, None)
            self._reads = None
            if self._flags:
                usual = [c for c, evaluates in zip(self._counted, self._flags, strict=True) if not evaluates]
                usual = usual or self._counted
                sites = read_rows(sum(usual, Counter()))
                self._facts["reads"] = {"steps": len(usual), "sites": sites}

    def _plain(self) -> dict[str, Any]:
        lasted = [seconds_between(a, b) for a, b in itertools.pairwise(self._stamps)]
        usual = [s for s, evaluates in zip(lasted, self._flags, strict=False) if not evaluates] or lasted
        low, middle, high = statistics.quantiles([*usual, *usual], n=4, method="inclusive")
        return {"steps": len(usual), "step_s": middle, "step_s_low": low, "step_s_high": high}

    def _keep_profile(self, profiler: StepProfiler) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        try:
            recording = profiler.recording()
            left_out = [number for number, evaluates in enumerate(self._flags) if evaluates]
            if self._flags:
                self._facts["profile"] = summarize(
                    recording, device=self._device, left_out=left_out, weights=self._weights
                )
        except UnsupportedError as error:
            self._problem = str(error)

    def _abandon(self) -> None:
        if self._boundaries:
            self._leave()
        self._facts = dict.fromkeys(self._facts)

    # ---- the end

    def finish(self) -> None:
        """Keep what there is when the script has ended by itself."""
        if not self._done:
            self._done = True
            if self._boundaries:
                self._leave()
            self._write()

    def _write(self) -> None:
        unit = "call" if self._by_calls else "step"
        needed = 1 + sum(phase.steps for phase in self._phases if phase.name in (WARM_UP, PLAIN)) + 1
        write_result(
            self._folder,
            self._facts
            | {
                "unit": unit,
                "seen": self._boundaries,
                "needed": needed,
                "device": self._device,
                "fused": None if self._pace is None else _is_fused(self._pace),
                "problem": self._problem,
            },
        )


def _is_fused(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether its step is one op; None: it has no such choice."""
    if "fused" not in optimizer.defaults:
        return None
    return all(bool(group.get("fused")) for group in optimizer.param_groups)
