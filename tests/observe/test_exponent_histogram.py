"""What a cast makes of numbers, from counts alone: equal to casting them, at every edge, for every format."""

import math

import pytest
import torch

from narrowcast import formats
from narrowcast.errors import ScaleError, SettingError
from narrowcast.formats import FLOAT16, OCP_E4M3, round_to, torch_dtype
from narrowcast.formats._format import FORMATS
from narrowcast.observe import ExponentHistogram, _exponent_histogram

STORED = [format for format in FORMATS if format.name != "TF32"]
OUTCOMES = ("flushed", "subnormal", "normal", "overflowed")


def histogram_of(*tensors):
    histogram = ExponentHistogram()
    for tensor in tensors:
        histogram.add(tensor)
    return histogram


def by_casting(x, format):
    """The outcomes of torch's own cast, counted; x is float32, finite and not zero."""
    y = x.to(torch_dtype(format)).double().abs()
    # Half a unit past the largest number is where rounding leaves the format; E4M3 keeps the tie itself, and
    # torch's conversion saturates, so that what it returns does not tell.
    past = x.double().abs() > format.overflow_threshold
    overflowed = past if format == OCP_E4M3 else ~y.isfinite()
    flushed, subnormal = y == 0, (y > 0) & (y < format.smallest_normal)
    counts = [int(mask.sum()) for mask in (flushed, subnormal & ~overflowed, overflowed)]
    return dict(zip(("flushed", "subnormal", "overflowed"), counts, strict=True)) | {
        "normal": x.numel() - sum(counts)
    }


def outcomes(counts):
    return {name: getattr(counts, name) for name in OUTCOMES}


@pytest.fixture(scope="module")
def every_rounding():
    """Whatever rounding to eleven bits or fewer can depend on: exponents around the limits of formats, each
    start of 11 bits of a fraction, and after it nothing, a bit, half, or all."""
    fields = [*range(8), *range(80, 152), *range(248, 255)]
    exponents = torch.tensor(fields, dtype=torch.int32)[:, None, None] << 23
    starts = torch.arange(1 << 11, dtype=torch.int32)[None, :, None] << 12
    ends = torch.tensor([0, 1, 1 << 11, (1 << 12) - 1], dtype=torch.int32)
    numbers = (exponents + starts + ends).flatten().view(torch.float32)
    return numbers[numbers != 0]


@pytest.fixture(scope="module")
def its_histogram(every_rounding):
    return histogram_of(every_rounding)


@pytest.mark.parametrize("format", STORED, ids=lambda format: format.name)
def test_a_cast_is_foretold_exactly(every_rounding, its_histogram, format):
    assert outcomes(its_histogram.cast_to(format)) == by_casting(every_rounding, format)


@pytest.mark.parametrize("shift", [-13, 3, 24])
@pytest.mark.parametrize("format", [FLOAT16, formats.BFLOAT16, OCP_E4M3], ids=lambda format: format.name)
def test_a_scale_is_foretold_exactly(every_rounding, format, shift):
    there = (every_rounding * 2.0**shift).double() == every_rounding.double() * 2.0**shift  # float32 holds it
    x = every_rounding[there]
    told = histogram_of(x).cast_to(format, scale=2.0**shift)
    assert outcomes(told) == by_casting(x * 2.0**shift, format)
    assert told.scale == 2.0**shift


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_cast_is_foretold_around_the_limits_of_a_format(format):
    """One number at a time, against the slow reference, with scales that float32 could not hold."""
    limits = [
        format.flush_threshold,
        format.smallest_normal - format.smallest_subnormal / 2,
        format.smallest_normal,
        format.max,
        format.overflow_threshold,
    ]
    for limit in limits:
        shift = math.frexp(limit)[1]
        near = torch.tensor(math.ldexp(limit, -shift), dtype=torch.float32)
        for _ in range(3):
            near = torch.nextafter(near, torch.tensor(0.0))
        for _ in range(7):
            y = abs(round_to(format, math.ldexp(near.item(), shift)))
            small, large = y < format.smallest_normal, not math.isfinite(y)
            expected = "overflowed" if large else "normal" if not small else "subnormal" if y else "flushed"
            told = histogram_of(near).cast_to(format, scale=2.0**shift)
            assert outcomes(told) == dict.fromkeys(OUTCOMES, 0) | {expected: 1}, (limit, near.item())
            near = torch.nextafter(near, torch.tensor(math.inf))


def test_every_half_of_two_formats_keeps_its_exponent():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        histogram = histogram_of(x)
        wide = x.double()
        assert histogram.total == 1 << 16
        told = histogram.cast_to(FLOAT16)
        assert (told.zeros, told.infinities, told.nans) == (2, 2, int(wide.isnan().sum()))
        finite = wide[wide.isfinite() & (wide != 0)]
        found, counts = (torch.frexp(finite).exponent - 1).unique(return_counts=True)
        assert histogram.exponents == dict(zip(found.tolist(), counts.tolist(), strict=True))


def test_counts_add_up_over_tensors_and_parts(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(5, 41, 3).transpose(0, 1)
    whole = histogram_of(x)
    monkeypatch.setattr(_exponent_histogram, "_CHUNK", 7)
    parts = histogram_of(x[:10], x[10:], torch.empty(0))
    assert parts._read() == whole._read()
    assert whole.total == x.numel()
    parts.clear()
    assert (parts.total, parts.exponents) == (0, {})


def test_zeros_and_what_is_not_finite_are_apart():
    told = histogram_of(torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1e-20])).cast_to(
        FLOAT16
    )
    assert (told.zeros, told.infinities, told.nans, told.flushed, told.normal) == (2, 2, 1, 1, 1)
    assert (told.total, told.nonzero) == (7, 2)
    assert told.shares == {"flushed": 0.5, "subnormal": 0.0, "normal": 0.5, "overflowed": 0.0}
    assert str(told) == (
        "FLOAT16 at scale 1: 50.00 % flushed to zero, 0.00 % subnormal, 50.00 % normal, 0.00 % overflow"
    )
    none = histogram_of(torch.zeros(3)).cast_to(FLOAT16)
    assert none.shares == {}
    assert str(none) == "FLOAT16 at scale 1: no finite number but zero"


def test_the_largest_scale_without_overflow():
    assert histogram_of(torch.tensor([65519.0])).largest_scale(FLOAT16) == 1.0
    assert histogram_of(torch.tensor([65520.0])).largest_scale(FLOAT16) == 0.5
    assert histogram_of(torch.tensor([1.0, 3e-6])).largest_scale(FLOAT16) == 2.0**15
    assert histogram_of(torch.tensor([2.0**-149])).largest_scale(FLOAT16) == 2.0**164
    assert histogram_of(torch.tensor([math.inf, 0.0])).largest_scale(FLOAT16) is None


def test_gradients_of_any_layout_and_dtype_are_counted():
    histogram = ExponentHistogram()
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(histogram.add)
    (y * 0.25).sum().backward()
    assert histogram.exponents == {-2: 3}
    assert x.grad.tolist() == [0.5] * 3
    histogram.clear()
    with torch.inference_mode():
        histogram.add(torch.ones(2))
    histogram.add(torch.tensor([1 + 4j]).conj())
    histogram.add(torch.tensor([1.0]).to(torch.float8_e5m2))
    histogram.add(torch.sparse_coo_tensor([[0, 0]], [1.0, 1.0], (4,), check_invariants=True))
    assert histogram.exponents == {0: 4, 1: 1, 2: 1}
    assert str(histogram) == "6 numbers: 0 zeros, 0 infinities, 0 NaN, exponents 0 to 2"


def test_what_cannot_be_counted_is_refused():
    histogram = ExponentHistogram()
    for wrong in (torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)):
        with pytest.raises(SettingError, match=rf"got {wrong.dtype}: make it one by x\.float\(\)"):
            histogram.add(wrong)
    with pytest.raises(SettingError, match="expected a tensor, got float"):
        histogram.add(1.0)
    for scale in (0.0, 3.0, -2.0, math.inf, math.nan, True, "2", 2.0**501):
        with pytest.raises(ScaleError, match=r"expected a power of two from 2\*\*-500 to 2\*\*500"):
            histogram.cast_to(FLOAT16, scale=scale)
    with pytest.raises(SettingError, match=r"expected a format, as nc\.formats\.FLOAT16, got 'fp16'"):
        histogram.cast_to("fp16")


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits(every_rounding, no_waiting):
    x = every_rounding.cuda()
    histogram = histogram_of(x[:8])
    with no_waiting():
        histogram.add(x)
    assert histogram._read() == histogram_of(every_rounding[:8], every_rounding)._read()
