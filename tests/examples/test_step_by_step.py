"""The example prints every stage of four steps, with numbers that can be checked by hand."""

import re

import pytest
from example_runs import run, succeeded

PLAIN, SCALED, INFINITE, FIRST = (
    "FP32",
    "fp16, loss scale 4096",
    "fp16, an infinite loss",
    "fp16, unscaled before the step",
)
# Weight and bias, and their gradients, with seed 47: published figures of this experiment.
FP32_STEP = {
    "forward": [("-0.8939", "none"), ("-0.9002", "none")],
    "backward": [("-0.8939", "-0.0591"), ("-0.9002", "1.0000")],
    "step": [("-0.8348", "-0.0591"), ("-1.9002", "1.0000")],
    "zeroed": [("-0.8348", "none"), ("-1.9002", "none")],
}
FP16_STEP = {
    "forward": [("-0.8348", "none"), ("-1.9002", "none")],
    "backward": [("-0.8348", "-242.2500"), ("-1.9002", "4096.0000")],
    "unscale": [("-0.8348", "-0.0591"), ("-1.9002", "1.0000")],
    "step": [("-0.7756", "-0.0591"), ("-2.9002", "1.0000")],
    "zeroed": [("-0.7756", "none"), ("-2.9002", "none")],
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What it prints, cut into the steps."""
    folder = tmp_path_factory.mktemp("step_by_step")
    lines = succeeded(run("step_by_step.py", "--device", "cpu", folder=folder))
    blocks = [block.splitlines() for block in "\n".join(lines).strip().split("\n\n")]
    return {block[0]: block[1:] for block in blocks}


def table(lines):
    """Weight and gradient of both parameters, by stage."""
    stages, stage = {}, None
    for line in lines[lines.index(next(line for line in lines if line.startswith("----"))) + 1 :]:
        if line[:8].strip() not in ("", "skipped"):
            stage = stages.setdefault(line[:8].strip(), [])
        stage.append(tuple(re.split(r"\s+", line[33:].strip())))
    return stages


def test_the_step_in_fp32(printed):
    lines = printed[PLAIN]
    assert lines[:3] == [
        "one step of OneByOne: taken",
        "input  float32 1x1  -0.0591",
        "output  float32 1x1  -0.8473",
    ]
    assert table(lines) == FP32_STEP


@pytest.mark.parametrize("title", [SCALED, FIRST])
def test_the_step_in_fp16(printed, title):
    lines = printed[title]
    assert lines[0] == "one step of OneByOne: taken, loss scale 4096"
    assert lines[2] == "output  float16 1x1  -1.8506"
    assert table(lines) == FP16_STEP


def test_an_infinity_skips_the_step(printed):
    lines = printed[INFINITE]
    assert lines[0] == "one step of OneByOne: skipped, loss scale 4096"
    weights = {tuple(weight for weight, _ in rows) for rows in table(lines).values()}
    assert weights == {("-0.7756", "-2.9002")}
    assert [gradient for _, gradient in table(lines)["backward"]] == ["-inf", "inf"]


def test_unscaling_first_changes_nothing(printed):
    assert list(printed)[-1] == "unscaled before the step or in it: the same weights"
