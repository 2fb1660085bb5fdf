"""Least squares by SGD with weights in bfloat16: the experiment of Zamirai et al. 2020, arXiv 2010.06192.

Set-up: d = 10, batch 1, 20 000 steps of ``torch.optim.SGD``; x ~ N(0, I), w* uniform in [0, 100),
y = <x, w*> + N(0, 0.5**2), loss (<x, w> - y)**2 / 2, w from 0. Only the weights (and their gradients) are in
bfloat16. The paper's final losses, of one run each, at rates 0.01 / 0.001: fp32 0.136 / 0.124; bfloat16 with
nearest rounding 1.76 / 258; stochastic 0.295 / 1.04; Kahan 0.216 / 0.230.

Here 48 such problems run side by side, a row of one tensor each, which an elementwise optimizer does not
notice, and the final loss is the expected one, |w - w*|**2 / 2 + 0.5**2 / 2, over the last 2 000 steps.
"""

import math

import pytest
import torch

from narrowcast.weights import hold

pytestmark = pytest.mark.long
D, PROBLEMS, STEPS, TAIL, NOISE = 10, 48, 20_000, 2_000, 0.5
FLOOR = NOISE**2 / 2


def final_losses(updates):
    """The mean over problems and last steps, at rates 0.01 and 0.001, of which each has half of the rows."""
    draws = torch.Generator().manual_seed(1)
    truth = (torch.rand(PROBLEMS, D, generator=draws) * 100).repeat(2, 1)
    dtype = torch.float32 if updates == "fp32" else torch.bfloat16
    fast, slow = (torch.nn.Parameter(torch.zeros(PROBLEMS, D, dtype=dtype)) for _ in range(2))
    groups = [{"params": [fast], "lr": 0.01}, {"params": [slow], "lr": 0.001}]
    optimizer = torch.optim.SGD(groups, foreach=True)
    if updates in ("kahan", "stochastic", "masters"):
        hold(optimizer, updates)
    excess = torch.zeros(2, dtype=torch.float64)
    for step in range(STEPS):
        x = torch.randn(PROBLEMS, D, generator=draws).repeat(2, 1)
        y = (x * truth).sum(1) + NOISE * torch.randn(PROBLEMS, generator=draws).repeat(2)
        w = torch.cat([fast.detach(), slow.detach()]).float()
        gradient = (((x * w).sum(1) - y)[:, None] * x).to(dtype)
        fast.grad, slow.grad = gradient.split(PROBLEMS)
        optimizer.step()
        if step >= STEPS - TAIL:
            excess += (w - truth).square().sum(1).view(2, PROBLEMS).mean(1) / (2 * TAIL)
    return [FLOOR + each for each in excess.tolist()]


@pytest.fixture(scope="module")
def losses():
    return {
        updates: final_losses(updates) for updates in ("fp32", "nearest", "stochastic", "kahan", "masters")
    }


def test_float32_reaches_the_noise_floor(losses):
    # Stationary: E|w - w*|**2 = lr d s**2 / (2 - lr (d + 2)), from the second moments of a normal x.
    for lr, loss in zip((0.01, 0.001), losses["fp32"], strict=True):
        expected = FLOOR + lr * D * NOISE**2 / (2 - lr * (D + 2)) / 2
        # The excess has d degrees of freedom in each problem and forgets itself in 1 / lr steps, so that
        # the mean over all problems and TAIL * lr spans is off by sqrt(2 / (d problems spans)) of it.
        spans = max(1.0, TAIL * lr)
        assert loss - FLOOR == pytest.approx(expected - FLOOR, rel=5 * math.sqrt(2 / (D * PROBLEMS * spans)))


def test_nearest_rounding_stops_early(losses):
    fast, slow = losses["nearest"]
    # A weight of about 50, with a unit of 0.25, stops where lr |e x| stays below 0.125 for thousands of
    # steps. |x| reaches 4 in so many, so e, the error of the prediction, is about 0.125 / (4 lr): 3 at a rate
    # of 0.01 and 30 at 0.001, and the loss e**2 / 2 about 5 and 500, less where a rare large e x moved it on.
    assert fast > 5 * losses["fp32"][0]
    assert slow > 50 * fast
    assert 0.5 < fast < 5.0
    assert 50.0 < slow < 500.0


# Of weights uniform in [0, 100): the part of them in each power of two, with the unit of bfloat16 there.
UNITS = [((min(2.0**e, 100.0) - 2.0 ** (e - 1)) / 100, 2.0 ** (e - 8)) for e in range(-10, 8)]


@pytest.mark.parametrize("updates", ["kahan", "masters"])
def test_kahan_and_masters_lose_only_the_rounding_of_reads(losses, updates):
    # The weight that is read is a neighbour of w*. The gradient pulls until it is w* on average, so that it
    # is the upper neighbour a part f of the time, where f is how far w* is between them: a variance of
    # unit**2 f (1 - f), on average over f a sixth of unit**2.
    rounding = D / 2 * sum(share * unit**2 / 6 for share, unit in UNITS)
    # Over 480 weights: E[unit**4] E[f**2 (1 - f)**2] with the latter 1 / 30, against the square of the mean.
    mean = sum(share * unit**2 for share, unit in UNITS) / 6
    spread = math.sqrt(sum(share * unit**4 for share, unit in UNITS) / 30 - mean**2)
    deviation = rounding * spread / mean / math.sqrt(D * PROBLEMS)
    for full, kept in zip(losses["fp32"], losses[updates], strict=True):
        assert kept == pytest.approx(full + rounding, abs=5 * deviation)


def test_stochastic_rounding_adds_the_same_noise_at_every_rate(losses):
    # A step u that is small against the unit adds a variance of |u| unit, and the rate takes 2 lr of it
    # away. With u = lr e x, for an error e of variance 2 L and E|e x| = (2 / pi) sqrt(2 L), the variance of a
    # weight is sqrt(2 L) unit / pi, and L = floor + d / 2 times that: a quadratic equation for sqrt(L).
    slope = D / 2 * math.sqrt(2) / math.pi * sum(share * unit for share, unit in UNITS)
    expected = ((slope + math.sqrt(slope**2 + 4 * FLOOR)) / 2) ** 2
    # e is not independent of x, nor u always small: terms left out, of the order of 10 %.
    for loss, nearest in zip(losses["stochastic"], losses["nearest"], strict=True):
        assert loss == pytest.approx(expected, rel=0.25)
        assert loss < nearest
