"""``LogMax`` against its formula in numpy, against the scaler it comes from, and in the long run."""

import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.errors import ScaleError
from narrowcast.scaling import LogMax

NORMAL_ABOVE = 0.0010008  # P(a standard normal > 3.09)
AMAX = st.floats(1e-30, 1e4) | st.floats(5e-324, 1e308)


def after(loss_scale, amaxes):
    for amax in amaxes:
        loss_scale = loss_scale.after_step(overflow=False, amax=float(amax))
    return loss_scale


@settings(max_examples=200, deadline=None)
@given(
    amaxes=st.lists(AMAX, min_size=1, max_size=60),
    mean_decay=st.sampled_from([0.99, 0.5]),
    variance_decay=st.sampled_from([0.999, 0.7]),
    deviations=st.sampled_from([3.09, 0.0, 1.0]),
    largest_log2=st.sampled_from([16.0, 12.0]),
)
def test_the_formula(amaxes, mean_decay, variance_decay, deviations, largest_log2):
    """Bias-corrected running averages are weighted means with decaying weights, which numpy computes."""
    ours = after(
        LogMax(
            mean_decay=mean_decay,
            variance_decay=variance_decay,
            deviations=deviations,
            largest_log2=largest_log2,
            max_scale=2.0**127,
        ),
        amaxes,
    )
    x = numpy.log2(numpy.array(amaxes))
    age = numpy.arange(len(x))[::-1]
    mean = numpy.average(x, weights=mean_decay**age)
    slow_mean = numpy.average(x, weights=variance_decay**age)
    variance = numpy.average((x - slow_mean) ** 2, weights=variance_decay**age)
    # n steps of 3 roundings each, relative to the largest term; the variance is a difference of squares.
    rounding = 4 * len(x) * numpy.finfo(float).eps
    assert ours.steps == len(x)
    assert ours.mean_log2 == pytest.approx(mean, rel=0, abs=rounding * abs(x).max())
    assert ours.deviation_log2**2 == pytest.approx(variance, rel=0, abs=4 * rounding * (x**2).max() + 1e-300)
    exponent = largest_log2 - (ours.mean_log2 + deviations * ours.deviation_log2)
    expected = numpy.clip(2.0 ** numpy.clip(exponent, -1000, 1000), 2.0**-126, 2.0**127)
    # Rounded to float32 once; numpy's power may be an ulp of float64 away.
    assert ours.scale == pytest.approx(expected, rel=2.0**-24 * 1.001)
    assert ours.scale == float(numpy.float32(ours.scale))


class OpenSeq2Seq:
    """NVIDIA OpenSeq2Seq ``LogMaxScaler.update_op``, in float64, with its limits and what it does with an
    overflow as arguments."""

    def __init__(self, smallest, largest):
        self.limits = smallest, largest
        self.fast = self.slow = self.squares = 0.0
        self.fast_left = self.slow_left = 1.0

    def step(self, overflow, amax):
        x = 2.0**16 if overflow else math.log2(amax)
        self.fast = 0.99 * self.fast + 0.01 * x
        self.slow = 0.999 * self.slow + 0.001 * x
        self.squares = 0.999 * self.squares + 0.001 * (x * x)
        self.fast_left *= 0.99
        self.slow_left *= 0.999
        mean, slow = self.fast / (1 - self.fast_left), self.slow / (1 - self.slow_left)
        sigma = math.sqrt(max(self.squares / (1 - self.slow_left) - slow * slow, 0.0))
        self.scale = min(max(2.0 ** (16 - (3.09 * sigma + mean)), self.limits[0]), self.limits[1])


def test_without_overflows_it_is_that_of_openseq2seq():
    random = numpy.random.default_rng(0)
    ours, theirs = LogMax(min_scale=1.0), OpenSeq2Seq(1.0, 2.0**24)
    for step, amax in enumerate(2.0 ** random.normal(-3, 2, 3000)):
        ours = ours.after_step(overflow=False, amax=float(amax))
        theirs.step(False, amax)
        # Float32 rounds the scale, by 2**-24. Its correction 1 - 0.999**n loses three digits of float64 at
        # first, which the deviation of so few steps makes visible.
        assert ours.scale == pytest.approx(theirs.scale, rel=2.0**-23 if step > 50 else 1e-5)


def test_one_overflow_stops_openseq2seq_for_thousands_of_steps_and_not_this():
    ours, theirs = LogMax(min_scale=1.0), OpenSeq2Seq(1.0, 2.0**24)
    steady = [2.0**-6] * 500
    ours = after(ours, steady)
    for amax in steady:
        theirs.step(False, amax)
    assert theirs.scale == pytest.approx(2.0**22, rel=1e-3)
    assert ours.scale == pytest.approx(2.0**22, rel=1e-3)
    ours = ours.after_step(overflow=True)
    theirs.step(True, None)
    for _ in range(5000):
        theirs.step(False, 2.0**-6)
        assert theirs.scale == 1.0
    # The mean, raised by 1, is within 0.14 of where it was after 200 steps: 0.99**200 = 0.134.
    assert 2.0**21.8 < after(ours, steady[:200]).scale <= 2.0**22


@pytest.mark.parametrize("burst", [1, 2, 5, 20])
def test_a_burst_of_overflows_halves_each_time_and_is_forgotten(burst):
    before = after(LogMax(), 2.0 ** numpy.random.default_rng(1).normal(-2, 1, 300))
    ours = before
    for _ in range(burst):
        scale = ours.scale
        ours = ours.after_step(overflow=True)
        assert ours.scale == scale / 2
        # The statistics agree with the scale: the next good step goes on from here.
        by_formula = 16 - (ours.mean_log2 + 3.09 * ours.deviation_log2)
        assert math.log2(ours.scale) == pytest.approx(by_formula, abs=1e-6)
    assert ours.mean_log2 == pytest.approx(before.mean_log2 + burst, abs=1e-6)
    assert ours.deviation_log2 == before.deviation_log2
    assert ours.steps == before.steps
    good = 2.0 ** numpy.random.default_rng(2).normal(-2, 1, 600)
    apart_log2 = math.log2(after(before, good).scale) - math.log2(after(ours, good).scale)
    # What the burst added decays by 1 % a step: the two means differ by the same share of 1 a step.
    weight_then, weight_now = 1 - 0.99**300, 1 - 0.99**900
    assert apart_log2 == pytest.approx(burst * 0.99**600 * weight_then / weight_now, abs=1e-6)


def test_gradients_that_grow_a_thousandfold_cost_a_dozen_steps():
    random = numpy.random.default_rng(3)
    ours = after(LogMax(), 2.0 ** random.normal(-12, 0.5, 2000))
    overflows = 0
    for x in random.normal(-2, 0.5, 1000):
        overflow = x + math.log2(ours.scale) > 16
        overflows += overflow
        ours = ours.after_step(overflow=bool(overflow), amax=None if overflow else 2.0**x)
    # 10 bits less the 1.5 that were in hand, give or take the 1.5 that single gradients stray, is 7 to 10
    # halvings; then a few while the mean forgets them as fast as it learns the new level.
    assert 7 <= overflows <= 14
    assert -2 - 3.09 * 6 < math.log2(ours.scale) < 16 + 2


def test_it_comes_down_before_the_first_amax():
    ours = LogMax()
    for halvings in range(1, 30):
        ours = ours.after_step(overflow=True, amax=math.nan)
        assert ours == LogMax(scale=2.0 ** (16 - halvings))
    assert math.isnan(ours.mean_log2)
    assert math.isnan(ours.deviation_log2)


def test_it_comes_down_from_its_maximum_at_once():
    """The formula may give far more than max_scale where what overflows is not what amax is of."""
    ours = after(LogMax(), [2.0**-40] * 100)
    assert ours.scale == 2.0**24
    ours = ours.after_step(overflow=True)
    assert ours.scale == 2.0**23
    assert ours.mean_log2 == pytest.approx(16 - 23, abs=1e-4)


def test_at_its_minimum_an_overflow_changes_nothing():
    ours = after(LogMax(min_scale=2.0**10), [2.0**20] * 100)
    assert ours.scale == 2.0**10
    lowered = ours.after_step(overflow=True)
    assert lowered.scale == 2.0**10
    assert lowered.mean_log2 == pytest.approx(20, abs=1e-9)


def test_no_gradient_says_nothing():
    ours = after(LogMax(), [1.0, 2.0])
    assert ours.after_step(overflow=False, amax=0.0) is ours
    assert ours.after_step(overflow=False, amax=0) is ours


@pytest.mark.parametrize("amax", [5e-324, 1.7e308])
def test_the_ends_of_float64_stay_within_limits(amax):
    ours = after(LogMax(min_scale=2.0**-126, max_scale=2.0**127), [amax] * 3)
    assert ours.scale == (2.0**127 if amax < 1 else 2.0**-126)


NEEDS = (
    "LogMax needs amax, the largest absolute value of the unscaled gradients, after every step without an "
    "overflow: after_step(overflow=False, amax=...)"
)
FINITE = "expected an amax of at least 0 and finite without an overflow, got "


@pytest.mark.parametrize(
    ("amax", "message"),
    [
        (None, NEEDS),
        *[(bad, f"{FINITE}{bad!r}") for bad in (-1.0, math.inf, math.nan, "1", True)],
    ],
)
def test_an_amax_that_says_nothing_is_refused(amax, message):
    with pytest.raises(ScaleError) as refused:
        LogMax().after_step(overflow=False, amax=amax)
    assert str(refused.value) == message
    LogMax().after_step(overflow=True, amax=amax)


STEPS = 60_000


@pytest.mark.parametrize("deviation_log2", [0.5, 2.0])
def test_predicted_scales_overflow_once_in_a_thousand_steps(deviation_log2):
    """The scale predicted from the steps so far, against the next amax; overflows are not reported back.

    The mean of 199 effective steps ((1 + 0.99) / (1 - 0.99)) and the deviation of 1999 are themselves
    uncertain: the share above is that of a normal of variance 1 + 1/199 + 3.09**2 / (2 * 1999) at 3.09,
    0.00105. The count is near Poisson; 4 of its deviations, and 5 % for what one estimate has in common with
    the next.
    """
    random = numpy.random.default_rng(4)
    ours = after(LogMax(), 2.0 ** random.normal(-3, deviation_log2, 3000))
    overflows = 0
    for x in random.normal(-3, deviation_log2, STEPS):
        overflows += x + math.log2(ours.scale) > 16
        ours = ours.after_step(overflow=False, amax=2.0**x)
    expected = 0.00105 * STEPS
    assert abs(overflows - expected) < 4 * math.sqrt(expected) + 0.05 * expected


@pytest.mark.parametrize("deviation_log2", [0.5, 2.0])
def test_training_skips_at_most_about_one_step_in_a_thousand(deviation_log2):
    """Overflows are reported back, as in training. Each raises the mean by 1 bit, which is b = 1 / deviation
    deviations and decays by 1 % a step. The share above falls by about exp(-3.37 b) with it, so an overflow
    saves about 100 * Ein(3.37 b) steps' worth of overflows, where Ein(6.7) = 2.5 and Ein(1.7) = 1.2: the
    period goes from 1/0.00105 = 952 to 1202 and 1072 steps."""
    period = {0.5: 1202, 2.0: 1072}[deviation_log2]
    random = numpy.random.default_rng(5)
    ours = after(LogMax(), 2.0 ** random.normal(-3, deviation_log2, 3000))
    overflows = 0
    for x in random.normal(-3, deviation_log2, STEPS):
        overflow = bool(x + math.log2(ours.scale) > 16)
        overflows += overflow
        ours = ours.after_step(overflow=overflow, amax=None if overflow else 2.0**x)
    expected = STEPS / period
    assert abs(overflows - expected) < 4 * math.sqrt(expected) + 0.05 * expected


def test_the_share_above_the_default():
    assert math.erfc(LogMax().deviations / math.sqrt(2)) / 2 == pytest.approx(NORMAL_ABOVE, rel=1e-3)
