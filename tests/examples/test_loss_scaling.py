"""The example: no gradients without a scale, no steps under a huge one, and it learns under a dynamic one."""

import re
from typing import NamedTuple

import pytest
from example_runs import run, succeeded
from matplotlib.image import imread


class Row(NamedTuple):
    loss_left: float
    zeros: str  # share of the gradients; "-" where none were counted
    skipped: int
    last_scale: float


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The rows of the printed table, by the name of the training."""
    folder = tmp_path_factory.mktemp("loss_scaling")
    lines = succeeded(
        run("loss_scaling.py", "--steps", "60", "--device", "cpu", folder=folder, OMP_NUM_THREADS="1")
    )
    assert lines[-1] == "picture loss_scaling.png"
    assert imread(folder / "loss_scaling.png").shape[:2] == (900, 1350)
    rows = [re.fullmatch(r"(\S.*?) {2,}(\S+) +(\S+) +(\d+) of 60 +(\S+)", line) for line in lines]
    return {row[1]: Row(float(row[2]), row[3], int(row[4]), float(row[5])) for row in rows if row}


def test_without_a_scale_gradients_vanish(printed):
    row = printed["fp16, no scale"]
    assert float(row.zeros) > 0.9
    assert (row.skipped, row.last_scale) == (0, 1.0)
    assert row.loss_left > 0.9


def test_too_large_a_scale_skips_every_step(printed):
    # 2**60: with two digits in the name, with three in its column.
    assert printed["fp16, scale 1.2e+18"] == (1.0, "-", 60, 1.15e18)


def test_the_dynamic_scale_learns_as_fp32(printed):
    fp32, dynamic = printed["FP32"], printed["fp16, dynamic scale"]
    assert fp32.skipped == 0
    assert fp32.loss_left < 0.6
    # Some steps are lost to the skips at the start: as if training had ended that much earlier.
    assert 0 < dynamic.skipped < 15
    assert fp32.loss_left <= dynamic.loss_left < fp32.loss_left + 0.2
    assert float(dynamic.zeros) < 0.05
    assert 2.0**30 < dynamic.last_scale < 2.0**60  # at 2**60 every step overflows


def test_a_stepper_does_the_same(printed):
    dynamic, by_stepper = printed["fp16, dynamic scale"], printed["fp16, by a Stepper"]
    # The Stepper zeroes the gradients itself, so that its zeros are not counted.
    assert by_stepper == dynamic._replace(zeros="-")
