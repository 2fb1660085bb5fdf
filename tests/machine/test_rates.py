"""Rates on a clock of our own, where every number is known; and a short real measurement of this CPU."""

import errno
import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kept_rates import keep_rates, rows_of
from narrowcast.errors import SettingError
from narrowcast.machine import (
    Budget,
    Choice,
    _rates,
    arithmetic_settings,
    best_format,
    examine,
    slow_formats,
)
from narrowcast.machine import _examination as examination
from narrowcast.machine._examination import kept_rows, rates_path, read_rates
from narrowcast.machine._rates import Shape, Work, has_tf32, measure_device, work_for, work_for_auto

SHORT = Budget(device_s=0.4, call_s=0.05)
NUMBERS = [
    "time_s_median", "time_s_low", "time_s_high", "rate_flop_per_s", "rate_element_per_s", "rate_byte_per_s",
    "speed_against_fp32", "speed_against_fp32_low", "speed_against_fp32_high",
]  # fmt: skip


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
    """Work that takes ``seconds(format, shape, number of the call)``, and otherwise looks like ``Work``."""

    kind = "add"
    shapes = SIZES

    def __init__(self, clock, seconds, formats=("fp32", "bf16")):
        self.clock, self.seconds, self.formats = clock, seconds, formats
        self.made = 0

    def amount(self, shape):
        return shape.numbers[0]

    def flop_count(self, shape):
        return None

    def element_count(self, shape):
        return shape.numbers[0]

    def tensor_shape(self, shape):
        return list(shape.numbers)

    def prepare(self, shape, format_name, device):
        def call():
            self.made += 1
            self.clock.call(self.seconds(format_name, shape.numbers[0], self.made))

        return call


def measured(work, budget=None):
    rows = measure_device("cpu", (work,), budget or Budget(), clock=work.clock)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    return {(row["size"], row["format"]): row for row in rows}


def test_every_number_follows_from_the_times():
    work = Made(Clock(), lambda name, n, _: n * (0.001 if name == "fp32" else 0.00025))
    rows = measured(work, Budget(device_s=1000, call_s=10))
    assert list(rows) == [(s, f) for s in ("small", "medium", "large") for f in ("fp32", "bf16")]
    row = rows["medium", "bf16"]
    assert row["time_s_median"] == pytest.approx(0.016)
    assert row["rate_element_per_s"] == pytest.approx(4000)
    assert row["rate_byte_per_s"] == pytest.approx(4000 * 3 * 2)
    assert rows["medium", "fp32"]["rate_byte_per_s"] == pytest.approx(1000 * 3 * 4)
    assert row["rate_flop_per_s"] is None
    assert row["speed_against_fp32"] == pytest.approx(4)
    assert row["rounds"] == 31
    # Two milliseconds at least are timed together: eight calls of 0.25 ms.
    assert [rows[s, "bf16"]["calls_per_round"] for s in ("small", "medium", "large")] == [8, 1, 1]
    assert row["reason"] is None
    assert row["expected_time_s"] is None


def test_a_call_that_would_take_too_long_is_never_made():
    clock = Clock()
    work = Made(clock, lambda name, n, _: n * (1e-4 if name == "fp32" else 0.03))
    rows = measured(work, Budget(device_s=1000, call_s=0.5))
    assert max(clock.calls_s) <= 0.5
    assert rows["small", "bf16"]["rounds"]
    assert rows["medium", "bf16"]["reason"] == "one call would take about 1.9 s"
    assert rows["medium", "bf16"]["expected_time_s"] == pytest.approx(1.92)
    assert rows["large", "bf16"]["reason"] == "one call would take about 15.4 s"
    assert all(rows["large", "bf16"][name] is None for name in NUMBERS)
    assert rows["large", "fp32"]["speed_against_fp32"] == 1


def test_the_time_for_a_device_is_kept():
    """Operands that take a second to make use it up: five at first, then two a size."""
    clock = Clock()
    start = clock()

    class Slow(Made):
        def prepare(self, shape, format_name, device):
            clock.now_s += 1
            return super().prepare(shape, format_name, device)

    rows = measured(Slow(clock, lambda name, n, _: 0.0001), Budget(device_s=8.0))
    assert clock() - start <= 8.0 + 2 + 0.1, "what began in time is finished"
    assert rows["small", "fp32"]["rounds"] >= 3
    for name in ("fp32", "bf16"):
        assert rows["large", name]["reason"] == "the time for this device, 8.0 s, was used up"
        assert rows["large", name]["expected_time_s"] > 0


def test_no_call_takes_more_than_a_thirtieth_of_the_time():
    work = Made(Clock(), lambda name, n, _: n * 0.01)
    assert measured(work, Budget(device_s=3.0, call_s=10.0))["small", "bf16"]["rounds"]
    assert max(work.clock.calls_s) <= 0.1


def test_what_is_cut_short_has_the_speed_of_a_smaller_size():
    """Of a step that is not shown, or of a row; in rounds that take turns, never from one call."""
    work = Made(Clock(), lambda name, n, _: n * (1e-4 if name == "fp32" else 0.01))
    rows = measured(work, Budget(device_s=1000, call_s=0.5))
    assert rows["medium", "bf16"]["rounds"] == 0
    for size in ("medium", "large"):
        assert rows[size, "bf16"]["speed_at_most"] == pytest.approx(0.01)
        assert rows[size, "bf16"]["speed_at_most_shape"] == [8]
        assert rows[size, "fp32"]["speed_at_most"] is None
    assert rows["small", "bf16"]["speed_at_most"] is None, "it was measured"


def test_gradients_are_timed_where_the_caller_turned_them_off():
    (work, *_) = work_for("cpu")
    with torch.inference_mode():
        rows = measure_device(
            "cpu", (Work(kind=work.kind, formats=("fp32",), shapes=work.shapes[:2]),), SHORT
        )
    assert rows[0]["reason"] is None


def test_a_busy_machine_slows_all_formats_and_changes_no_ratio():
    def seconds(name, n, index):
        busy = 1 + 10 * (index // 50 % 2)
        return busy * n * (0.01 if name == "fp32" else 0.005)

    rows = measured(Made(Clock(), seconds), Budget(device_s=1000, call_s=1000))
    for size in ("small", "medium", "large"):
        assert rows[size, "bf16"]["speed_against_fp32"] == pytest.approx(2)
        assert rows[size, "bf16"]["speed_against_fp32_low"] <= 2


def test_what_was_disturbed_is_measured_once_more():
    """The second half of the first rounds takes a hundred times as long; later, nothing does."""
    clock = Clock()

    def seconds(name, n, index):
        return 0.01 * n * (100 if 20 < index < 60 else 1)

    rows = measured(Made(clock, seconds), Budget(device_s=1e6, call_s=1e3))
    assert rows["small", "fp32"]["time_s_high"] == pytest.approx(0.01)
    assert rows["small", "fp32"]["time_s_median"] == pytest.approx(0.01)
    late = {"format": "bf16", "time_s_low": None, "reason": "", "expected_time_s": 1.0, "out_of_time": True}
    assert _rates._known([late])["bf16"].out_of_time, "then too"


def test_formats_take_turns():
    order = []

    def seconds(name, n, index):
        order.append((name, n))
        return 0.1

    measured(Made(Clock(), seconds, ("fp32", "bf16", "fp16")), Budget(device_s=1e6, call_s=1e3))
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

    rows = measured(Made(Clock(), seconds))
    assert rows["small", "bf16"]["rounds"]
    for size in ("medium", "large"):
        assert rows[size, "bf16"]["reason"] == 'torch cannot do it here: "addmm" not implemented for it'
        assert rows[size, "fp32"]["rounds"]


@pytest.mark.parametrize(
    ("name", "value"), [("device_s", 0), ("device_s", math.nan), ("call_s", -1.0), ("call_s", math.inf)]
)
def test_a_budget_is_a_time(name, value):
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
    found = {one: has_tf32({"capability": one}) for one in ("8.0", "12.1", "7.5", None)}
    assert found == {"8.0": True, "12.1": True, "7.5": False, None: False}


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_fp32_is_exact_while_measured_and_as_before_afterwards(precision):
    seen, backends = [], torch.backends

    def seconds(name, n, _):
        seen.append((name, backends.cuda.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision))
        if len(seen) == 100:
            raise KeyError("in the middle of it")
        return 0.1

    torch.set_float32_matmul_precision(precision)
    try:
        before = arithmetic_settings()
        work = Made(Clock(), seconds, ("fp32", "tf32"))
        with pytest.raises(KeyError):
            measured(work, Budget(device_s=1e6, call_s=1e3))
        assert arithmetic_settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {("fp32", "ieee", "ieee"), ("tf32", "tf32", "tf32")}


@pytest.fixture(scope="module")
def short():
    """A real measurement of this CPU, as short as can be."""
    return measure_device("cpu", work_for("cpu"), Budget(device_s=2.5, call_s=0.05))


def test_a_real_measurement_is_consistent(short):
    assert json.loads(json.dumps(short, allow_nan=False)) == short
    assert len(short) == 4 * 3 * 3
    assert any(row["rounds"] for row in short)
    for row in short:
        if not row["rounds"]:
            assert row["reason"]
            assert all(row[name] is None for name in NUMBERS)
            continue
        assert 0 < row["time_s_low"] <= row["time_s_median"] <= row["time_s_high"]
        assert (row["rate_flop_per_s"] or row["rate_element_per_s"]) > 0
        assert (row["rate_byte_per_s"] is None) == (row["kind"] != "add")
        if row["speed_against_fp32"] is not None:
            low, high = row["speed_against_fp32_low"], row["speed_against_fp32_high"]
            assert 0 < low <= row["speed_against_fp32"] <= high


@pytest.mark.gpu
def test_a_real_gpu_is_measured_in_every_format():
    found = examine(budget=Budget(device_s=5.0))
    gpu = next(device for device in found["rates"]["devices"] if device["device_type"] == "cuda")
    matmuls = [row for row in gpu["rows"] if row["kind"] == "matmul"]
    assert {row["format"] for row in matmuls} >= {"fp32", "bf16", "fp16"}
    assert all(row["rounds"] for row in matmuls if row["size"] == "small")
    assert gpu["choice"]["format"] in ("bf16", "fp16")
    assert not [wrong for wrong in found["mismatches"] if wrong["severity"] == "error"]


def row(format_name, speed, shape=(512, 512), kind="matmul"):
    where = {"kind": kind, "shape": list(shape), "format": format_name, "out_of_time": False}
    ends = {f"speed_against_fp32{end}": speed for end in ("", "_low", "_high")}
    return where | ends | dict.fromkeys(("expected_time_s", "speed_at_most", "speed_at_most_shape"))


def shaken(low, high):
    """The middle half of the ratios of a row that was measured on a busy machine."""
    return {"speed_against_fp32_low": low, "speed_against_fp32_high": high}


def test_rates_say_which_formats_are_slow(monkeypatch):
    """Measured matmuls count for more than what is known of the kind of CPU; noise counts for nothing."""
    monkeypatch.setattr(examination, "known_to_be_slow", lambda name, kind: f"known of {kind}s")
    monkeypatch.setattr(examination, "best_format", lambda _: Choice(format="bf16", because=""))

    def said(*rows):
        return slow_formats(["fp16"], "cpu", list(rows))

    conv = row("fp16", 0.2, (1, 64, 32, 32), "convolution")
    assert said(row("fp16", 0.1, (64, 64)), row("fp16", 0.62), conv) == [
        "fp16 on this CPU is slow, as measured forward and backward against fp32: 1.6x slower in matmuls of "
        "512 x 512 and 5x slower in convolutions of 1 x 64 x 32 x 32: use --policy bf16 or --policy fp32"
    ]
    assert said(row("fp16", 2.0)) == ["known of convolutions: use --policy bf16 or --policy fp32"]
    fast = row("fp16", 1.5, (1, 64, 32, 32), "convolution")
    assert said(row("fp16", 2.0), fast) == [], "rates have the backward pass"
    known = ["known of matmuls; known of convolutions: use --policy bf16 or --policy fp32"]
    assert said(row("fp16", 0.1) | shaken(0.02, 3.0)) == said(row("bf16", 0.1)) == known
    # A larger one that may be fast leaves it open; one that was cut short, since it is long, does not.
    small, large = row("fp16", 0.6, (64, 64)), row("fp16", None, (2048, 2048))
    cut = large | {"speed_at_most": 0.02, "speed_at_most_shape": [512, 512]}
    fp32 = row("fp32", 1.0, (2048, 2048))
    assert "fp32: 50x slower in matmuls of 512 x 512;" in said(small, fp32, cut)[0]
    assert "50x" not in said(small, cut)[0], "fp32 was too slow as well: the machine was busy"
    fast, late = row("fp16", 2.0) | shaken(0.7, 3.0), large | {"out_of_time": True}
    assert said(small, fast) == said(small, late) == said(small, large) == known
    assert said(row("fp16", 2.0, (64, 64)), large) == known, (
        "nor is a small one proof that large ones are fast"
    )


@pytest.fixture
def fully_measured(monkeypatch, short):
    """Devices that were measured, all of them at once and in full."""
    devices = []
    whole = [row | {"out_of_time": False} for row in short]

    def measure(device, works, *_, **__):
        devices.append(device)
        return list(whole) if len(works) == 4 else rows_of(works[0].formats[1], (2.0, 2.0, 2.0))

    monkeypatch.setattr(examination, "measure_device", measure)
    return devices


def test_rates_are_kept_until_asked_for_anew(tmp_path, fully_measured):
    first = examine(cache=tmp_path, budget=SHORT)
    assert (first["rates"]["source"], first["notes"]) == ("measured", [])
    second = examine(cache=tmp_path, budget=SHORT)
    assert second["rates"] == first["rates"] | {"source": "cache"}
    path = Path(first["rates"]["file"])
    assert len(list(path.parent.iterdir())) == 2, "these and those for auto; nothing half-written is left"
    assert "choice" not in path.read_text(), "it follows from the rates"
    assert first["rates"]["devices"][0]["choice"]["because"].startswith("measured on ")
    count = len(fully_measured)
    fresh = examine(cache=tmp_path, fresh=True, budget=SHORT)
    assert (fresh["rates"]["source"], len(fully_measured)) == ("measured", 2 * count)
    other = examine(cache=tmp_path, budget=Budget(device_s=0.3))
    assert other["rates"]["file"] != first["rates"]["file"]
    assert json.loads(json.dumps(first, allow_nan=False)) == first


def test_kept_rates_decide_what_is_slow(tmp_path, monkeypatch, fully_measured):
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    path = Path(examine(cache=tmp_path, budget=SHORT)["rates"]["file"])
    kept = json.loads(path.read_bytes())
    assert kept_rows() == kept["rates"]["devices"][0]["rows"]
    kept["rates"]["devices"][0]["rows"] = [row("bf16", 0.06)]
    path.write_text(json.dumps(kept))
    assert "against fp32: 17x slower in matmuls of 512" in slow_formats(["bf16"], "cpu")[0]
    kept["key"]["cpu"]["torch_threads"] += 1
    path.write_text(json.dumps(kept))
    path.with_name("damaged.json").write_text("[]")
    assert {row["size"] for row in kept_rows()} == {"medium"}, "other threads, other rates: those for auto"
    keep_rates(tmp_path, (0.5, 0.5, 0.5))
    assert "against fp32: 2x slower in matmuls of 512 x 512" in slow_formats(["bf16"], "cpu")[0]


def test_rates_without_backward_passes_decide_nothing(tmp_path, monkeypatch, fully_measured):
    """An earlier version kept them; what measures says so and measures anew, and anything else says so."""
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as earlier:
        earlier.setattr(examination, "CACHE_FORMAT", 2)
        old = Path(examine(cache=tmp_path, budget=SHORT)["rates"]["file"])
        keep_rates(tmp_path, (0.5, 0.5, 0.5))
    assert best_format("cpu").because.endswith(
        "by the table, since the kept rates are of an earlier version, which did not time backward passes"
    )
    assert kept_rows() == []
    said = (
        "the rates that an earlier version kept here are not used: they have no backward passes; narrowcast"
    )
    assert slow_formats(["bf16"], "cpu")[0].startswith(said)
    assert slow_formats(["fp32"], "cpu") == []
    found = examine(cache=tmp_path, budget=SHORT)
    assert (
        f"{old} is of an earlier version, which did not time backward passes: measured anew" in found["notes"]
    )
    assert len(found["notes"]) == 2, "and those for auto"
    assert found["rates"]["source"] == "measured"
    assert best_format("cpu").because.startswith("measured on ")
    assert not any(said in one for one in slow_formats(["bf16"], "cpu"))
    assert examine(cache=tmp_path, budget=SHORT)["notes"] == []


def test_incomplete_rates_are_not_kept(tmp_path, monkeypatch, short):
    late = [short[0] | {"out_of_time": True}, *short[1:]]
    monkeypatch.setattr(examination, "measure_device", lambda *_, **__: late)
    for _ in range(2):
        found = examine(cache=tmp_path, budget=SHORT)
        assert (found["rates"]["source"], found["rates"]["file"]) == ("measured", None)
        assert "cells not measured; try again when this machine is quiet" in found["notes"][-1]


@pytest.mark.parametrize(("fp32", "bf16"), [(50e9, 1.2e9), (50e9, 0.05e9), (6e9, 0.01e9), (150e9, 400e9)])
def test_the_set_for_auto_ends_in_time(fp32, bf16):
    """On CPUs that emulate bf16 too, where a matmul of 2048 takes 14 s."""
    clock = Clock()

    class OnThisCpu(Work):
        def prepare(self, shape, format_name, device):
            return lambda: clock.call(self.amount(shape) / (fp32 if format_name == "fp32" else bf16) + 1e-5)

    works = tuple(
        OnThisCpu(kind=one.kind, formats=one.formats, shapes=one.shapes)
        for one in work_for_auto("cpu", "bf16")
    )
    rows = measure_device("cpu", works, Budget(device_s=2.0), clock=clock)
    assert clock() - 100.0 < 2.2
    speeds = examination._auto_speeds(rows, "bf16", "fp32")
    assert len(speeds) == 3
    for speed in speeds.values():
        # At a smaller size what each call costs anyway weighs more.
        assert 0.5 * bf16 / fp32 < speed < 1.5 * bf16 / fp32 + 0.005


def test_the_dearest_cells_are_left_out():
    """A busy machine measures what is cheap first, and has estimates for the rest."""
    clock = Clock()
    dear, cheap = (Made(clock, lambda name, n, _, cost=cost: n * cost) for cost in (4e-4, 4e-5))
    cheap.kind = "convolution"
    rows = measure_device("cpu", (dear, cheap), Budget(device_s=3.0, call_s=10.0), clock=clock)
    late = [(row["kind"], row["size"]) for row in rows if row["out_of_time"]]
    assert late == []
    assert all(row["rounds"] or row["expected_time_s"] for row in rows)


BROKEN = "is damaged, or of another machine or version"


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b'{"key": 1, "rates": {}}'],
    ids=["cut", "bytes", "deep", "a list", "foreign"],
)
def test_a_damaged_or_foreign_file_is_written_anew(tmp_path, fully_measured, content):
    path = Path(examine(cache=tmp_path, budget=SHORT)["rates"]["file"])
    path.write_bytes(content)
    found = examine(cache=tmp_path, budget=SHORT)
    assert (found["rates"]["source"], found["notes"]) == ("measured", [f"{path} {BROKEN}: measured anew"])
    assert examine(cache=tmp_path, budget=SHORT)["rates"]["source"] == "cache"


def test_a_cache_that_cannot_be_used_is_a_note(tmp_path, fully_measured):
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    found = examine(cache=cache, budget=SHORT)
    assert found["rates"]["file"] is None
    assert f"{cache / 'rates'}: {os.strerror(errno.ENOTDIR)}; set NARROWCAST_CACHE_DIR" in found["notes"][0]
    assert "there is no home folder" in examine(budget=SHORT)["notes"][0]
    path = rates_path(tmp_path, {"cpu": "a"})
    path.mkdir(parents=True)
    assert read_rates(tmp_path, {"cpu": "a"}) == (
        None,
        f"{path} cannot be read ({os.strerror(errno.EISDIR)})",
    )


def test_a_gpu_that_fails_is_a_finding():
    facts = examine(budget=SHORT)["facts"]
    gpu = {"device_type": "cuda", "name": "X", "memory_bytes": 1, "capability": "9.0", "gfx": None}
    three = [gpu | {"device": "cuda:98"}, gpu | {"device": "cuda:99"}]
    three.append(gpu | {"device": "cuda:97", "name": "Y"})
    cpu, *gpus = examine(budget=SHORT, facts=facts | {"gpus": three})["rates"]["devices"]
    assert [device["device"] for device in gpus] == ["cuda:98", "cuda:97"], "one of each kind"
    assert cpu["rows"]
    for device in gpus:
        assert device["reason"] or all(row["reason"] for row in device["rows"])
    built = {"architectures": ["sm_90"], "build": "cuda", "cuda": "13.0", "cudnn": 1}
    old = [gpu | {"device": "cuda:0", "capability": "5.0"}]
    found = examine(budget=SHORT, facts=facts | {"gpus": old, "torch": facts["torch"] | built})
    assert found["mismatches"][0]["device"] == "cuda:0"
    assert [device["device"] for device in found["rates"]["devices"]] == ["cpu"], "without kernels"
