"""``Dynamic`` moves as torch's own scaler, to the bit, over any sequence of good and overflowing steps."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.scaling import RULES, Dynamic, Off, Static

SMALLEST, LARGEST = 2.0**-126, 2.0**127
SCALES = st.floats(SMALLEST, LARGEST) | st.integers(-126, 127).map(lambda power: 2.0**power)
# Powers of two, and factors that round in float32.
GROWTH = st.sampled_from([2.0, 4.0, 2.0**100, math.nextafter(1, 2)]) | st.floats(1.0, 1e6, exclude_min=True)
BACKOFF = st.sampled_from([0.5, 2.0**-100, 1e-60, math.nextafter(1, 0)]) | st.floats(
    1e-6, 1.0, exclude_max=True
)


def as_float32(value):
    return float(torch.tensor(value, dtype=torch.float32))


class Torch:
    """``torch._amp_update_scale_``, and the two limits where narrowcast does otherwise on purpose."""

    def __init__(self, loss_scale):
        self.settings = loss_scale
        self.scale = torch.tensor(loss_scale.scale, dtype=torch.float32)
        self.tracker = torch.tensor(loss_scale.good_steps, dtype=torch.int32)
        self.at_a_limit = 0

    def after_step(self, overflow):
        s = self.settings
        torch._amp_update_scale_(
            self.scale,
            self.tracker,
            torch.tensor(float(overflow)),
            s.growth_factor,
            s.backoff_factor,
            s.growth_interval,
        )
        if overflow and self.scale < SMALLEST:
            self.scale.fill_(SMALLEST)
            self.at_a_limit += 1
        if not overflow and self.scale > LARGEST:
            self.scale.fill_(LARGEST)
            self.at_a_limit += 1


@settings(max_examples=200, deadline=None)
@given(
    scale=SCALES,
    given_settings=st.fixed_dictionaries(
        {"growth_factor": GROWTH, "backoff_factor": BACKOFF, "growth_interval": st.integers(1, 4)}
    ),
    events=st.lists(st.booleans(), max_size=40),
)
def test_any_sequence_of_steps_moves_a_scale_as_in_torch(scale, given_settings, events):
    ours = Dynamic(scale=scale, **given_settings)
    theirs = Torch(ours)
    for overflow in events:
        ours = ours.after_step(overflow=overflow)
        theirs.after_step(overflow)
        assert as_float32(ours.scale) == float(theirs.scale)
        assert ours.good_steps == int(theirs.tracker)
        assert SMALLEST <= ours.scale <= LARGEST


def test_a_scale_stops_at_limits_that_torch_does_not_have():
    """A backoff stops at the smallest normal float32, a growth at 2**127; both may be set closer."""
    low = Dynamic(scale=SMALLEST, good_steps=3)
    theirs = Torch(low)
    assert low.after_step(overflow=True) == Dynamic(scale=SMALLEST)
    theirs.after_step(True)
    assert theirs.at_a_limit == 1
    high = Dynamic(scale=1.5 * 2.0**126, growth_interval=2, good_steps=1)
    theirs = Torch(high)
    # torch would go on to 1.5 * 2**127, which is a finite float32.
    assert high.after_step(overflow=False) == Dynamic(scale=LARGEST, growth_interval=2)
    theirs.after_step(False)
    assert theirs.at_a_limit == 1
    # An infinite product is not taken, as in torch, wherever the limit is.
    assert Dynamic(scale=LARGEST, growth_interval=1).after_step(overflow=False).scale == LARGEST
    below = Dynamic(scale=1.5 * 2.0**126, growth_interval=1, growth_factor=4.0)
    assert below.after_step(overflow=False).scale == 1.5 * 2.0**126


@pytest.mark.parametrize("rule", RULES)
def test_a_scale_stays_within_limits_that_were_set(rule):
    ours = Dynamic(scale=3.0, growth_interval=1, rule=rule, min_scale=1.0, max_scale=10.0)
    down = [ours := ours.after_step(overflow=True) for _ in range(3)]
    assert [value.scale for value in down] == [1.5, 1.0, 1.0]
    up = [ours := ours.after_step(overflow=False) for _ in range(5)]
    assert [value.scale for value in up] == [2.0, 4.0, 8.0, 10.0, 10.0]


def test_limits_are_rounded_to_float32_as_scales_are():
    """A scale that comes back from a device is a float32, and 0.7 there is less than 0.7."""
    low, high = as_float32(0.7), as_float32(0.1)
    assert low < 0.7
    assert high > 0.1
    ours = Dynamic(scale=1.0, min_scale=0.7)
    assert ours.after_step(overflow=True).scale == low
    assert Dynamic(scale=low, min_scale=0.7).scale == low
    assert Dynamic(scale=high, max_scale=0.1).scale == high
    grown = Dynamic(scale=0.09, max_scale=0.1, growth_interval=1).after_step(overflow=False)
    assert grown.scale == high


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("loss_scale", [Off(), Static(scale=1024.0), Static(scale=0.1)])
def test_fixed_scales_do_not_move(loss_scale, overflow):
    assert loss_scale.after_step(overflow=overflow) is loss_scale
    assert Off().scale == 1.0
