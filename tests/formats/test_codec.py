"""Every code of every format of 16 bits or fewer, against torch, at zero tolerance."""

import math
from operator import attrgetter

import numpy as np
import pytest
import torch

from narrowcast.errors import SettingError
from narrowcast.formats import E4M3FNUZ, FLOAT32, OCP_E4M3, TF32, decode, encode, torch_dtype
from narrowcast.formats._format import FORMATS

NARROW = [format for format in FORMATS if format.bits <= 16]


@pytest.mark.parametrize("format", NARROW, ids=attrgetter("name"))
def test_every_code_means_what_torch_says(format, same_bits):
    codes = np.arange(format.code_count).astype(f"uint{format.bits}")
    theirs = torch.from_numpy(codes.view(f"int{format.bits}")).view(torch_dtype(format)).double()
    assert same_bits([decode(format, code) for code in range(format.code_count)], theirs.numpy())


@pytest.mark.parametrize("format", NARROW, ids=attrgetter("name"))
def test_every_number_is_encoded_as_its_own_code(format):
    for code in range(format.code_count):
        x = decode(format, code)
        assert encode(format, x) == (format.nan_code if math.isnan(x) else code), hex(code)


@pytest.mark.parametrize("format", [FLOAT32, TF32], ids=attrgetter("name"))
def test_wide_codes_mean_what_the_float32_word_says(format, same_bits):
    # Too many codes to walk: each sign and exponent with the ends and the middle of the significand field.
    last = (1 << format.significand_bits) - 1
    trailings = [0, 1, 2, last // 3, last // 2, last // 2 + 1, last - 1, last]
    exponents = range(1 << (format.exponent_bits + 1))
    codes = [
        (exponent << format.significand_bits) + trailing for exponent in exponents for trailing in trailings
    ]
    words = np.array(codes, dtype=np.uint32) << np.uint32(format.storage_bits - format.bits)
    ours = [decode(format, code) for code in codes]
    assert same_bits(ours, torch.from_numpy(words.view(np.int32)).view(torch.float32).double().numpy())
    for code, x in zip(codes, ours, strict=True):
        assert encode(format, x) == (format.nan_code if math.isnan(x) else code), hex(code)


def test_nan_is_encoded_as_the_documents_say():
    codes = {format.name: format.nan_code for format in FORMATS}
    assert codes == {
        "FLOAT32": 0x7FC00000, "TF32": 0x7FC00000 >> 13, "BFLOAT16": 0x7FC0, "FLOAT16": 0x7E00,
        "OCP_E4M3": 0x7F, "OCP_E5M2": 0x7E, "E4M3FNUZ": 0x80, "E5M2FNUZ": 0x80,
    }  # fmt: skip
    for format in FORMATS:
        assert encode(format, math.nan) == encode(format, -math.nan) == format.nan_code


@pytest.mark.parametrize("format", FORMATS, ids=attrgetter("name"))
def test_numbers_that_the_format_lacks_are_refused(format):
    absent = [
        1.0 + format.eps / 2, format.overflow_threshold, format.flush_threshold, 2 * format.max, 1e308,
        5e-324, math.nextafter(format.max, 0.0), math.nextafter(format.smallest_normal, 0.0),
    ]  # fmt: skip
    if not format.has_infinity:
        absent.append(math.inf)
    for x in absent:
        for signed in (x, -x):
            with pytest.raises(SettingError, match="round it first"):
                encode(format, signed)


def test_what_a_refusal_says():
    with pytest.raises(SettingError, match=r"-0.0 cannot be .* round_to\(E4M3FNUZ, -0.0\)"):
        encode(E4M3FNUZ, -0.0)
    for code in (-1, 256):
        with pytest.raises(SettingError, match=f"expected a OCP_E4M3 code from 0 to 255, got {code}"):
            decode(OCP_E4M3, code)
