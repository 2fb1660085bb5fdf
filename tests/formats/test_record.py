"""The record: what the standards fix, what follows from it, and what is refused."""

import copy
import dataclasses
import doctest
import math
import pickle
from operator import attrgetter

import pytest
import torch

from narrowcast import formats
from narrowcast.errors import SettingError
from narrowcast.formats import E5M2FNUZ, TF32, decode, encode, round_to, torch_dtype
from narrowcast.formats._format import FORMATS

STORED = [format for format in FORMATS if format is not TF32]


def test_the_package_has_exactly_these_names():
    constants = {format.name for format in FORMATS}
    functions = {"decode", "encode", "round_to", "torch_dtype"}
    assert set(formats.__all__) == constants | functions | {"Format", "RoundingMode"}
    assert len(formats.__all__) == len(set(formats.__all__))
    assert all(getattr(formats, format.name) is format for format in FORMATS)


@pytest.mark.parametrize("function", [decode, encode, round_to], ids=attrgetter("__name__"))
def test_examples_in_docstrings_hold(function):
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    results = [runner.run(example) for example in finder.find(function)]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0


@pytest.mark.parametrize("format", FORMATS, ids=attrgetter("name"))
def test_a_record_survives_copy_and_pickle_and_is_frozen(format):
    for again in (copy.copy(format), copy.deepcopy(format), pickle.loads(pickle.dumps(format))):
        assert (again, hash(again)) == (format, hash(format))
    with pytest.raises(dataclasses.FrozenInstanceError):
        format.bias = 16


@pytest.mark.parametrize("format", STORED, ids=attrgetter("name"))
def test_limits_are_those_of_torch(format):
    finfo = torch.finfo(torch_dtype(format))
    assert finfo.bits == format.storage_bits == format.bits
    assert (finfo.min, finfo.max) == (format.min, format.max)
    assert finfo.smallest_normal == format.smallest_normal
    # torch 2.13 says 0.125 for E5M2FNUZ, whose 2 significand bits make it 0.25: the codes are asked below.
    assert format is E5M2FNUZ or finfo.eps == format.eps
    one_code = torch.tensor([1], dtype={8: torch.uint8, 16: torch.int16, 32: torch.int32}[format.bits])
    assert one_code.view(torch_dtype(format)).double().item() == format.smallest_subnormal


def test_limits_of_tf32_which_torch_has_not_are_those_of_its_bits():
    assert TF32.max == (2 - 2**-10) * 2.0**127 == -TF32.min
    assert (TF32.smallest_normal, TF32.smallest_subnormal) == (2**-126, 2**-136)


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


def test_dtypes_are_the_ones_meant():
    small = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
    assert [torch_dtype(one) for one in STORED] == [torch.float32, torch.bfloat16, torch.float16, *small]


def test_a_format_without_a_dtype_is_refused():
    with pytest.raises(SettingError, match="no torch dtype stores TF32: use one of FLOAT32, BFLOAT16"):
        torch_dtype(TF32)
