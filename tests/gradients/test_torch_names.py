"""Private names of torch's scaler that other libraries read and write answer, and are obeyed, as torch's."""

import gc
import inspect
import math
import weakref
from collections import defaultdict

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ScaleError, UnsupportedError
from narrowcast.gradients import _torch_internals as internals

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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler_of", SCALERS)
def test_a_flag_that_is_written_in_place_skips_the_step(scaler_of, fused):
    """As ``all_reduce`` writes it."""
    layer, optimizer, scaler = made(scaler_of, fused=fused)
    before = layer.weight.detach().clone()
    scaler.unscale_(optimizer)
    for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        flag.fill_(1.0)
    result = scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() == 4.0
    if result is not None:
        assert result.skipped
        assert result.nonfinite == ()


def test_a_flag_that_a_closure_writes_in_place_skips_the_step():
    layer, optimizer, scaler = made(nc.GradScaler)
    before = layer.weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.ones(2, 3)).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            flag.fill_(1.0)
        return loss

    assert scaler.step(optimizer, closure).skipped
    assert torch.equal(layer.weight, before)


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
    scaler = scaler_of("cpu", init_scale=8.0)
    assert (scaler._init_scale, scaler._init_growth_tracker) == (8.0, 0)
    scaler._init_scale, scaler._init_growth_tracker = 4.0, 3
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 3)
    scaler._init_scale, scaler._init_growth_tracker = 8.0, 0
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))  # as Accelerate does after it loaded a state
    assert (scaler._scale.item(), scaler._growth_tracker.item()) == (8.0, 0)
    scaler._init_scale, scaler._init_growth_tracker = 2.0, 1  # too late, in torch too
    scaler._growth_tracker.fill_(5)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 5)
    scaler._growth_tracker = torch.tensor(2, dtype=torch.int32)
    assert scaler._get_growth_tracker() == scaler.state_dict()["_growth_tracker"] == 2
    if scaler_of is nc.GradScaler:
        with pytest.raises(ScaleError, match="positive, finite"):
            scaler._scale = torch.tensor(0.0)
    scaler._scale.fill_(1024.0)
    assert scaler.get_scale() == scaler.state_dict()["scale"] == 1024.0
    scaler._scale = torch.tensor(128.0)
    assert scaler.get_scale() == 128.0
    assert scaler.scale(torch.ones(())) == 128.0
    scaler.load_state_dict(scaler.state_dict())
    scaler._scale.fill_(32.0)
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("scaler_of", SCALERS)
def test_a_scale_tensor_that_somebody_holds_counts(scaler_of):
    scaler = scaler_of("cpu", init_scale=8.0)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scale = scaler._scale
    assert scaler.get_scale() == 8.0
    scale.fill_(4.0)
    assert scaler.get_scale() == scaler.scale(torch.ones(())) == 4.0


def test_a_fixed_scale_that_somebody_wrote_counts():
    scaler = nc.GradScaler("cpu", loss_scale=nc.scaling.Static(scale=8.0))
    scaler.scale(torch.ones(()))
    scaler._scale.fill_(4.0)
    assert scaler.get_scale() == scaler.scale(torch.ones(())) == 4.0


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
    weights, seen = [], []
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
        seen.append(optimizer.seen)
    assert torch.equal(*weights)
    assert seen[0] == seen[1]
    assert isinstance(seen[0][0][0], torch.Tensor) is not unscaled


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


# ---- private names of torch that gradients/ uses: these fail loudly when one changes its meaning


def test_the_node_that_accumulates_knows_its_leaf():
    leaf = torch.ones(1, requires_grad=True)
    node = (leaf * 2).grad_fn.next_functions[0][0]
    assert type(node) is internals.ACCUMULATE_GRAD
    assert node.variable is leaf


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers_divide_and_skip_by_two_attributes(kind):
    for found in (0.0, 1.0):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = kind([weight], lr=0.5, fused=True)
        if not internals.takes_grad_scale(optimizer):
            assert kind is torch.optim.Adagrad  # of torch 2.11
            return
        assert not internals.takes_grad_scale(kind([weight], lr=0.5))
        assert not internals.wants_the_scaler(optimizer)
        weight.grad = torch.tensor([8.0, 8.0])
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found)
        optimizer.step()
        assert weight.grad.tolist() == ([1.0, 1.0] if found == 0.0 else [8.0, 8.0])
        assert bool((weight == 1.0).all()) == (found == 1.0)


def test_what_other_libraries_read_of_torchs_scaler():
    """The signatures of torch's own, and the attributes that ours answers in their place."""
    for name, method in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction):
        if name.startswith("_"):
            continue
        expected = list(inspect.signature(method).parameters)
        assert list(inspect.signature(getattr(nc.GradScaler, name)).parameters)[: len(expected)] == expected
    for scaler_of in SCALERS:
        _, optimizer, scaler = made(scaler_of)
        assert scaler._get_scale_async() is scaler._scale
        scaler._check_inf_per_device(optimizer)
        assert [flag.item() for flag in scaler._found_inf_per_device(optimizer).values()] == [0.0]
        assert scaler._per_optimizer_states[id(optimizer)]["stage"] is internals.OptState.READY


def test_a_scaler_asks_an_optimizer_before_it_steps():
    class Asked:
        def __bool__(self):
            raise KeyError

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    setattr(optimizer, internals.ASKED_BY_SCALERS, Asked())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
    with pytest.raises(KeyError):
        scaler.step(optimizer)


def test_a_scaler_in_the_place_of_torchs(monkeypatch):
    """As ``torch.amp.GradScaler = nc.GradScaler``."""
    theirs = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", nc.GradScaler)

    class Derived(torch.amp.GradScaler):
        def step(self, *args, **kwargs):
            return super().step(*args, **kwargs)

    weights = []
    for kind in (theirs, torch.amp.GradScaler, Derived):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], 0.5)
        scaler = kind("cpu", init_scale=4.0, growth_interval=1)
        for factor in (1.0, torch.inf, 3.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert isinstance(scaler, theirs)
        weights.append((weight.tolist(), scaler.get_scale()))
    assert weights == [([-1.0, -1.0], 8.0)] * 3
