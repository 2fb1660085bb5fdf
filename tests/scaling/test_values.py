"""Loss scales as values: frozen, equal by their fields, the same after every journey, refused when wrong."""

import copy
import dataclasses
import math
import pickle

import pytest

from narrowcast.errors import ScaleError
from narrowcast.scaling import Dynamic, Off, Static, parse

# Each field away from its default.
CHANGED = {
    Off: {},
    Static: {"scale": 0.1},
    Dynamic: {
        "scale": 3.0,
        "growth_factor": 1.5,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "good_steps": 6,
        "rule": "megatron",
        "hysteresis": 3,
        "hysteresis_left": 2,
        "min_scale": 0.5,
        "max_scale": 2.0**20,
    },
}


@pytest.mark.parametrize("kind", CHANGED)
def test_every_field_survives_every_journey(kind):
    changed = CHANGED[kind]
    assert set(changed) == {field.name for field in dataclasses.fields(kind)}, "a field is missing here"
    value = kind(**changed)
    for field in dataclasses.fields(kind):
        assert field.default is dataclasses.MISSING or changed[field.name] != field.default
    names = {"Off": Off, "Static": Static, "Dynamic": Dynamic}
    journeys = [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v)), dataclasses.replace]
    journeys += [lambda v: kind(**dataclasses.asdict(v)), lambda v: eval(repr(v), names)]
    for journey in journeys:
        arrived = journey(value)
        assert arrived == value
        assert hash(arrived) == hash(value)
        assert repr(arrived) == repr(value)


@pytest.mark.parametrize("kind", CHANGED)
def test_a_value_cannot_be_changed(kind):
    value = kind(**CHANGED[kind])
    for name in CHANGED[kind]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 1.0)
    with pytest.raises((AttributeError, TypeError)):
        value.other = 1.0
    with pytest.raises(TypeError):
        kind(1.0)


def test_hysteresis_left_starts_full():
    assert Dynamic().hysteresis_left == 1
    full = Dynamic(rule="apex", hysteresis=3)
    assert full.hysteresis_left == 3
    assert full == Dynamic(rule="apex", hysteresis=3, hysteresis_left=3)
    more = dataclasses.replace(full, hysteresis=5, hysteresis_left=None)
    assert more.hysteresis_left == 5


NUMBER = "expected a .* that is a number, got"
RANGE = "expected a positive, finite"
BAD_SCALES = [
    *[(bad, RANGE) for bad in (0.0, -1.0, math.inf, math.nan, 2.0**-127, 2.0**127 * (1 + 2.0**-23), 10**400)],
    *[(bad, NUMBER) for bad in (True, "2", None)],
]
BAD_FIELDS = {
    "growth_factor": (1.0, 0.5, -2.0, math.inf, math.nan, "2", None, True),
    "backoff_factor": (0.0, 1.0, -0.5, 2.0, math.nan, "0.5", None),
    "growth_interval": (0, -1, 2.0, "2", None, True),
    "good_steps": (-1, 2000, 1.0, "1", None, False),
    "hysteresis": (0, -1, 1.0, "1", None, True, 2),
    "hysteresis_left": (-1, 2, 1.0, "1", True),
}
BAD = [
    *[(name, *bad) for name in ("scale", "min_scale", "max_scale") for bad in BAD_SCALES],
    *[(name, bad, f"{name} must be") for name, values in BAD_FIELDS.items() for bad in values],
    ("min_scale", 2.0**17, "scale must be from min_scale to max_scale"),
    ("max_scale", 2.0**15, "scale must be from min_scale to max_scale"),
    ("rule", "Apex", 'unknown rule .*Did you mean "apex"'),
    ("rule", None, "unknown rule None"),
    ("rule", "deepspeed", "rule 'deepspeed' is gone: use 'megatron'"),
]


@pytest.mark.parametrize(("field", "bad", "message"), BAD, ids=lambda value: str(value)[:30])
def test_a_bad_field_is_refused(field, bad, message):
    with pytest.raises(ScaleError, match=message):
        Dynamic(**{field: bad})
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Dynamic(), **{field: bad})
    if field == "scale":
        with pytest.raises(ScaleError, match=message):
            Static(scale=bad)


def test_good_steps_end_where_the_scale_grows():
    assert Dynamic(growth_interval=7, good_steps=6).good_steps == 6
    with pytest.raises(ScaleError, match="from 0 to growth_interval - 1, got 7"):
        Dynamic(growth_interval=7, good_steps=7)


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**127, 1, 1024])
def test_the_ends_of_the_range_are_valid(scale):
    assert Static(scale=scale).scale == scale
    assert Dynamic(scale=scale).scale == scale


WORDS = {
    "dynamic": Dynamic(),
    " Dynamic ": Dynamic(),
    "OFF": Off(),
    "1024": Static(scale=1024.0),
    "2e3": Static(scale=2000.0),
    ".5": Static(scale=0.5),
}
OTHER_WORDS = "'dynamic', 'off' or a positive number such as 1024, got"
REFUSED = [
    *[(text, OTHER_WORDS) for text in ("", "on", "dynamic 2", "1,024", "2**16", "0x10")],
    *[(text, RANGE) for text in ("0", "-1", "inf", "nan", "1e-40", "1e39")],
]


@pytest.mark.parametrize("text", WORDS)
def test_a_command_line_names_a_loss_scale(text):
    assert parse(text) == WORDS[text]


@pytest.mark.parametrize(("text", "match"), REFUSED)
def test_other_words_and_numbers_out_of_range_are_refused(text, match):
    with pytest.raises(ScaleError, match=match):
        parse(text)
