"""Stochastic rounding: no draw is left to chance, every probability is counted on a grid of u."""

import math
from fractions import Fraction
from operator import attrgetter

import pytest

from narrowcast.formats import E4M3FNUZ, FLOAT16, FLOAT32, OCP_E4M3, OCP_E5M2, TF32, decode, encode, round_to
from narrowcast.formats._format import FORMATS

STEPS = 64


def gaps(format):
    """Codes whose gap to the next number is tried: subnormal, about the first normal, at 1.0, at the end."""
    first_normal = 1 << format.significand_bits
    return [0, 1, first_normal - 1, first_normal, encode(format, 1.0), format.largest_finite_code - 1]


@pytest.mark.parametrize("format", FORMATS, ids=attrgetter("name"))
def test_the_mean_over_all_draws_is_the_number_itself(format):
    for code in gaps(format):
        below, above = Fraction(decode(format, code)), Fraction(decode(format, code + 1))
        for step in range(STEPS):
            x = below + (above - below) * Fraction(step, STEPS)
            for sign in (1, -1):
                assert Fraction(float(sign * x)) == sign * x, "a point that is not exact tests nothing"
                draws = [
                    round_to(format, float(sign * x), "stochastic", u=draw / STEPS) for draw in range(STEPS)
                ]
                assert sum(map(Fraction, draws)) / STEPS == sign * x
                assert set(draws) <= {float(sign * below), float(sign * above)}


def test_the_probability_is_exact_to_the_last_bit_of_u():
    x = 1 + FLOAT16.eps / 3  # the float's own fraction, which is not a third
    fraction = Fraction(x - 1) / Fraction(FLOAT16.eps)
    assert round_to(FLOAT16, x, "stochastic", u=fraction) == 1.0
    assert round_to(FLOAT16, x, "stochastic", u=fraction - Fraction(1, 10**40)) == 1 + FLOAT16.eps


def test_a_number_of_the_format_stays_whatever_is_drawn():
    for code in range(OCP_E4M3.code_count):
        x = decode(OCP_E4M3, code)
        for u in (0.0, 0.5, math.nextafter(1.0, 0.0)):
            assert math.isnan(x) or round_to(OCP_E4M3, x, "stochastic", u=u) == x


@pytest.mark.parametrize(
    ("format", "past"),
    [(FLOAT32, math.inf), (TF32, math.inf), (FLOAT16, math.inf), (OCP_E5M2, math.inf), (E4M3FNUZ, math.nan)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_past_the_largest_number_it_overflows_as_often_as_the_next_would_be_drawn(format, past):
    quarter = format.max + (format.overflow_threshold - format.max) / 2
    draws = [round_to(format, quarter, "stochastic", u=u / 8) for u in range(8)]
    expected = [past] * 2 + [format.max] * 6
    assert [math.isfinite(draw) for draw in draws] == [math.isfinite(draw) for draw in expected]
    assert draws[2:] == expected[2:]
    assert round_to(format, quarter, "stochastic", u=0.0, saturate=True) == format.max
    assert not math.isfinite(round_to(format, 2 * format.max + format.max, "stochastic", u=0.99))
