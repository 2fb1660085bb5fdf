"""A scale on a device moves exactly as the frozen value of ``narrowcast.scaling`` that it was made from."""

import itertools
import math

import pytest
import torch
from pairs import iterate

import narrowcast as nc
from narrowcast.gradients._scales import DeviceScale
from narrowcast.scaling import RULES, Dynamic, Off, Static

FACTORS = [{}, {"growth_factor": 1.7, "backoff_factor": 0.3}]
# Narrow limits, so that every sequence meets both; the last are no float32 numbers.
LIMITS = [{}, {"min_scale": 2.0, "max_scale": 8.0}, {"min_scale": 1.1, "max_scale": 7.7}]


def placed(value):
    scale = DeviceScale(value)
    scale.place(torch.device("cpu"))
    return scale


def assert_both_go_alike(start, overflows):
    value, device = start, placed(start)
    for overflow in overflows:
        value = value.after_step(overflow=overflow)
        device.move(torch.tensor(float(overflow)))
    assert device.read() == value, overflows


@pytest.mark.parametrize("limits", LIMITS, ids=["free", "limits", "odd limits"])
@pytest.mark.parametrize("factors", FACTORS, ids=["powers", "odd factors"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [5, pytest.param(8, marks=pytest.mark.long)])
def test_every_sequence_of_overflows(length, rule, factors, limits):
    for hysteresis in (1,) if rule == "torch" else (1, 2, 3):
        start = Dynamic(scale=4.0, growth_interval=2, rule=rule, hysteresis=hysteresis, **factors, **limits)
        for overflows in itertools.product((False, True), repeat=length):
            assert_both_go_alike(start, overflows)


@pytest.mark.parametrize("rule", RULES)
def test_a_scale_that_was_read_half_way_goes_on_alike(rule):
    start = Dynamic(scale=4.0, growth_interval=3, rule=rule, hysteresis=1 if rule == "torch" else 2)
    for overflows in itertools.product((False, True), repeat=5):
        device, again = placed(start), placed(start)
        for overflow in overflows:
            device.move(torch.tensor(float(overflow)))
            again.set(again.read())
            again.move(torch.tensor(float(overflow)))
        assert device.read() == again.read()


@pytest.mark.parametrize("value", [Off(), Static(scale=8.0)])
def test_a_fixed_scale_does_not_move(value):
    device = placed(value)
    for found in (1.0, 0.0, 1.0):
        device.move(torch.tensor(found))
    assert device.read() == value
    assert float(device.factor) == value.scale


def train(scaler, factors, fused=False):
    """One step for each factor of the loss; the scale after each."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0, fused=fused)
    scales = []
    for factor in factors:
        iterate(scaler, optimizer, (weight * factor).sum)
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_moves_the_scale_of_a_training(rule, fused):
    value = Dynamic(scale=64.0, growth_interval=2, rule=rule, hysteresis=1 if rule == "torch" else 2)
    overflows = [True, True, False, True, False, False, False, False, True]
    scaler = nc.GradScaler("cpu", loss_scale=value)
    scales = train(scaler, [math.inf if overflow else 1.0 for overflow in overflows], fused)
    for overflow, scale in zip(overflows, scales, strict=True):
        value = value.after_step(overflow=overflow)
        assert scale == value.scale
    assert scaler.loss_scale() == value


def test_get_scale_is_the_fp32_factor_of_losses():
    scaler = nc.GradScaler("cpu", 1000.1)
    assert scaler.get_scale() == 1000.1
    scaled = scaler.scale(torch.ones(()))
    assert scaler.get_scale() == scaled.item() == scaler.loss_scale().scale == 1000.0999755859375
    scaler.update(3.3)
    assert scaler.get_scale() == scaler.scale(torch.ones(())).item() != 3.3


def test_an_interval_set_below_the_good_steps_grows_at_the_next():
    theirs, ours = torch.amp.GradScaler("cpu", 8.0), nc.GradScaler("cpu", 8.0)
    for scaler in (theirs, ours):
        train(scaler, [1.0] * 5)
        scaler.set_growth_interval(3)
    assert train(theirs, [1.0] * 4) == [8.0] * 4  # torch waits for a count that has passed
    assert train(ours, [1.0] * 4) == [16.0, 16.0, 16.0, 32.0]


def test_a_factor_learned_late_does_not_hide_one_that_was_set():
    """On a GPU the factor of an earlier step may arrive after the script has set another."""
    scale = DeviceScale(Dynamic(scale=1024.0))
    scale.place(torch.device("meta"))  # as on a GPU, the host cannot read it
    moves_of_step = scale.moves
    scale.set(Dynamic(scale=0.5))
    scale.learn(1024.0, moves_of_step)
    assert scale.may_be_below(1.0)
