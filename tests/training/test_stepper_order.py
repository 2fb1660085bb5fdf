"""A wrong order of calls, or a wrong setting, is refused with the right one."""

import contextlib

import pytest
import torch
from stepper_runs import loss_of, made, micro_batch
from torch import nn

import narrowcast as nc
from narrowcast.errors import CheckpointError, OrderError, SettingError, UnsupportedError

O2 = nc.Policy(compute="fp16", master_weights=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def test_step_inside_the_region_is_refused():
    model, _, stepper = made()
    with pytest.raises(OrderError, match=r"then call stepper\.step\(loss\)"), stepper.autocast():
        stepper.step(model(torch.ones(2, 4)).mean())


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "O2"])
def test_a_step_of_the_optimizer_by_hand_is_refused(policy):
    """In fp16 its gradients would be scaled."""
    model, optimizer, stepper = made(policy, accumulate=2)
    micro_batch(model, stepper)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(OrderError, match=r"SGD\.step was called by hand.*stepper\.step\(loss\)"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert micro_batch(model, stepper).complete


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_zero_grad_in_an_accumulation_is_refused(zero, set_to_none):
    model, optimizer, stepper = made(accumulate=4)
    micro_batch(model, stepper)
    (optimizer if zero == "optimizer" else model).zero_grad(set_to_none=set_to_none)
    loss = loss_of(model, stepper)
    what = "gone" if set_to_none else "changed"
    with pytest.raises(OrderError, match=f"the first 1 micro-batches are {what}: .*Leave it out"):
        stepper.step(loss)
    stepper.zero_grad()


def test_zeros_in_low_weights_do_not_hide_that_masters_lost_their_gradients():
    model, optimizer, stepper = made(O2, accumulate=2)
    micro_batch(model, stepper)
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    loss = loss_of(model, stepper)
    with pytest.raises(OrderError, match="the first 1 micro-batches are gone: zero_grad was called"):
        stepper.step(loss)
    stepper.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("policy", ["fp16", O2], ids=["fp16", "O2"])
def test_a_backward_by_hand_is_refused(policy, accumulate):
    """Its gradients would be added to scaled ones; under O2 it is the low weights that hold them."""
    model, optimizer, stepper = made(policy, accumulate=accumulate)
    if accumulate > 1:
        micro_batch(model, stepper)
    loss = loss_of(model, stepper)
    loss.backward(retain_graph=True)
    message = r"backward\(\) was called by hand" if accumulate == 1 or policy is O2 else "are changed"
    with pytest.raises(OrderError, match=message):
        stepper.step(loss)
    stepper.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    micro_batch(model, stepper)  # zeros are no gradients


def test_two_steppers_of_one_optimizer_both_step():
    """As in two phases of training, or where a notebook's traceback keeps the first alive."""
    model, optimizer, first = made("bf16")
    second = nc.Stepper(model, optimizer, "fp32")
    for stepper in (first, second):
        assert micro_batch(model, stepper).complete
    with pytest.raises(OrderError, match=r"delete the Stepper first \(del stepper\)"):
        optimizer.step()


# ---- losses


def test_losses_that_no_backward_can_start_from_are_refused():
    model, _, stepper = made()
    with torch.no_grad():
        loss = loss_of(model, stepper)
    with pytest.raises(OrderError, match="expected a loss with a graph"):
        stepper.step(loss)
    with pytest.raises(SettingError, match=r"a loss of one element, got shape \(2, 1\): take its mean"):
        stepper.step(model(torch.ones(2, 4)))
    for wrong, name in ((1.0, "float"), ({}, "dict: add several losses")):
        with pytest.raises(SettingError, match=f"expected a loss, got {name}"):
            stepper.step(wrong)
    other = nn.Linear(4, 1)
    with pytest.raises(OrderError, match="no parameter of this SGD got a gradient from this loss"):
        stepper.step(other(torch.ones(2, 4)).mean())
    assert micro_batch(model, stepper).complete


def test_an_optimizer_that_needs_a_closure_gets_a_function():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(OrderError, match=r"LBFGS evaluates the loss .*: give step a function"):
        nc.Stepper(model, optimizer, "bf16").step(model(torch.ones(2, 4)).mean())
    several = nc.Stepper(model, optimizer, "bf16", accumulate=2)
    with pytest.raises(SettingError, match="an optimizer with a closure needs accumulate=1"):
        several.step(lambda: model(torch.ones(1, 4)).mean())
    with pytest.raises(UnsupportedError, match=r"LBFGS .* which masters do not support"):
        nc.Stepper(model, optimizer, O2)


@pytest.mark.parametrize(("policy", "casts"), [("bf16", False), ("bf16", True), ("fp32", False)])
def test_a_first_loss_from_outside_the_region_is_warned_of(policy, casts):
    model, _, stepper = made(policy)
    warns = pytest.warns(UserWarning, match="the loss was computed from fp32 weights without a cast")
    with warns if policy == "bf16" and not casts else contextlib.nullcontext():
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss = model(torch.ones(2, 4)).mean()
        stepper.step(loss)
    stepper.step(model(torch.ones(2, 4)).mean())


def test_a_loss_that_is_a_parameter_trains_it():
    model = nn.ParameterList([torch.tensor(2.0)])
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.5), "bf16")
    assert not stepper.step(model[0]).skipped
    assert model[0].item() == 1.5


def test_gradients_that_cannot_be_scaled_or_clamped_are_refused():
    model = nn.Linear(4, 1)
    model.weight.grad_dtype = torch.float16
    _, _, stepper = made("fp32", model)
    with pytest.raises(nc.NarrowcastError, match="got fp16 for weight, as grad_dtype says"):
        micro_batch(model, stepper)
    _, _, stepper = made()
    stepper.scaler.scale(torch.ones(()))
    of_complex = torch.optim.SGD([torch.ones(1) * 1j], 0.1)
    with pytest.raises(nc.NarrowcastError, match="are clipped by their norm of order 2"):
        stepper.scaler.clip_grad_value_(of_complex, 1.0)


def test_parameters_on_the_meta_device_are_refused():
    model = nn.Linear(4, 1, device="meta")
    with pytest.raises(SettingError, match=r"parameters on the meta device: call model\.to_empty"):
        nc.Stepper(model, sgd(model))


# ---- settings

BAD = [
    ({"accumulate": 0}, "accumulate must be a whole number of at least 1, got 0"),
    ({"accumulate": 1.5}, "whole number of at least 1, got 1.5"),
    ({"accumulate": True}, "whole number of at least 1, got True"),
    ({"max_norm": 0.0}, "max_norm must be a number above 0, or None, got 0.0"),
    ({"max_norm": float("nan")}, "max_norm must be a number above 0, or None, got nan"),
    ({"max_value": -1.0}, "max_value must be a number above 0, or None, got -1.0"),
    ({"max_norm": 1.0, "max_value": 1.0}, "expected max_norm or max_value, got both"),
    ({"restore": "norm"}, "unknown restore='norm'. Did you mean"),
    ({"scheduler": 3}, "expected a learning-rate scheduler with a step method, got 3"),
    ({"scheduler": torch.optim.lr_scheduler.StepLR}, "expected a learning-rate scheduler .*, got <class"),
    ({"scheduler": {"D": None}}, r"scheduler has the names \['D'\], and the optimizers have no names"),
    ({"scaler": torch.amp.GradScaler("cpu")}, "expected an nc.GradScaler, got torch's"),
    ({"scaler": nc.GradScaler(), "process_group": object()}, "give process_group to the GradScaler"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=range(len(BAD)))
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        made(**settings)


def test_models_and_optimizers_that_do_not_fit_are_refused():
    a, b = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer, other = sgd(a), sgd(b)
    none = "expected an optimizer, a list or a dict of optimizers, got"
    wrong = [((a, one), {}, none) for one in (None, [], {}, "SGD", a.parameters())]
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    wrong += [
        (([a, b], [optimizer, other]), {}, r"expected a torch\.nn\.Module, got list; .*nn\.ModuleDict"),
        ((nn.Tanh(), optimizer), {}, "expected a model with parameters, got Tanh without any"),
        ((a, other), {}, "no parameter of this SGD is one of the model's"),
        ((a, [optimizer, optimizer]), {}, "the same optimizer was given twice"),
        ((a, optimizer), {"scheduler": scheduler}, "this StepLR is of another optimizer"),
    ]
    for arguments, settings, message in wrong:
        with pytest.raises(SettingError, match=message):
            nc.Stepper(*arguments, **settings)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(UnsupportedError, match=r"call scheduler\.step\(metric\) after each evaluation"):
        nc.Stepper(a, optimizer, scheduler=plateau)


def test_names_are_given_exactly_where_optimizers_have_them():
    model, _, stepper = made()
    with pytest.raises(SettingError, match="expected no name, since the optimizer has none, got 'D'"):
        stepper.step(loss_of(model, stepper), name="D")
    both = nn.ModuleDict({"D": nn.Linear(4, 1), "G": nn.Linear(4, 1)})
    optimizers = {name: sgd(part) for name, part in both.items()}
    named = nc.Stepper(both, optimizers, "bf16")
    loss = both["D"](torch.ones(2, 4)).mean()
    with pytest.raises(SettingError, match=r"expected name=\.\.\. of the optimizer that steps: D, G"):
        named.step(loss)
    with pytest.raises(SettingError, match=r"no optimizer is called 'd'\. Did you mean"):
        named.step(loss, name="d")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers["D"], 1)
    with pytest.raises(SettingError, match="expected a dict of schedulers by the names of the optimizers"):
        nc.Stepper(both, optimizers, scheduler=scheduler)


def test_a_scaler_belongs_to_one_stepper_at_a_time():
    scaler = nc.GradScaler(init_scale=8.0)
    model, optimizer, stepper = made("bf16", scaler=scaler)
    with pytest.raises(SettingError, match="this GradScaler is another Stepper's"):
        nc.Stepper(model, optimizer, "bf16", scaler=scaler)
    del stepper
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    again = nc.Stepper(model, optimizer, "bf16", scaler=scaler, scheduler=scheduler)
    micro_batch(model, again)
    assert scheduler.last_epoch == 1


def test_a_scheduler_that_is_stepped_by_hand_too_is_warned_of():
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    stepper = nc.Stepper(model, optimizer, "bf16", scheduler=scheduler)
    micro_batch(model, stepper)
    scheduler.step()
    loss = loss_of(model, stepper)
    with pytest.warns(
        UserWarning, match=r"StepLR\.step was called by hand, and the Stepper moves it too"
    ) as found:
        stepper.step(loss)
    assert found[0].filename == __file__


def test_schedulers_without_last_epoch_move():
    class Halving:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            self.optimizer.param_groups[0]["lr"] /= 2

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    chained = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)])
    stepper = nc.Stepper(model, optimizer, "bf16", scheduler=[Halving(optimizer), chained])
    for _ in range(2):
        micro_batch(model, stepper)
    assert optimizer.param_groups[0]["lr"] == 0.5 / 16


def test_optimizers_of_weights_in_bf16_are_warned_of():
    model = nn.Linear(4, 1).bfloat16()
    with pytest.warns(UserWarning, match=r'loses updates smaller than 2\*\*-9 of a weight: policy="O2"'):
        nc.Stepper(model, sgd(model), "bf16")


# ---- states


def test_saving_in_an_accumulation_is_refused():
    model, _, stepper = made(accumulate=2)
    micro_batch(model, stepper)
    with pytest.raises(OrderError, match=r"1 of 2 micro-batches are accumulated.*call flush\(\)"):
        stepper.state_dict()
    stepper.flush()
    assert stepper.state_dict()["steps"] == 1


def test_a_state_of_another_stepper_is_refused():
    _, _, stepper = made()
    without_steps = stepper.state_dict()
    del without_steps["steps"]
    for state in ({"scale": 1.0}, {}, None, without_steps):
        with pytest.raises(CheckpointError, match=r"expected what stepper.state_dict\(\) returned"):
            stepper.load_state_dict(state)
    _, _, with_masters = made(O2)
    with pytest.raises(CheckpointError, match="it holds no held weights '0'"):
        with_masters.load_state_dict(stepper.state_dict())
