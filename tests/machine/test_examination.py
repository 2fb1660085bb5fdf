"""What ``doctor`` finds: rates that are kept, formats that are slow by them, and devices that fail."""

import errno
import json
import os
from pathlib import Path

import pytest

from kept_rates import keep_rates
from narrowcast.machine import Budget, Choice, _auto, _slow_formats, examine, slow_formats
from narrowcast.machine import _examination as examination
from narrowcast.machine._kept_rates import rates_path, read_rates
from narrowcast.machine._rates import Rate


@pytest.fixture
def measured(monkeypatch):
    """A quiet machine, on which each GPU is broken; the devices that were measured."""
    devices = []

    def measure(device, works, *_, **__):
        if device.startswith("cuda"):
            raise RuntimeError("CUDA error: an illegal instruction\nand more")
        devices.append(device)
        rates = []
        for work in works:
            for shape in work.shapes:
                if shape.size:
                    rates += [rate(name, 2.0, work.tensor_shape(shape), work.kind) for name in work.formats]
        return rates

    monkeypatch.setattr(examination, "measure_device", measure)
    monkeypatch.setattr(_auto, "measure_device", measure)
    return devices


def rate(format_name, speed, shape=(512, 512), kind="matmul", **more):
    ends = {f"speed_against_fp32{end}": speed for end in ("", "_low", "_high")}
    fields = {"kind": kind, "size": None, "shape": list(shape), "format": format_name, "rounds": 9}
    return Rate(**fields | ends | more)


def shaken(low, high):
    """The middle half of the ratios of a rate that was measured on a busy machine."""
    return {"speed_against_fp32_low": low, "speed_against_fp32_high": high}


# ---- rates that are kept


def test_rates_are_kept_until_asked_for_anew(tmp_path, measured):
    first = examine(cache=tmp_path)
    assert (first["rates"]["source"], first["notes"]) == ("measured", [])
    second = examine(cache=tmp_path)
    assert second["rates"] == first["rates"] | {"source": "cache"}
    path = Path(first["rates"]["file"])
    assert len(list(path.parent.iterdir())) == 2, "these and those for auto; nothing half-written is left"
    assert "choice" not in path.read_text(), "it follows from the rates"
    assert first["rates"]["devices"][0]["choice"]["because"].startswith("measured on ")
    count = len(measured)
    fresh = examine(cache=tmp_path, fresh=True)
    assert (fresh["rates"]["source"], len(measured)) == ("measured", 2 * count)
    other = examine(cache=tmp_path, budget=Budget(device_s=0.3))
    assert other["rates"]["file"] != first["rates"]["file"]
    assert json.loads(json.dumps(first, allow_nan=False)) == first


def test_incomplete_rates_are_not_kept(tmp_path, monkeypatch, measured):
    late = [rate("bf16", None, rounds=0, reason="used up", out_of_time=True), rate("fp32", 1.0)]
    monkeypatch.setattr(examination, "measure_device", lambda *_, **__: late)
    for _ in range(2):
        found = examine(cache=tmp_path)
        assert (found["rates"]["source"], found["rates"]["file"]) == ("measured", None)
        assert "1 of 2 cells not measured; try again when this machine is quiet" in found["notes"][-1]


@pytest.mark.parametrize("content", ["{", '{"key": 1, "rates": {}}'], ids=["damaged", "foreign"])
def test_a_damaged_or_foreign_file_is_written_anew(tmp_path, measured, content):
    path = Path(examine(cache=tmp_path)["rates"]["file"])
    path.write_text(content)
    found = examine(cache=tmp_path)
    note = f"{path} is damaged, or of another machine or version: measured anew"
    assert (found["rates"]["source"], found["notes"]) == ("measured", [note])
    assert examine(cache=tmp_path)["rates"]["source"] == "cache"


def test_a_cache_that_cannot_be_used_is_a_note(tmp_path, measured):
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    found = examine(cache=cache)
    assert found["rates"]["file"] is None
    assert f"{cache / 'rates'}: {os.strerror(errno.ENOTDIR)}; set NARROWCAST_CACHE_DIR" in found["notes"][0]
    assert "there is no home folder" in examine()["notes"][0]
    path = rates_path(tmp_path, {"cpu": "a"})
    path.mkdir(parents=True)
    why = f"{path} cannot be read ({os.strerror(errno.EISDIR)})"
    assert read_rates(tmp_path, {"cpu": "a"}) == (None, why)


# ---- formats that are slow


def test_rates_say_which_formats_are_slow(monkeypatch):
    """Measured matmuls count for more than what is known of the kind of CPU; noise counts for nothing."""
    monkeypatch.setattr(_slow_formats, "known_to_be_slow", lambda name, kind: f"known of {kind}s")
    monkeypatch.setattr(_slow_formats, "best_format", lambda _: Choice(format="bf16", because=""))

    def said(*rates):
        return slow_formats(["fp16"], "cpu", list(rates))

    conv = rate("fp16", 0.2, (1, 64, 32, 32), "convolution")
    assert said(rate("fp16", 0.1, (64, 64)), rate("fp16", 0.62), conv) == [
        "fp16 on this CPU is slow, as measured forward and backward against fp32: 1.6x slower in matmuls "
        "of 512 x 512 and 5x slower in convolutions of 1 x 64 x 32 x 32: train with --policy bf16 or "
        "--policy fp32"
    ]
    assert said(rate("fp16", 2.0)) == ["known of convolutions: train with --policy bf16 or --policy fp32"]
    fast = rate("fp16", 1.5, (1, 64, 32, 32), "convolution")
    assert said(rate("fp16", 2.0), fast) == [], "rates have the backward pass"
    known = ["known of matmuls; known of convolutions: train with --policy bf16 or --policy fp32"]
    assert said(rate("fp16", 0.1, **shaken(0.02, 3.0))) == said(rate("bf16", 0.1)) == known


def test_a_larger_size_that_may_be_fast_leaves_open_what_is_slow(monkeypatch):
    monkeypatch.setattr(_slow_formats, "known_to_be_slow", lambda name, kind: None)
    monkeypatch.setattr(_slow_formats, "best_format", lambda _: Choice(format="bf16", because=""))

    def said(*rates):
        return slow_formats(["fp16"], "cpu", list(rates))

    small = rate("fp16", 0.6, (64, 64))
    large = rate("fp16", None, (2048, 2048))
    assert "1.7x slower in matmuls of 64 x 64:" in said(small)[0]
    assert said(small, rate("fp16", 2.0, **shaken(0.7, 3.0))) == said(small, large) == []
    # One that was cut short is slow, unless fp32 was as well: then the machine was busy.
    cut = rate("fp16", None, (2048, 2048), speed_at_most=0.02, speed_at_most_shape=[512, 512])
    fp32 = rate("fp32", 1.0, (2048, 2048))
    assert "fp32: 50x slower in matmuls of 512 x 512:" in said(small, fp32, cut)[0]
    fp32 = rate("fp32", None, (2048, 2048))
    assert "1.7x slower in matmuls of 64 x 64:" in said(small, fp32, cut)[0]
    # Nor is a small one proof that large ones are fast.
    monkeypatch.setattr(_slow_formats, "known_to_be_slow", lambda name, kind: f"known of {kind}s")
    assert said(rate("fp16", 2.0, (64, 64)), large)[0].startswith("known of matmuls")


def test_the_kept_rates_of_auto_decide_what_is_slow(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    keep_rates(tmp_path, (0.5, 0.5, 0.5))
    assert "against fp32: 2x slower in matmuls of 512 x 512" in slow_formats(["bf16"], "cpu")[0]
    keep_rates(tmp_path, (2.0, 2.0, 2.0))
    assert slow_formats(["bf16"], "cpu") == []


# ---- devices


def with_gpus(monkeypatch, facts, *gpus, **of_torch):
    """Have this machine these GPUs."""
    common = {"device_type": "cuda", "memory_bytes": 1, "capability": "9.0", "name": "X", "gfx": None}
    changed = {"gpus": [common | gpu for gpu in gpus], "torch": facts["torch"] | of_torch}
    monkeypatch.setattr(examination, "gather_facts", lambda: facts | changed)


def test_a_gpu_that_fails_is_a_finding(monkeypatch, measured):
    facts = examine()["facts"]
    with_gpus(
        monkeypatch, facts, {"device": "cuda:0"}, {"device": "cuda:1"}, {"device": "cuda:2", "name": "Y"}
    )
    cpu, *gpus = examine()["rates"]["devices"]
    assert cpu["rows"]
    assert [gpu["device"] for gpu in gpus] == ["cuda:0", "cuda:2"], "one of each kind"
    assert {gpu["reason"] for gpu in gpus} == {"CUDA error: an illegal instruction"}


def test_a_gpu_without_kernels_is_not_measured(monkeypatch, measured):
    built = {"architectures": ["sm_90"], "build": "cuda", "cuda": "13.0", "cudnn": 1}
    with_gpus(monkeypatch, examine()["facts"], {"device": "cuda:0", "capability": "5.0"}, **built)
    found = examine()
    assert found["mismatches"][0]["device"] == "cuda:0"
    assert [device["device"] for device in found["rates"]["devices"]] == ["cpu"]
