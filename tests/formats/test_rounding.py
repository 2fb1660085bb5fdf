"""Deterministic rounding, against torch, the order of the codes and bit masks, at zero tolerance."""

import math
import re
from functools import cache
from operator import attrgetter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.errors import SettingError
from narrowcast.formats import (
    FLOAT16,
    FLOAT32,
    OCP_E4M3,
    TF32,
    RoundingMode,
    decode,
    encode,
    round_to,
    torch_dtype,
)
from narrowcast.formats._format import FORMATS

NARROW = [format for format in FORMATS if format.bits <= 16]
SPECIAL = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-45, -1e-45], dtype=np.float32)
# PyTorch's pull request 178817 made its conversion to E4M3 saturate: 2.13 gives 448 there, older ones NaN.
TORCH_SATURATES = {OCP_E4M3: bool(torch.tensor(1e4).to(torch.float8_e4m3fn).double().isfinite())}


@cache
def magnitudes(format):
    """Every finite magnitude in rising order, and what would follow the last if the exponent had no limit."""
    finite = [decode(format, code) for code in range(format.largest_finite_code + 1)]
    return np.array([*finite, 2 * finite[-1] - finite[-2]])


@cache
def ties(format):
    numbers = magnitudes(format)
    return (numbers[:-1] + numbers[1:]) / 2


def both_signs(points):
    return np.concatenate([points, -points])


def around_every_tie_float32(format):
    """All numbers, the tie between each two, and the float32 just below and just above every tie."""
    middle = ties(format).astype(np.float32)
    assert np.array_equal(middle, ties(format)), "a tie that float32 does not hold tests nothing"
    zero, inf = np.float32(0), np.float32(math.inf)
    numbers = magnitudes(format)[:-1].astype(np.float32)
    near = [numbers, middle, np.nextafter(middle, zero), np.nextafter(middle, inf)]
    return np.concatenate([both_signs(np.concatenate(near)), SPECIAL])


def rounded(format, points, mode="nearest-even", **options):
    return [round_to(format, x, mode, **options) for x in points.tolist()]


@pytest.mark.long
@pytest.mark.parametrize("format", NARROW, ids=attrgetter("name"))
def test_nearest_around_every_tie_is_torchs_conversion_of_float32(format, same_bits):
    points = around_every_tie_float32(format)
    theirs = torch.from_numpy(points).to(torch_dtype(format)).double().numpy()
    assert same_bits(rounded(format, points, saturate=TORCH_SATURATES.get(format, False)), theirs)


@pytest.mark.parametrize("format", NARROW, ids=attrgetter("name"))
def test_around_every_tie_the_order_of_the_codes_decides(format, same_bits):
    below, above = magnitudes(format)[:-1], magnitudes(format)[1:].copy()
    above[-1] = math.inf if format.has_infinity else math.nan
    even = np.where(np.arange(below.size) % 2 == 0, below, above)
    middle = ties(format)
    assert same_bits(rounded(format, np.nextafter(middle, 0)), below)
    assert same_bits(rounded(format, middle), even)
    assert same_bits(rounded(format, np.nextafter(middle, math.inf)), above)


@pytest.mark.parametrize("format", NARROW, ids=attrgetter("name"))
def test_toward_zero_drops_what_is_past_a_number(format, same_bits):
    numbers = magnitudes(format)[:-1]
    expected = both_signs(numbers)
    if not format.has_negative_zero:
        expected = expected + 0.0
    just_below_next = both_signs(np.nextafter(magnitudes(format)[1:], 0))
    for points in (both_signs(numbers), both_signs(ties(format)), just_below_next):
        assert same_bits(rounded(format, points, "toward-zero"), expected)


def test_float32_is_torchs_conversion_of_float64(same_bits):
    generator = np.random.default_rng(0)
    words = generator.integers(0, 2**64, 20_000, dtype=np.uint64).view(np.float64)
    scales = 2.0 ** generator.integers(-151, 129, 20_000)
    near = generator.standard_normal(20_000).astype(np.float32)
    above = np.nextafter(near, np.float32(math.inf))
    tie = (near.astype(np.float64) + above) / 2
    points = np.concatenate([words, near * scales, tie, np.nextafter(tie, 0), np.nextafter(tie, math.inf)])
    assert same_bits(rounded(FLOAT32, points), torch.from_numpy(points).float().double().numpy())


def tf32_points():
    """Float32 words: each exponent and sign with the ends of the 10 bits that stay and of the 13 that go."""
    kept, dropped = [0, 1, 2, 511, 512, 1022, 1023], [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF]
    words = [(head << 23) + (k << 13) + d for head in range(512) for k in kept for d in dropped]
    return np.array([word for word in words if word >> 23 & 0xFF != 0xFF], dtype=np.uint32)


def test_tf32_is_a_bit_mask_on_float32_to_nearest_after_an_addition(same_bits):
    words = tf32_points()
    # Half a unit less one bit, and one more where the last kept bit is odd, carries when ties to even do.
    added = words + np.uint32(0xFFF) + (words >> np.uint32(13) & np.uint32(1))
    for mode, unmasked in (("nearest-even", added), ("toward-zero", words)):
        expected = (unmasked & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
        assert same_bits(rounded(TF32, words.view(np.float32), mode), expected)


@pytest.mark.parametrize("format", FORMATS, ids=attrgetter("name"))
@pytest.mark.parametrize("mode", RoundingMode)
def test_zeros_keep_their_sign_where_the_format_has_two(format, mode, same_bits):
    u = 0.5 if mode is RoundingMode.STOCHASTIC else None
    negative_zero = -0.0 if format.has_negative_zero else 0.0
    for x, expected in [(0.0, 0.0), (-0.0, negative_zero), (5e-324, 0.0), (-5e-324, negative_zero)]:
        assert same_bits([round_to(format, x, mode, u=u)], [expected])


@pytest.mark.parametrize("format", FORMATS, ids=attrgetter("name"))
def test_nan_and_infinities(format, same_bits):
    for mode, u in [("nearest-even", None), ("toward-zero", None), ("stochastic", 0.0)]:
        for saturate in (False, True):
            assert math.isnan(round_to(format, math.nan, mode, u=u, saturate=saturate))
        for x in (math.inf, -math.inf):
            expected = x if format.has_infinity else math.nan
            assert same_bits([round_to(format, x, mode, u=u)], [expected])
            assert round_to(format, x, mode, u=u, saturate=True) == math.copysign(format.max, x)


@pytest.mark.parametrize("format", FORMATS, ids=attrgetter("name"))
def test_overflow_begins_half_a_unit_past_the_largest_number(format, same_bits):
    threshold, past = format.overflow_threshold, math.inf if format.has_infinity else math.nan
    assert round_to(format, math.nextafter(threshold, 0)) == format.max
    # The tie goes to the even code, and of all largest codes only OCP E4M3's (0x7E) is even.
    assert same_bits([round_to(format, threshold)], [format.max if format is OCP_E4M3 else past])
    for x in (math.nextafter(threshold, math.inf), 2 * format.max, 4 * format.max, 1.7e308):
        assert same_bits([round_to(format, x), round_to(format, -x)], [past, -past])
        for how in ({"saturate": True}, {"mode": "toward-zero"}):
            assert (round_to(format, x, **how), round_to(format, -x, **how)) == (format.max, format.min)


@pytest.mark.parametrize("format", FORMATS, ids=attrgetter("name"))
def test_flushing_ends_at_half_the_smallest_subnormal(format):
    assert round_to(format, format.flush_threshold) == 0.0
    assert round_to(format, math.nextafter(format.flush_threshold, 1)) == format.smallest_subnormal
    assert round_to(format, math.nextafter(format.smallest_subnormal, 0), "toward-zero") == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "nearest-evn"}, '"nearest-evn" is not a rounding mode. Did you mean "nearest-even"'),
        ({"mode": "stochastic"}, "stochastic rounding needs a random number: pass u, 0 <= u < 1"),
        ({"mode": "stochastic", "u": 1.0}, "u must be in [0, 1), not 1.0"),
        ({"mode": "stochastic", "u": -0.25}, "u must be in [0, 1), not -0.25"),
        ({"mode": "stochastic", "u": math.nan}, "u must be in [0, 1), not nan"),
        ({"u": 0.5}, "nearest-even rounding uses no random number: leave out u, or use stochastic"),
    ],
)
def test_a_wrong_mode_or_random_number_is_refused(arguments, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        round_to(FLOAT16, 1.0, **arguments)


finite = st.floats(allow_nan=False, allow_infinity=False)
near_one = st.floats(min_value=-1e5, max_value=1e5)
numbers = st.one_of(finite, near_one, st.floats(min_value=-1e-4, max_value=1e-4))
formats_ = st.sampled_from(FORMATS)
draws = st.floats(min_value=0, max_value=1, exclude_max=True).map(lambda u: ("stochastic", u))
modes = st.one_of(st.just(("nearest-even", None)), st.just(("toward-zero", None)), draws)


@settings(max_examples=300, deadline=None)
@given(formats_, modes, numbers, numbers)
def test_rounding_keeps_the_order(format, how, x, y):
    low, high = (round_to(format, each, how[0], u=how[1], saturate=True) for each in sorted([x, y]))
    assert low <= high


@settings(max_examples=300, deadline=None)
@given(formats_, modes, numbers)
def test_the_result_is_one_of_the_two_neighbours(format, how, x):
    result = abs(round_to(format, x, how[0], u=how[1], saturate=True))
    below = encode(format, abs(round_to(format, x, "toward-zero")))
    above = min(below + 1, format.largest_finite_code)
    assert decode(format, below) <= abs(x)
    assert result in (decode(format, below), decode(format, above))
    assert below == format.largest_finite_code or abs(x) < decode(format, above)
