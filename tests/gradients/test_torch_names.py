"""Private names of torch's scaler that other libraries read and write answer, and are obeyed, as torch's."""

import gc
import math
import weakref
from collections import defaultdict

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ScaleError, UnsupportedError

SCALERS = [torch.amp.GradScaler, nc.GradScaler]


def made(scaler_of, **settings):
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, **settings)
    scaler = scaler_of("cpu", init_scale=8.0)
    scaler.scale(layer(torch.ones(2, 3)).mean()).backward()
    return layer, optimizer, scaler


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler_of", SCALERS)
def test_a_flag_that_somebody_wrote_skips_the_step(scaler_of, fused):
    layer, optimizer, scaler = made(scaler_of, fused=fused)
    before = layer.weight.detach().clone()
    scaler.unscale_(optimizer)
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    for device in flags:
        flags[device] = torch.tensor(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("scaler_of", SCALERS)
def test_a_check_by_hand_is_obeyed(scaler_of):
    """As scripts do that look again after they have clipped."""
    layer, optimizer, scaler = made(scaler_of)
    before = layer.weight.detach().clone()
    scaler.unscale_(optimizer)
    layer.weight.grad[0, 0] = math.nan
    scaler._check_inf_per_device(optimizer)
    result = scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() == 4.0
    if result is not None:
        assert result.nonfinite == ("group 0, parameter 0, shape (1, 3)",)


@pytest.mark.parametrize("scaler_of", SCALERS)
def test_a_scale_that_somebody_wrote_counts(scaler_of):
    _, _, scaler = made(scaler_of)
    scaler._scale.fill_(1024.0)
    assert scaler.get_scale() == scaler.state_dict()["scale"] == 1024.0
    scaler._scale = torch.tensor(128.0)
    assert scaler.get_scale() == 128.0
    assert scaler.scale(torch.ones(())) == 128.0
    scaler.load_state_dict(scaler.state_dict())
    scaler._scale.fill_(32.0)
    assert scaler.get_scale() == 32.0


def test_a_scale_out_of_range_is_refused():
    _, _, scaler = made(nc.GradScaler)
    with pytest.raises(ScaleError, match="positive, finite"):
        scaler._scale = torch.tensor(0.0)


@pytest.mark.parametrize("scaler_of", SCALERS)
def test_a_scale_is_put_on_a_device_by_hand(scaler_of):
    """Accelerate does, after it has loaded a state."""
    scaler = scaler_of("cpu", init_scale=8.0)
    assert (scaler._init_scale, scaler._init_growth_tracker) == (8.0, 0)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._scale.item() == 8.0
    assert scaler._growth_tracker.item() == 0


@pytest.mark.parametrize("scaler_of", SCALERS)
def test_settings_that_somebody_wrote_count(scaler_of):
    layer, optimizer, scaler = made(scaler_of)
    assert (scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval) == (2.0, 0.5, 2000)
    scaler._growth_interval = 1
    scaler._growth_factor = 4.0
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert layer.weight.isfinite().all()


@pytest.mark.parametrize("scaler_of", SCALERS)
def test_states_that_somebody_reset_are_fresh(scaler_of):
    layer, optimizer, scaler = made(scaler_of)
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states = defaultdict(torch.amp.grad_scaler._refresh_per_optimizer_state)
    optimizer.zero_grad()
    scaler.scale(layer(torch.ones(2, 3)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler._get_growth_tracker() == 1


class Contract(torch.optim.SGD):
    """A custom optimizer of torch's contract: it reads both attributes at every step."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, 0.1)
        self._step_supports_amp_scaling = True
        self.seen = []

    @torch.no_grad()
    def step(self, closure=None):
        self.seen.append((self.grad_scale, float(self.found_inf)))
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.grad_scale is not None:
                    parameter.grad.div_(self.grad_scale)
                parameter.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("scale", [8.0, 1000.0])
def test_a_custom_optimizer_of_torchs_contract(scale, unscaled):
    weights = []
    for scaler_of in SCALERS:
        torch.manual_seed(0)
        layer = nn.Linear(3, 1)
        optimizer = Contract(layer.parameters())
        scaler = scaler_of("cpu", init_scale=scale)
        scaler.scale(layer(torch.ones(2, 3)).mean()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not hasattr(optimizer, "found_inf")
        weights.append(layer.weight.detach())
    assert torch.equal(*weights)


def test_an_optimizer_whose_step_is_wrapped_is_let_go():
    """As Accelerate wraps it: the scaler must not keep the wrapper, which keeps parameters and state."""

    def one():
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], fused=True)
        scaler, step = nc.GradScaler("cpu"), optimizer.step

        def wrapped(*args, **kwargs):
            return step(*args, **kwargs)

        optimizer.step = wrapped
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        return weakref.ref(optimizer)

    references = [one() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_a_subclass_that_would_not_be_asked_is_refused():
    with pytest.raises(UnsupportedError, match="Sub overrides _maybe_opt_step of torch"):
        type("Sub", (nc.GradScaler,), {"_maybe_opt_step": lambda *_: None})
    assert issubclass(type("Fine", (nc.GradScaler,), {"unscale_": lambda *_: None}), torch.amp.GradScaler)
