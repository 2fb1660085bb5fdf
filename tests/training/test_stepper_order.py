"""A wrong order, or a wrong setting, is refused with the right one."""

import copy
import pickle
import random

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import OrderError, SettingError, UnsupportedError
from narrowcast.scaling import Dynamic


def made(policy="bf16", **settings):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, nc.Stepper(model, optimizer, policy, **settings)


def loss_of(model, stepper):
    with stepper.autocast():
        return model(torch.ones(2, 4)).square().mean()


def test_step_inside_the_region():
    model, _, stepper = made()
    with (
        pytest.raises(OrderError, match=r"end the region after the loss, then call stepper\.step\(loss\)"),
        stepper.autocast(),
    ):
        stepper.step(model(torch.ones(2, 4)).mean())


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "O2"])
def test_the_optimizer_stepped_by_hand(policy):
    """In fp16 its gradients would be scaled: it must not go through in silence."""
    model, optimizer, stepper = made(policy, accumulate=2)
    stepper.step(loss_of(model, stepper))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(
        OrderError, match=r"SGD\.step was called by hand.*Call result = stepper\.step\(loss\)"
    ):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert stepper.step(loss_of(model, stepper)).complete


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_zero_grad_in_the_middle_of_a_window(zero, set_to_none):
    model, optimizer, stepper = made(accumulate=4)
    stepper.step(loss_of(model, stepper))
    (optimizer if zero == "optimizer" else model).zero_grad(set_to_none=set_to_none)
    loss = loss_of(model, stepper)
    what = "gone" if set_to_none else "changed"
    with pytest.raises(OrderError, match=f"the first 1 micro-batches are {what}: .*Leave it out"):
        stepper.step(loss)
    stepper.zero_grad()


def test_a_backward_by_hand():
    """Its gradients would be added to the scaled ones."""
    model, optimizer, stepper = made("fp16")
    loss = loss_of(model, stepper)
    loss.backward(retain_graph=True)
    with pytest.raises(OrderError, match=r"backward\(\) was called by hand, which stepper\.step"):
        stepper.step(loss)
    optimizer.zero_grad(set_to_none=False)
    stepper.step(loss_of(model, stepper))  # zeros are no gradients


def test_two_steppers_of_one_optimizer_both_step():
    """As in two phases of training, or where a notebook's traceback keeps the first alive."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steppers = [nc.Stepper(model, optimizer, policy) for policy in ("bf16", "fp32")]
    for stepper in steppers:
        assert stepper.step(loss_of(model, stepper)).complete
    with pytest.raises(OrderError, match=r"to step by hand, delete the Stepper first \(del stepper\)"):
        optimizer.step()


def test_arguments_that_do_not_belong_together():
    a, b = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer, other = torch.optim.SGD(a.parameters(), 0.1), torch.optim.SGD(b.parameters(), 0.1)
    with pytest.raises(SettingError, match=r"expected a torch\.nn\.Module, got list; .*nn\.ModuleDict"):
        nc.Stepper([a, b], [optimizer, other])
    with pytest.raises(SettingError, match="no parameter of this SGD is one of the model's"):
        nc.Stepper(a, other)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(SettingError, match="this StepLR is of another optimizer"):
        nc.Stepper(a, optimizer, scheduler=scheduler)


def test_losses_that_no_backward_can_start_from():
    model, _, stepper = made()
    with torch.no_grad():
        loss = loss_of(model, stepper)
    with pytest.raises(OrderError, match=r"expected a loss with a graph.*outside torch\.no_grad\(\)"):
        stepper.step(loss)
    with pytest.raises(
        SettingError, match=r"expected a loss of one element, got shape \(2, 1\): take its mean"
    ):
        stepper.step(model(torch.ones(2, 4)))
    with pytest.raises(SettingError, match="expected a loss or a function, got float"):
        stepper.step(1.0)


def test_an_optimizer_that_asks_for_a_closure():
    model = nn.Linear(4, 1)
    stepper = nc.Stepper(model, torch.optim.LBFGS(model.parameters()), "bf16")
    with pytest.raises(OrderError, match=r"LBFGS evaluates the loss .*: give step a function"):
        stepper.step(model(torch.ones(2, 4)).mean())


def test_saving_in_the_middle_of_a_window():
    model, _, stepper = made(accumulate=2)
    stepper.step(loss_of(model, stepper))
    with pytest.raises(OrderError, match=r"1 of 2 micro-batches are accumulated.*call flush\(\)"):
        stepper.state_dict()
    stepper.flush()
    assert stepper.state_dict()["steps"] == 1


BAD = [
    ({"accumulate": 0}, "accumulate must be a whole number of at least 1, got 0"),
    ({"accumulate": 1.5}, "accumulate must be a whole number of at least 1, got 1.5"),
    ({"accumulate": True}, "accumulate must be a whole number of at least 1, got True"),
    ({"max_norm": 0.0}, "max_norm must be a number above 0, or None, got 0.0"),
    ({"max_norm": -1}, "max_norm must be a number above 0, or None, got -1"),
    ({"max_norm": float("nan")}, "max_norm must be a number above 0, or None, got nan"),
    ({"max_value": -1.0}, "max_value must be a number above 0, or None, got -1.0"),
    ({"max_norm": 1.0, "max_value": 1.0}, "expected max_norm or max_value, got both: clip by one of them"),
    ({"restore": "norm"}, "unknown restore='norm'. Did you mean \"norms\"? Known: norms, all, none."),
    ({"scheduler": 3}, "expected a learning-rate scheduler with a step method, got 3"),
    (
        {"scheduler": {"D": None}},
        "scheduler has the names ['D'], and the optimizers ['None']",
    ),
    (
        {"scaler": torch.amp.GradScaler("cpu")},
        "expected a nc.GradScaler, got torch's: its results do not tell what was skipped",
    ),
    (
        {"scaler": nc.GradScaler(), "process_group": object()},
        "give process_group to the GradScaler, or leave the scaler to Stepper",
    ),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_settings_say_what_was_expected(settings, message):
    with pytest.raises(SettingError) as refused:
        made(**settings)
    assert str(refused.value) == message


def test_a_plateau_scheduler_wants_what_a_stepper_has_not():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(UnsupportedError, match=r"call scheduler\.step\(metric\) after each evaluation"):
        nc.Stepper(model, optimizer, scheduler=plateau)


def test_optimizers_that_are_none():
    model = nn.Linear(4, 1)
    for wrong in (None, [], {}, "SGD", model.parameters()):
        with pytest.raises(SettingError, match="expected an optimizer, a list or a dict of optimizers, got"):
            nc.Stepper(model, wrong)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(SettingError, match="the same optimizer was given twice"):
        nc.Stepper(model, [optimizer, optimizer])
    with pytest.raises(SettingError, match="expected a model with parameters, got Tanh without any"):
        nc.Stepper(nn.Tanh(), optimizer)


def test_names_where_there_are_none_and_none_where_there_are():
    model, _, stepper = made()
    with pytest.raises(SettingError, match="expected no name, since the optimizer has none, got 'D'"):
        stepper.step(loss_of(model, stepper), name="D")
    d, g = nn.Linear(4, 1), nn.Linear(4, 1)
    both = nn.ModuleList([d, g])
    named = nc.Stepper(
        both,
        {"D": torch.optim.SGD(d.parameters(), 0.1), "G": torch.optim.SGD(g.parameters(), 0.1)},
        "bf16",
    )
    with pytest.raises(SettingError, match=r"expected name=\.\.\. of the optimizer that steps: D, G"):
        named.step(d(torch.ones(2, 4)).mean())
    with pytest.raises(SettingError, match=r"no optimizer is called 'd'\. Did you mean"):
        named.step(d(torch.ones(2, 4)).mean(), name="d")
    optimizers = {"D": torch.optim.SGD(d.parameters(), 0.1), "G": torch.optim.SGD(g.parameters(), 0.1)}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers["D"], 1)
    with pytest.raises(SettingError, match="expected a dict of schedulers by the names of the optimizers"):
        nc.Stepper(both, optimizers, scheduler=scheduler)


def test_a_state_of_another_stepper():
    _, _, stepper = made()
    _, _, other = made(scheduler=None)
    state = other.state_dict()
    state["groups"][""]["schedulers"] = [{}]
    with pytest.raises(SettingError, match="expected a state with 0 schedulers, as this Stepper has, got 1"):
        stepper.load_state_dict(state)
    for state in ({"scale": 1.0}, {}, None):
        with pytest.raises(SettingError, match=r"expected what stepper.state_dict\(\) returned"):
            stepper.load_state_dict(state)
    model = nn.Linear(4, 1)
    adam = nc.Stepper(model, torch.optim.Adam(model.parameters()), "bf16")
    with pytest.raises(SettingError, match="expected the state of Adam, got that of another optimizer"):
        adam.load_state_dict(stepper.state_dict())


@pytest.mark.parametrize("scaler", [Dynamic(scale=8.0), nc.GradScaler(init_scale=8.0)])
def test_a_scaler_or_a_loss_scale_of_ones_own(scaler):
    model, _, stepper = made("bf16", scaler=scaler)
    assert stepper.step(loss_of(model, stepper)).scale == 8.0
    assert stepper.scaler.get_scale() == 8.0


def test_an_interrupted_backward_begins_a_new_window():
    model, _, stepper = made("fp16", accumulate=2)
    stepper.step(loss_of(model, stepper))
    out = model(torch.ones(2, 4))
    out.register_hook(interrupt)
    loss = out.square().mean()
    with pytest.raises(KeyboardInterrupt):
        stepper.step(loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [stepper.step(loss_of(model, stepper)).complete for _ in range(2)] == [False, True]


def interrupt(_):
    raise KeyboardInterrupt


def test_a_stepper_that_is_let_go_leaves_no_scaled_gradients():
    model, optimizer, stepper = made("fp16", accumulate=2)
    stepper.step(loss_of(model, stepper))
    assert model.weight.grad.abs().max() > 100
    del stepper
    assert model.weight.grad is None
    optimizer.step()


def test_a_loss_that_reaches_no_parameter():
    model, _, stepper = made()
    other = nn.Linear(4, 1)
    with pytest.raises(OrderError, match="no parameter of this SGD got a gradient from this loss"):
        stepper.step(other(torch.ones(2, 4)).mean())
    with pytest.raises(SettingError, match="expected a loss or a function, got dict: add several losses"):
        stepper.step({})
    assert stepper.step(loss_of(model, stepper)).complete


def test_a_scheduler_that_is_stepped_by_hand_too():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    stepper = nc.Stepper(model, optimizer, "bf16", scheduler=scheduler)
    stepper.step(loss_of(model, stepper))
    scheduler.step()
    loss = loss_of(model, stepper)
    with pytest.warns(UserWarning, match=r"StepLR\.step was called by hand, and the Stepper moves it too"):
        stepper.step(loss)


def test_a_scaler_belongs_to_one_stepper_at_a_time():
    scaler = nc.GradScaler(init_scale=8.0)
    model, optimizer, stepper = made("bf16", scaler=scaler)
    with pytest.raises(SettingError, match="this GradScaler is another Stepper's"):
        nc.Stepper(model, optimizer, "bf16", scaler=scaler)
    del stepper
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    again = nc.Stepper(model, optimizer, "bf16", scaler=scaler, scheduler=scheduler)
    again.step(loss_of(model, again))
    assert scheduler.last_epoch == 1


def test_weights_in_bf16_with_fp32_weights_are_warned_of():
    model = nn.Linear(4, 1).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match=r'loses updates smaller than 2\*\*-9 of a weight: policy="O2"'):
        nc.Stepper(model, optimizer, "bf16")


def test_what_masters_do_not_follow():
    model = nn.Linear(4, 1)
    o2 = nc.Policy(compute="fp16", master_weights=True)
    with pytest.raises(UnsupportedError, match=r"LBFGS .* which masters do not support"):
        nc.Stepper(model, torch.optim.LBFGS(model.parameters()), o2)
    model, optimizer, stepper = made(o2, scaler=Dynamic(scale=8.0))
    loss = loss_of(model, stepper)
    loss.backward(retain_graph=True)
    with pytest.raises(OrderError, match=r"backward\(\) was called by hand"):
        stepper.step(loss)
    with pytest.raises(ValueError, match="a held optimizer can be neither copied nor pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="a held optimizer can be neither copied nor pickled"):
        pickle.dumps(optimizer)


def test_a_backward_by_hand_with_masters():
    """The masters' gradients are as they were; it is the low weights that hold the stray ones."""
    model, _, stepper = made(nc.Policy(compute="fp16", master_weights=True), accumulate=2)
    stepper.step(loss_of(model, stepper))
    loss = loss_of(model, stepper)
    loss.backward(retain_graph=True)
    with pytest.raises(OrderError, match=r"backward\(\) was called by hand"):
        stepper.step(loss)


def test_a_stepper_is_neither_copied_nor_pickled():
    _, _, stepper = made()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="a Stepper cannot be copied or pickled"):
            copied(stepper)


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
        stepper.step(loss_of(model, stepper))
    assert optimizer.param_groups[0]["lr"] == 0.5 / 16


def test_a_retry_draws_the_same_numbers_of_python():
    model, _, stepper = made("fp16", scaler=Dynamic(scale=2.0**24))
    drawn = []

    def function():
        drawn.append(random.random())
        return model(torch.ones(2, 4)).float().square().mean() * drawn[-1] * 1e3

    assert not stepper.step(function).skipped
    assert len(drawn) > 1
    assert len(set(drawn)) == 1
