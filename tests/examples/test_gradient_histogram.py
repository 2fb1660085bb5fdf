"""The example counts what fp16 flushes, draws it, and finds the known shares of normal deviates."""

import math
import re

import pytest
from example_runs import load, run, succeeded
from matplotlib.image import imread


def table(lines):
    """Shares (zero, subnormal, normal, overflow) by the scale's exponent."""
    rows = [re.match(r" *2\*\*(-?\d+)((?: +[\d.]+){4})", line) for line in lines]
    return {int(row[1]): tuple(map(float, row[2].split())) for row in rows if row}


def test_gradients_of_a_training(tmp_path):
    lines = succeeded(
        run(
            "gradient_histogram.py", "--steps", "1", "--scale", "1024", "--device", "cpu",
            folder=tmp_path, OMP_NUM_THREADS="1",
        )
    )  # fmt: skip
    assert re.match(r"1 steps on real digits, loss 2\.\d{4} in the end", lines[0])
    shares = table(lines)
    assert {0, 5, 10, 15, 20} < set(shares)
    for row in shares.values():
        assert sum(row) == pytest.approx(1, abs=2e-4)  # four roundings to four digits
    zero = [shares[k][0] for k in sorted(shares)]
    assert zero[0] > zero[-1] == 0
    assert zero == sorted(zero, reverse=True)
    largest = next(line for line in lines if line.endswith("the largest that overflows nothing here"))
    assert table([largest]).popitem()[1][3] == 0
    picture = imread(tmp_path / "gradient_histogram.png")[..., :3]
    for colour in load("gradient_histogram.py").COLOURS.values():
        rgb = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        assert (abs(picture - rgb).max(axis=2) < 0.02).sum() > 50, f"{colour} is not in the picture"


@pytest.mark.parametrize(("exponent", "published"), [(-24, 0.3829), (-20, 0.0249)])
def test_normal_deviates(exponent, published, tmp_path):
    lines = succeeded(
        run(
            "gradient_histogram.py", "--normal", str(exponent), "--device", "cpu",
            folder=tmp_path, OMP_NUM_THREADS="1",
        )
    )  # fmt: skip
    assert lines[0] == f"normal deviates of size 2**{exponent}: {published:.4f} of them should become zero"
    # Five standard deviations of a share among 2**20, and half a unit of the fourth digit.
    assert table(lines)[0][0] == pytest.approx(published, abs=5 * math.sqrt(0.25 / 2**20) + 1e-4)
