"""A scale on a device moves exactly as the frozen value of ``narrowcast.scaling`` that it stands for."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import ScaleError
from narrowcast.gradients._device_scale import DeviceScale
from narrowcast.scaling import RULES, Dynamic, LogMax, Off, Static

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
def test_every_sequence_of_overflows(rule, factors, limits):
    for hysteresis in (1,) if rule == "torch" else (1, 2, 3):
        start = Dynamic(scale=4.0, growth_interval=2, rule=rule, hysteresis=hysteresis, **factors, **limits)
        for overflows in itertools.product((False, True), repeat=7):
            assert_both_go_alike(start, overflows)


@pytest.mark.parametrize("rule", RULES)
def test_every_longer_sequence_with_a_longer_interval(rule):
    start = Dynamic(scale=4.0, growth_interval=3, rule=rule, hysteresis=1 if rule == "torch" else 2)
    for overflows in itertools.product((False, True), repeat=10):
        assert_both_go_alike(start, overflows)


@pytest.mark.parametrize("rule", RULES)
def test_a_scale_that_was_read_half_way_goes_on_alike(rule):
    start = Dynamic(scale=4.0, growth_interval=3, rule=rule, hysteresis=1 if rule == "torch" else 2)
    for overflows in itertools.product((False, True), repeat=6):
        device, again = placed(start), placed(start)
        for overflow in overflows:
            device.move(torch.tensor(float(overflow)))
            again.set(again.read())
            again.move(torch.tensor(float(overflow)))
        assert device.read() == again.read()


def test_any_number_above_zero_is_an_overflow():
    """Flags of several optimizers are added up."""
    for found in (0.5, 1.0, 3.0):
        for rule in RULES:
            device = placed(Dynamic(scale=4.0, rule=rule))
            device.move(torch.tensor(found))
            assert device.read().scale == 2.0, rule


@pytest.mark.parametrize("min_scale", [2.0**-30, 2.0**18])
@pytest.mark.parametrize("seed", range(20))
def test_log_max_moves_as_its_value(seed, min_scale):
    drawn = torch.Generator().manual_seed(seed)
    value = LogMax(scale=2.0**18, mean_decay=0.9, variance_decay=0.95, min_scale=min_scale)
    device = placed(value)
    for _ in range(60):
        kind = int(torch.randint(0, 8, (), generator=drawn))
        overflow = kind == 0
        exponent = torch.randn((), generator=drawn) * 3 - 10
        amax = 0.0 if kind == 1 else float((2.0**exponent).float())
        value = value.after_step(overflow=overflow, amax=amax)
        found = torch.tensor(math.nan if overflow else amax)
        device.move(torch.tensor(float(overflow)), found)
        read = device.read()
        assert read.steps == value.steps
        for name in ("mean_sum", "slow_mean_sum", "square_sum"):
            # Up to 60 steps of a few fp64 roundings each; the sum after an overflow hangs on a deviation,
            # the root of a difference.
            assert getattr(read, name) == pytest.approx(getattr(value, name), rel=1e-12, abs=1e-12)
        assert read.scale == pytest.approx(value.scale, rel=2.0**-22)  # two roundings to fp32


@pytest.mark.parametrize("amax", [123.4, 0.001, 3e-5, 7e-7, 1e-10])
def test_log_max_of_equal_gradients_does_not_stray(amax):
    """The variance is a difference of equal numbers: what is left of it is rounding."""
    value = LogMax(min_scale=2.0**-100, max_scale=2.0**100)
    device = placed(value)
    # A quotient off by 4 * 2**-53 leaves a deviation of sqrt(4 * 2**-53) * x; the scale is rounded to fp32.
    tolerance = value.deviations * math.sqrt(2.0**-51) * abs(math.log2(amax)) + 2.0**-23
    for _ in range(200):
        value = value.after_step(overflow=False, amax=amax)
        device.move(torch.tensor(0.0), torch.tensor(amax, dtype=torch.float64))
        assert math.log2(device.read().scale) == pytest.approx(math.log2(value.scale), abs=tolerance)


def test_log_max_without_amax_says_what_it_needs():
    with pytest.raises(ScaleError, match=r"^LogMax needs amax, the largest magnitude of the unscaled grad"):
        placed(LogMax()).move(torch.tensor(0.0))


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
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_schedule_moves_the_scale_of_a_training(rule, fused):
    value = Dynamic(scale=64.0, growth_interval=2, rule=rule, hysteresis=1 if rule == "torch" else 2)
    overflows = [True, True, False, True, False, False, False, False, True]
    scaler = nc.GradScaler("cpu", schedule=value)
    scales = train(scaler, [math.inf if overflow else 1.0 for overflow in overflows], fused)
    for overflow, scale in zip(overflows, scales, strict=True):
        value = value.after_step(overflow=overflow)
        assert scale == value.scale
    assert scaler.loss_scale() == value


@pytest.mark.parametrize("fused", [False, True])
def test_log_max_sees_the_largest_unscaled_gradient(fused):
    value = LogMax(scale=2.0**10)
    scaler = nc.GradScaler("cpu", schedule=value)
    factors = [0.5, -3.0, math.inf, 0.25, 0.0]
    scales = train(scaler, factors, fused)
    for factor, scale in zip(factors, scales, strict=True):
        value = value.after_step(overflow=math.isinf(factor), amax=abs(factor))
        assert scale == pytest.approx(value.scale, rel=1e-6)


def test_log_max_sees_the_largest_of_all_optimizers():
    for largest in (0, 1):
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizers = [torch.optim.SGD([weight], lr=0.0) for weight in weights]
        scaler = nc.GradScaler("cpu", schedule=LogMax(scale=2.0**10))
        scaler.scale(weights[largest].sum() * 4.0 + weights[1 - largest].sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.loss_scale().mean_log2 == pytest.approx(2.0)


@pytest.mark.parametrize("clip", ["norm", "infinity norm", "value"])
@pytest.mark.parametrize("fused", [False, True])
def test_log_max_sees_gradients_before_they_are_clipped(clip, fused):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0, fused=fused)
    scaler = nc.GradScaler("cpu", schedule=LogMax(scale=2.0**10))
    scaler.scale((weight * torch.tensor([3.0, -4.0])).sum()).backward()
    if clip == "value":
        scaler.clip_grad_value_(optimizer, 0.1)
    else:
        scaler.clip_grad_norm_(optimizer, 0.1, math.inf if clip == "infinity norm" else 2.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.loss_scale().mean_log2 == pytest.approx(2.0)  # log2 of 4


def test_hysteresis_forgives_overflows_that_good_steps_part():
    scaler = nc.GradScaler("cpu", 64.0, hysteresis=2)
    assert train(scaler, [math.inf, 1.0, math.inf, 1.0, math.inf, math.inf]) == [64.0] * 5 + [32.0]
    assert scaler.loss_scale() == replace(Dynamic(scale=32.0, rule="apex", hysteresis=2), hysteresis_left=0)


def test_the_scale_stays_within_its_limits():
    scaler = nc.GradScaler("cpu", 64.0, growth_interval=1, min_scale=20.0, max_scale=100.0)
    assert train(scaler, [1.0, 1.0, math.inf, math.inf, math.inf, math.inf, 1.0]) == [
        100.0, 100.0, 50.0, 25.0, 20.0, 20.0, 40.0
    ]  # fmt: skip


def test_the_scale_is_the_fp32_number_that_losses_are_multiplied_by():
    scaler = nc.GradScaler("cpu", 1000.1)
    assert scaler.get_scale() == 1000.1
    scaled = scaler.scale(torch.ones(()))
    assert scaler.get_scale() == scaled.item() == scaler.loss_scale().scale == 1000.0999755859375
    scaler.update(3.3)
    assert scaler.get_scale() == scaler.scale(torch.ones(())).item() != 3.3


def test_no_step_uses_a_scale_before_its_loss():
    scaler = nc.GradScaler("cpu", 8.0)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (
        3.0, 0.25, 1
    )  # fmt: skip
    assert train(scaler, [1.0, math.inf]) == [24.0, 6.0]


def test_an_interval_set_below_the_good_steps_grows_at_the_next():
    theirs, ours = torch.amp.GradScaler("cpu", 8.0), nc.GradScaler("cpu", 8.0)
    for scaler in (theirs, ours):
        train(scaler, [1.0] * 5)
        scaler.set_growth_interval(3)
    assert train(theirs, [1.0] * 4) == [8.0] * 4  # torch waits for a count that has passed
    assert train(ours, [1.0] * 4) == [16.0, 16.0, 16.0, 32.0]
