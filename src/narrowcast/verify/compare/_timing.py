"""Time a script in FP32 and in mixed precision: pairs of runs, whose steps take turns.

``compare`` and ``doctor SCRIPT`` use it. Equal processes differ in speed by a few percent and sometimes by
much more (addresses, pages, placement of threads), which no number of steps of one pair shows. So the first
pair of runs is followed by as many short ones as the time limit allows.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from narrowcast.capture import (
    FEWEST_PAIRS,
    RUN,
    Capture,
    Estimate,
    is_busy,
    kind_of,
    median_of_runs,
    read_capture,
    speedup_of,
    timed_optimizer,
    times_of_runs,
    times_s,
    used_by_others,
    why_no_speedup,
    worth_it,
)
from narrowcast.errors import FileError, ScaleCollapseError, ScriptError, UnsupportedError
from narrowcast.machine import cpu_share_in_use
from narrowcast.policy import FP8_RECIPES, Policy, as_policy
from narrowcast.scripts import only_run_in_folder
from narrowcast.verify.runs._runs import (
    LITTLE_MEMORY,
    MEMORY,
    STEPS_AFTER_THE_END,
    LiveRun,
    Purpose,
    ScriptRuns,
    ScriptSettings,
    collapsed,
    last_line,
    take_turns,
)

MOST_PAIRS = 8
# The default time limit of all runs: the first number, or so many times the first pair if that is longer.
# Runs that take turns take about 5 % longer than alone, so this is 1.5 times what the pair takes alone.
_LEAST_S = 25.0
_TIMES_THE_PAIR = 1.42
# A slow run is ended after so many seconds of steps at the earliest, unless ``longest_run_s`` says otherwise.
_LEAST_SLOW_RUN_S = 15.0
# A run of a later pair has at least the three steps of the warm-up and nine more. It has at most 40 steps, or
# as many as take both runs of the pair two seconds, if those are more.
_FEWEST_STEPS = 12
_ENOUGH_STEPS, _ENOUGH_S = 40, 2.0
# If the untimed runs leave no time, as many short pairs as an interval needs are timed all the same. The
# steps of each pair take ``_SHORT_S``. If all these pairs would take more than ``_SHORT_PAIRS_SHARE`` of the
# time limit, none is timed.
_SHORT_S = 1.0
_SHORT_PAIRS_SHARE = 0.4
# For how long to watch whether other programs use the CPUs, before each pair and after the last. The system
# counts in ticks of 10 ms, so this is ten of them.
_LOOK_S = 0.1


class TimingSettings(ScriptSettings, frozen=True, kw_only=True):
    """Which script to time, and for how long.

    Attributes:
        steps: optimizer steps after which a run is ended; 0: it ends by itself.
        repeats: number of seeds, each run in both formats.
        time_limit_s: seconds for all runs, which limits how many timed pairs follow the first; 0: no limit;
            None: 25 s, or 1.42 times the first pair if that is longer.
        longest_run_s: seconds of steps after which every run is ended. None: only a mixed run that takes much
            longer than FP32's is; where ``auto`` is fp32, any run after 15 s; if ``time_limit_s`` is 0, none.
        min_speedup: below which mixed precision is not worth it; None: any speedup is.
    """

    steps: int = 200
    repeats: int = 1
    longest_run_s: float | None = None
    time_limit_s: float | None = None
    min_speedup: float | None = None


class Spent(NamedTuple):
    """The time of a timed run without pauses, until its first step and from there on, and its steps."""

    format: str
    startup_s: float
    stepping_s: float
    steps: int


@dataclass(slots=True)
class TimedPairs:
    """The timed runs of a script, while they are made.

    Attributes:
        write: gets the events ``run``, ``busy`` and ``note``.
        untimed_runs: how many runs follow that are not timed.
        untimed_s: returns about how long those take.
        captures: of each format, those of the runs that ended.
        spent: the time and steps of each timed run.
        spawns: whether the script trains in processes that it starts itself.
        began: when, by ``time.monotonic``.
        memory: the most that a timed run claimed, in thousandths of the machine's memory.
        changes_files: whether a timed run changed files of the user before a pause.
        shares_of_others: the share of the CPUs that other programs used, at each look.
    """

    settings: TimingSettings
    runs: ScriptRuns
    write: Callable[[dict[str, Any]], None]
    untimed_runs: int = 0
    untimed_s: Callable[[], float] = lambda: 0.0
    captures: dict[str, list[Capture]] = field(default_factory=lambda: {"fp32": [], "mixed": []})
    spent: list[Spent] = field(default_factory=list)
    spawns: bool = False
    began: float = field(default_factory=time.monotonic)
    memory: int = 0
    changes_files: bool = False
    shares_of_others: list[float] = field(default_factory=list)
    _pair_s: list[float] = field(default_factory=list)  # of each pair, how long it took
    _why_alone: list[str] = field(default_factory=list)  # of pairs whose runs took no turns

    # ---- what is known so far

    def all_captures(self) -> list[Capture]:
        return [*self.captures["fp32"], *self.captures["mixed"]]

    def kind(self) -> str | None:
        return kind_of(self.all_captures())

    def speedup(self) -> Estimate | None:
        """Return the speedup and the ends of its interval; None: not known."""
        return speedup_of(self.captures["fp32"], self.captures["mixed"], self.kind())

    def has_times(self) -> bool:
        """Return whether steps of both formats were timed."""
        return bool(self.step_times("fp32") and self.step_times("mixed"))

    def why_no_speedup(self) -> str:
        """Say why ``speedup`` is None."""
        return why_no_speedup(self.captures["fp32"], self.captures["mixed"], self.kind())

    def step_times(self, format_: str) -> list[float]:
        """Return the times of steps or calls in one format."""
        runs = times_of_runs(self.captures[format_], self.kind(), like=self.captures["fp32"])
        return list(itertools.chain.from_iterable(runs))

    def plain_times(self, format_: str, profile: dict[str, Any]) -> dict[str, Any]:
        """Return the median time of a step and the ends of its interval, under the names of a profile.

        Those of mixed precision are scaled to the speedup, which comes from steps that took turns: where the
        speed of the machine changes, the medians of both formats are of different moments. For a script that
        trains nothing they are those of ``profile``, from one call to the next; its timed runs measured only
        the inside of the calls.
        """
        kind = self.kind()
        if kind == "inference":
            step_s = profile["step_s"]
            return {
                "plain_steps": profile["steps"],
                "plain_step_s": step_s,
                "plain_step_s_low": step_s,
                "plain_step_s_high": step_s,
            }
        fp32 = median_of_runs(times_of_runs(self.captures["fp32"], kind))
        own = median_of_runs(times_of_runs(self.captures[format_], kind, like=self.captures["fp32"]))
        assert fp32 is not None
        assert own is not None

        scale = 1.0
        speedup = self.speedup()
        if format_ == "mixed" and speedup is not None:
            scale = fp32.median_s / speedup.value / own.median_s
        low_s, high_s = own.interval_s
        return {
            "plain_steps": len(self.step_times(format_)),
            "plain_step_s": own.median_s * scale,
            "plain_step_s_low": low_s * scale,
            "plain_step_s_high": high_s * scale,
        }

    def used_by_others(self) -> float:
        """Return which share of the CPUs other programs used meanwhile; 0 where that does not matter."""
        return used_by_others(self.shares_of_others, self.all_captures())

    def is_too_slow(self) -> bool:
        """Return whether mixed precision is certainly not worth it."""
        speedup = self.speedup()
        if speedup is None:
            return False
        return worth_it(speedup, self.settings.min_speedup, self.used_by_others()) == "no"

    def format(self) -> str:
        """Return the formats that the mixed runs computed in, or else the policy."""
        formats: dict[str, None] = {}
        for capture in self.captures["mixed"]:
            for device in capture.of("device"):
                formats[device["format"]] = None
        return ", ".join(formats) or self.settings.policy

    def step_s(self) -> float:
        """Return how long a step takes in both formats together, by the first pair of runs."""
        return max(1e-6, sum(run.stepping_s / run.steps for run in self.spent[:2]))

    def step_s_of(self, format_: str) -> float:
        """Return how long a step takes in one format, by its first run."""
        run = next(spent for spent in self.spent if spent.format == format_)
        return run.stepping_s / run.steps

    def pair_besides_s(self) -> float:
        """Return how long a pair of runs takes besides its steps: to start, to end, to be read."""
        return self._pair_s[-1] - sum(run.stepping_s for run in self.spent[-2:])

    def limit_s(self) -> float:
        """Return how long all runs may take; the default depends on the first pair.

        If the user set no limit (0), it is the default all the same: progress needs an end to expect.
        """
        return self.settings.time_limit_s or max(_LEAST_S, _TIMES_THE_PAIR * self._first_pair_s())

    def _first_pair_s(self) -> float:
        """Return how long the first pair of runs took."""
        return sum(run.startup_s + run.stepping_s for run in self.spent[:2])

    # ---- pairs of runs

    def time_all(self) -> None:
        """Time a pair of runs for each seed, and shorter ones as long as there is time.

        How many these are depends on time alone. To stop when the answer is clear would make it less certain
        than it looks.
        """
        # Until the first pair has shown how long it takes, progress expects as few as an interval needs.
        self.runs.expected = 2 * max(self.settings.repeats, FEWEST_PAIRS) + self.untimed_runs
        for repeat in range(self.settings.repeats):
            self._time_pair(repeat, self.settings.steps)
            self._plan_untimed_runs(whole_pairs_left=self.settings.repeats - 1 - repeat)

        # Each shorter pair shows once more how far two processes differ. How many more fit is computed again
        # after each one.
        pairs = self.settings.repeats
        while pairs < MOST_PAIRS and self.has_times():
            fitting, steps = self._pairs_that_fit(MOST_PAIRS - pairs)
            if fitting < FEWEST_PAIRS - pairs:
                fitting, steps = self._short_pairs(FEWEST_PAIRS - pairs)
            self.runs.expected = 2 * (pairs + fitting) + self.untimed_runs
            if not fitting:
                break
            self._time_pair(0, steps)
            self._plan_untimed_runs()
            pairs += 1
        self._look_for_others()
        self._note_how(pairs)

    def _look_for_others(self) -> None:
        """Note which share of the CPUs other programs use, while no run goes on."""
        share = cpu_share_in_use(_LOOK_S)
        if share is not None:
            self.shares_of_others.append(share)
            self.write({"event": "busy", "share": share})

    def _plan_untimed_runs(self, whole_pairs_left: int = 0) -> None:
        """Decide whether two of the untimed runs may go on at once, and tell progress when all will end.

        The run with exact sums takes twice the memory of a timed one, and two runs at once would see each
        other's files.
        """
        took_turns = not self._why_alone
        self.runs.beside = took_turns and self.memory < LITTLE_MEMORY and not self.changes_files
        # These runs, and a pair for each seed, are made even where the time limit has no room for them. How
        # long the untimed ones take depends on ``beside``.
        spent_s = time.monotonic() - self.began
        pairs_s = whole_pairs_left * self._first_pair_s()
        self.runs.ends = self.began + max(self.limit_s(), spent_s + pairs_s + self.untimed_s())

    def _note_how(self, pairs: int) -> None:
        if self._why_alone:
            self._note(f"timed one after the other, at least in part, since {self._why_alone[0]}")
        if pairs < FEWEST_PAIRS and self.has_times():
            timed = f"{pairs} pairs of runs are"
            if pairs == 1:
                timed = "one pair of runs is"
            # No interval is reported while other programs use the CPUs, nor where no speedup was measured.
            consequence = ""
            if self.speedup() is not None and not is_busy(self.used_by_others()):
                consequence = ", so that the interval is wide"
            self._note(
                f"{timed} too few to show how far equal runs differ here{consequence}; the time limit had no "
                f"room for more: give --time-limit 0 to time {MOST_PAIRS} pairs"
            )

    def _note(self, text: str) -> None:
        self.write({"event": "note", "text": text})

    def _pairs_that_fit(self, most: int) -> tuple[int, int]:
        """Return how many more pairs of runs there is time for, at most ``most``, and the steps of each run.

        With 0 steps the runs end by themselves.
        """
        # A short run has enough steps for a median, after those of the script that are not timed.
        step_s = self.step_s()
        enough = self._steps_of_a_run(max(_ENOUGH_STEPS, math.ceil(_ENOUGH_S / step_s)))
        fewest = self._steps_of_a_run(_FEWEST_STEPS)

        # What is left of the time limit once the other runs are made.
        left_s = math.inf
        if self.settings.time_limit_s != 0:
            spent_s = time.monotonic() - self.began
            left_s = self.limit_s() - spent_s - self.untimed_s()

        # As many pairs as possible, if need be short ones: the interval is of their spread.
        for pairs in range(most, 0, -1):
            fitting = (left_s / pairs - self.pair_besides_s()) / step_s
            if fitting >= fewest:
                return pairs, self._steps_setting(int(min(fitting, enough)))
        return 0, 0

    def _short_pairs(self, pairs: int) -> tuple[int, int]:
        """Return ``pairs`` and the steps of their short runs; zeros if these take too long."""
        steps = self._steps_of_a_run(max(_FEWEST_STEPS, math.ceil(_SHORT_S / self.step_s())))
        needed_s = pairs * (steps * self.step_s() + self.pair_besides_s())
        if needed_s > _SHORT_PAIRS_SHARE * self.limit_s():
            return 0, 0
        return pairs, self._steps_setting(steps)

    def _steps_of_a_run(self, timed: int) -> int:
        """Return how many steps a run must take to time ``timed`` of them; at most those of the script."""
        return min(self._steps_taken(), self._steps_before_timed() + timed)

    def _steps_taken(self) -> int:
        """Return how many steps the first pair of runs took."""
        return max(run.steps for run in self.spent[:2])

    def _steps_setting(self, steps: int) -> int:
        """Return ``steps``, or the setting of the first pair if that took no more steps."""
        if steps < self._steps_taken():
            return steps
        return self.settings.steps

    def _steps_before_timed(self) -> int:
        """Return how many optimizer steps a run takes before the first one that is timed."""
        steps = self.captures["fp32"][0].of("step")
        timed = timed_optimizer(self.captures["fp32"])
        optimizers = [step["optimizer"] for step in steps]
        if timed not in optimizers or optimizers[0] == timed:
            return 0
        # Another optimizer stepped first, as in a search for the learning rate. The run pauses at steps of
        # the timed one only after so many in a row, which show that the other has ended (``StepProbe``).
        return optimizers.index(timed) + STEPS_AFTER_THE_END + 1

    def _time_pair(self, repeat: int, steps: int) -> None:
        """Make a run of each format, whose steps take turns if they can."""
        self._look_for_others()
        seed = self.settings.seed + repeat
        begun: list[float] = []

        def begin(format_: str) -> LiveRun:
            name = f"{format_}-{len(self.captures[format_]) + 1}"
            # Written now too, so that a comparison that is killed has the run as far as it came.
            self._write_run(name, format_, seed, capture=RUN, last_line="", ended=False)
            live = self.runs.begin(name, format_, Purpose.TIMED, seed_shift=repeat, steps=steps)
            begun.append(time.monotonic())
            return live

        # Each pair begins with the other format, so that a machine that slows down slows both alike.
        formats = ["fp32", "mixed"]
        if len(self.captures["fp32"]) % 2 == 1:
            formats.reverse()
        ended = functools.partial(self._ended, seed=seed)
        with only_run_in_folder(self.runs.progress):
            why_alone = take_turns(formats, begin, ended, steps=steps, limit_s=self._limit_of_run_s)
        # Since the first run began, without the start of the server that forks runs, which happens once.
        self._pair_s.append(time.monotonic() - begun[0])
        if why_alone is not None:
            self._why_alone.append(why_alone)

    def _limit_of_run_s(self, run: LiveRun, first: LiveRun) -> float:
        """Return after how many seconds of steps to end a run; ``first`` is the first run of its pair.

        During the first pair, also tell progress when all runs will have ended.
        """
        steps = self.settings.steps
        if steps and not self.spent:
            # Expect both runs to go on as fast as so far, for all steps or until they are ended.
            both_s = 0.0
            for live in (run, first):
                all_steps_s = live.stepping_s * steps / max(live.steps, 1)
                both_s += live.startup_s + min(all_steps_s, self._most_stepping_s(live, first))
            expected_s = self.settings.time_limit_s or max(_LEAST_S, _TIMES_THE_PAIR * both_s)
            self.runs.ends = self.began + expected_s
        return self._most_stepping_s(run, first)

    def _most_stepping_s(self, run: LiveRun, first: LiveRun) -> float:
        """Return after how many seconds of steps to end a run."""
        if self.settings.longest_run_s is not None:
            return self.settings.longest_run_s
        if self.settings.time_limit_s == 0:
            return math.inf
        # Where ``auto`` is fp32, FP32 may be slow too: either run is ended.
        if self.settings.fp32_because:
            return _LEAST_SLOW_RUN_S
        if run.format == "fp32":
            return math.inf
        # A mixed run that takes twice as long as FP32's has shown what it can show.
        first_s = first.active_s
        if self.spent:
            first_s = self.spent[0].startup_s + self.spent[0].stepping_s
        return max(_LEAST_SLOW_RUN_S, 2 * first_s)

    def _ended(self, run: LiveRun, *, seed: int) -> None:
        """Keep what a timed run left, or raise why there is nothing to compare."""
        try:
            folder = run.checked()
        except ScriptError:
            # A loss scale that collapsed is a result; anything else is an error of the script.
            why = collapsed(run.folder)
            if why is None:
                raise
            raise ScaleCollapseError(why) from None
        try:
            path = _trained_capture(folder)
            capture = read_capture(path)
        except FileError as error:
            raise ScriptError(
                f"{run.name} left no capture, so there is nothing to compare: {error}"
            ) from error
        _check_comparable(capture)
        if run.format == "mixed":
            _check_mixed(capture, self.settings.policy)
        self.memory = max(self.memory, run.numbers[MEMORY])
        self.changes_files |= run.changes_files
        self.captures[run.format].append(capture)
        self.spawns |= path.name != RUN

        totals = capture.totals()
        # A run without an end, as after ``os._exit``, has events alone, and no totals.
        counted = (totals["backwards"], totals["forwards"])
        reached = len(capture.of("step")) or max(filter(None, counted), default=0)
        reached = reached or len(capture.of("loss")) or len(capture.of("forward"))
        stepping_s = run.stepping_s
        # The steps of a process that the script starts are in its capture alone.
        if not run.steps:
            stepping_s = sum(times_s(capture, kind_of([capture])))
        self.spent.append(Spent(run.format, run.active_s - stepping_s, stepping_s, max(reached, 1)))

        took_fewer = not self.settings.steps or reached < self.settings.steps
        cut = bool(totals["stopped"]) and took_fewer
        # The runs of later pairs are cut on purpose.
        was_to_be_whole = len(self.captures[run.format]) <= self.settings.repeats
        if cut and was_to_be_whole and self.settings.longest_run_s is None:
            self._note(
                f"{run.name} was ended after {reached} steps, to keep to the time limit (--time-limit)"
            )
        last = last_line(folder)
        self._write_run(run.name, run.format, seed, capture=path.name, last_line=last, cut=cut, ended=True)

    def _write_run(self, name: str, format_: str, seed: int, *, capture: str, **fields: Any) -> None:
        """Write the event of a timed run, whose capture is a file in the folder of this name."""
        run = {"event": "run", "name": name, "format": format_, "seed": seed}
        self.write({**run, "capture": f"{name}/{capture}", **fields})


def _check_comparable(capture: Capture) -> None:
    """Refuse a run that does in mixed precision what it does in FP32, or nothing."""
    left_alone = capture.totals()["left_alone"]
    if left_alone is not None:
        raise UnsupportedError(
            f"{left_alone}, so its FP32 and its mixed run would be the same. Compare it without that (most "
            "scripts have an option for it), or trust its own"
        )
    if not any(map(capture.of, ("forward", "loss", "step", "device"))):
        raise UnsupportedError(
            "the script called no module with parameters and went backward from nothing, so there is nothing "
            "to compare"
        )


def _check_mixed(capture: Capture, policy: str) -> None:
    """Refuse a run in mixed precision that computed in FP32 alone: the comparison would say "yes"."""
    devices = capture.of("device")
    if has_low_rules(as_policy(policy)) or any(device["format"] != "fp32" for device in devices):
        return
    same = "the mixed run too computed in FP32 alone, so there is nothing to compare"
    if devices:
        device_type, because = devices[0]["device_type"], devices[0]["because"]
        raise UnsupportedError(
            f"{same}: {policy} is fp32 on {device_type}, since {because}. Give another policy (--policy bf16)"
        )
    raise UnsupportedError(
        f"{same}: operators compute in a low format inside calls of modules with parameters in fp32, and the "
        "script made none"
    )


def has_low_rules(policy: Policy) -> bool:
    """Return whether a rule names a low format, whatever the format of the rest."""
    # "lower" is none of them: it is the format of the rest, and so fp32 where that is.
    low = ("bf16", "fp16", *FP8_RECIPES)
    return any(rule.compute in low or rule.output in low for rule in policy.rules)


def _trained_capture(folder: Path) -> Path:
    """Return the capture of the run, or of its first spawned process that took a step if it took none."""
    own = folder / RUN
    if read_capture(own).of("step"):
        return own
    for spawned in sorted(folder.glob("capture-process*.jsonl")):
        if read_capture(spawned).of("step"):
            return spawned
    return own
