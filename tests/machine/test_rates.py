"""Rates on a clock of our own, where every number is known; and a short real measurement of this CPU."""

import itertools
import json
import math
from dataclasses import asdict

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from narrowcast.errors import SettingError
from narrowcast.machine import Budget, _auto, arithmetic_settings, examine
from narrowcast.machine._rates import measure_device
from narrowcast.machine._work import Shape, Work, has_tf32, work_for, work_for_auto

SHORT = Budget(device_s=0.4, call_s=0.05)
LONG = Budget(device_s=1e6, call_s=1e3)
NUMBERS = [
    "time_s_median", "time_s_low", "time_s_high", "rate_flop_per_s", "rate_element_per_s", "rate_byte_per_s",
    "speed_against_fp32", "speed_against_fp32_low", "speed_against_fp32_high",
]  # fmt: skip
# Keys of a row in the JSON of ``doctor``.
FIELDS = [
    *("kind", "size", "shape", "format", "rounds", "calls_per_round", "reason", "expected_time_s"),
    *("out_of_time", *NUMBERS, "speed_at_most", "speed_at_most_shape"),
]


class Clock:
    """Time that passes only in calls, and is remembered."""

    def __init__(self):
        self.now_s = 100.0
        self.calls_s = []

    def __call__(self):
        return self.now_s

    def call(self, seconds):
        self.calls_s.append(seconds)
        self.now_s += seconds


SIZES = (
    Shape(numbers=(1,), size="small"),
    Shape(numbers=(8,)),
    Shape(numbers=(64,), size="medium"),
    Shape(numbers=(512,), size="large"),
)


class Made:
    """Work that takes ``seconds(format, n of the shape, number of the call)``; otherwise like ``Work``."""

    kind = "add"
    shapes = SIZES

    def __init__(self, clock, seconds, formats=("fp32", "bf16")):
        self.clock, self.seconds, self.formats = clock, seconds, formats
        self.made = 0

    def amount(self, shape):
        return shape.numbers[0]

    def tensor_shape(self, shape):
        return list(shape.numbers)

    def prepare(self, shape, format_name, device):
        def call():
            self.made += 1
            self.clock.call(self.seconds(format_name, shape.numbers[0], self.made))

        return call


def measured(work, budget=None):
    rates = measure_device("cpu", (work,), budget or Budget(), clock=work.clock)
    return {(rate.size, rate.format): rate for rate in rates}


def test_every_number_follows_from_the_times():
    work = Made(Clock(), lambda name, n, _: n * (0.001 if name == "fp32" else 0.00025))
    rates = measured(work, Budget(device_s=1000, call_s=10))
    assert list(rates) == [(s, f) for s in ("small", "medium", "large") for f in ("fp32", "bf16")]
    rate = rates["medium", "bf16"]
    assert list(asdict(rate)) == FIELDS
    assert rate.time_s_median == pytest.approx(0.016)
    assert rate.rate_element_per_s == pytest.approx(4000)
    assert rate.rate_byte_per_s == pytest.approx(4000 * 3 * 2)
    assert rates["medium", "fp32"].rate_byte_per_s == pytest.approx(1000 * 3 * 4)
    assert rate.rate_flop_per_s is None
    assert rate.speed_against_fp32 == pytest.approx(4)
    assert rate.rounds == 31
    # Two milliseconds at least are timed together: eight calls of 0.25 ms.
    assert [rates[s, "bf16"].calls_per_round for s in ("small", "medium", "large")] == [8, 1, 1]
    assert rate.reason is None
    assert rate.expected_time_s is None


def test_a_call_that_would_take_too_long_is_never_made():
    clock = Clock()
    work = Made(clock, lambda name, n, _: n * (1e-4 if name == "fp32" else 0.03))
    rates = measured(work, Budget(device_s=1000, call_s=0.5))
    assert max(clock.calls_s) <= 0.5
    assert rates["small", "bf16"].rounds
    assert rates["medium", "bf16"].reason == "one call would take about 1.9 s"
    assert rates["medium", "bf16"].expected_time_s == pytest.approx(1.92)
    assert rates["large", "bf16"].reason == "one call would take about 15.4 s"
    assert all(getattr(rates["large", "bf16"], name) is None for name in NUMBERS)
    assert rates["large", "fp32"].speed_against_fp32 == 1


def test_no_call_takes_more_than_a_thirtieth_of_the_time():
    work = Made(Clock(), lambda name, n, _: n * 0.01)
    assert measured(work, Budget(device_s=3.0, call_s=10.0))["small", "bf16"].rounds
    assert max(work.clock.calls_s) <= 0.1


def test_the_time_for_a_device_is_kept():
    """Operands that take a second to make use it up: five at first, then two a size."""
    clock = Clock()
    start = clock()

    class Slow(Made):
        def prepare(self, shape, format_name, device):
            clock.now_s += 1
            return super().prepare(shape, format_name, device)

    rates = measured(Slow(clock, lambda name, n, _: 0.0001), Budget(device_s=8.0))
    assert clock() - start <= 8.0 + 2 + 0.1, "what began in time is finished"
    assert rates["small", "fp32"].rounds >= 3
    for name in ("fp32", "bf16"):
        assert rates["large", name].reason == "the time for this device, 8.0 s, was used up"
        assert rates["large", name].out_of_time
        assert rates["large", name].expected_time_s > 0


def test_the_cheapest_sizes_are_measured_first():
    clock = Clock()
    dear = Made(clock, lambda name, n, _: n * 4e-2)
    cheap = Made(clock, lambda name, n, _: n * 4e-4)
    cheap.kind = "matmul"
    said = []
    measure_device("cpu", (dear, cheap), LONG, clock=clock, progress=said.append)
    in_rounds = [line.removeprefix("cpu: ") for line in said if "," in line]
    # Of 0.4 ms, 26 ms, 40 ms, 0.2 s, 2.6 s and 20 s a call.
    sizes = ["matmul, small", "matmul, medium", "add, small", "matmul, large", "add, medium", "add, large"]
    assert in_rounds == sizes


def test_what_is_cut_short_has_the_speed_of_a_smaller_size():
    """Of a step that is not shown, or of a rate; in rounds that take turns, never from one call."""
    work = Made(Clock(), lambda name, n, _: n * (1e-4 if name == "fp32" else 0.01))
    rates = measured(work, Budget(device_s=1000, call_s=0.5))
    assert rates["medium", "bf16"].rounds == 0
    for size in ("medium", "large"):
        assert rates[size, "bf16"].speed_at_most == pytest.approx(0.01)
        assert rates[size, "bf16"].speed_at_most_shape == [8]
        assert rates[size, "fp32"].speed_at_most is None
    assert rates["small", "bf16"].speed_at_most is None, "it was measured"


def test_gradients_are_timed_where_the_caller_turned_them_off():
    (work, *_) = work_for("cpu")
    with torch.inference_mode():
        smallest = Work(kind=work.kind, formats=("fp32",), shapes=work.shapes[:2])
        rates = measure_device("cpu", (smallest,), SHORT)
    assert rates[0].reason is None


def test_a_busy_machine_slows_all_formats_and_changes_no_ratio():
    def seconds(name, n, index):
        busy = 1 + 10 * (index // 50 % 2)
        return busy * n * (0.01 if name == "fp32" else 0.005)

    rates = measured(Made(Clock(), seconds), LONG)
    for size in ("small", "medium", "large"):
        assert rates[size, "bf16"].speed_against_fp32 == pytest.approx(2)
        assert rates[size, "bf16"].speed_against_fp32_low <= 2


def test_what_was_disturbed_is_measured_once_more():
    """The second half of the first rounds takes a hundred times as long; later, nothing does."""

    def seconds(name, n, index):
        return 0.01 * n * (100 if 20 < index < 60 else 1)

    rates = measured(Made(Clock(), seconds), LONG)
    assert rates["small", "fp32"].time_s_high == pytest.approx(0.01)
    assert rates["small", "fp32"].time_s_median == pytest.approx(0.01)


def test_formats_take_turns():
    order = []

    def seconds(name, n, index):
        order.append((name, n))
        return 0.1

    measured(Made(Clock(), seconds, ("fp32", "bf16", "fp16")), LONG)
    small = [name for name, n in order if n == 1]
    rounds = [small[i : i + 3] for i in range(len(small) - 9, len(small), 3)]
    assert all(sorted(names) == ["bf16", "fp16", "fp32"] for names in rounds)
    assert len({names[0] for names in rounds}) == 3


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, TypeError])
def test_a_format_that_torch_lacks_is_a_reason(error):
    def seconds(name, n, _):
        if name == "bf16" and n >= 64:
            raise error('"addmm" not implemented for it\nand more')
        return 0.001

    rates = measured(Made(Clock(), seconds))
    assert rates["small", "bf16"].rounds
    for size in ("medium", "large"):
        assert rates[size, "bf16"].reason == 'torch cannot do it here: "addmm" not implemented for it'
        assert rates[size, "fp32"].rounds


@pytest.mark.parametrize(
    ("name", "value"), [("device_s", 0), ("device_s", math.nan), ("call_s", -1.0), ("call_s", math.inf)]
)
def test_a_budget_is_a_time_above_0(name, value):
    with pytest.raises(SettingError, match=f"expected {name} to be a number of seconds above 0, got {value}"):
        Budget(**{name: value})


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_work_is_counted_as_torch_counts_it(device_type):
    for work in work_for(device_type):
        amounts = [work.amount(shape) for shape in work.shapes]
        assert amounts == sorted(amounts)
        # A guess of half a second from the step below then stands for a call of 8 ms at least.
        assert max(b / a for a, b in itertools.pairwise(amounts)) <= 64
        assert [shape.size for shape in work.shapes if shape.size] == ["small", "medium", "large"]
        shape = work.shapes[0]
        for name in work.formats:
            call = work.prepare(shape, name, "cpu")
            with FlopCounterMode(display=False) as counter:
                result = call()
            assert counter.get_total_flops() == (0 if work.kind == "add" else amounts[0])
            dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
            assert result.dtype == dtypes[name]
        if work.kind == "add":
            assert result.numel() == amounts[0]


def test_tf32_is_for_matmuls_on_gpus_that_have_it():
    kinds = [work.kind for work in work_for("cuda", has_tf32=True) if "tf32" in work.formats]
    assert kinds == ["matmul", "convolution"]
    assert not any("tf32" in work.formats for work in work_for("cuda"))
    has = {capability: has_tf32({"capability": capability}) for capability in ("8.0", "12.1", "7.5", None)}
    assert has == {"8.0": True, "12.1": True, "7.5": False, None: False}


def test_fp32_is_exact_while_measured_and_as_before_afterwards():
    seen, backends = [], torch.backends

    def seconds(name, n, _):
        seen.append((name, backends.cuda.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision))
        if len(seen) == 100:
            raise KeyError("in the middle of it")
        return 0.1

    torch.set_float32_matmul_precision("high")
    try:
        before = arithmetic_settings()
        work = Made(Clock(), seconds, ("fp32", "tf32"))
        with pytest.raises(KeyError):
            measured(work, LONG)
        assert arithmetic_settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {("fp32", "ieee", "ieee"), ("tf32", "tf32", "tf32")}


def test_a_real_measurement_is_consistent():
    works = work_for("cpu")
    works[0].prepare(works[0].shapes[0], "fp32", "cpu")()  # starts threads, which may take long
    rates = measure_device("cpu", works, Budget(device_s=2.5, call_s=0.05))
    assert len(rates) == 4 * 3 * 3
    assert any(rate.rounds for rate in rates)
    for rate in rates:
        row = asdict(rate)
        assert json.loads(json.dumps(row, allow_nan=False)) == row
        if not rate.rounds:
            assert rate.reason
            assert all(row[name] is None for name in NUMBERS)
            continue
        assert 0 < rate.time_s_low <= rate.time_s_median <= rate.time_s_high
        assert (rate.rate_flop_per_s or rate.rate_element_per_s) > 0
        assert (rate.rate_byte_per_s is None) == (rate.kind != "add")
        if rate.speed_against_fp32 is not None:
            low, high = rate.speed_against_fp32_low, rate.speed_against_fp32_high
            assert 0 < low <= rate.speed_against_fp32 <= high


@pytest.mark.gpu
def test_a_real_gpu_is_measured_in_every_format():
    found = examine(budget=Budget(device_s=5.0))
    gpu = next(device for device in found["rates"]["devices"] if device["device_type"] == "cuda")
    matmuls = [row for row in gpu["rows"] if row["kind"] == "matmul"]
    assert {row["format"] for row in matmuls} >= {"fp32", "bf16", "fp16"}
    assert all(row["rounds"] for row in matmuls if row["size"] == "small")
    assert gpu["choice"]["format"] in ("bf16", "fp16")
    assert not [wrong for wrong in found["mismatches"] if wrong["severity"] == "error"]


@pytest.mark.parametrize(("fp32", "bf16"), [(50e9, 1.2e9), (50e9, 0.05e9), (6e9, 0.01e9), (150e9, 400e9)])
def test_the_set_for_auto_ends_in_time(fp32, bf16):
    """On CPUs that emulate bf16 too, where a matmul of 2048 takes 14 s."""
    clock = Clock()

    class OnThisCpu(Work):
        def prepare(self, shape, format_name, device):
            return lambda: clock.call(self.amount(shape) / (fp32 if format_name == "fp32" else bf16) + 1e-5)

    works = tuple(
        OnThisCpu(kind=work.kind, formats=work.formats, shapes=work.shapes)
        for work in work_for_auto("cpu", "bf16")
    )
    rates = measure_device("cpu", works, Budget(device_s=2.0), clock=clock)
    assert clock() - 100.0 < 2.2
    speeds = _auto.auto_speeds(rates, "bf16", "fp32")
    assert len(speeds) == 3
    for speed in speeds.values():
        # At a smaller size what each call costs anyway weighs more.
        assert 0.5 * bf16 / fp32 < speed < 1.5 * bf16 / fp32 + 0.005
