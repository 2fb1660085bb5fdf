"""The example measures three ways to predict, says honestly what they gain, and draws the predictions."""

import re

from example_runs import run, succeeded
from matplotlib.image import imread

SMALL = ("--size", "16", "--hidden", "8", "--epochs", "40", "--passes", "3", "--device", "cpu")
LINE = re.compile(
    r"(FP32|bf16|autocast bf16|baked bf16) +(\d+\.\d\d) ms +(\d+\.\d) MiB  "
    r"(loss|largest error) (\d\.\d{4}) *(.*)"
)


def test_it_measures_and_draws(tmp_path):
    there = tmp_path / "a folder"
    lines = succeeded(
        run("inference.py", *SMALL, folder=tmp_path, NARROWCAST_RUN_DIR=str(there), OMP_NUM_THREADS="1")
    )
    assert lines[0].startswith("16 by 16 pixels, 8 channels, 40 steps, cpu, torch ")
    rows = [match.groups() for line in lines if (match := LINE.fullmatch(line))]
    assert [row[0] for row in rows] == ["FP32", "bf16", "FP32", "autocast bf16", "baked bf16"]
    for base, row in ((0, 1), (2, 3), (2, 4)):
        ratio, share = map(float, re.findall(r"\d+\.\d\d", rows[row][5]))
        assert ("no gain on this machine" in rows[row][5]) == (ratio < 1.05)
        assert 0.1 < share < 10
        assert rows[base][5] == ""
    # A variance of 0.11 to begin with; seeds 0 to 2 come to 0.05 in FP32 and in bf16 at this size.
    losses = [float(row[4]) for row in rows[:2]]
    assert max(losses) < 0.11
    errors = [float(row[4]) for row in rows[2:]]
    assert errors[0] == 0
    assert 0 < errors[1] == errors[2] < 0.2  # baked has the bits of the region
    assert lines[-1] == f"picture {there / 'inference.png'}"
    assert imread(there / "inference.png").shape[1] > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["a folder"]
