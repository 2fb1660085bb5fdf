"""Saved states of other libraries: told apart, read, written, and refused where something would be lost."""

import dataclasses
import types
from collections import OrderedDict

import numpy
import pytest
import torch

from narrowcast.errors import ScaleError
from narrowcast.scaling import (
    Dynamic,
    LogMax,
    Off,
    Static,
    from_apex,
    from_deepspeed,
    from_megatron,
    from_state,
    from_torch,
    recognise,
    to_apex,
    to_deepspeed,
    to_megatron,
    to_torch,
)

SCALER = {
    "cur_scale": 1024.0,
    "cur_iter": 30,
    "last_overflow_iter": 4,
    "scale_factor": 2.0,
    "scale_window": 10,
    "min_scale": 0.25,
    "delayed_shift": 3,
    "cur_hysteresis": 2,
    "consecutive_hysteresis": True,
}
OPTIMIZER = {
    "dynamic_loss_scale": True,
    "cur_scale": 1024.0,
    "cur_iter": 30,
    "last_overflow_iter": 4,
    "scale_factor": 2.0,
    "scale_window": 10,
}
TORCH = {
    "scale": 8.0,
    "growth_factor": 1.5,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "_growth_tracker": 6,
}
APEX = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 5}}
MEGATRON = {"scale": 8.0, "growth_tracker": 5, "hysteresis_tracker": -1}
FROM_SCALER = Dynamic(
    scale=1024.0,
    growth_interval=10,
    # 25 good steps: growths at the 11th and the 21st, which left 1, and 4 since.
    good_steps=5,
    rule="deepspeed_consecutive",
    hysteresis=3,
    hysteresis_left=2,
    min_scale=0.25,
)
FROM_APEX = Dynamic(scale=8.0, good_steps=5, rule="apex", max_scale=2.0**24)
FROM_MEGATRON = Dynamic(
    scale=8.0,
    growth_interval=1000,
    good_steps=5,
    rule="megatron",
    hysteresis=2,
    hysteresis_left=0,
    min_scale=1.0,
)


@pytest.mark.parametrize(
    ("source", "state", "expected"),
    [
        ("torch", {}, [Off()]),
        (
            "torch",
            TORCH,
            [Dynamic(scale=8.0, growth_factor=1.5, backoff_factor=0.25, growth_interval=7, good_steps=6)],
        ),
        ("apex", APEX, [FROM_APEX]),
        (
            "apex",
            OrderedDict(
                loss_scaler0={"loss_scale": 8.0, "unskipped": 5},
                loss_scaler1={"loss_scale": 4.0, "unskipped": 0},
                masters=[],
            ),
            [FROM_APEX, dataclasses.replace(FROM_APEX, scale=4.0, good_steps=0)],
        ),
        ("megatron", MEGATRON, [FROM_MEGATRON]),
        (
            "megatron",
            {
                "scale": torch.tensor([8.0]),
                "growth_tracker": torch.tensor(5),
                "hysteresis_tracker": numpy.int64(0),
            },
            [FROM_MEGATRON],
        ),
        ("deepspeed", SCALER, [FROM_SCALER]),
        ("deepspeed", types.SimpleNamespace(dynamic=True, **SCALER), [FROM_SCALER]),
        ("deepspeed", {"loss_scaler": types.SimpleNamespace(**SCALER), "overflow": False}, [FROM_SCALER]),
        (
            "deepspeed",
            OPTIMIZER | {"fp32_groups_flat": [], "clip_grad": 1.0},
            [Dynamic(scale=1024.0, growth_interval=10, good_steps=5, rule="deepspeed", min_scale=1.0)],
        ),
    ],
)
def test_a_state_is_told_by_its_keys(source, state, expected):
    assert recognise(state) == source
    assert from_state(state) == expected
    assert from_state(state, source) == expected


def test_the_real_scaler_of_torch():
    scaler = torch.amp.GradScaler("cpu")
    assert from_state(scaler.state_dict()) == [Dynamic()]
    scaler.load_state_dict(to_torch(Dynamic(scale=3.0, good_steps=9)))
    assert from_torch(scaler.state_dict()) == Dynamic(scale=3.0, good_steps=9)
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.load_state_dict(to_torch(Off()))
    assert from_torch(off.state_dict()) == Off()


def test_settings_that_a_library_does_not_save():
    megatron = from_megatron(
        MEGATRON,
        growth_factor=1.7,
        backoff_factor=0.3,
        growth_interval=6,
        hysteresis=4,
        min_scale=0.7,
    )
    assert megatron.growth_factor == float(numpy.float32(1.7))
    assert megatron.backoff_factor == float(numpy.float32(0.3))
    assert megatron.min_scale == float(numpy.float32(0.7))
    assert (megatron.growth_interval, megatron.hysteresis) == (6, 4)
    (apex,) = from_apex(APEX, min_scale=2.0, max_scale=16.0)
    assert (apex.min_scale, apex.max_scale) == (2.0, 16.0)
    assert from_deepspeed(OPTIMIZER, min_scale=8.0).min_scale == 8.0
    assert from_deepspeed(SCALER, min_scale=8.0).min_scale == 0.25


def test_a_fixed_scale_of_apex():
    state = {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 12345}}
    assert from_apex(state, dynamic=False) == [Static(scale=128.0)]
    assert to_apex([Static(scale=128.0)], dynamic=False) == {
        "loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}
    }


def without(state, key):
    return {name: value for name, value in state.items() if name != key}


IN_TORCH = "in the state of torch.amp.GradScaler"
IN_MEGATRON = "in the state of Megatron's DynamicGradScaler"
MAKES_NONE = "does not make a loss scale:"
BAD_STATES = [
    (
        "torch",
        without(TORCH, "_growth_tracker"),
        f'expected "_growth_tracker" {IN_TORCH}, found backoff_factor, growth_factor, growth_interval, scale',
    ),
    ("torch", TORCH | {"scale": "8"}, f"expected \"scale\" {IN_TORCH} to be a number, got '8'"),
    ("torch", TORCH | {"scale": None}, f'expected "scale" {IN_TORCH} to be a number, got None'),
    ("torch", TORCH | {"scale": True}, f'expected "scale" {IN_TORCH} to be a number, got True'),
    (
        "torch",
        TORCH | {"scale": torch.ones(2)},
        f'expected "scale" {IN_TORCH} to be a number, got tensor([1., 1.])',
    ),
    (
        "torch",
        TORCH | {"growth_interval": 2.5},
        f'expected "growth_interval" {IN_TORCH} to be a whole number, got 2.5',
    ),
    (
        "torch",
        TORCH | {"growth_interval": float("inf")},
        f'expected "growth_interval" {IN_TORCH} to be a whole number, got inf',
    ),
    (
        "torch",
        TORCH | {"scale": 0.0},
        f"the state of torch.amp.GradScaler {MAKES_NONE} expected a positive, finite loss scale from "
        "2**-126 to 2**127, got 0.0",
    ),
    ("torch", [TORCH], "expected the state of torch.amp.GradScaler to be a mapping, got list"),
    ("apex", {}, 'expected "loss_scaler0" in the state of apex.amp, found nothing'),
    (
        "apex",
        {"loss_scaler0": APEX["loss_scaler0"], "loss_scaler1": {"loss_scale": 8.0}},
        'expected "unskipped" in the state of apex.amp (loss_scaler1), found loss_scale',
    ),
    (
        "apex",
        {"loss_scaler0": 8.0},
        "expected the state of apex.amp (loss_scaler0) to be a mapping, got float",
    ),
    (
        "apex",
        {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 2000}},
        'expected "unskipped" in the state of apex.amp (loss_scaler0) to be below 2000, got 2000; a fixed '
        "scale counts so far: pass dynamic=False",
    ),
    (
        "megatron",
        without(MEGATRON, "hysteresis_tracker"),
        f'expected "hysteresis_tracker" {IN_MEGATRON}, found growth_tracker, scale',
    ),
    (
        "megatron",
        MEGATRON | {"hysteresis_tracker": 3},
        f"the state of Megatron's DynamicGradScaler {MAKES_NONE} hysteresis_left must be a whole number from "
        "0 to hysteresis, here 2, got 3",
    ),
    (
        "deepspeed",
        without(SCALER, "cur_iter"),
        'expected "cur_iter" in the state of DeepSpeed\'s DynamicLossScaler, found consecutive_hysteresis, '
        "cur_hysteresis, cur_scale, delayed_shift, last_overflow_iter, min_scale, scale_factor, scale_window",
    ),
    (
        "deepspeed",
        types.SimpleNamespace(**without(SCALER, "cur_hysteresis") | {"cur_scale": 1.0}),
        'expected "cur_hysteresis" in the state of DeepSpeed\'s DynamicLossScaler, found '
        "consecutive_hysteresis, cur_iter, cur_scale, delayed_shift, last_overflow_iter, min_scale, "
        "scale_factor, scale_window",
    ),
    (
        "deepspeed",
        SCALER | {"consecutive_hysteresis": 1},
        'expected "consecutive_hysteresis" in the state of DeepSpeed\'s DynamicLossScaler to be True or '
        "False, got 1",
    ),
    (
        "deepspeed",
        {"cur_scale": 1.0, "cur_iter": 3},
        'expected "dynamic_loss_scale" in the state of DeepSpeed\'s FP16_Optimizer, found cur_iter, '
        "cur_scale",
    ),
    (
        "deepspeed",
        OPTIMIZER | {"scale_window": 0},
        f"the state of DeepSpeed's FP16_Optimizer {MAKES_NONE} growth_interval must be a whole number of at "
        "least 1, got 0",
    ),
    (
        "deepspeed",
        OPTIMIZER | {"scale_factor": 0.0},
        f"the state of DeepSpeed's FP16_Optimizer {MAKES_NONE} growth_factor must be above 1 and finite, "
        "got 0.0",
    ),
    (
        "deepspeed",
        OPTIMIZER | {"last_overflow_iter": 31},
        f"the state of DeepSpeed's FP16_Optimizer {MAKES_NONE} good_steps must be a whole number from 0 to "
        "growth_interval, got -2",
    ),
    (
        "deepspeed",
        {},
        'expected "dynamic_loss_scale" in the state of DeepSpeed\'s FP16_Optimizer, found nothing',
    ),
    (
        "Torch",
        TORCH,
        "unknown source 'Torch'. Did you mean \"torch\"? Known: torch, apex, megatron, deepspeed.",
    ),
]


@pytest.mark.parametrize(("source", "state", "message"), BAD_STATES)
def test_a_malformed_state_is_refused_by_its_key(source, state, message):
    with pytest.raises(ScaleError) as refused:
        from_state(state, source)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("state", "got"),
    [({"scale": 1.0, "epoch": 2}, "one with epoch, scale"), (3.0, "float"), (None, "NoneType"), ([], "list")],
)
def test_what_no_library_saved_is_not_recognised(state, got):
    for ask in (recognise, from_state):
        with pytest.raises(ScaleError) as refused:
            ask(state)
        assert str(refused.value) == (
            f"expected a loss scaler's state saved by torch, apex, megatron or deepspeed, got {got}"
        )


def test_bad_settings_are_refused_as_dynamic_refuses_them():
    with pytest.raises(ScaleError, match="growth_factor must be above 1 and finite, got '2'"):
        from_megatron(MEGATRON, growth_factor="2")
    with pytest.raises(ScaleError, match="expected a max_scale that is a number, got None"):
        from_apex(APEX, max_scale=None)


MEGATRON_2 = Dynamic(rule="megatron", hysteresis=2, growth_interval=1000, min_scale=1.0)
AS_APEX = Dynamic(rule="apex", max_scale=2.0**24)
AS_DEEPSPEED = Dynamic(rule="deepspeed", min_scale=1.0)


def as_optimizer(loss_scale):
    return to_deepspeed(loss_scale, into="FP16_Optimizer")


def apex(loss_scale):
    return to_apex([loss_scale])


def fixed_apex(loss_scale):
    return to_apex([loss_scale], dynamic=False)


T, A, M = "torch.amp.GradScaler", "apex.amp", "Megatron's DynamicGradScaler"
S, O = "DeepSpeed's DynamicLossScaler", "DeepSpeed's FP16_Optimizer"  # noqa: E741
STATIC = "cannot hold Static(scale=2.0): expected a Dynamic scale"
CANNOT_HOLD = [
    (to_torch, Static(scale=2.0), f"{T} {STATIC}"),
    (to_torch, MEGATRON_2, f"{T} cannot hold hysteresis=2, only 1"),
    (to_torch, Dynamic(rule="deepspeed"), f"{T} cannot hold rule='deepspeed': it moves by 'torch'"),
    (to_torch, Dynamic(min_scale=1.0), f"{T} cannot hold min_scale=1.0, only 2.0**-126"),
    (to_torch, AS_APEX, f"{T} cannot hold max_scale=2.0**24, only 2.0**127"),
    (apex, Static(scale=2.0), f"{A} {STATIC}"),
    (apex, Off(), f"{A} cannot hold Off(): expected a Dynamic scale"),
    (apex, Dynamic(rule="apex", hysteresis=2), f"{A} cannot hold hysteresis=2, only 1"),
    (apex, Dynamic(rule="deepspeed"), f"{A} cannot hold rule='deepspeed': it moves by 'apex'"),
    (apex, dataclasses.replace(AS_APEX, growth_factor=1.5), f"{A} cannot hold growth_factor=1.5, only 2.0"),
    (apex, dataclasses.replace(AS_APEX, backoff_factor=0.3), f"{A} cannot hold backoff_factor=0.3, only 0.5"),
    (apex, dataclasses.replace(AS_APEX, growth_interval=7), f"{A} cannot hold growth_interval=7, only 2000"),
    (
        apex,
        dataclasses.replace(AS_APEX, min_scale=4.0),
        f"{A} saves no min_scale and would run with 2.0**-126, not 4.0: pass min_scale=4.0 here and set it "
        "there",
    ),
    (
        apex,
        Dynamic(),
        f"{A} saves no max_scale and would run with 2.0**24, not 2.0**127: pass max_scale=2.0**127 here and "
        "set it there",
    ),
    (fixed_apex, AS_APEX, f"{A} with dynamic=False holds Static scales only, got {AS_APEX!r}"),
    (to_megatron, Static(scale=2.0), f"{M} {STATIC}"),
    (
        to_megatron,
        Dynamic(),
        f"{M} saves no hysteresis and would run with 2, not 1: pass hysteresis=1 here and set it there",
    ),
    (
        to_megatron,
        Dynamic(rule="apex", hysteresis=2),
        f"{M} cannot hold rule='apex': it moves by 'megatron'",
    ),
    (
        to_megatron,
        dataclasses.replace(MEGATRON_2, max_scale=2.0**24),
        f"{M} cannot hold max_scale=2.0**24, only 2.0**127",
    ),
    *[
        (
            to_megatron,
            dataclasses.replace(MEGATRON_2, **{field: value}),
            f"{M} saves no {field} and would run with {default}, not {value}: pass {field}={value} here and "
            "set it there",
        )
        for field, value, default in [
            ("growth_factor", 4.0, 2.0),
            ("backoff_factor", 0.25, 0.5),
            ("growth_interval", 7, 1000),
            ("min_scale", 2.0, 1.0),
        ]
    ],
    (to_deepspeed, Static(scale=2.0), f"{S} {STATIC}"),
    (to_deepspeed, Off(), f"{S} cannot hold Off(): expected a Dynamic scale"),
    (to_deepspeed, MEGATRON_2, f"{S} cannot hold rule='megatron': it moves by 'deepspeed'"),
    (to_deepspeed, Dynamic(), f"{S} cannot hold rule='torch': it moves by 'deepspeed'"),
    (
        to_deepspeed,
        dataclasses.replace(AS_DEEPSPEED, backoff_factor=0.25),
        f"{S} cannot hold backoff_factor=0.25, only 0.5",
    ),
    (
        to_deepspeed,
        dataclasses.replace(AS_DEEPSPEED, max_scale=2.0**20),
        f"{S} cannot hold max_scale=2.0**20, only 2.0**127",
    ),
    (as_optimizer, FROM_SCALER, f"{O} cannot hold hysteresis=3, only 1"),
    (
        as_optimizer,
        dataclasses.replace(AS_DEEPSPEED, min_scale=0.25),
        f"{O} saves no min_scale and would run with 1.0, not 0.25: pass min_scale=0.25 here and set it there",
    ),
    *[
        (convert, LogMax(), f"{target} cannot hold {LogMax()!r}: expected a Dynamic scale")
        for convert, target in [
            (to_torch, T),
            (apex, A),
            (to_megatron, M),
            (to_deepspeed, S),
            (as_optimizer, O),
        ]
    ],
    (
        lambda loss_scale: to_deepspeed(loss_scale, into="fp16_optimizer"),
        AS_DEEPSPEED,
        "unknown class 'fp16_optimizer'. Did you mean \"FP16_Optimizer\"? Known: DynamicLossScaler, "
        "FP16_Optimizer.",
    ),
]


@pytest.mark.parametrize(("convert", "loss_scale", "message"), CANNOT_HOLD)
def test_what_another_library_cannot_hold_is_refused_by_its_field(convert, loss_scale, message):
    with pytest.raises(ScaleError) as refused:
        convert(loss_scale)
    assert str(refused.value) == message


def test_rules_without_hysteresis_go_to_any_library_that_counts_alike():
    for rule in ("torch", "apex", "megatron"):
        ours = Dynamic(rule=rule, good_steps=5)
        assert to_torch(ours) == to_torch(Dynamic(good_steps=5))
        assert to_apex([ours], max_scale=2.0**127) == {
            "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 5}
        }
        state = to_megatron(ours, hysteresis=1, growth_interval=2000, min_scale=2.0**-126)
        assert state == {"scale": 65536.0, "growth_tracker": 5, "hysteresis_tracker": 1}
    for rule in ("deepspeed", "deepspeed_consecutive"):
        state = to_deepspeed(Dynamic(rule=rule, good_steps=5), into="FP16_Optimizer", min_scale=2.0**-126)
        assert state == OPTIMIZER | {
            "cur_scale": 65536.0,
            "cur_iter": 5,
            "last_overflow_iter": -1,
            "scale_window": 2000,
        }


def test_deepspeed_is_given_no_hysteresis_below_1():
    ours = Dynamic(rule="deepspeed", hysteresis=2, hysteresis_left=0)
    assert to_deepspeed(ours)["cur_hysteresis"] == 1
    assert (
        ours.after_step(overflow=True).scale
        == from_deepspeed(to_deepspeed(ours)).after_step(overflow=True).scale
        == 2.0**15
    )
