"""The verdict on losses, beside scipy."""

import math
import random
import statistics

import pytest
from scipy import stats

from narrowcast.report._statistics import judge_losses, mean


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 6.0], 3.0),
        ([0.1] * 10, 0.1),  # a plain sum gives 0.9999999999999999
        ([math.nan, 1.0], math.nan),
        ([math.inf, 1.0], math.inf),
        ([math.inf, -math.inf], math.nan),
    ],
)
def test_a_mean_of_whatever_a_loss_may_be(values, expected):
    found = mean(values)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


# ---- losses


@pytest.mark.parametrize("count", [*range(3, 31), 100, 1000])
@pytest.mark.parametrize("above", [True, False])
def test_what_is_higher_fails_beyond_scipys_quantile_of_student(count, above):
    """The paired differences are made so that their t is a hair above or below the critical one."""
    draw = random.Random(count)
    noise = [draw.gauss(0, 1) for _ in range(count)]
    scale = statistics.stdev(noise) / math.sqrt(count)
    shift = scale * stats.t.ppf(0.975, count - 1) * (1.001 if above else 0.999) - statistics.fmean(noise)
    # FP32's own losses hardly differ, so that the mean difference is above their spread. Against their mean
    # the noise is less than what rounding changes.
    pairs = [(1000 + 1e-6 * n, 1000 + 1e-6 * n + noise[n] + shift) for n in range(count)]
    found = judge_losses(pairs)
    assert found.verdict == ("fail" if above else "cannot tell")
    assert stats.ttest_1samp([m - f for f, m in pairs], 0).pvalue / 2 == pytest.approx(0.025, rel=0.01)


ABOVE = "every mixed loss is above what another seed of FP32 would give"
BRANCHES = [
    ([], None, None, "not judged", "no loss was seen in both formats"),
    ([(1.0, 1.5)], 0.5, None, "not judged", "1 seed cannot show what other seeds change: use --repeats 3"),
    ([(1.0, 1.5), (1.0, 1.0)], 0.25, None, "not judged", "2 seeds cannot show"),
    ([(math.nan, math.nan), (1.0, 1.0), (1.0, 1.0)], None, None, "cannot tell", "not finite in FP32 itself"),
    ([(math.inf, 1.0)], None, None, "cannot tell", "not finite in FP32 itself"),
    ([(1.0, math.nan)], None, None, "fail", "finite in FP32 and not in mixed precision"),
    ([(1.0, 1.0), (1.0, math.inf), (1.0, 1.0)], None, None, "fail", "and not in mixed precision"),
    ([(1.0, 1.25), (2.0, 2.25), (3.0, 3.25)], 0.25, 1.0, "pass", "is 0.25 of the spread between 3 seeds"),
    ([(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)], 1.0, 1.0, "pass", "is 1.00 of the spread"),
    ([(2.0, 2.0)] * 4, 0.0, 0.0, "pass", "the same to the last digit for all 4 seeds"),
    ([(2.0, 2.5)] * 3, 0.5, None, "not judged", "since seeds change nothing in this script"),
    ([(1.0, 1.5), (1.0, 0.5), (1.0, 1.0)], 0.0, None, "not judged", "since seeds change nothing"),
    ([(2.0, 50.0)] * 3, 48.0, None, "cannot tell", "25 times FP32's, but 3 seeds cannot show it"),
    ([(1.0, -1.0), (2.0, 0.0), (3.0, 1.0)], -2.0, 1.0, "pass", "lower than FP32's by 2.0 times"),
    ([(1.0, 3.0), (2.0, 4.0), (3.0, 5.5)], 6.5 / 3, 1.0, "fail", "higher than FP32's by 2.2 times"),
    # Many times FP32's, where FP32 goes on to zero and rounding does not let bf16 follow.
    ([(1e-6, 1e-5), (2e-6, 3e-5), (3e-6, 8e-5)], 3.8e-5, 1e-6, "cannot tell", "the pairs differ too much"),
    ([(0.0, 1.0), (0.5, 2.0), (1.0, 9.0)], 3.5, 0.5, "cannot tell", "the pairs differ too much"),
    ([(-1.0, 1.0), (-0.5, 2.0), (0.0, 9.0)], 4.5, 0.5, "cannot tell", "the pairs differ too much"),
    # A tenth above FP32's mean, where its losses hardly differ.
    (
        [(1.0, 1.12), (1.01, 1.2), (1.02, 1.6)],
        0.89 / 3,
        0.01,
        "fail",
        ABOVE,
    ),
    ([(1.0, 1.10), (1.01, 1.2), (1.02, 1.6)], 0.87 / 3, 0.01, "cannot tell", "the pairs differ too much"),
    # The prediction limit of 1, 2, 3 is 2 + 4.303 * sqrt(4 / 3), which is 6.97.
    (
        [(1.0, 7.0), (2.0, 22.0), (3.0, 40.0)],
        21.0,
        1.0,
        "fail",
        ABOVE,
    ),
    ([(1.0, 6.9), (2.0, 22.0), (3.0, 40.0)], 62.9 / 3, 1.0, "cannot tell", "the pairs differ too much"),
    ([(1.0, 1.0), (2.0, 2.0), (3.0, 12.0)], 3.0, 1.0, "cannot tell", "and the pairs differ too much"),
]


@pytest.mark.parametrize(("pairs", "difference", "spread", "verdict", "reason"), BRANCHES)
def test_each_verdict_and_its_reason(pairs, difference, spread, verdict, reason):
    found = judge_losses(pairs)
    # The differences of decimal fractions are off by roundoff.
    assert (found.difference, found.seed_spread) == (pytest.approx(difference), pytest.approx(spread))
    assert found.verdict == verdict
    assert reason in found.reason


LOSSES = (math.nan, math.inf, -math.inf, 0.0, 1.0, 2.0, -3e38, 3e38, 1e-45)


def test_every_list_of_losses_gets_a_verdict():
    """Whatever fp32 holds: no error, and no number that is not finite for a difference."""
    draw = random.Random(0)
    for count in range(1000):
        pairs = [(draw.choice(LOSSES), draw.choice(LOSSES)) for _ in range(count % 5)]
        found = judge_losses(pairs)
        assert found.verdict in ("pass", "fail", "cannot tell", "not judged")
        assert found.reason
        assert found.difference is None or math.isfinite(found.difference)
        if found.verdict == "pass":
            assert found.seed_spread is not None
