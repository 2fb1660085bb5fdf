"""Loss scales as values: frozen, equal by their fields, the same after every journey, refused when wrong."""

import copy
import dataclasses
import math
import pickle

import pytest

from narrowcast.errors import ScaleError
from narrowcast.scaling import RULES, Dynamic, LogMax, Off, Static, parse

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
    LogMax: {
        "scale": 3.0,
        "mean_decay": 0.9,
        "variance_decay": 0.95,
        "deviations": 2.0,
        "largest_log2": 15.0,
        "min_scale": 0.5,
        "max_scale": 2.0**20,
        "steps": 4,
        "mean_sum": -1.5,
        "slow_mean_sum": -2.5,
        "square_sum": 7.25,
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
    names = {"Off": Off, "Static": Static, "Dynamic": Dynamic, "LogMax": LogMax}
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


@pytest.mark.parametrize("kind", [Dynamic, LogMax])
def test_each_field_makes_a_difference(kind):
    # Beside the changed values, since not every field may differ from its default alone.
    base = kind(**CHANGED[kind])
    allowed = {"rule": "apex", "hysteresis": 2, "steps": 1}
    for field in dataclasses.fields(kind):
        other = allowed.get(field.name, field.default)
        assert dataclasses.replace(base, **{field.name: other}) != base


def test_hysteresis_left_starts_full():
    assert Dynamic().hysteresis_left == 1
    full = Dynamic(rule="apex", hysteresis=3)
    assert full.hysteresis_left == 3
    assert full == Dynamic(rule="apex", hysteresis=3, hysteresis_left=3)
    more = dataclasses.replace(full, hysteresis=5, hysteresis_left=None)
    assert more.hysteresis_left == 5


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
KNOWN_RULES = "torch, apex, megatron, deepspeed, deepspeed_consecutive."
SUMS = (
    "mean_sum, slow_mean_sum and square_sum must be 0 before the first step, and square_sum never below 0, "
    "got "
)
LIMITS = [
    *[
        (
            name,
            bad,
            message.replace("a loss scale", f"a {name}").replace("finite loss scale", f"finite {name}"),
        )
        for name in ("min_scale", "max_scale")
        for bad, message in BAD_SCALES
    ],
    (
        "min_scale",
        2.0**17,
        "scale must be from min_scale to max_scale, here 131072.0 to {most}, got 65536.0",
    ),
    (
        "max_scale",
        2.0**15,
        "scale must be from min_scale to max_scale, here 1.1754943508222875e-38 to 32768.0, got 65536.0",
    ),
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
    *[
        ("hysteresis", bad, f"hysteresis must be a whole number of at least 1, got {bad!r}")
        for bad in (0, -1, 1.0, "1", None, True)
    ],
    *[
        (
            "hysteresis_left",
            bad,
            f"hysteresis_left must be a whole number from 0 to hysteresis, here 1, got {bad!r}",
        )
        for bad in (-1, 2, 1.0, "1", True)
    ],
    ("rule", "Apex", "unknown rule 'Apex'. Did you mean \"apex\"? Known: " + KNOWN_RULES),
    ("rule", "deep_speed", "unknown rule 'deep_speed'. Did you mean \"deepspeed\"? Known: " + KNOWN_RULES),
    ("rule", None, "unknown rule None. Known: " + KNOWN_RULES),
    (
        "hysteresis",
        2,
        "rule 'torch' backs off at every overflow: hysteresis must be 1, got 2. Rules with hysteresis: apex, "
        "megatron, deepspeed, deepspeed_consecutive.",
    ),
    *LIMITS,
]
BAD_STATISTICS = [
    *[("scale", *bad) for bad in BAD_SCALES],
    *LIMITS,
    *[
        (name, bad, f"{name} must be between 0 and 1, got {bad!r}")
        for name in ("mean_decay", "variance_decay")
        for bad in (0.0, 1.0, -0.5, math.nan, "0.5", None)
    ],
    *[
        ("deviations", bad, f"deviations must be at least 0 and finite, got {bad!r}")
        for bad in (-0.1, math.inf, math.nan, "3", True)
    ],
    *[
        ("steps", bad, f"steps must be a whole number of at least 0, got {bad!r}")
        for bad in (-1, 1.0, "1", None, True)
    ],
    *[
        (name, bad, f"{name} must be a finite number, got {bad!r}")
        for name in ("largest_log2", "mean_sum", "slow_mean_sum", "square_sum")
        for bad in (math.inf, math.nan, "1", None)
    ],
    ("mean_sum", 1.0, SUMS + "(1.0, 0.0, 0.0) after 0 steps"),
    ("square_sum", -1.0, SUMS + "(0.0, 0.0, -1.0) after 0 steps"),
]


BAD = [(Dynamic, *bad) for bad in BAD_FIELDS] + [(LogMax, *bad) for bad in BAD_STATISTICS]


@pytest.mark.parametrize(("kind", "field", "bad", "message"), BAD)
def test_a_bad_field_is_refused_with_what_was_expected(kind, field, bad, message):
    with pytest.raises(ScaleError) as refused:
        kind(**{field: bad})
    assert str(refused.value) == message.replace("{most}", repr(kind().max_scale))
    with pytest.raises(ValueError, match=r"got|unknown rule"):
        dataclasses.replace(kind(), **{field: bad})


def test_limits_that_contradict_each_other_are_refused():
    for kind in (Dynamic, LogMax):
        with pytest.raises(ScaleError) as refused:
            kind(min_scale=2.0, max_scale=1.0)
        assert str(refused.value) == "min_scale must be at most max_scale, got 2.0 and 1.0"


@pytest.mark.parametrize("rule", RULES)
def test_good_steps_end_where_the_scale_grows(rule):
    """DeepSpeed's first growth takes one good step more."""
    most, said = (7, "growth_interval") if rule.startswith("deepspeed") else (6, "growth_interval - 1")
    assert Dynamic(rule=rule, growth_interval=7, good_steps=most).good_steps == most
    with pytest.raises(ScaleError) as refused:
        Dynamic(rule=rule, growth_interval=7, good_steps=most + 1)
    assert str(refused.value) == f"good_steps must be a whole number from 0 to {said}, got {most + 1}"


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
