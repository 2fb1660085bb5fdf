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
    },
}


@pytest.mark.parametrize("kind", CHANGED)
def test_every_field_survives_every_journey(kind):
    changed = CHANGED[kind]
    assert set(changed) == {field.name for field in dataclasses.fields(kind)}, "a field is missing here"
    value = kind(**changed)
    for field in dataclasses.fields(kind):
        assert field.default is dataclasses.MISSING or changed[field.name] != field.default
    by_fields = kind(**dataclasses.asdict(value))
    names = {"Off": Off, "Static": Static, "Dynamic": Dynamic}
    journeys = [
        copy.copy(value),
        copy.deepcopy(value),
        pickle.loads(pickle.dumps(value)),
        dataclasses.replace(value),
        by_fields,
        eval(repr(value), names),
    ]
    for arrived in journeys:
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


def test_each_field_makes_a_difference():
    base = Dynamic()
    for name, other in CHANGED[Dynamic].items():
        assert dataclasses.replace(base, **{name: other}) != base


NUMBER = "expected a loss scale that is a number, got "
RANGE = "expected a positive, finite loss scale from 2**-126 to 2**127, got "
BAD_SCALES = [
    (0.0, f"{RANGE}0.0"),
    (-1.0, f"{RANGE}-1.0"),
    (math.inf, f"{RANGE}inf"),
    (math.nan, f"{RANGE}nan"),
    (2.0**-127, f"{RANGE}5.877471754111438e-39"),
    (2.0**127 * (1 + 2.0**-23), f"{RANGE}1.7014120374287884e+38"),
    (10**400, f"{RANGE}{10**400}"),
    (True, f"{NUMBER}True"),
    ("2", f"{NUMBER}'2'"),
    (None, f"{NUMBER}None"),
]
BAD_FIELDS = [
    *[("scale", *bad) for bad in BAD_SCALES],
    *[
        ("growth_factor", bad, f"growth_factor must be above 1 and finite, got {bad!r}")
        for bad in (1.0, 0.5, -2.0, math.inf, math.nan, "2", None, True)
    ],
    *[
        ("backoff_factor", bad, f"backoff_factor must be between 0 and 1, got {bad!r}")
        for bad in (0.0, 1.0, -0.5, 2.0, math.nan, "0.5", None)
    ],
    *[
        ("growth_interval", bad, f"growth_interval must be a whole number of at least 1, got {bad!r}")
        for bad in (0, -1, 2.0, "2", None, True)
    ],
    *[
        ("good_steps", bad, f"good_steps must be a whole number from 0 to growth_interval - 1, got {bad!r}")
        for bad in (-1, 2000, 1.0, "1", None, False)
    ],
]


@pytest.mark.parametrize(("field", "bad", "message"), BAD_FIELDS)
def test_a_bad_field_is_refused_with_what_was_expected(field, bad, message):
    with pytest.raises(ScaleError) as refused:
        Dynamic(**{field: bad})
    assert str(refused.value) == message
    with pytest.raises(ValueError, match="got"):
        dataclasses.replace(Dynamic(), **{field: bad})


@pytest.mark.parametrize(("bad", "message"), BAD_SCALES)
def test_a_bad_fixed_scale_is_refused(bad, message):
    with pytest.raises(ScaleError) as refused:
        Static(scale=bad)
    assert str(refused.value) == message


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**127, 1, 1024])
def test_the_ends_of_the_range_are_in_it(scale):
    assert Static(scale=scale).scale == scale
    assert Dynamic(scale=scale).scale == scale


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dynamic", Dynamic()),
        (" Dynamic ", Dynamic()),
        ("off", Off()),
        ("OFF", Off()),
        ("1024", Static(scale=1024.0)),
        ("2e3", Static(scale=2000.0)),
        (".5", Static(scale=0.5)),
    ],
)
def test_words_of_a_command_line(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", "on", "dynamic 2", "1,024", "2**16", "0x10"])
def test_other_words_are_refused(text):
    with pytest.raises(ScaleError) as refused:
        parse(text)
    assert str(refused.value) == (
        f"expected a loss scale of 'dynamic', 'off' or a positive number such as 1024, got {text!r}"
    )


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "1e-40", "1e39"])
def test_numbers_that_cannot_scale_a_loss_are_refused(text):
    with pytest.raises(ScaleError) as refused:
        parse(text)
    assert str(refused.value) == f"{RANGE}{float(text)!r}"
