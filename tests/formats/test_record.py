"""The record: what the standards fix, what follows from it, and what is refused."""

import copy
import dataclasses
import doctest
import math
import pickle
import sys
from operator import attrgetter

import ml_dtypes
import pytest
import torch

from child_processes import output_of
from narrowcast import formats
from narrowcast.errors import SettingError
from narrowcast.formats import (
    BFLOAT16,
    E4M3FNUZ,
    E5M2FNUZ,
    FLOAT16,
    FLOAT32,
    OCP_E4M3,
    OCP_E5M2,
    TF32,
    Format,
    decode,
    encode,
    round_to,
    torch_dtype,
)
from narrowcast.formats._format import FORMATS, Specials, from_torch_dtype

STORED = [format for format in FORMATS if format is not TF32]
CHANGES = {
    "name": "OTHER",
    "standard": "another document",
    "storage_bits": 64,
    "exponent_bits": 4,
    "significand_bits": 5,
    "bias": 3,
    "specials": Specials.NAN_NEGATIVE_ZERO,
}


def test_the_package_has_exactly_these_names():
    constants = {format.name for format in FORMATS}
    functions = {"decode", "encode", "round_to", "torch_dtype"}
    assert set(formats.__all__) == constants | functions | {"Format", "RoundingMode"}
    assert len(formats.__all__) == len(set(formats.__all__))
    assert all(getattr(formats, format.name) is format for format in FORMATS)


def test_importing_the_package_does_not_import_torch():
    program = "import sys, narrowcast.formats; sys.exit('torch' in sys.modules)"
    output_of([sys.executable, "-c", program])


@pytest.mark.parametrize("function", [decode, encode, round_to], ids=attrgetter("__name__"))
def test_examples_in_docstrings_hold(function):
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    results = [runner.run(example) for example in finder.find(function)]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0


def test_every_field_of_the_record_can_be_another():
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(Format)}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_record_survives_copy_pickle_and_repr(field):
    changed = dataclasses.replace(FLOAT16, **{field: CHANGES[field]})
    assert changed != FLOAT16
    assert getattr(changed, field) == CHANGES[field]
    again = [copy.copy(changed), copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))]
    again.append(eval(repr(changed), {"Format": Format, "Specials": Specials}))
    assert all(each == changed and hash(each) == hash(changed) for each in again)
    assert all(getattr(changed, other) == getattr(FLOAT16, other) for other in CHANGES if other != field)


def test_a_record_is_frozen_slotted_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FLOAT16.bias = 16
    assert not hasattr(FLOAT16, "__dict__")
    with pytest.raises(TypeError, match="positional"):
        Format("x", "y", 16, 5, 10, 15, Specials.IEEE)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": ""}, "name must describe the format, got ''"),
        ({"standard": ""}, "standard must describe the format, got ''"),
        ({"exponent_bits": 1}, "FLOAT16: exponent_bits must be an integer, 2 or more, got 1"),
        ({"significand_bits": 0}, "FLOAT16: significand_bits must be an integer, 1 or more, got 0"),
        ({"bias": 7.5}, "FLOAT16: bias must be an integer, 0 or more, got 7.5"),
        ({"specials": "ieee"}, "FLOAT16: specials must be one of Specials.IEEE, .*, got 'ieee'"),
        ({"storage_bits": 15}, "more than storage_bits = 15: set storage_bits to at least 16"),
        ({"storage_bits": 64, "significand_bits": 52}, "with 52 significand bits are not all exact"),
        (
            {"storage_bits": 32, "exponent_bits": 11, "bias": 1023},
            r"2\*\*-1032 to 2\*\*1023 .* not all exact",
        ),
        ({"bias": 1065}, r"from 2\*\*-1074 to 2\*\*-1035 .* not all exact"),
    ],
)
def test_a_record_that_cannot_be_is_refused(change, match):
    with pytest.raises(SettingError, match=match):
        dataclasses.replace(FLOAT16, **change)


@pytest.mark.parametrize("format", STORED, ids=attrgetter("name"))
def test_limits_are_those_of_torch(format):
    finfo = torch.finfo(torch_dtype(format))
    assert finfo.bits == format.storage_bits == format.bits
    assert (finfo.min, finfo.max) == (format.min, format.max)
    assert finfo.smallest_normal == format.smallest_normal
    # torch 2.13 says 0.125 for E5M2FNUZ, whose 2 significand bits make it 0.25: ml_dtypes is asked below.
    assert format is E5M2FNUZ or finfo.eps == format.eps
    one_code = torch.tensor([1], dtype={8: torch.uint8, 16: torch.int16, 32: torch.int32}[format.bits])
    assert one_code.view(torch_dtype(format)).double().item() == format.smallest_subnormal


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        (FLOAT16, "float16"),
        (BFLOAT16, ml_dtypes.bfloat16),
        (OCP_E4M3, ml_dtypes.float8_e4m3fn),
        (OCP_E5M2, ml_dtypes.float8_e5m2),
        (E4M3FNUZ, ml_dtypes.float8_e4m3fnuz),
        (E5M2FNUZ, ml_dtypes.float8_e5m2fnuz),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_limits_are_those_of_ml_dtypes(format, dtype):
    finfo = ml_dtypes.finfo(dtype)
    assert float(finfo.eps) == format.eps
    assert float(finfo.max) == format.max
    assert float(finfo.smallest_normal) == format.smallest_normal
    assert float(finfo.smallest_subnormal) == format.smallest_subnormal
    assert (finfo.nexp, finfo.nmant) == (format.exponent_bits, format.significand_bits)
    assert finfo.minexp == format.min_exponent


@pytest.mark.parametrize(
    ("format", "largest", "smallest_normal", "smallest_subnormal"),
    [
        (FLOAT16, 65504.0, 2**-14, 2**-24),
        (OCP_E4M3, 448.0, 2**-6, 2**-9),
        (OCP_E5M2, 57344.0, 2**-14, 2**-16),
        (E4M3FNUZ, 240.0, 2**-7, 2**-10),
        (E5M2FNUZ, 57344.0, 2**-15, 2**-17),
        (BFLOAT16, (2 - 2**-7) * 2.0**127, 2**-126, 2**-133),
        (TF32, (2 - 2**-10) * 2.0**127, 2**-126, 2**-136),
        (FLOAT32, (2 - 2**-23) * 2.0**127, 2**-126, 2**-149),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_limits_are_those_of_the_documents(format, largest, smallest_normal, smallest_subnormal):
    assert format.max == largest == -format.min
    assert format.smallest_normal == smallest_normal
    assert format.smallest_subnormal == smallest_subnormal


@pytest.mark.parametrize("format", FORMATS, ids=attrgetter("name"))
def test_limits_agree_with_the_codes(format):
    assert decode(format, format.largest_finite_code) == format.max
    assert decode(format, 1) == format.smallest_subnormal
    assert decode(format, 1 << format.significand_bits) == format.smallest_normal
    assert decode(format, encode(format, 1.0) + 1) - 1.0 == format.eps
    assert 2.0**format.max_exponent <= format.max < 2.0 ** (format.max_exponent + 1)
    assert format.smallest_normal == 2.0**format.min_exponent
    unit = format.max - decode(format, format.largest_finite_code - 1)
    assert format.overflow_threshold == format.max + unit / 2
    assert format.flush_threshold == format.smallest_subnormal / 2
    assert math.isnan(decode(format, format.nan_code))
    assert format.code_count == 2 ** (1 + format.exponent_bits + format.significand_bits)


def test_what_differs_between_the_variants():
    finite_only = [format.name for format in FORMATS if not format.has_infinity]
    assert finite_only == ["OCP_E4M3", "E4M3FNUZ", "E5M2FNUZ"]
    assert [format.name for format in FORMATS if not format.has_negative_zero] == ["E4M3FNUZ", "E5M2FNUZ"]
    assert [format.name for format in FORMATS if format.bits != format.storage_bits] == ["TF32"]
    assert (TF32.bits, TF32.code_count) == (19, 2**19)


@pytest.mark.parametrize("format", STORED, ids=attrgetter("name"))
def test_dtypes_map_one_to_one(format):
    assert from_torch_dtype(torch_dtype(format)) is format


def test_dtypes_are_the_ones_meant():
    small = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
    assert [torch_dtype(one) for one in STORED] == [torch.float32, torch.bfloat16, torch.float16, *small]


def test_a_format_without_a_dtype_is_refused():
    with pytest.raises(SettingError, match="no torch dtype stores TF32: use one of FLOAT32, BFLOAT16"):
        torch_dtype(TF32)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.complex64, torch.float8_e8m0fnu, "float16"]
)
def test_a_dtype_without_a_record_is_refused(dtype):
    with pytest.raises(SettingError, match=f"has no format for {dtype}: use one of torch.float32, torch.bfl"):
        from_torch_dtype(dtype)
