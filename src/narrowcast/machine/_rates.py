"""How fast each format is, forward and backward: matmuls, convolutions and additions, side by side."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from narrowcast.errors import SettingError
from narrowcast.machine._environment import first_line

Clock = Callable[[], float]
_FEWEST_ROUNDS, _ENOUGH_ROUNDS, _MOST_ROUNDS = 3, 5, 31
# Timed together, so that the clock and the wait for a GPU weigh little.
_SAMPLE_S = 0.002
_MOST_CALLS = 1000
# Where the middle half of the rounds spans more than this share of the median, something else was running.
_NOISY = 0.25
# The longest call that is made fits this often into the time for a device.
_CALLS_IN_TIME = 30
# The share of the time that is left for rounds where estimates alone would take all of it.
_FOR_ROUNDS = 0.4
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CAST_MATMUL = "matmul_with_casts"
# The backward pass of a product has two more of the same size: one for each operand's gradient.
_PRODUCTS_PER_CALL = 3
_TF32_CAPABILITY = 8


# ---- what is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One size of a kind of work.

    Attributes:
        numbers: n of an n x n product; batch, channels and side of a convolution; elements of an addition.
        size: ``"small"``, ``"medium"`` or ``"large"``; None for a step on the way, which is never shown.
    """

    numbers: tuple[int, ...]
    size: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A kind of work, its shapes from the smallest on, and the formats in which it is measured.

    ``matmul`` and ``convolution`` (3x3, padded, as many channels out as in) have their operands in the format
    already; ``matmul_with_casts`` has them in fp32 and casts both at each call, as autocast does with what it
    sees for the first time; the backward pass casts their gradients back. A call is what training does: the
    forward pass, and the backward pass for both operands. ``add`` adds two tensors into a third, and stands
    for all elementwise work that waits for memory: forward alone, as its backward pass computes nothing.
    """

    kind: str
    formats: tuple[str, ...]
    shapes: tuple[Shape, ...]

    def amount(self, shape: Shape) -> int:
        """Return the operations of one call, a multiply-add as two; of an addition the elements."""
        if self.kind == "add":
            return shape.numbers[0]
        if self.kind == "convolution":
            batch, channels, side = shape.numbers
            forward = 2 * batch * channels * channels * 9 * side * side
        else:
            forward = 2 * shape.numbers[0] ** 3
        return _PRODUCTS_PER_CALL * forward

    def tensor_shape(self, shape: Shape) -> list[int]:
        """Return the shape of the first operand."""
        if self.kind == "add":
            return list(shape.numbers)
        if self.kind == "convolution":
            batch, channels, side = shape.numbers
            return [batch, channels, side, side]
        return [shape.numbers[0]] * 2

    def prepare(self, shape: Shape, format_name: str, device: str) -> Callable[[], object]:
        """Make the operands and return a call that does the work once, forward and backward."""
        dtype, random = DTYPES[format_name], torch.Generator(device=device).manual_seed(0)

        def operand(*sizes: int) -> torch.Tensor:
            made = torch.randn(*sizes, generator=random, device=device)
            return made if self.kind == _CAST_MATMUL else made.to(dtype)

        first = operand(*self.tensor_shape(shape))
        if self.kind == "add":
            second, result = operand(*self.tensor_shape(shape)), torch.empty_like(first)
            return lambda: torch.add(first, second, out=result)
        if self.kind == "convolution":
            channels = shape.numbers[1]
            second = operand(channels, channels, 3, 3)
        else:
            second = operand(*self.tensor_shape(shape))
        operands = (first.requires_grad_(), second.requires_grad_())
        # Each result is as large as the first operand, and in the format.
        gradient = operand(*self.tensor_shape(shape)).to(dtype)

        def forward_and_backward() -> torch.Tensor:
            if self.kind == "convolution":
                result = F.conv2d(first, second, padding=1)
            elif self.kind == _CAST_MATMUL:
                result = first.to(dtype) @ second.to(dtype)
            else:
                result = first @ second
            torch.autograd.grad(result, operands, gradient)
            return result

        return forward_and_backward


def work_for(device_type: str, *, has_tf32: bool = False) -> tuple[Work, ...]:
    """Return every kind of work in sizes for a CPU or a GPU, with steps between them."""
    product, convolution, elements = _CPU_SHAPES if device_type == "cpu" else _GPU_SHAPES
    exact = ("fp32", "tf32", "bf16", "fp16") if has_tf32 else ("fp32", "bf16", "fp16")
    without = ("fp32", "bf16", "fp16")
    return (
        Work(kind="matmul", formats=exact, shapes=product),
        Work(kind=_CAST_MATMUL, formats=without, shapes=product),
        Work(kind="convolution", formats=exact, shapes=convolution),
        Work(kind="add", formats=without, shapes=elements),
    )


def work_for_auto(device_type: str, candidate: str) -> tuple[Work, ...]:
    """Return the small fixed set of cells that decides ``auto``: matmuls and a convolution of medium size.

    Where a call takes long, as of emulated bf16, the steps below that size end it early.
    """
    works = []
    for work in work_for(device_type):
        medium = next(index for index, shape in enumerate(work.shapes) if shape.size == "medium")
        shapes = (*(Shape(numbers=step.numbers) for step in work.shapes[:medium]), work.shapes[medium])
        works.append(Work(kind=work.kind, formats=("fp32", candidate), shapes=shapes))
    return tuple(work for work in works if work.kind != "add")


def has_tf32(device: dict[str, Any]) -> bool:
    """Return whether a GPU of ``gather_facts`` multiplies in TF32: NVIDIA's from capability 8.0 on."""
    return int((device.get("capability") or "0").split(".")[0]) >= _TF32_CAPABILITY


@contextmanager
def float32_as(precision: str) -> Iterator[None]:
    """Make fp32 products exact (``"ieee"``) or TF32 (``"tf32"``) on every backend, and put it back."""
    backends = torch.backends
    places = (
        backends.cuda.matmul,
        backends.cudnn.conv,  # type: ignore[attr-defined]  # set by name in torch.backends.cudnn
        backends.mkldnn.matmul,  # type: ignore[attr-defined]
        backends.mkldnn.conv,  # type: ignore[attr-defined]
    )
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = precision
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.fp32_precision = was


def _shapes(*numbers: tuple[int, ...], named: tuple[int, int, int]) -> tuple[Shape, ...]:
    sizes = dict(zip(named, ("small", "medium", "large"), strict=True))
    return tuple(Shape(numbers=one, size=sizes.get(at)) for at, one in enumerate(numbers))


_CPU_SHAPES = (
    # The first steps are for CPUs on which a low format takes hundreds of times as long.
    _shapes((32,), (64,), (128,), (256,), (512,), (1024,), named=(1, 4, 5)),
    _shapes((1, 8, 8), (1, 16, 16), (1, 32, 32), (4, 64, 32), (4, 256, 28), named=(1, 3, 4)),
    _shapes((2**12,), (2**18,), (2**22,), named=(0, 1, 2)),
)
_GPU_SHAPES = (
    _shapes((256,), (512,), (1024,), (2048,), (4096,), (8192,), named=(0, 3, 5)),
    _shapes((1, 64, 28), (4, 64, 56), (32, 128, 28), (64, 256, 56), named=(0, 2, 3)),
    _shapes((2**16,), (2**22,), (2**26,), named=(0, 1, 2)),
)


# ---- measuring


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


def measure_device(
    device: str,
    works: tuple[Work, ...],
    budget: Budget,
    *,
    progress: Callable[[str], None] = lambda _: None,
    clock: Clock = time.perf_counter,
) -> list[dict[str, Any]]:
    """Measure every kind of work at every named size in every format on ``device``.

    The cheapest sizes come first, so that what the time does not suffice for is dear. Formats take turns
    within a round, so that a busy machine slows all of them alike. Sizes with noisy times are measured once
    more at the end, and the quieter result is kept. fp32 is exact (no TF32) whatever the settings are; they
    are restored.

    Returns:
        One JSON-ready row for each: ``kind``, ``size``, ``shape``, ``format``, ``rounds``,
        ``calls_per_round``; ``time_s_median`` of one call with the quartiles ``time_s_low`` and
        ``time_s_high``; ``rate_flop_per_s``, or for ``add`` ``rate_element_per_s`` and ``rate_byte_per_s``
        (two operands read, one result written); ``speed_against_fp32``, the median over rounds of the time in
        fp32 by the time in this format, with its quartiles. Where it was not measured these are null,
        ``reason`` says why, and ``expected_time_s`` is the time of a call, estimated from one or two calls or
        from a smaller size; null if none was made. ``out_of_time``: the time for the device was used up.
        A format whose call takes too long is cut short: ``speed_at_most`` is the upper quartile of its speed
        against fp32 at the largest smaller size at which both were measured, ``speed_at_most_shape``; else
        both are null.
    """
    run = _Run(
        device=device,
        budget=budget,
        clock=clock,
        deadline=clock() + budget.device_s,
        longest_s=min(budget.call_s, budget.device_s / _CALLS_IN_TIME),
    )
    share_s = budget.device_s / (2 * sum(1 for work in works for shape in work.shapes if shape.size))
    # The caller may have turned gradients off.
    with torch.inference_mode(False), torch.enable_grad():
        estimates: dict[tuple[Work, Shape], dict[str, float | _Skipped]] = {}
        for work in works:
            of_format = {name: run.estimate(work, name, progress) for name in work.formats}
            for shape in work.shapes:
                estimates[work, shape] = {name: known[shape] for name, known in of_format.items()}
        shown = [(work, shape) for work, shape in estimates if shape.size is not None]
        found = {cell: list[dict[str, Any]]() for cell in shown}
        for work, shape in sorted(shown, key=lambda cell: _cost_s(estimates[cell])):
            progress(f"{device}: {work.kind.replace('_', ' ')}, {shape.size}")
            found[work, shape] = run.side_by_side(work, shape, estimates[work, shape], share_s)
        for (work, shape), rows in found.items():
            if _spread(rows) > _NOISY and clock() < run.deadline:
                progress(f"{device}: {work.kind.replace('_', ' ')}, {shape.size}, again")
                again = run.side_by_side(work, shape, _known(rows), share_s)
                if _measured(again) == _measured(rows):
                    found[work, shape] = min(rows, again, key=_spread)
        for (work, shape), rows in found.items():
            for row in rows:
                if _is_cut_short(row):
                    below = run.speed_below(work, shape, row["format"], estimates, found, share_s)
                    row.update(below)
    return [row for rows in found.values() for row in rows]


def _cost_s(estimates: dict[str, float | _Skipped]) -> float:
    """Return the time of one call of each format, also of those that would take too long."""
    return sum(v.expected_s or 0.0 if isinstance(v, _Skipped) else v for v in estimates.values())


def _spread(rows: list[dict[str, Any]]) -> float:
    """Return the widest middle half of the rounds of one format, as a share of its median."""
    measured = [row for row in rows if row["time_s_median"] is not None]
    return max(
        ((row["time_s_high"] - row["time_s_low"]) / row["time_s_median"] for row in measured), default=0.0
    )


def _measured(rows: list[dict[str, Any]]) -> int:
    return sum(row["rounds"] > 0 for row in rows)


def _is_cut_short(row: dict[str, Any]) -> bool:
    """Return whether a low format was left out because one call takes too long."""
    is_left_out = row["rounds"] == 0 and not row["out_of_time"]
    return is_left_out and row["expected_time_s"] is not None and row["format"] != "fp32"


def _known(rows: list[dict[str, Any]]) -> dict[str, float | _Skipped]:
    return {
        row["format"]: row["time_s_low"]
        or _Skipped(row["reason"], row["expected_time_s"], row["out_of_time"])
        for row in rows
    }


@dataclass(frozen=True, slots=True)
class _Skipped:
    """Why a shape is not measured; ``expected_s`` is the estimated time of a call."""

    reason: str
    expected_s: float | None = None
    out_of_time: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    device: str
    budget: Budget
    clock: Clock
    deadline: float
    longest_s: float

    def estimate(
        self, work: Work, format_name: str, progress: Callable[[str], None]
    ) -> dict[Shape, float | _Skipped]:
        """Return the seconds of one call at each shape, from the smallest up, or why it is not made.

        A shape is tried only if the time of the one before it, scaled up, is below ``longest_s``. Overhead
        makes the estimate from a small call too long; steps between the sizes limit that.
        """
        found: dict[Shape, float | _Skipped] = {}
        last: tuple[float, int] | None = None
        failure: _Skipped | None = None
        for shape in work.shapes:
            expected_s = None if last is None else last[0] * work.amount(shape) / last[1]
            if failure is not None:
                found[shape] = failure
            elif self.clock() > self.deadline - self.budget.device_s * _FOR_ROUNDS:
                found[shape] = self._out_of_time(expected_s)
            elif expected_s is not None and expected_s > self.longest_s:
                found[shape] = _Skipped(f"one call would take about {_seconds(expected_s)}", expected_s)
            else:
                progress(f"{self.device}: {work.kind.replace('_', ' ')} in {format_name}")
                try:
                    call = work.prepare(shape, format_name, self.device)
                    if last is None:
                        # The first backward pass of a process starts threads, which takes 0.3 s.
                        self._time(call, format_name, 1)
                    seconds = self._quickest(call, format_name)
                except (RuntimeError, NotImplementedError, TypeError) as error:
                    failure = found[shape] = _Skipped(f"torch cannot do it here: {first_line(error)}")
                    continue
                last = (seconds, work.amount(shape))
                too_long = _Skipped(f"one call takes {_seconds(seconds)}", seconds)
                found[shape] = too_long if seconds > self.longest_s else seconds
        return found

    def side_by_side(
        self, work: Work, shape: Shape, estimates: dict[str, float | _Skipped], share_s: float
    ) -> list[dict[str, Any]]:
        """Return one row for each format, from rounds in which all take turns and another one begins."""
        if self.clock() > self.deadline:
            estimates = {
                n: v if isinstance(v, _Skipped) else self._out_of_time(v) for n, v in estimates.items()
            }
        reasons = {name: value for name, value in estimates.items() if isinstance(value, _Skipped)}
        seconds = {name: value for name, value in estimates.items() if not isinstance(value, _Skipped)}
        times: dict[str, list[float]] = {name: [] for name in seconds}
        calls: dict[str, Callable[[], object]] = {}
        count: dict[str, int] = {}
        for name in list(times):
            count[name] = min(_MOST_CALLS, max(1, round(_SAMPLE_S / max(seconds[name], 1e-9))))
            try:
                calls[name] = work.prepare(shape, name, self.device)
                self._time(calls[name], name, 1)
            except RuntimeError as error:  # out of memory, now that there are several
                reasons[name] = _Skipped(f"torch cannot do it here: {first_line(error)}")
                del times[name]
        self._rounds(calls, times, count, share_s)
        for name in [name for name, measured in times.items() if len(measured) < _FEWEST_ROUNDS]:
            reasons[name] = self._out_of_time(seconds[name])
            del times[name]
        return [
            _row(work, shape, name, times=times, calls=count.get(name), skipped=reasons.get(name))
            for name in estimates
        ]

    def speed_below(
        self,
        work: Work,
        shape: Shape,
        name: str,
        estimates: dict[tuple[Work, Shape], dict[str, float | _Skipped]],
        found: dict[tuple[Work, Shape], list[dict[str, Any]]],
        share_s: float,
    ) -> dict[str, Any]:
        """Return the speed of a format at the largest size below ``shape`` at which it and fp32 can be timed.

        A size that is not among the rows of ``found`` is timed now, in rounds like any other.
        """
        below = work.shapes[: work.shapes.index(shape)]
        for step in reversed(below):
            both = {which: estimates[work, step][which] for which in ("fp32", name)}
            if any(isinstance(value, _Skipped) for value in both.values()):
                continue
            rows = found.get((work, step)) or self.side_by_side(work, step, both, share_s / 4)
            row = next(row for row in rows if row["format"] == name)
            speed = row["speed_against_fp32_high"]
            return {"speed_at_most": speed, "speed_at_most_shape": speed and row["shape"]}
        return {}

    def _rounds(
        self,
        calls: dict[str, Callable[[], object]],
        times: dict[str, list[float]],
        count: dict[str, int],
        share_s: float,
    ) -> None:
        names, start = list(times), self.clock()
        if len(names) == 1:
            # fp32 beside what was cut short: the time is better spent on the size at which both can be timed.
            share_s /= 4
        for index in range(_MOST_ROUNDS if names else 0):
            now = self.clock()
            if now > self.deadline or (index >= _ENOUGH_ROUNDS and now > start + share_s):
                return
            if index >= _FEWEST_ROUNDS and now > start + 2 * share_s:
                return
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                times[name].append(self._time(calls[name], name, count[name]))

    def _quickest(self, call: Callable[[], object], format_name: str) -> float:
        """Return the shortest of up to four calls: the first sets things up, another may be interrupted."""
        seconds = math.inf
        for allowed_s in (math.inf, self.longest_s, *[self.longest_s / 50] * 2):
            if seconds < allowed_s or seconds == math.inf:
                seconds = min(seconds, self._time(call, format_name, 1))
        return seconds

    def _time(self, call: Callable[[], object], format_name: str, calls: int) -> float:
        with float32_as("tf32" if format_name == "tf32" else "ieee"):
            self._wait()
            start = self.clock()
            for _ in range(calls):
                call()
            self._wait()
            return (self.clock() - start) / calls

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.accelerator.synchronize(torch.device(self.device))

    def _out_of_time(self, expected_s: float | None) -> _Skipped:
        reason = f"the time for this device, {_seconds(self.budget.device_s)}, was used up"
        return _Skipped(reason, expected_s, out_of_time=True)


def _row(
    work: Work,
    shape: Shape,
    name: str,
    *,
    times: dict[str, list[float]],
    calls: int | None,
    skipped: _Skipped | None,
) -> dict[str, Any]:
    measured = times.get(name)
    row: dict[str, Any] = {
        "kind": work.kind,
        "size": shape.size,
        "shape": work.tensor_shape(shape),
        "format": name,
        "rounds": len(measured) if measured else 0,
        "calls_per_round": calls if measured else None,
        "reason": skipped.reason if skipped else None,
        "expected_time_s": skipped.expected_s if skipped else None,
        "out_of_time": bool(skipped and skipped.out_of_time),
    }
    low, middle, high = _quartiles(measured)
    row |= {"time_s_median": middle, "time_s_low": low, "time_s_high": high}
    done = {"element" if work.kind == "add" else "flop": work.amount(shape)}
    if work.kind == "add":
        done["byte"] = done["element"] * 3 * DTYPES[name].itemsize
    for unit in ("flop", "element", "byte"):
        row[f"rate_{unit}_per_s"] = done[unit] / middle if unit in done and middle else None
    reference = times.get("fp32")
    pairs = [a / b for a, b in zip(reference, measured, strict=False)] if reference and measured else None
    low, middle, high = _quartiles(pairs)
    return row | {
        "speed_against_fp32": middle,
        "speed_against_fp32_low": low,
        "speed_against_fp32_high": high,
        "speed_at_most": None,
        "speed_at_most_shape": None,
    }


def _quartiles(numbers: list[float] | None) -> tuple[float | None, float | None, float | None]:
    if not numbers:
        return None, None, None
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, middle, high


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
