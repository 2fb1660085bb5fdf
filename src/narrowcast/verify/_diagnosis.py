"""``doctor SCRIPT``: where the time of a script's steps goes, in FP32 and in mixed precision."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from narrowcast.attach import call_site
from narrowcast.errors import UnsupportedError
from narrowcast.observe.capture import RUN, discard_captures, make_run_folder, read_capture, worth_it
from narrowcast.observe.profiling import HostReads, Recorder, same_size, stamp, summarize
from narrowcast.verify._reasons import from_profiles, is_fp32
from narrowcast.verify.compare._comparison import stays_in_fp32
from narrowcast.verify.compare._probes import StepProbe
from narrowcast.verify.compare._runs import (
    Purpose,
    RunSettings,
    ScriptRuns,
    read_result,
    why_unseen,
    write_result,
)
from narrowcast.verify.compare._timing import TimedPairs, TimingSettings

_SCHEMA = 2
_SIZES = 6
_PROFILES = 2


class DiagnosisSettings(TimingSettings, frozen=True, kw_only=True):
    """What to diagnose. Runs end early, since nothing of how they end is compared."""

    steps: int = 100
    longest_run_s: float | None = 5.0


def diagnose(
    settings: DiagnosisSettings,
    rates: dict[str, Any],
    *,
    spent_s: float = 0.0,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Profile a few steps of the script in FP32 and in mixed precision, and time some as ``compare`` does.

    Args:
        settings: what to run, and how.
        rates: of this machine, as in ``machine.examine(...)["rates"]``.
        spent_s: what was spent of the time limit before.
        progress: called with short messages.

    Returns:
        JSON-ready: ``schema``, ``target``, ``policy``, ``problem`` (a sentence if there are no numbers, else
        null), ``device``, ``format``, ``unit`` (``"step"`` or ``"call"``), the profiles ``fp32`` and
        ``mixed``, ``notes`` on how it was timed, and ``together``, what all show (``side_by_side``).

    Raises:
        ScriptError: the script failed.
        FileError: the folder cannot be written.
    """
    found: dict[str, Any] = {
        "schema": _SCHEMA,
        "target": list(settings.target),
        "policy": settings.policy,
        "notes": [],
        **dict.fromkeys(("problem", "device", "format", "unit", "fp32", "mixed", "together")),
    }
    why = stays_in_fp32(settings.policy)
    if why is not None:
        return found | {"problem": f"mixed precision stays in fp32 here, since {why}"}
    discard_captures(make_run_folder("doctor", asked=settings.folder))
    with ScriptRuns(settings, progress=progress) as runs:
        timed = TimedPairs(
            settings,
            runs,
            _notes_into(found["notes"]),
            runs_aside=_PROFILES,
            began=time.monotonic() - spent_s,
        )
        for name in ("fp32", "mixed"):
            folder = runs.start(name, name, Purpose.PROFILE)
            result = read_result(folder)
            problem = _problem(folder, result)
            if result is None or problem is not None:
                return found | {"problem": problem}
            found[name] = _profile_of(folder, result)
            found |= {"device": result["profile"]["device"], "unit": result["unit"]}
        found["format"] = found["mixed"]["format"]
        if found["format"] in (None, "fp32"):
            reason = f"the mixed run too computed in FP32 on {found['device']}: there is nothing to compare"
            return found | {"problem": reason, "mixed": None}
        timed.time_all()
    if not timed.has_times():
        if found["unit"] == "call" and timed.kind() == "training":
            problem = "its updates are made by hand, without torch.optim, so that its steps cannot be timed"
        else:
            problem = "the script ended before enough steps were timed: let it run longer"
        return found | {"problem": problem}
    for name in ("fp32", "mixed"):
        found[name] |= timed.plain_times(name, found[name])
    together = side_by_side(found, rates, timed.speedup(), why_unknown=timed.why_no_speedup())
    return found | {"together": together}


def _notes_into(notes: list[str]) -> Callable[[dict[str, Any]], None]:
    """Return what keeps the notes on timed runs, and drops the rest of what is written of them."""

    def write(event: dict[str, Any]) -> None:
        if event["event"] == "note":
            notes.append(event["text"])

    return write


def _profile_of(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Return the profile of a run with what else is known of it."""
    capture = read_capture(folder / RUN)
    formats = dict.fromkeys(event["format"] for event in capture.of("device"))
    return {
        **result["profile"],
        **{name: result[name] for name in ("unit", "fused", "reads")},
        "notes": [note["text"] for note in capture.of("note")],
        "format": ", ".join(formats) or None,
    }


def _problem(folder: Path, result: dict[str, Any] | None) -> str | None:
    """Return why a run has no numbers; None if it has."""
    complete = result is not None and result["profile"] is not None
    advice = "diagnose it without that, or look at it with torch's own profiler"
    problem = why_unseen(folder, advice=advice, verb=None if complete else "profiled")
    if problem is not None:
        return problem
    if result is None:
        return "the run was ended before anything was measured"
    if result["problem"] is not None:
        return str(result["problem"])
    if complete:
        return None
    seen, s = result["seen"], "s" * (result["seen"] > 1)
    if not seen:
        expected = "optimizer steps or, without an optimizer, calls of a module with parameters"
        return f"nothing to profile: expected {expected}"
    what = f"optimizer step{s}" if result["unit"] == "step" else f"call{s} of its modules"
    return f"the script ended after {seen} {what}, and {result['needed']} are needed: let it run longer"


def side_by_side(
    found: dict[str, Any],
    rates: dict[str, Any],
    timed: tuple[float, float, float] | None,
    *,
    why_unknown: str = "",
) -> dict[str, Any]:
    """Compare the two profiles with each other and with the machine's rates.

    Times of products come from profiled steps, and ``speedup`` with its interval from timed ones.

    Returns:
        ``speedup`` of a step and ``speedup_interval``, or null; ``worth_it``, ``"yes"``, ``"no"`` or
        ``"cannot tell"`` as in ``compare``, with ``why_unknown`` if there is no speedup; ``products_share``
        of the FP32 step; ``products_speedup`` in this script, of the products in FP32 by the same in the
        mixed format, casts not counted, null if none ran in it; ``sizes``, the products that take the most
        time in FP32, each with its ``share`` there, ``speedup`` in this script and ``machine_speedup`` in the
        machine's rates, null if none is of this size; ``machine_speedup`` over all sizes, weighted by time,
        null unless known for half of it; ``not_faster``, ``cause``, ``text`` and ``share`` of why it is not
        worth it, null unless it is not; ``limit_here`` and ``limit_machine``, how much faster a step gets if
        only products get faster by either; ``machine_best``, ``speed`` and ``shape`` of the matmul that gains
        most here, or null.
    """
    fp32, mixed = found["fp32"], found["mixed"]
    low = [row for row in mixed["products"] if not is_fp32(row)]
    mixed_s = {same_size(row["kind"], row["shape"]): row["each_s"] for row in low}
    on_device = [device for device in rates["devices"] if device["device_type"] == found["device"]]
    speeds = _speeds(found["format"], [row for device in on_device for row in device["rows"]])
    sizes = []
    for row in fp32["products"]:
        size = same_size(row["kind"], row["shape"])
        own = {name: row[name] for name in ("kind", "shape", "count", "share", "each_s")}
        speedup = row["each_s"] / mixed_s[size] if mixed_s.get(size) else None
        sizes.append(own | {"speedup": speedup, "machine_speedup": speeds.get(size)})

    def of_all(name: str) -> tuple[float, float]:
        """Return the time in FP32 of products whose speedup is known, and what this would make of it."""
        times = [(row["each_s"] * row["count"], row[name]) for row in sizes if row[name] is not None]
        return sum(time for time, _ in times), sum(time / faster for time, faster in times)

    share = fp32["shares"]["products"]
    (same_s, same_mixed_s), (known_s, faster_s) = of_all("speedup"), of_all("machine_speedup")
    here = same_s / same_mixed_s if same_mixed_s else None
    total_s = sum(row["each_s"] * row["count"] for row in sizes)
    machine_all = known_s / faster_s if known_s > total_s / 2 else None
    verdict = "cannot tell" if timed is None else worth_it(timed, None)
    reason = from_profiles(fp32, mixed, found["format"]) if verdict == "no" else None
    best = max(((speed, shape) for (kind, shape), speed in speeds.items() if kind == "matmul"), default=None)
    return {
        "speedup": None if timed is None else timed[0],
        "speedup_interval": None if timed is None else list(timed[1:]),
        "worth_it": verdict,
        "why_unknown": why_unknown if timed is None else None,
        "not_faster": None if reason is None else reason._asdict(),
        "products_share": share,
        "products_speedup": here,
        "machine_speedup": machine_all,
        "limit_here": None if here is None else most_speedup(share, here),
        "limit_machine": None if machine_all is None else most_speedup(share, machine_all),
        "machine_best": best and {"speed": best[0], "shape": list(best[1][:2])},
        "sizes": sizes[:_SIZES],
        "sizes_left_out": max(0, len(sizes) - _SIZES),
    }


def most_speedup(share: float, ratio: float) -> float:
    """Amdahl's law: a step of which ``share`` gets ``ratio`` times as fast, and the rest stays."""
    return 1.0 / (1.0 - share + share / ratio)


def _speeds(format_: str, rows: list[dict[str, Any]]) -> dict[Any, float]:
    """Return the steady speeds against FP32, by the size that was measured as a profile has it.

    Measured are square matrices, and kernels of 3 x 3.
    """
    speeds = {}
    for rate in rows:
        kind, shape = rate["kind"], rate["shape"]
        if kind in ("matmul", "convolution") and rate["format"] == format_ and rate["steady"]:
            operands = [*shape, shape[1], shape[1], 3, 3] if kind == "convolution" else shape[:1] * 3
            speeds[same_size(kind, operands)] = rate["speed_against_fp32"]
    return speeds


# ---- the probe of a run


class Phase(NamedTuple):
    """A few steps for one purpose. Ends after ``steps``, or after ``fewest`` if they took ``seconds``."""

    name: str
    steps: int
    fewest: int
    seconds: float


WARM_UP, PROFILED, READS = "warm-up", "profiled", "reads"
SHARES_PHASES = (
    Phase(name=WARM_UP, steps=3, fewest=1, seconds=0.5),
    Phase(name=PROFILED, steps=4, fewest=1, seconds=1.0),
)
PROFILE_PHASES = (
    *SHARES_PHASES,
    Phase(name=READS, steps=6, fewest=1, seconds=1.0),
)


class ProfileProbe(StepProbe):
    """Let a few steps pass, profile the next ones, and count reads of tensors in the last ones."""

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        super().__init__(settings, argv)
        self._phases = SHARES_PHASES if settings.purpose == Purpose.SHARES else PROFILE_PHASES
        self._problem: str | None = None
        self._device = "cpu"
        self._weights: set[int] = set()
        self._known: set[int] = set()
        self._profiler: Recorder | None = None
        self._reads: HostReads | None = None
        self._begin()

    def _begin(self) -> None:
        self._facts: dict[str, Any] = {"profile": None, "reads": None}
        self._boundaries = 0
        self._at = 0

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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

    def pace_changed(self) -> None:
        self.restart()

    def boundary(self) -> None:
        self._boundaries += 1
        if self._boundaries == 1:  # the first step begins here
            self._enter()
            return
        if self._profiler is not None:
            self._profiler.mark()
        self._stamps.append(stamp(self._device))
        if self._reads is not None:
            self._facts["reads"] = {"steps": self._steps, "sites": self._reads.rows()}
        phase = self._phases[self._at]
        slow = time.perf_counter() - self._begun > phase.seconds
        if self._steps < (phase.fewest if slow else phase.steps):
            return
        self._leave()
        self._at += 1
        if self._at == len(self._phases) or self._problem is not None:
            self.done = True
            self.attachment.stop()
        self._enter()

    @property
    def _steps(self) -> int:
        """How many steps of the current phase have ended."""
        return len(self._stamps) - 1

    def _enter(self) -> None:
        name = self._phases[self._at].name
        if name == PROFILED and self._device not in ("cpu", "cuda"):
            self._problem = f"profiles are read on CPUs and CUDA, and the model is on {self._device!r}"
        elif name == PROFILED:
            self._profiler = Recorder()
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
        """End the current phase and keep its result; it may have seen no step."""
        if self._profiler is not None:
            if self._device == "cuda":
                torch.cuda.synchronize()
            try:
                tree, results = self._profiler.stop()
                if self._steps:
                    profile = summarize(tree, results, device=self._device, weights=self._weights)
                    self._facts["profile"] = profile
            except UnsupportedError as error:
                self._problem = str(error)
            self._profiler = None
        if self._reads is not None:
            self._reads.__exit__(None, None, None)
            self._reads = None

    def finish(self) -> None:
        if not self.done and self._boundaries:
            self._leave()
        self.done = True
        by_calls = self.unit == "call"
        needed = 2 + self._phases[0].steps  # of the warm-up; the first one ends before it, one is profiled
        groups = self.pace.param_groups if self.pace is not None and "fused" in self.pace.defaults else []
        facts = {
            "unit": self.unit,
            "seen": self._boundaries + by_calls,  # the first call ends no step
            "needed": needed + by_calls,
            "fused": all(group.get("fused") for group in groups) if groups else None,
            "problem": self._problem,
        }
        write_result(self.folder, self._facts | facts)
