"""The meter of swallowed updates: its figures, and that it changes nothing."""

import math
import threading

import pytest
import torch

from narrowcast.errors import SettingError, UnsupportedError
from narrowcast.weights import UpdateMeter, held_by, hold

# Share of swallowed updates and effective gain in bfloat16, by learning rate, for weights ~ N(0, 0.02**2).
ANCHORS = {
    1e-3: (0.045, 1.00),
    3e-4: (0.15, 0.99),
    1e-4: (0.42, 0.92),
    3e-5: (0.80, 0.33),
    1e-5: (0.92, 0.15),
}


@pytest.mark.parametrize(("lr", "share", "gain"), [(lr, *figures) for lr, figures in ANCHORS.items()])
def test_the_third_step_of_adam_swallows_what_is_known(lr, share, gain):
    """Adam's third step on independent normal gradients g1, g2, g3 is lr times a number uniform in [-1, 1]:
    it is sqrt(3) times the weighted mean of three normals over their length, which is, with nearly equal
    weights, a coordinate of a point drawn evenly from a sphere (Archimedes).

    The anchors are rounded to half a unit of their last digit. On n elements a share is off by
    sqrt(s (1 - s) / n) < 0.0009 a standard deviation. The gain is a mean weighted with the squared update:
    where few updates get through, each moves a weight by a whole unit, up to u / |update| as much as was
    meant, so that its deviation is about sqrt(1 / (n lr / u)) of it, below 0.01 for a unit of 2**-13.
    Both moments of bfloat16 are exact enough in 8 bits to move neither by that.
    """
    n = 300_000
    weights = torch.nn.Parameter((torch.randn(n) * 0.02).bfloat16())
    optimizer = torch.optim.Adam([weights], lr=lr)
    with UpdateMeter(optimizer) as meter:
        for _ in range(3):
            # Each step from weights as they were: only the third is asked about, and it is N(0, 0.02**2).
            meter.reset()
            weights.data.copy_(torch.randn(n) * 0.02)
            weights.grad = torch.randn(n).bfloat16()
            optimizer.step()
    (row,) = meter.read()
    assert row.intended_elements > 0.999 * n
    assert row.swallowed_share == pytest.approx(share, abs=0.005 + 3 * 0.0009)
    assert row.effective_gain == pytest.approx(gain, abs=0.005 + 3 * 0.01)


def quarter():
    """A step of 2**-9 from 1.0, where it is lost, and from 0.25, where it is not."""
    return torch.nn.Parameter(torch.tensor([1.0, 0.25, 0.25, 0.25]).bfloat16())


def test_intended_and_swallowed_elements_are_counted():
    low = quarter()
    optimizer = torch.optim.SGD([low], lr=2.0**-10)
    meter = UpdateMeter(optimizer)
    low.grad = -torch.tensor([2.0, 2.0, 0.0, 1.0]).bfloat16()
    optimizer.step()
    (row,) = meter.read()
    assert (row.group, row.format, row.updates) == (0, "bf16", "nearest")
    assert row.intended_elements == 3, "an update of zero is not swallowed"
    # 0.25 has a unit of 2**-9; the update of 2**-10 is half of it and goes to the even 0.25.
    assert row.swallowed_elements == 2
    assert row.swallowed_share == pytest.approx(2 / 3)
    # <(0, 2, 0), (2, 2, 1)> / |(2, 2, 1)|**2
    assert row.effective_gain == pytest.approx(4 / 9)


@pytest.mark.parametrize("meter_first", [True, False])
@pytest.mark.parametrize(
    ("updates", "swallowed", "gain"), [("masters", 0, 1.0), ("kahan", 0, 1.0), ("stochastic", None, None)]
)
def test_held_parameters_count_by_what_is_kept(updates, swallowed, gain, meter_first):
    low = quarter()
    optimizer = torch.optim.SGD([low], lr=2.0**-10)
    meter = UpdateMeter(optimizer) if meter_first else None
    hold(optimizer, updates, generator=torch.Generator().manual_seed(0) if swallowed is None else None)
    meter = meter or UpdateMeter(optimizer)
    for _ in range(2):
        low.grad = -torch.tensor([2.0, 2.0, 0.0, 1.0]).bfloat16()
        optimizer.step()
    (row,) = meter.read()
    assert row.updates == updates
    assert meter.measured_steps == 2
    assert row.intended_elements == 6
    if swallowed is not None:
        assert (row.swallowed_elements, row.effective_gain) == (swallowed, gain)
    else:
        assert row.swallowed_elements <= 4


def test_stochastic_rounding_gains_one_on_average():
    low = torch.nn.Parameter(torch.ones(100_000).bfloat16())
    optimizer = torch.optim.SGD([low], lr=2.0**-10)
    hold(optimizer, "stochastic")
    with UpdateMeter(optimizer) as meter:
        low.grad = torch.full_like(low, -1.0)
        optimizer.step()
    (row,) = meter.read()
    # Each element moves a whole unit, 8 times as far, with probability 1/8: a deviation of sqrt(7 / n).
    assert row.effective_gain == pytest.approx(1.0, abs=5 * math.sqrt(7 / 100_000))
    assert row.swallowed_share == pytest.approx(7 / 8, abs=5 * math.sqrt(7 / 64 / 100_000))


def test_an_optimizer_held_and_removed_under_the_meter():
    low = quarter()
    optimizer = torch.optim.SGD([low], lr=2.0**-10)
    with UpdateMeter(optimizer) as meter:
        handle = hold(optimizer)
        low.grad = torch.ones_like(low)
        optimizer.step()
        handle.remove()
        optimizer.step()
        assert sorted(row.updates for row in meter.read()) == ["masters", "nearest"]
        assert handle.watchers == []
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_measuring_changes_nothing(make_low_optimizer, parameters, give_gradients):
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    plain, measured = make_low_optimizer(parameters), make_low_optimizer(twins)
    called = []
    measured.register_step_post_hook(lambda *_: called.append(1))
    with UpdateMeter(measured) as meter:
        for step in range(3):
            give_gradients(parameters, twins, seed=step)
            before = torch.get_rng_state()
            plain.step()
            measured.step()
            assert torch.equal(torch.get_rng_state(), before)
    assert len(called) == 3
    for p, q in zip(parameters, twins, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p.grad, q.grad)
    for a, b in zip(plain.state.values(), measured.state.values(), strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b[key])), key
    assert sum(row.intended_elements for row in meter.read()) > 0


class Counts(torch.optim.SGD):
    """Has something of its own that a step changes, and draws random numbers."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.counts = {"steps": 0}
        self.named = dict.fromkeys(self.param_groups[0]["params"], "a parameter")

    def step(self, closure=None):
        self.counts["steps"] += 1
        torch.rand(3)
        for group in self.param_groups:
            assert all(p in self.named for p in group["params"]), "a reference led to another optimizer"
        super().step(closure)


def test_attributes_of_an_optimizer_are_not_touched():
    low = quarter()
    optimizer = Counts([low])
    with UpdateMeter(optimizer) as meter:
        low.grad = torch.ones_like(low)
        state = torch.get_rng_state()
        optimizer.step()
        torch.set_rng_state(state)
        torch.rand(3)
        expected = torch.rand(1)
        torch.set_rng_state(state)
        optimizer.step()
        assert torch.equal(torch.rand(1), expected)
    assert optimizer.counts == {"steps": 2}
    assert meter.read()[0].effective_gain == pytest.approx(1.0, abs=0.05)


def test_a_gain_is_nan_without_updates_or_with_nan():
    low = quarter()
    optimizer = torch.optim.SGD([low], lr=0.1, fused=True)
    with UpdateMeter(optimizer) as meter:
        low.grad = torch.ones_like(low)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
        optimizer.step()
    (row,) = meter.read()
    assert row.intended_elements == 0
    assert math.isnan(row.swallowed_share)
    assert math.isnan(row.effective_gain)
    assert str(meter).endswith("              0            -            -")
    optimizer.found_inf = torch.tensor(0.0)
    with UpdateMeter(optimizer) as meter:
        low.grad = torch.tensor([math.nan, 1.0, 1.0, 1.0]).bfloat16()
        optimizer.step()
    (row,) = meter.read()
    assert row.intended_elements == 4
    assert math.isnan(row.effective_gain)


def test_a_gain_is_nan_if_a_weight_overflows():
    low = torch.nn.Parameter(torch.tensor([65504.0, 1.0]).half())
    optimizer = torch.optim.SGD([low], lr=1.0)
    with UpdateMeter(optimizer) as meter:
        low.grad = torch.tensor([-65504.0, 0.0]).half()
        optimizer.step()
    assert low[0] == math.inf
    (row,) = meter.read()
    assert (row.intended_elements, row.swallowed_elements) == (1, 0)
    assert math.isnan(row.effective_gain)
    assert str(meter).endswith("        0.0 %            -")


def test_every_nth_step_is_measured():
    low = quarter()
    optimizer = torch.optim.SGD([low], lr=2.0**-3)
    meter = UpdateMeter(optimizer, every=3)
    for _ in range(7):
        low.grad = torch.ones_like(low)
        optimizer.step()
    assert meter.measured_steps == 3
    assert meter.read()[0].intended_elements == 12
    meter.reset()
    assert meter.read() == ()
    optimizer.step()
    assert meter.measured_steps == 1
    meter.remove()
    optimizer.step()
    assert meter.measured_steps == 1


def test_groups_and_formats_have_rows_of_their_own():
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2)), quarter()]},
        {"params": [torch.nn.Parameter(torch.ones(3).half())], "lr": 2.0**-12},
        {"params": [torch.nn.Parameter(torch.ones(3).double())]},
    ]
    optimizer = torch.optim.SGD(groups, lr=2.0**-12)
    meter = UpdateMeter(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = -torch.ones_like(parameter)
    optimizer.step()
    rows = {(row.group, row.format): row for row in meter.read()}
    assert list(rows) == [(0, "bf16"), (0, "fp32"), (1, "fp16")]
    assert rows[0, "fp32"].effective_gain == 1.0
    assert rows[0, "fp32"].swallowed_elements == 0
    assert rows[0, "bf16"].swallowed_elements == 4
    assert rows[1, "fp16"].swallowed_share == 1.0
    assert rows[1, "fp16"].effective_gain == 0.0
    assert str(meter) == (
        "Updates that survive, over 1 measured steps of SGD\n"
        "group  format  updates            elements    swallowed         gain\n"
        "    0  bf16    nearest                   4      100.0 %        0.000\n"
        "    0  fp32    nearest                   2        0.0 %        1.000\n"
        "    1  fp16    nearest                   3      100.0 %        0.000"
    )


def test_a_step_that_raised_is_not_measured():
    low = quarter()
    optimizer = torch.optim.SGD([low], lr=0.1)
    meter = UpdateMeter(optimizer)
    fail = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    low.grad = torch.ones_like(low)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    fail.remove()
    optimizer.step()
    assert meter.measured_steps == 1
    assert meter.read()[0].intended_elements == 4


def test_what_cannot_be_measured_is_refused():
    low = quarter()
    optimizer = torch.optim.SGD([low], lr=0.1)
    with pytest.raises(SettingError, match="every must be a whole number"):
        UpdateMeter(optimizer, every=0)
    with UpdateMeter(optimizer):
        with pytest.raises(UnsupportedError, match="gradients in a closure"):
            optimizer.step(lambda: None)
        optimizer.lock = threading.Lock()
        with pytest.raises(UnsupportedError, match=r"cannot be copied .*narrowcast\.weights\.hold"):
            optimizer.step()
        hold(optimizer)
        optimizer.step(lambda: None)
        assert held_by(optimizer) is not None
