"""How fast each format is: every kind of work in several formats, timed side by side."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from narrowcast.errors import SettingError
from narrowcast.machine._environment import first_line
from narrowcast.machine._work import DTYPES, Shape, Work, float32_as

Clock = Callable[[], float]
_FEWEST_ROUNDS, _ENOUGH_ROUNDS, _MOST_ROUNDS = 3, 5, 31
# A round repeats a short call for about this long, so that the clock and the wait for a GPU weigh little.
_SAMPLE_S = 0.002
_MOST_CALLS = 1000
# Where the middle half of the rounds, or of their ratios to fp32, spans more than this share of the median,
# something else was running.
_STEADY = 0.25
# The longest call that is made fits this often into the time for a device.
_CALLS_IN_TIME = 30
# The share of the time that is left for rounds where estimates alone would take all of it.
_FOR_ROUNDS = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a measurement may take.

    Attributes:
        device_s: seconds for one device; what has not begun by then is skipped.
        call_s: a call that is expected to take longer than this, or than a thirtieth of ``device_s``, is
            never made.
    """

    device_s: float = 15.0
    call_s: float = 0.5

    def __post_init__(self) -> None:
        for name in ("device_s", "call_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SettingError(f"expected {name} to be a number of seconds above 0, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast one format does one kind of work at one size. Its fields are a row of the JSON of ``doctor``.

    What was not measured has no numbers; ``reason`` says why.

    Attributes:
        kind, size, shape: ``Work.kind``, ``Shape.size``, and the shape of the first operand.
        format: ``"fp32"`` (exact, without TF32), ``"tf32"``, ``"bf16"`` or ``"fp16"``.
        rounds, calls_per_round: how often it was timed; 0 and None if it was not measured.
        expected_time_s: the time of a call that was not timed in rounds, from single calls or scaled up from
            a smaller size; None if it is not known, or torch cannot make the call.
        out_of_time: whether it was not measured because the time for the device was used up.
        time_s_median, time_s_low, time_s_high: time of one call, the median over rounds and its quartiles.
        rate_flop_per_s: floating-point operations a second; None for ``add``.
        rate_element_per_s, rate_byte_per_s: of ``add``: two operands read and one result written.
        speed_against_fp32: the median over rounds of the time in fp32 by the time in this format, and its
            quartiles.
        speed_at_most: for a format whose call takes too long, the upper quartile of its speed against fp32 at
            the largest smaller size at which both were measured, ``speed_at_most_shape``.
    """

    kind: str
    size: str | None
    shape: list[int]
    format: str
    rounds: int = 0
    calls_per_round: int | None = None
    reason: str | None = None
    expected_time_s: float | None = None
    out_of_time: bool = False
    time_s_median: float | None = None
    time_s_low: float | None = None
    time_s_high: float | None = None
    rate_flop_per_s: float | None = None
    rate_element_per_s: float | None = None
    rate_byte_per_s: float | None = None
    speed_against_fp32: float | None = None
    speed_against_fp32_low: float | None = None
    speed_against_fp32_high: float | None = None
    speed_at_most: float | None = None
    speed_at_most_shape: list[int] | None = None

    @property
    def spread(self) -> float:
        """The middle half of the rounds, as a share of their median; 0 if it was not measured."""
        if self.time_s_median is None or self.time_s_low is None or self.time_s_high is None:
            return 0.0
        return (self.time_s_high - self.time_s_low) / self.time_s_median

    @property
    def is_steady(self) -> bool:
        """Whether it was measured against fp32, and no other program disturbed that."""
        speed, low, high = self.speed_against_fp32, self.speed_against_fp32_low, self.speed_against_fp32_high
        if speed is None or low is None or high is None:
            return False
        return high - low <= _STEADY * speed

    @property
    def is_cut_short(self) -> bool:
        """Whether a format other than fp32 was not measured because one call takes too long."""
        is_left_out = self.rounds == 0 and not self.out_of_time
        return is_left_out and self.expected_time_s is not None and self.format != "fp32"


def measure_device(
    device: str,
    works: tuple[Work, ...],
    budget: Budget,
    *,
    progress: Callable[[str], None] = lambda _: None,
    clock: Clock = time.perf_counter,
) -> list[Rate]:
    """Measure every kind of work at every named size in every format on ``device``.

    The cheapest sizes come first, so that if the time runs out, only the dearest are missing.
    Formats take turns within a round, so that a busy machine slows all of them alike. Sizes with noisy times
    are measured once more at the end, and the quieter result is kept. fp32 is exact (no TF32) whatever the
    settings are; they are restored.
    """
    measurement = _Measurement(device, works, budget, progress, clock)
    # The caller may have turned gradients off.
    with torch.inference_mode(False), torch.enable_grad():
        measurement.estimate_all()
        measurement.measure_from_the_cheapest_on()
        measurement.repeat_noisy()
        measurement.compare_those_cut_short()
    return list(itertools.chain.from_iterable(measurement.rates.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """What is known of one format at one shape before it is timed in rounds.

    Attributes:
        call_s: seconds of one call, timed or scaled up from a smaller shape; None if neither is known.
        reason: why it is not timed in rounds, or None.
        out_of_time: whether the reason is that the time for the device was used up.
    """

    call_s: float | None = None
    reason: str | None = None
    out_of_time: bool = False


@dataclass(slots=True, kw_only=True)
class _Series:
    """One format in rounds at one shape: the call, how often a round makes it, and the seconds of one."""

    call: Callable[[], object]
    calls_per_round: int
    times_s: list[float] = field(default_factory=list)


_Cell = tuple[Work, Shape]


class _Measurement:
    """The measurement of one device.

    Attributes:
        estimates: of each shape, those between the sizes too: format -> estimate.
        rates: of each shape with a size: one rate for each format.
    """

    def __init__(
        self,
        device: str,
        works: tuple[Work, ...],
        budget: Budget,
        progress: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._device = device
        self._works = works
        self._budget = budget
        self._progress = progress
        self._clock = clock
        self._deadline = clock() + budget.device_s
        self._longest_call_s = min(budget.call_s, budget.device_s / _CALLS_IN_TIME)

        self.estimates: dict[_Cell, dict[str, _Estimate]] = {}
        self.rates: dict[_Cell, list[Rate]] = {}
        for work in works:
            for shape in work.shapes:
                self.estimates[work, shape] = {}
                if shape.size is not None:
                    self.rates[work, shape] = []
        # Estimates take time too, so only half of the time is shared out among the sizes.
        self._share_s = budget.device_s / (2 * len(self.rates))

    # ---- estimates, from the smallest shape up

    def estimate_all(self) -> None:
        for work in self._works:
            for format_name in work.formats:
                self._estimate_format(work, format_name)

    def _estimate_format(self, work: Work, format_name: str) -> None:
        """Estimate the time of one call at each shape, from the smallest up.

        A shape is tried only if the time of the one before it, scaled up, is short enough. Overhead makes the
        estimate from a small call too long; steps between the sizes limit that.
        """
        estimates_end_s = self._deadline - self._budget.device_s * _FOR_ROUNDS
        seconds_per_amount: float | None = None
        failure: _Estimate | None = None
        for shape in work.shapes:
            expected_s = None
            if seconds_per_amount is not None:
                expected_s = seconds_per_amount * work.amount(shape)

            # If a small size fails, for example because there is no kernel, larger ones fail too.
            if failure is not None:
                estimate = failure
            elif self._clock() > estimates_end_s:
                estimate = self._out_of_time(expected_s)
            elif expected_s is not None and expected_s > self._longest_call_s:
                reason = f"one call would take about {_seconds(expected_s)}"
                estimate = _Estimate(call_s=expected_s, reason=reason)
            else:
                estimate = self._try(work, shape, format_name, is_first=seconds_per_amount is None)
                if estimate.call_s is None:
                    failure = estimate
                else:
                    seconds_per_amount = estimate.call_s / work.amount(shape)
            self.estimates[work, shape][format_name] = estimate

    def _try(self, work: Work, shape: Shape, format_name: str, *, is_first: bool) -> _Estimate:
        """Estimate the time of one call from up to four calls, after one untimed call if ``is_first``."""
        self._progress(f"{self._device}: {work.kind.replace('_', ' ')} in {format_name}")
        try:
            call = work.prepare(shape, format_name, self._device)
            if is_first:
                # The first backward pass of a process starts threads, which takes 0.3 s.
                self._time(call, format_name, 1)
            seconds = self._quickest(call, format_name)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            return _cannot(error)
        if seconds > self._longest_call_s:
            return _Estimate(call_s=seconds, reason=f"one call takes {_seconds(seconds)}")
        return _Estimate(call_s=seconds)

    def _quickest(self, call: Callable[[], object], format_name: str) -> float:
        """Return the seconds of the shortest of up to four calls.

        The first one sets things up, and another may be interrupted.
        """
        seconds = self._time(call, format_name, 1)
        # A second call is made unless the first took too long; a third and a fourth only if calls are short.
        short_s = self._longest_call_s / 50
        for once_more_below_s in (self._longest_call_s, short_s, short_s):
            if seconds < once_more_below_s:
                seconds = min(seconds, self._time(call, format_name, 1))
        return seconds

    # ---- rounds

    def measure_from_the_cheapest_on(self) -> None:
        """Time every size in rounds."""

        def cost_s(cell: _Cell) -> float:
            # Calls that would take too long count too, although they are not made.
            return sum(estimate.call_s or 0.0 for estimate in self.estimates[cell].values())

        for work, shape in sorted(self.rates, key=cost_s):
            self._progress(f"{self._device}: {work.kind.replace('_', ' ')}, {shape.size}")
            self.rates[work, shape] = self._side_by_side(
                work, shape, self.estimates[work, shape], self._share_s
            )

    def repeat_noisy(self) -> None:
        """Measure noisy sizes once more, and keep the quieter result unless a format is missing in it."""
        for (work, shape), rates in self.rates.items():
            if _spread(rates) <= _STEADY or self._clock() >= self._deadline:
                continue
            self._progress(f"{self._device}: {work.kind.replace('_', ' ')}, {shape.size}, again")
            # What was not measured before is not tried again: its estimate has the reason.
            estimates = {rate.format: _estimate_of(rate) for rate in rates}
            again = self._side_by_side(work, shape, estimates, self._share_s)
            is_as_complete = _count_measured(again) == _count_measured(rates)
            if is_as_complete and _spread(again) < _spread(rates):
                self.rates[work, shape] = again

    def compare_those_cut_short(self) -> None:
        """Add to the rates that were cut short their speed at a smaller size."""
        for (work, shape), rates in self.rates.items():
            for index, rate in enumerate(rates):
                if rate.is_cut_short:
                    rates[index] = self._with_speed_below(rate, work, shape)

    def _with_speed_below(self, rate: Rate, work: Work, shape: Shape) -> Rate:
        """Return ``rate`` with its speed at the largest size below ``shape`` at which fp32 can be timed too.

        A size that has no rates is timed now, in rounds like any other.
        """
        smaller = work.shapes[: work.shapes.index(shape)]
        for step in reversed(smaller):
            both = {name: self.estimates[work, step][name] for name in ("fp32", rate.format)}
            if any(estimate.reason is not None for estimate in both.values()):
                continue
            rates = self.rates.get((work, step))
            if rates is None:
                rates = self._side_by_side(work, step, both, self._share_s / 4)
            below = next(other for other in rates if other.format == rate.format)
            if below.speed_against_fp32_high is None:
                return rate
            return replace(rate, speed_at_most=below.speed_against_fp32_high, speed_at_most_shape=below.shape)
        return rate

    def _side_by_side(
        self, work: Work, shape: Shape, estimates: dict[str, _Estimate], share_s: float
    ) -> list[Rate]:
        """Return one rate for each format, from rounds in which all of them take turns."""
        estimates = dict(estimates)
        # After the deadline, what was still to be timed is out of time.
        if self._clock() > self._deadline:
            for name, estimate in estimates.items():
                if estimate.reason is None:
                    estimates[name] = self._out_of_time(estimate.call_s)

        # All operands are made before the first round, so that rounds time nothing but calls.
        timed: dict[str, _Series] = {}
        for name, estimate in estimates.items():
            if estimate.reason is None and estimate.call_s is not None:
                try:
                    call = work.prepare(shape, name, self._device)
                    self._time(call, name, 1)
                except RuntimeError as error:  # out of memory, now that there are several
                    estimates[name] = _cannot(error)
                else:
                    timed[name] = _Series(call=call, calls_per_round=_calls_per_round(estimate.call_s))
        self._make_rounds(timed, share_s)

        # Quartiles of fewer than three rounds mean nothing, so these count as not measured.
        for name, series in list(timed.items()):
            if len(series.times_s) < _FEWEST_ROUNDS:
                estimates[name] = self._out_of_time(estimates[name].call_s)
                del timed[name]
        rates = []
        for name, estimate in estimates.items():
            if name in timed:
                rates.append(_measured(work, shape, name, timed[name], timed.get("fp32")))
            else:
                rates.append(_not_measured(work, shape, name, estimate))
        return rates

    def _make_rounds(self, timed: dict[str, _Series], share_s: float) -> None:
        names = list(timed)
        if not names:
            return
        if len(names) == 1:
            # The other formats were cut short, so that fp32 is timed alone. The time is better spent on the
            # smaller size at which both can be timed.
            share_s /= 4
        start = self._clock()
        for index in range(_MOST_ROUNDS):
            # At least three rounds, five if they take up to twice the share, and more within the share.
            now = self._clock()
            if now > self._deadline:
                return
            if index >= _FEWEST_ROUNDS and now > start + 2 * share_s:
                return
            if index >= _ENOUGH_ROUNDS and now > start + share_s:
                return
            # Each round begins with another format.
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                series = timed[name]
                series.times_s.append(self._time(series.call, name, series.calls_per_round))

    def _time(self, call: Callable[[], object], format_name: str, calls: int) -> float:
        """Return the seconds of one call, as the mean of ``calls`` calls."""
        with float32_as("tf32" if format_name == "tf32" else "ieee"):
            self._wait()
            start = self._clock()
            for _ in range(calls):
                call()
            self._wait()
            return (self._clock() - start) / calls

    def _wait(self) -> None:
        if self._device != "cpu":
            torch.accelerator.synchronize(torch.device(self._device))

    def _out_of_time(self, expected_s: float | None) -> _Estimate:
        reason = f"the time for this device, {_seconds(self._budget.device_s)}, was used up"
        return _Estimate(call_s=expected_s, reason=reason, out_of_time=True)


def _cannot(error: Exception) -> _Estimate:
    return _Estimate(reason=f"torch cannot do it here: {first_line(error)}")


def _estimate_of(rate: Rate) -> _Estimate:
    if rate.rounds:
        return _Estimate(call_s=rate.time_s_low)
    return _Estimate(call_s=rate.expected_time_s, reason=rate.reason, out_of_time=rate.out_of_time)


def _calls_per_round(call_s: float) -> int:
    calls = round(_SAMPLE_S / max(call_s, 1e-9))
    return min(_MOST_CALLS, max(1, calls))


def _spread(rates: list[Rate]) -> float:
    return max(rate.spread for rate in rates)


def _count_measured(rates: list[Rate]) -> int:
    return sum(rate.rounds > 0 for rate in rates)


def _not_measured(work: Work, shape: Shape, name: str, estimate: _Estimate) -> Rate:
    return Rate(
        kind=work.kind,
        size=shape.size,
        shape=work.tensor_shape(shape),
        format=name,
        reason=estimate.reason,
        expected_time_s=estimate.call_s,
        out_of_time=estimate.out_of_time,
    )


def _measured(work: Work, shape: Shape, name: str, series: _Series, fp32: _Series | None) -> Rate:
    low_s, median_s, high_s = _quartiles(series.times_s)
    rate = Rate(
        kind=work.kind,
        size=shape.size,
        shape=work.tensor_shape(shape),
        format=name,
        rounds=len(series.times_s),
        calls_per_round=series.calls_per_round,
        time_s_median=median_s,
        time_s_low=low_s,
        time_s_high=high_s,
    )
    amount = work.amount(shape)
    if work.kind == "add":
        bytes_moved = amount * 3 * DTYPES[name].itemsize
        rate = replace(rate, rate_element_per_s=amount / median_s, rate_byte_per_s=bytes_moved / median_s)
    else:
        rate = replace(rate, rate_flop_per_s=amount / median_s)

    if fp32 is None:
        return rate
    # The ratio is taken in each round: another program slows both formats of a round alike.
    pairs = zip(fp32.times_s, series.times_s, strict=True)
    low, median, high = _quartiles([fp32_s / own_s for fp32_s, own_s in pairs])
    return replace(rate, speed_against_fp32=median, speed_against_fp32_low=low, speed_against_fp32_high=high)


def _quartiles(numbers: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, median, high


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
