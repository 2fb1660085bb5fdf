"""The example loses gradients without a scale, skips all under too large a one, learns under a dynamic."""

import re

import pytest
from example_runs import run, succeeded
from matplotlib.image import imread


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Loss left, share of zeros, skipped steps, last scale, by the name of the training."""
    folder = tmp_path_factory.mktemp("loss_scaling")
    lines = succeeded(
        run("loss_scaling.py", "--steps", "60", "--device", "cpu", folder=folder, OMP_NUM_THREADS="1")
    )
    assert lines[-1] == "picture loss_scaling.png"
    assert imread(folder / "loss_scaling.png").shape[:2] == (900, 1350)
    rows = [re.fullmatch(r"(\S.*?) {2,}(\S+) +(\S+) +(\d+) of 60 +(\S+)", line) for line in lines]
    return {row[1]: (float(row[2]), row[3], int(row[4]), float(row[5])) for row in rows if row}


def test_without_a_scale_gradients_vanish(printed):
    left, zeros, skipped, scale = printed["fp16, no scale"]
    assert float(zeros) > 0.9
    assert (skipped, scale) == (0, 1.0)
    assert left > 0.9


def test_too_large_a_scale_skips_every_step(printed):
    assert printed["fp16, scale 1.2e+18"] == (1.0, "-", 60, 1.15e18)


def test_the_dynamic_scale_learns_as_fp32(printed):
    fp32, dynamic = printed["FP32"], printed["fp16, dynamic scale"]
    assert fp32[2] == 0
    assert fp32[0] < 0.6
    # Some steps are lost to the skips at the start: as if training had ended that much earlier.
    assert 0 < dynamic[2] < 15
    assert fp32[0] <= dynamic[0] < fp32[0] + 0.2
    assert float(dynamic[1]) < 0.05
    assert 2.0**30 < dynamic[3] < 2.0**60  # found by itself, far below the one at which all overflows


def test_a_stepper_does_the_same(printed):
    dynamic, by_stepper = printed["fp16, dynamic scale"], printed["fp16, by a Stepper"]
    assert (by_stepper[0], *by_stepper[2:]) == (dynamic[0], *dynamic[2:])
