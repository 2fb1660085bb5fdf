"""``doctor SCRIPT``: where the time of a script's steps goes, in FP32 and in mixed precision."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from narrowcast.attach import call_site
from narrowcast.capture import (
    RUN,
    Estimate,
    discard_captures,
    is_busy,
    make_run_folder,
    read_capture,
    worth_it,
)
from narrowcast.errors import UnsupportedError
from narrowcast.observe.profiling import HostReads, Recorder, same_size, summarize
from narrowcast.verify._reasons import Size, TimedProfile, doctor_command, from_profiles
from narrowcast.verify.compare._comparison import stays_in_fp32
from narrowcast.verify.compare._timing import TimedPairs, TimingSettings
from narrowcast.verify.runs._probes import StepProbe
from narrowcast.verify.runs._runs import (
    Purpose,
    RunSettings,
    ScriptRuns,
    read_result,
    why_unseen,
    write_result,
)

_SCHEMA = 2
_MOST_SIZES = 6
_FORMATS = ("fp32", "mixed")


class DiagnosisSettings(TimingSettings, frozen=True, kw_only=True):
    """What to diagnose. Runs end early, since their losses are not compared."""

    steps: int = 100
    longest_run_s: float | None = 5.0


@dataclass(slots=True, kw_only=True)
class _Diagnosis:
    """What ``diagnose`` returns; a field is None until it is known."""

    schema: int = _SCHEMA
    target: list[str]
    policy: str
    notes: list[str] = field(default_factory=list)
    problem: str | None = None
    device: str | None = None
    format: str | None = None
    unit: str | None = None
    fp32: dict[str, Any] | None = None
    mixed: dict[str, Any] | None = None
    together: dict[str, Any] | None = None
    next: str | None = None


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
        spent_s: how much of the time limit was spent before this call.
        progress: called with short messages.

    Returns:
        JSON-ready: ``schema``, ``target``, ``policy``, ``problem`` (a sentence if there are no numbers, else
        null), ``device``, ``format``, ``unit`` (``"step"`` or ``"call"``), the profiles ``fp32`` and
        ``mixed``, ``notes`` on how it was timed, ``together``, what ``side_by_side`` returns, and ``next``,
        the command to type where that cannot tell whether mixed precision is worth it, else null.

    Raises:
        ScriptError: the script failed.
        FileError: the folder cannot be written.
    """
    diagnosis = _Diagnosis(target=list(settings.target), policy=settings.policy)
    stays_because = stays_in_fp32(settings.policy)
    if stays_because is not None:
        diagnosis.problem = f"mixed precision stays in fp32 here, since {stays_because}"
        return asdict(diagnosis)

    def keep_note(event: dict[str, Any]) -> None:
        if event["event"] == "note":
            diagnosis.notes.append(event["text"])

    # Profiles first: where there is nothing to compare, no time is spent on timed runs.
    discard_captures(make_run_folder("doctor", asked=settings.folder))
    with ScriptRuns(settings, progress=progress) as runs:
        began = time.monotonic() - spent_s
        timed = TimedPairs(settings, runs, keep_note, untimed_runs=len(_FORMATS), began=began)
        diagnosis.problem = _profile_both(diagnosis, runs)
        if diagnosis.problem is None:
            timed.time_all()
    if diagnosis.problem is not None:
        return asdict(diagnosis)

    if not timed.has_times():
        diagnosis.problem = "the script ended before enough steps were timed: let it run longer"
        if diagnosis.unit == "call" and timed.kind() == "training":
            diagnosis.problem = (
                "its updates are made by hand, without torch.optim, so that its steps cannot be timed"
            )
        return asdict(diagnosis)

    # The profiler slows steps down, so the times of steps come from the timed runs.
    data = asdict(diagnosis)
    for name in _FORMATS:
        data[name] |= timed.plain_times(name, data[name])
    data["together"] = side_by_side(
        data,
        rates,
        timed.speedup(),
        by_others=timed.used_by_others(),
        why_unknown=timed.why_no_speedup(),
    )
    if data["together"]["worth_it"] == "cannot tell":
        data["next"] = _next_command(settings, timed)
    return data


def _next_command(settings: DiagnosisSettings, timed: TimedPairs) -> str:
    """Return the command that tells more about whether mixed precision is worth it."""
    if timed.speedup() is not None and is_busy(timed.used_by_others()):
        # To repeat when the other programs have ended.
        return doctor_command(settings)
    return doctor_command(settings, "--time-limit", "0")


def _profile_both(diagnosis: _Diagnosis, runs: ScriptRuns) -> str | None:
    """Profile the script in both formats; return why there is nothing to compare, if so."""
    profiles: dict[str, dict[str, Any]] = {}
    for name in _FORMATS:
        folder = runs.start(name, name, Purpose.PROFILE)
        result = read_result(folder)
        problem = _problem(folder, result)
        if result is None or problem is not None:
            diagnosis.fp32 = profiles.get("fp32")
            return problem
        profiles[name] = _profile_of(folder, result)
        diagnosis.device, diagnosis.unit = result["profile"]["device"], result["unit"]
    diagnosis.fp32 = profiles["fp32"]
    diagnosis.format = profiles["mixed"]["format"]
    if diagnosis.format in (None, "fp32"):
        return f"the mixed run too computed in FP32 on {diagnosis.device}: there is nothing to compare"
    diagnosis.mixed = profiles["mixed"]
    return None


def _profile_of(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Return the profile of a run, with its notes, its formats, and its reads of tensors."""
    capture = read_capture(folder / RUN)
    formats = dict.fromkeys(event["format"] for event in capture.of("device"))
    return {
        **result["profile"],
        "unit": result["unit"],
        "fused": result["fused"],
        "reads": result["reads"],
        "notes": [note["text"] for note in capture.of("note")],
        "format": ", ".join(formats) or None,
    }


def _problem(folder: Path, result: dict[str, Any] | None) -> str | None:
    """Return why a run has no numbers; None if it has."""
    # Processes that the script starts matter only where this one was not profiled.
    has_profile = result is not None and result["profile"] is not None
    problem = why_unseen(
        folder,
        advice="diagnose it without that, or look at it with torch's own profiler",
        verb=None if has_profile else "profiled",
    )
    if problem is not None:
        return problem
    if result is None:
        return "the run was ended before anything was measured"
    if result["problem"] is not None:
        return str(result["problem"])
    if has_profile:
        return None

    seen = result["seen"]
    if not seen:
        expected = "optimizer steps or, without an optimizer, calls of a module with parameters"
        return f"nothing to profile: expected {expected}"
    plural = "s" if seen > 1 else ""
    what = f"call{plural} of its modules"
    if result["unit"] == "step":
        what = f"optimizer step{plural}"
    return f"the script ended after {seen} {what}, and {result['needed']} are needed: let it run longer"


def side_by_side(
    diagnosis: dict[str, Any],
    rates: dict[str, Any],
    timed: Estimate | None,
    *,
    by_others: float = 0.0,
    why_unknown: str = "",
) -> dict[str, Any]:
    """Compare the two profiles with each other and with the machine's rates.

    Times of products come from profiled steps, and ``speedup`` with its interval from timed ones.

    Returns:
        JSON-ready; what is not known is null.

        - ``speedup``: of a step; ``speedup_interval``: null also if other programs used the CPUs.
        - ``worth_it``: ``"yes"``, ``"no"`` or ``"cannot tell"``, as in ``compare``.
        - ``why_unknown``: why there is no ``speedup``; ``not_faster``: the ``Reason`` for ``"no"``.
        - ``by_others``: which share of the CPUs other programs used.
        - ``products_share``: which share of the FP32 step the products take.
        - ``products_speedup``: of the products in this script, without casts; null if none ran in the mixed
          format.
        - ``machine_speedup``: of the products by the machine's rates, weighted by time; null unless known for
          more than half of that time.
        - ``machine_best``: ``speed`` and ``shape`` of the matmul that gains most on this machine.
        - ``limit_here`` and ``limit_machine``: how much faster a step gets if only its products get faster,
          by ``products_speedup`` or by ``machine_speedup``.
        - ``sizes``: the products that take the most time in FP32, each with its ``share`` of the FP32 step,
          its ``speedup`` in this script, and its ``machine_speedup``, null if the machine's rates have no
          product of this size; ``sizes_left_out``: how many others there are.
    """
    fp32, mixed = TimedProfile.of(diagnosis["fp32"]), TimedProfile.of(diagnosis["mixed"])
    speeds = _speeds(diagnosis["format"], diagnosis["device"], rates)
    sizes = _sizes(fp32, mixed, speeds)

    # What a step would gain if only its products got faster: by as much as here, or as the machine can.
    share = fp32.shares["products"]
    products_speedup, _ = _speedup_of_all(sizes, "speedup")
    machine_speedup, known_s = _speedup_of_all(sizes, "machine_speedup")
    total_s = sum(product.time_s for product in fp32.products)
    if known_s <= total_s / 2:
        machine_speedup = None
    limit_here = limit_machine = None
    if products_speedup is not None:
        limit_here = most_speedup(share, products_speedup)
    if machine_speedup is not None:
        limit_machine = most_speedup(share, machine_speedup)

    together: dict[str, Any] = {
        "speedup": None,
        "speedup_interval": None,
        "worth_it": "cannot tell",
        "why_unknown": why_unknown,
        "by_others": by_others,
        "not_faster": None,
        "products_share": share,
        "products_speedup": products_speedup,
        "machine_speedup": machine_speedup,
        "limit_here": limit_here,
        "limit_machine": limit_machine,
        "machine_best": _best_matmul(speeds),
        "sizes": sizes[:_MOST_SIZES],
        "sizes_left_out": max(0, len(sizes) - _MOST_SIZES),
    }
    if timed is not None:
        together["speedup"] = timed.value
        # Where other programs used the CPUs, equal runs differ by more than their spread shows.
        if not is_busy(by_others):
            together["speedup_interval"] = [timed.low, timed.high]
        together["worth_it"] = worth_it(timed, None, by_others)
        together["why_unknown"] = None
    if together["worth_it"] == "no":
        together["not_faster"] = from_profiles(fp32, mixed, diagnosis["format"])._asdict()
    return together


def most_speedup(share: float, ratio: float) -> float:
    """Return the speedup of a step of which ``share`` gets ``ratio`` times as fast (Amdahl's law)."""
    return 1.0 / (1.0 - share + share / ratio)


def _sizes(
    fp32: TimedProfile, mixed: TimedProfile, machine_speeds: Mapping[Size, float]
) -> list[dict[str, Any]]:
    """Return a row for each product of the FP32 step, with its speedup here and on this machine."""
    low_products = mixed.low_products
    sizes = []
    for product in fp32.products:
        speedup: float | None = None
        low = low_products.get(product.size)
        if low is not None and low.each_s:
            speedup = product.each_s / low.each_s
        sizes.append(
            {
                "kind": product.kind,
                "shape": list(product.shape),
                "count": product.count,
                "share": product.share,
                "each_s": product.each_s,
                "speedup": speedup,
                "machine_speedup": machine_speeds.get(product.size),
            }
        )
    return sizes


def _speedup_of_all(sizes: Sequence[dict[str, Any]], column: str) -> tuple[float | None, float]:
    """Return the speedup of all products together that have one in ``column``, and their time in FP32."""
    fp32_s = faster_s = 0.0
    for row in sizes:
        if row[column] is not None:
            time_s = row["each_s"] * row["count"]
            fp32_s += time_s
            faster_s += time_s / row[column]
    if not faster_s:
        return None, fp32_s
    return fp32_s / faster_s, fp32_s


def _speeds(format_: str, device_type: str, rates: dict[str, Any]) -> dict[Size, float]:
    """Return the steady speeds of this machine against FP32, by the size of a product.

    Only square matrices and kernels of 3 x 3 were measured.
    """
    speeds = {}
    for device in rates["devices"]:
        if device["device_type"] != device_type:
            continue
        for rate in device["rows"]:
            if rate["format"] != format_ or not rate["steady"]:
                continue
            kind, shape = rate["kind"], rate["shape"]
            # A profile has M, N and K of a matmul, here all the same, or the shapes of input and weight of a
            # convolution.
            if kind == "matmul":
                speeds[same_size(kind, shape[:1] * 3)] = rate["speed_against_fp32"]
            elif kind == "convolution":
                weight = [shape[1], shape[1], 3, 3]
                speeds[same_size(kind, [*shape, *weight])] = rate["speed_against_fp32"]
    return speeds


def _best_matmul(speeds: Mapping[Size, float]) -> dict[str, Any] | None:
    """Return speed and shape of the matmul that gains most on this machine."""
    matmuls = [(speed, shape) for (kind, shape), speed in speeds.items() if kind == "matmul"]
    if not matmuls:
        return None
    speed, shape = max(matmuls)
    return {"speed": speed, "shape": list(shape[:2])}


# ---- the probe of a run


class Phase(NamedTuple):
    """A few steps for one purpose.

    The phase ends after ``steps``, or with the first step that ends more than ``seconds`` after it began.
    """

    name: str
    steps: int
    seconds: float


WARM_UP, PROFILED, READS = "warm-up", "profiled", "reads"
# ``compare`` needs only the shares of a step.
SHARES_PHASES = (
    Phase(name=WARM_UP, steps=3, seconds=0.5),
    Phase(name=PROFILED, steps=4, seconds=1.0),
)
# ``doctor`` also counts reads, after the profile: to count them slows each call of a tensor's method.
PROFILE_PHASES = (
    *SHARES_PHASES,
    Phase(name=READS, steps=6, seconds=1.0),
)


class ProfileProbe(StepProbe):
    """Let a few steps pass, profile the next ones, and count reads of tensors in the last ones."""

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        super().__init__(settings, argv)
        self._phases: tuple[Phase, ...] = PROFILE_PHASES
        if settings.purpose == Purpose.SHARES:
            self._phases = SHARES_PHASES
        self._problem: str | None = None
        self._device = "cpu"
        self._weight_storages: set[int] = set()
        self._known_modules: set[int] = set()
        self._profiler: Recorder | None = None
        self._reads: HostReads | None = None
        self._begin()

    def _begin(self) -> None:
        """Wait for the first step, without what was seen before."""
        self._facts: dict[str, Any] = {"profile": None, "reads": None}
        self._boundaries = 0
        self._phase = 0
        # Whether the optimizer is fused: it may be gone at the end.
        self._fused: bool | None = None

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(module) in self._known_modules:
            return
        parameters = list(module.parameters())
        # A lazy parameter has no storage before the first call has ended, so the next call looks again.
        if not any(map(is_lazy, parameters)):
            self._known_modules.add(id(module))
        # The profile has the storage that a cast reads, which tells whether it is a cast of a weight.
        for parameter in parameters:
            has_storage = parameter.layout == torch.strided and not parameter.is_meta
            if has_storage and not is_lazy(parameter):
                self._device = parameter.device.type
                self._weight_storages.add(parameter.untyped_storage().data_ptr())

    def closure_of_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        profiler = self._profiler
        if profiler is None:
            return closure

        @functools.wraps(closure)
        def recorded() -> Any:
            with profiler.closure():
                return closure()

        return recorded

    def restart(self) -> None:
        if self._boundaries:
            self._leave()
        self._begin()

    def pace_changed(self) -> None:
        self.restart()

    def boundary(self) -> None:
        self._boundaries += 1
        if self._boundaries == 1:  # the first step begins here
            self._fused = self._is_fused()
            self._enter()
            return
        if self._profiler is not None:
            self._profiler.mark()
        self._steps += 1
        if self._reads is not None:
            self._facts["reads"] = {"steps": self._steps, "sites": self._reads.rows()}
        phase = self._phases[self._phase]
        is_slow = time.perf_counter() - self._phase_began > phase.seconds
        if self._steps < phase.steps and not is_slow:
            return
        self._leave()
        self._phase += 1
        if self._phase == len(self._phases) or self._problem is not None:
            self.done = True
            self.attachment.stop()  # raises SystemExit
        self._enter()

    def _enter(self) -> None:
        """Begin the current phase."""
        name = self._phases[self._phase].name
        if name == PROFILED and self._device not in ("cpu", "cuda"):
            self._problem = f"profiles are read on CPUs and CUDA, and the model is on {self._device!r}"
        elif name == PROFILED:
            self._profiler = Recorder()
            try:
                self._profiler.start()
            except UnsupportedError as error:
                self._problem = str(error)
                self._profiler = None
        elif name == READS:
            self._reads = HostReads(call_site)
            self._reads.__enter__()
        self._phase_began = time.perf_counter()
        self._steps = 0  # that have ended in this phase

    def _leave(self) -> None:
        """End the current phase, perhaps before any of its steps has ended, and keep its result."""
        if self._profiler is not None:
            if self._device == "cuda":
                torch.cuda.synchronize()
            try:
                tree, results = self._profiler.stop()
                if self._steps:
                    profile = summarize(tree, results, device=self._device, weights=self._weight_storages)
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
        # A step that ends before the warm-up, those of the warm-up, and one that is profiled.
        warm_up = self._phases[0]
        seen = self._boundaries
        needed = 1 + warm_up.steps + 1
        # The first call ends no step, as the second one shows which module's calls are counted.
        if self.unit == "call":
            seen += 1
            needed += 1
        facts = {
            "unit": self.unit,
            "seen": seen,
            "needed": needed,
            "fused": self._fused,
            "problem": self._problem,
        }
        write_result(self.folder, self._facts | facts)

    def _is_fused(self) -> bool | None:
        """Return whether the optimizer is fused; None: there is no optimizer, or it has no fused kernel."""
        pace = self.pace
        if pace is None or "fused" not in pace.defaults:
            return None
        return all(group.get("fused") for group in pace.param_groups)
