"""Every hard case, in bf16 and fp16, against the same function in plain FP32."""

import math

import pytest
import torch
from scenarios import DEPTH, SCENARIOS
from test_overflow import all_finite

from narrowcast.attach import Attachment
from narrowcast.scaling import Dynamic

# Unit roundoff: the largest relative error of one rounding to nearest.
ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
# Roundings between a weight and its gradient, each layer: input, weight, bias and output on the way forward,
# the same four on the way back, and twice that where a gradient is differentiated again. They are independent
# (rounding to nearest has no direction), so they add up in quadrature, and over hundreds of entries a norm
# stays below the root of their number times the roundoff: 2.7 % in bf16, 0.34 % in fp16.
ROUNDINGS = 2 * 8 * DEPTH
# What an error of every gradient does to where training ends: a descent moves by its share of the way, twice
# that where Adam's division makes small gradients count; L-BFGS multiplies by the curvature it has seen.
AMPLIFICATION = {"lbfgs": 24.0}


def tolerance(policy):
    return math.sqrt(ROUNDINGS) * ROUNDOFF[policy]


def relative_error(found, expected):
    pairs = [(f.double(), e.double()) for f, e in zip(found, expected, strict=True)]
    difference = sum(float((f - e).square().sum()) for f, e in pairs)
    return math.sqrt(difference / sum(float(e.square().sum()) for _, e in pairs))


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_training_ends_where_fp32_ends(name, policy):
    expected = SCENARIOS[name]()
    with Attachment(policy) as attached:
        found = SCENARIOS[name]()
    if not attached.facts["skipped_steps"]:
        assert relative_error(found.first_gradients, expected.first_gradients) < tolerance(policy)
    # An error of this share in every gradient moves the end of a descent by at most this share of its length.
    length = abs(expected.loss_before - expected.loss_after)
    assert length > 0.01, "this scenario does not train"
    at_most = 2 * tolerance(policy) * max(length, expected.loss_before)
    assert abs(found.loss_after - expected.loss_after) < at_most
    moved = relative_error(found.parameters, expected.parameters)
    assert moved < AMPLIFICATION.get(name, 2.0) * tolerance(policy)
    assert moved > 0, "nothing ran in mixed precision"
    assert all(map(all_finite, found.optimizers))
    assert attached.facts["skipped_steps"] == 0 or policy == "fp16"
    assert attached.left_alone is None


@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_read_by_the_script_are_fp32s_at_any_scale(name):
    """Three scales, one result, but for fp16 subnormals, whose share of the gradients differs."""
    runs = []
    for scale in (2.0**7, 2.0**8, 2.0**10):
        with Attachment("fp16", Dynamic(scale=scale)) as attached:
            runs.append(SCENARIOS[name]())
        assert attached.facts["skipped_steps"] == 0
    first, *others = runs
    expected = SCENARIOS[name]()
    assert relative_error(first.first_gradients, expected.first_gradients) < tolerance("fp16")
    for other in others:
        assert relative_error(first.first_gradients, other.first_gradients) < 2 * ROUNDOFF["fp16"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_fp32_changes_nothing(name):
    expected = SCENARIOS[name]()
    with Attachment("fp32") as attached:
        found = SCENARIOS[name]()
    assert all(torch.equal(f, e) for f, e in zip(found.parameters, expected.parameters, strict=True))
    assert found.loss_after == expected.loss_after
    assert attached.facts["steps"] > 0
