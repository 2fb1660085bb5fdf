"""Fast stochastic rounding against the slow reference, and its probabilities counted over all the noise."""

import math
from fractions import Fraction

import pytest
import torch

from narrowcast.formats import BFLOAT16, FLOAT16
from narrowcast.weights._lower import round_stochastically, rounded_with

NOISE_BITS = {torch.bfloat16: 16, torch.float16: 31}
FORMATS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def same(a, b):
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def neighbours(format, x):
    """The numbers of the format on either side of x, that of smaller magnitude first, and how far x is on."""
    exponent = max(math.frexp(x)[1] - 1, format.min_exponent)
    unit = Fraction(2) ** (exponent - format.significand_bits)
    units = abs(Fraction(x)) / unit
    whole = math.floor(units)
    toward, away = float(whole * unit), float((whole + 1) * unit)
    if toward > format.max:
        toward = math.inf
    if away > format.max:
        away = math.inf
    return math.copysign(toward, x), math.copysign(away, x), units - whole


def stochastic_reference(format, x, u):
    """Round x away from zero if u is below the exact fraction of the way."""
    if not math.isfinite(x):
        return x
    toward, away, fraction = neighbours(format, x)
    return away if u < fraction else toward


def all_numbers(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(torch.float32)


def beyond(values):
    """A float32 somewhere between each number of a low format and the next, most of them subnormal or odd."""
    bits = values.view(torch.int32)
    return (bits + torch.randint(0, 2**16, bits.shape, dtype=torch.int32)).view(torch.float32)


def test_every_number_of_the_format_stays_whatever_the_noise(dtype):
    numbers = all_numbers(dtype)
    for noise in (0, 1, 2 ** NOISE_BITS[dtype] - 1):
        rounded = rounded_with(numbers, dtype, torch.full(numbers.shape, noise, dtype=torch.int32))
        assert rounded.dtype == dtype
        finite = ~numbers.isnan()
        assert torch.equal(rounded[finite].view(torch.int16), numbers[finite].to(dtype).view(torch.int16))
        assert rounded[~finite].isnan().all()


def test_each_gap_is_rounded_as_the_reference_rounds_it(dtype):
    format, bits = FORMATS[dtype], NOISE_BITS[dtype]
    values = beyond(all_numbers(dtype)[::3])
    noise = torch.randint(0, 2**bits, values.shape, dtype=torch.int64).to(torch.int32)
    rounded = rounded_with(values, dtype, noise).float().tolist()
    for x, n, y in zip(values.tolist(), noise.tolist(), rounded, strict=True):
        used = 13 if dtype == torch.float16 and abs(x) >= 2**-14 else bits
        u = Fraction(2**used - 1 - (n >> (bits - used)), 2**used)
        assert same(y, stochastic_reference(format, x, u)), (x, n, y)


@pytest.mark.parametrize("sign", [1, -1])
def test_bf16_rounds_away_as_often_as_the_fraction_says(sign):
    noise = torch.arange(2**16, dtype=torch.int32)
    for start in (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x4049, 0x7F7F):
        for rest in (1, 2, 0x7FFF, 0x8000, 0xABCD, 0xFFFF):
            x = sign * torch.tensor((start << 16) + rest, dtype=torch.int32).view(torch.float32)
            rounded = rounded_with(x.expand(2**16), torch.bfloat16, noise)
            near = torch.tensor(start << 16, dtype=torch.int32).view(torch.float32).item()
            assert int((rounded.float().abs() > near).sum()) == rest


def test_fp16_rounds_away_as_often_as_the_fraction_says():
    for exponent, draws in ((0, 13), (-14, 13), (-15, 14), (-20, 19), (-25, 19), (-27, 19)):
        # Every value of the leading bits of the noise, with the rest all ones: the fraction is a
        # multiple of what the leading bits resolve, so that the rest cannot decide.
        noise = ((torch.arange(2**draws, dtype=torch.int64) + 1 << (31 - draws)) - 1).to(torch.int32)
        x = torch.tensor(2.0**exponent * (1 + 2**-3 + (2**-13 if exponent >= -20 else 0)))
        unit = max(2.0 ** (exponent - 10), 2.0**-24)
        below = math.floor(x.item() / unit)
        fraction = Fraction(x.item()) / Fraction(unit) - below
        assert fraction > 0
        rounded = rounded_with(x.expand(2**draws), torch.float16, noise).float()
        assert int((rounded == (below + 1) * unit).sum()) == fraction * 2**draws
        assert int((rounded == below * unit).sum()) == (1 - fraction) * 2**draws


def test_fp16_below_what_its_noise_resolves_is_zero():
    noise = torch.full((1,), 2**31 - 1, dtype=torch.int32)
    tiny, least = torch.tensor([2.0**-56]), torch.tensor([2.0**-55])
    assert rounded_with(tiny, torch.float16, noise).item() == 0.0
    assert rounded_with(least, torch.float16, noise).item() == 2**-24
    assert rounded_with(least, torch.float16, noise - 1).item() == 0.0


def test_drawn_noise_is_even_in_every_bit(dtype):
    n, draws, format = 2**18, torch.Generator().manual_seed(3), FORMATS[dtype]
    for x in (1.0 + 2**-13, -1.0 - 2**-9 - 2**-12, 2**-25 + 2**-37, 2**-15 + 2**-26, 60001.5):
        toward, away, fraction = neighbours(format, x)
        rounded = round_stochastically(torch.full((n,), x), dtype, draws).float()
        share = (rounded == away).double().mean().item()
        assert ((rounded == away) | (rounded == toward)).all()
        # n draws with probability f are off by sqrt(f (1 - f) / n); five times that is once in 10**6.
        assert 0 < fraction < 1
        assert abs(share - fraction) <= 5 * math.sqrt(fraction * (1 - fraction) / n)


def test_the_generator_alone_decides(dtype):
    values = torch.randn(5, 7)
    before = torch.get_rng_state()
    one, two = (round_stochastically(values, dtype, torch.Generator().manual_seed(8)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)
    other = round_stochastically(values, dtype, torch.Generator().manual_seed(9))
    assert not torch.equal(one, other)


def test_shapes_and_strides_stay(dtype):
    for values in (
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 8).t(),
        torch.randn(6, 8)[::2, 1::3],
    ):
        rounded = round_stochastically(values, dtype)
        assert rounded.shape == values.shape
        gap = torch.finfo(dtype).eps * values.abs()
        assert ((rounded.float() - values).abs() <= gap).all()
        assert rounded.stride() == values.to(dtype).stride()
