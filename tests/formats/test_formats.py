"""Number formats, against torch's codes and conversions, at zero tolerance."""

import copy
import doctest
import math
import pickle
from operator import attrgetter

import numpy as np
import pytest
import torch

from narrowcast import formats
from narrowcast.errors import SettingError
from narrowcast.formats import E5M2FNUZ, FLOAT32, OCP_E4M3, TF32, round_to, torch_dtype
from narrowcast.formats._format import FORMATS

STORED = [format for format in FORMATS if format is not TF32]
NARROW = [format for format in STORED if format.storage_bits <= 16]
# PyTorch's pull request 178817 made its conversion to E4M3 saturate: 2.13 gives 448 there, older ones NaN.
TORCH_SATURATES = {OCP_E4M3: bool(torch.tensor(1e4).to(torch.float8_e4m3fn).double().isfinite())}

every_format = pytest.mark.parametrize("format", FORMATS, ids=attrgetter("name"))
stored_formats = pytest.mark.parametrize("format", STORED, ids=attrgetter("name"))
narrow_formats = pytest.mark.parametrize("format", NARROW, ids=attrgetter("name"))


def same_bits(ours, theirs):
    """Whether numbers are equal as float64 words, so that zeros agree in sign; any NaN equals any NaN."""
    ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert ours.shape == theirs.shape
    both_nan = np.isnan(ours) & np.isnan(theirs)
    return bool(np.all((ours.view(np.int64) == theirs.view(np.int64)) | both_nan))


def numbers_of(format):
    """Every number of a format of 16 bits or fewer that is not negative, in rising order, by its codes."""
    codes = np.arange(1 << (format.storage_bits - 1)).astype(f"uint{format.storage_bits}")
    values = torch.from_numpy(codes.view(f"int{format.storage_bits}")).view(torch_dtype(format)).double()
    return values[values.isfinite()].numpy()


def rounded(format, points, **options):
    return [round_to(format, x, **options) for x in points.tolist()]


@stored_formats
def test_limits_are_those_of_torch(format):
    finfo = torch.finfo(torch_dtype(format))
    assert finfo.bits == format.storage_bits == 1 + format.exponent_bits + format.significand_bits
    assert (finfo.min, finfo.max) == (format.min, format.max)
    assert finfo.smallest_normal == format.smallest_normal
    # torch 2.13 says 0.125 for E5M2FNUZ, whose 2 significand bits make it 0.25, as its codes say.
    assert format is E5M2FNUZ or finfo.eps == format.eps


@narrow_formats
def test_limits_are_those_of_the_codes(format):
    numbers = numbers_of(format)
    assert (numbers[0], numbers[1], numbers[-1]) == (0.0, format.smallest_subnormal, format.max)
    assert numbers[1 << format.significand_bits] == format.smallest_normal == 2.0**format.min_exponent
    assert numbers[numbers > 1].min() - 1.0 == format.eps
    assert 2.0**format.max_exponent <= format.max < 2.0 ** (format.max_exponent + 1)
    assert format.overflow_threshold == format.max + (numbers[-1] - numbers[-2]) / 2
    assert format.flush_threshold == format.smallest_subnormal / 2


def test_limits_of_tf32_are_those_of_its_bits():
    assert TF32.max == (2 - 2**-10) * 2.0**127 == -TF32.min
    assert (TF32.smallest_normal, TF32.smallest_subnormal) == (2**-126, 2**-136)


@narrow_formats
def test_numbers_and_what_is_just_beside_a_tie_go_to_the_nearest(format):
    numbers = numbers_of(format)
    ties = (numbers[:-1] + numbers[1:]) / 2
    assert same_bits(rounded(format, numbers), numbers)
    assert same_bits(rounded(format, np.nextafter(ties, 0)), numbers[:-1])
    assert same_bits(rounded(format, np.nextafter(ties, math.inf)), numbers[1:])


@narrow_formats
def test_a_tie_goes_to_the_even_code(format):
    numbers = numbers_of(format)
    ties = (numbers[:-1] + numbers[1:]) / 2
    even = np.where(np.arange(ties.size) % 2 == 0, numbers[:-1], numbers[1:])
    assert same_bits(rounded(format, ties), even)
    assert same_bits(rounded(format, -ties[1:]), -even[1:])


@pytest.mark.long
@narrow_formats
def test_around_every_tie_rounding_is_torchs_conversion_of_float32(format):
    numbers = numbers_of(format)
    past = 2 * numbers[-1] - numbers[-2]
    ties = (numbers + np.append(numbers[1:], past)) / 2
    points = ties.astype(np.float32)
    assert np.array_equal(points, ties), "a tie that float32 does not hold tests nothing"
    near = [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(math.inf))]
    special = np.array([0.0, math.inf, math.nan, 3e38, 1e-45], dtype=np.float32)
    points = np.concatenate([*near, special])
    points = np.concatenate([points, -points])
    theirs = torch.from_numpy(points).to(torch_dtype(format)).double().numpy()
    assert same_bits(rounded(format, points, saturate=TORCH_SATURATES.get(format, False)), theirs)


def test_float32_is_torchs_conversion_of_float64():
    generator = np.random.default_rng(0)
    words = generator.integers(0, 2**64, 5_000, dtype=np.uint64).view(np.float64)
    scales = 2.0 ** generator.integers(-151, 129, 5_000)
    near = generator.standard_normal(5_000).astype(np.float32)
    above = np.nextafter(near, np.float32(math.inf))
    tie = (near.astype(np.float64) + above) / 2
    points = np.concatenate([words, near * scales, tie, np.nextafter(tie, 0), np.nextafter(tie, math.inf)])
    assert same_bits(rounded(FLOAT32, points), torch.from_numpy(points).float().double().numpy())


def test_tf32_is_a_bit_mask_on_float32_after_an_addition():
    # Each exponent and sign, with the ends of the 10 bits that stay and of the 13 that go.
    kept, dropped = [0, 1, 511, 512, 1022, 1023], [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF]
    words = np.array(
        [(head << 23) + (k << 13) + d for head in range(512) for k in kept for d in dropped], dtype=np.uint32
    )
    words = words[words >> np.uint32(23) & np.uint32(0xFF) != 0xFF]
    # Half a unit less one bit, and one more where the last kept bit is odd, carries when ties to even do.
    added = words + np.uint32(0xFFF) + (words >> np.uint32(13) & np.uint32(1))
    expected = (added & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    assert same_bits(rounded(TF32, words.view(np.float32)), expected)


@every_format
def test_zeros_keep_their_sign_where_the_format_has_two(format):
    negative_zero = -0.0 if format.has_negative_zero else 0.0
    points = np.array([0.0, -0.0, 5e-324, -5e-324])
    assert same_bits(rounded(format, points), [0.0, negative_zero, 0.0, negative_zero])


@every_format
def test_nan_and_infinities_stay_where_the_format_has_them(format):
    assert math.isnan(round_to(format, math.nan, saturate=True))
    for x in (math.inf, -math.inf):
        assert same_bits([round_to(format, x)], [x if format.has_infinity else math.nan])
        assert round_to(format, x, saturate=True) == math.copysign(format.max, x)


@every_format
def test_overflow_begins_half_a_unit_past_the_largest_number(format):
    threshold, past = format.overflow_threshold, math.inf if format.has_infinity else math.nan
    assert round_to(format, math.nextafter(threshold, 0)) == format.max
    # The tie goes to the even code, and of all largest codes only OCP E4M3's (0x7E) is even.
    assert same_bits([round_to(format, threshold)], [format.max if format is OCP_E4M3 else past])
    for x in (math.nextafter(threshold, math.inf), 2 * format.max, 1.7e308):
        assert same_bits([round_to(format, x), round_to(format, -x)], [past, -past])
        assert round_to(format, -x, saturate=True) == format.min


def test_dtypes_are_the_ones_meant():
    small = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
    assert [torch_dtype(format) for format in STORED] == [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        *small,
    ]
    with pytest.raises(SettingError, match="no torch dtype stores TF32: use one of FLOAT32, BFLOAT16"):
        torch_dtype(TF32)


@every_format
def test_a_record_survives_copy_and_pickle(format):
    for again in (copy.deepcopy(format), pickle.loads(pickle.dumps(format))):
        assert (again, hash(again)) == (format, hash(format))


def test_examples_in_docstrings_hold():
    results = [doctest.testmod(module) for module in (formats, formats._format)]
    assert sum(result.attempted for result in results) >= 6
    assert sum(result.failed for result in results) == 0


@pytest.mark.parametrize("name", ["decode", "encode", "RoundingMode"])
def test_a_name_that_went_says_what_to_use(name):
    with pytest.raises(AttributeError, match=r"has no attribute '\w+': (torch|round_to)"):
        getattr(formats, name)


def test_what_replaces_decode_and_encode_gives_the_code():
    code = torch.tensor(448.0).to(torch.float8_e4m3fn).view(torch.uint8).item()
    assert code == 0x7E
    assert torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn).float().item() == 448.0
