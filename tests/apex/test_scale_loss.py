"""One loss and one optimizer: gradients after each block, skipped steps, and what is refused."""

import gc
import importlib
import math
import weakref
from contextlib import nullcontext, suppress

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.apex import amp
from narrowcast.errors import AmpError, OrderError, SettingError, UnsupportedError

SCALE = 2.0**16
# Four times as large and scaled, still in range in float16; so is the scaled gradient of the output, which is
# an eighth of the scale.
X = torch.tensor([[0.1875, 0.125, -0.0625, 0.15625]])


def start(level, make=None, **settings):
    """A linear model whose gradient is ``X``, and its optimizer."""
    model = torch.nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    make = make or (lambda parameters: torch.optim.SGD(parameters, 0.5, momentum=1.0))
    return amp.initialize(model, make(model.parameters()), opt_level=level, verbosity=0, **settings)


def loss_of(model):
    return model(8 * X).float().sum() / 8


def backward(model, optimizer, bad=None, **options):
    with amp.scale_loss(loss_of(model), optimizer, **options) as scaled:
        scaled.backward()
        if bad is not None:
            model.weight.grad[0, 0] = bad


def gradient(optimizer):
    (parameter,) = amp.master_params(optimizer)
    return parameter.grad


def numbers(model, optimizer):
    """Parameters and optimizer state, as lists."""
    (parameter,) = amp.master_params(optimizer)
    state = {
        key: torch.as_tensor(value).tolist() for key, value in optimizer.state.get(parameter, {}).items()
    }
    return model.weight.tolist(), parameter.tolist(), state


LEVELS = pytest.mark.parametrize(
    ("level", "settings"),
    [("O1", {}), ("O2", {}), ("O2", {"half_type": torch.bfloat16}), ("O3", {"loss_scale": "dynamic"})],
    ids=["O1", "O2", "O2 bf16", "O3"],
)


@LEVELS
def test_gradients_add_up_unscaled(level, settings):
    model, optimizer = start(level, **settings)
    for times in range(1, 4):
        backward(model, optimizer)
        assert torch.equal(gradient(optimizer).float(), X * times)
    # Of half weights they stay as they came, scaled.
    if level == "O2":
        assert torch.equal(model.weight.grad.float(), X * SCALE)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.tensor([[1.0, 2.0, 3.0, 4.0]]) - 1.5 * X)
    if level == "O2":
        assert gradient(optimizer) is None  # model.zero_grad() would not reach it


@LEVELS
def test_delayed_gradients_stay_scaled_until_a_block_without(level, settings):
    model, optimizer = start(level, **settings)
    backward(model, optimizer)
    for _ in range(2):
        backward(model, optimizer, delay_unscale=True)
    with pytest.raises(AmpError, match="came while gradients are scaled by 65536"):
        optimizer.step()
    assert amp._amp_state.loss_scalers[0]._unskipped == 1
    backward(model, optimizer)
    assert torch.equal(gradient(optimizer).float(), X * 4)
    assert amp._amp_state.loss_scalers[0]._unskipped == 2
    optimizer.step()
    # Delayed gradients that are cleared leave nothing behind.
    backward(model, optimizer, delay_unscale=True)
    optimizer.zero_grad()
    backward(model, optimizer)
    assert torch.equal(gradient(optimizer).float(), X)


def test_delayed_gradients_of_two_scales_are_not_added():
    model, optimizer = start("O1", num_losses=2)
    amp._amp_state.loss_scalers[1]._loss_scale = 4.0
    backward(model, optimizer, delay_unscale=True)
    with pytest.raises(AmpError, match=r"scaled by 65536.*this block scales by 4"):
        backward(model, optimizer, loss_id=1)
    assert torch.equal(gradient(optimizer), X * SCALE)
    # Dropped behind the optimizer's back, they are in nobody's way.
    model.zero_grad()
    backward(model, optimizer, loss_id=1)
    assert torch.equal(gradient(optimizer), X)


@LEVELS
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_left_out_touches_nothing(level, settings, bad, capsys):
    model, optimizer = start(level, **settings)
    amp._amp_state.verbosity = 1
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    before, called = numbers(model, optimizer), []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    backward(model, optimizer, bad=bad)
    assert optimizer.step() is None
    assert numbers(model, optimizer) == before
    assert not called
    said = capsys.readouterr().err.splitlines()
    assert said == ["Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"]
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert called == [1]
    assert numbers(model, optimizer) != before


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_a_static_scale_checks_too(level, scale, capsys):
    model, optimizer = start(level, loss_scale=scale)
    amp._amp_state.verbosity = 1
    before = numbers(model, optimizer)
    backward(model, optimizer, bad=math.inf)
    optimizer.step()
    assert numbers(model, optimizer) == before
    assert f"Skipping step, loss scaler 0 stays at {scale}" in capsys.readouterr().err
    assert amp._amp_state.loss_scalers[0].loss_scale() == scale
    optimizer.zero_grad()
    backward(model, optimizer)
    assert torch.equal(gradient(optimizer).float(), X)
    optimizer.step()
    assert numbers(model, optimizer) != before


@LEVELS
@pytest.mark.parametrize("delayed", [False, True])
def test_an_exception_in_the_block_brings_the_gradients_back(level, settings, delayed):
    model, optimizer = start(level, **settings)

    def interrupted():
        with suppress(KeyError), amp.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
            raise KeyError

    interrupted()
    assert gradient(optimizer) is None
    assert model.weight.grad is None
    backward(model, optimizer)
    interrupted()
    assert torch.equal(gradient(optimizer).float(), X)
    backward(model, optimizer, delay_unscale=delayed)
    if delayed:
        backward(model, optimizer)
    assert torch.equal(gradient(optimizer).float(), X * (3 if delayed else 2))
    assert amp._amp_state.loss_scalers[0]._unskipped == 2
    optimizer.step()


@LEVELS
@pytest.mark.parametrize("stepped", [True, False], ids=["step", "no step"])
def test_gradients_that_the_script_throws_away_are_gone(level, settings, stepped):
    model, optimizer = start(level, **settings)
    before = model.weight.detach().clone()
    backward(model, optimizer)
    model.zero_grad()
    if stepped:
        optimizer.step()
        assert torch.equal(model.weight, before)
    backward(model, optimizer)
    assert torch.equal(gradient(optimizer).float(), X)
    optimizer.step()
    assert torch.equal(model.weight, (before.float() - 0.5 * X).to(model.weight.dtype))


def test_changed_gradients_of_half_weights_are_reported(capsys):
    model, optimizer = start("O2", lambda p: torch.optim.SGD(p, lr=1.0))
    amp._amp_state.verbosity = 1
    for _ in range(2):
        backward(model, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert torch.equal(gradient(optimizer), X)
        optimizer.step()
        model.zero_grad()
    assert capsys.readouterr().err == (
        "amp: gradients of this SGD's half weights were changed after the scale_loss block, which has no "
        "effect: clip and change those of amp.master_params(optimizer), which it steps on\n"
    )


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_group_that_comes_later(level, half):
    both = torch.nn.ModuleList([torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(4, 1, bias=False)])
    first, second = both
    optimizer = torch.optim.SGD(first.parameters(), lr=0.5, momentum=1.0)
    amp.initialize(both, optimizer, opt_level=level, verbosity=0, loss_scale=256.0, half_type=half)
    x = X.to(first.weight.dtype)
    before = [first.weight.float().detach().clone(), second.weight.float().detach().clone()]
    for step in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(first(x).float().sum() + second(x).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        if step == 0:
            assert torch.equal(second.weight.float(), before[1])
            optimizer.add_param_group({"params": second.parameters(), "lr": 2.0})
            optimizer.zero_grad()
            second.zero_grad()
    masters = list(amp.master_params(optimizer))
    assert all(p.dtype == (half if level == "O3" else torch.float32) for p in masters)
    # Momentum 1: the second velocity is 2 x. Half weights end rounded, by half a unit at most.
    slack = 0.0 if level in ("O0", "O1") else torch.finfo(half).eps
    assert torch.allclose(first.weight.float(), before[0] - 0.5 * 3 * X, atol=slack + 1e-6, rtol=0)
    assert torch.allclose(second.weight.float(), before[1] - 2.0 * X, atol=slack + 1e-6, rtol=0)


# ---- misuse


def test_what_comes_in_the_wrong_order_or_place_is_refused():
    plain = torch.nn.Linear(4, 1)
    stranger = torch.optim.SGD(plain.parameters(), 0.1)
    for call in (amp.state_dict, lambda: amp.load_state_dict({}), lambda: backward(plain, stranger)):
        with pytest.raises(AmpError, match=r"came before amp\.initialize"):
            call()
    model, optimizer = start("O1", num_losses=2)
    loss = loss_of(model)
    for wrong, said in (
        ({"loss_id": 2}, "expected loss_id from 0 to 1, got 2"),
        ({"loss_id": -1}, "expected loss_id from 0 to 1, got -1"),
        ({"loss_id": 0.0}, "expected loss_id from 0 to 1, got 0.0"),
        ({"optimizers": stranger}, "this SGD was not given to amp.initialize"),
        ({"optimizers": [optimizer, stranger]}, "this SGD was not given to amp.initialize"),
        ({"optimizers": []}, "got an empty list"),
        ({"optimizers": model}, "expected a torch.optim.Optimizer, got Linear"),
        ({"loss": 1.0}, "expected the loss to be a torch.Tensor, got float"),
        ({"delay_overflow_check": True}, "delay_overflow_check=True is not supported"),
    ):
        with (
            pytest.raises((AmpError, UnsupportedError), match=said),
            amp.scale_loss(**{"loss": loss, "optimizers": optimizer, **wrong}),
        ):
            pytest.fail("the block was entered")
    with pytest.raises(AmpError, match="within another one"), amp.scale_loss(loss, optimizer):
        backward(model, optimizer)
    with pytest.raises(AmpError, match="inside a scale_loss block"), amp.scale_loss(loss, optimizer):
        optimizer.step()
    with pytest.raises(AmpError, match=r"given to amp\.initialize before"):
        amp.initialize(model, optimizer, verbosity=0)
    other = torch.nn.Linear(4, 1)
    twice = torch.optim.SGD(other.parameters(), 0.1)
    with pytest.raises(AmpError, match=r"given to amp\.initialize before"):
        amp.initialize(other, [twice, twice], verbosity=0)
    with pytest.raises(AmpError, match="num_losses to be a whole number of at least 1, got 0"):
        amp.initialize(other, twice, num_losses=0, verbosity=0)
    # None of it is left.
    backward(model, optimizer)
    assert torch.equal(gradient(optimizer), X)
    assert "step" not in vars(twice)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_another_loss_backward_in_the_block_is_refused(level):
    model, optimizer = start(level)
    backward(model, optimizer)
    loss = loss_of(model)
    said = "would be divided by 65536: call backward of what the block yields"
    with pytest.raises(AmpError, match=said), amp.scale_loss(loss, optimizer):
        loss.backward()
    assert torch.equal(gradient(optimizer), X)
    backward(model, optimizer)
    assert torch.equal(gradient(optimizer), 2 * X)
    # No loss goes backward, or its gradients are taken by hand.
    with amp.scale_loss(loss_of(model), optimizer):
        pass
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        model.weight.grad = torch.autograd.grad(scaled, model.weight)[0]
    assert torch.equal(gradient(optimizer), 3 * X)


@LEVELS
@pytest.mark.parametrize("how", ["model", "optimizer"])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_may_be_cleared_in_a_block(level, settings, how, to_none):
    model, optimizer = start(level, **settings)
    for delayed in (False, True):
        backward(model, optimizer, delay_unscale=True)
        with amp.scale_loss(loss_of(model), optimizer, delay_unscale=delayed):
            {"model": model, "optimizer": optimizer}[how].zero_grad(set_to_none=to_none)
        backward(model, optimizer)
        assert torch.equal(gradient(optimizer).float(), X)
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            optimizer.zero_grad(set_to_none=to_none)
            scaled.backward()
        assert torch.equal(gradient(optimizer).float(), X)
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scaled_loss_backward_after_its_block_is_refused(level):
    model, optimizer = start(level)
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        pass
    with pytest.raises(AmpError, match="scaled by 65536 went backward after its scale_loss block"):
        scaled.backward()
    model, optimizer = start(level, loss_scale=1.0)
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        pass
    scaled.backward()
    assert torch.equal(model.weight.grad.float(), X)


def test_a_loss_is_scaled_once():
    model, optimizer = start("O1", loss_scale=4.0)
    with amp.scale_loss(loss_of(model), optimizer) as loss:
        loss.backward(retain_graph=True)
    with pytest.raises(AmpError, match="scaled by 4 already"), amp.scale_loss(loss, optimizer):
        pytest.fail("the block was entered")
    backward(model, optimizer)
    assert torch.equal(gradient(optimizer), 2 * X)


def test_a_block_keeps_no_graph():
    model, optimizer = start("O1")
    gc.disable()
    try:
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
        gone = weakref.ref(scaled)
        del scaled
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("one_process")
def test_gradients_in_the_buckets_of_ddp_add_up():
    """DDP writes the gradients of the second block over those of the first."""
    model, optimizer = start("O1")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for factor in (1, 2):
        with amp.scale_loss(factor * loss_of(wrapped), optimizer) as scaled:
            scaled.backward()
    del wrapped
    gc.collect()  # DDP ends before its group
    assert torch.equal(gradient(optimizer), 3 * X)


def test_a_parameter_of_two_optimizers_is_refused():
    model = torch.nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)]
    amp.initialize(model, optimizers, verbosity=0)
    with pytest.raises(SettingError, match="in two optimizers"):
        backward(model, optimizers)


def test_sparse_gradients_add_up_and_have_no_masters():
    for level in ("O1", "O2"):
        table = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        before = table.weight.detach().clone()
        amp.initialize(table, optimizer, opt_level=level, verbosity=0)
        with pytest.raises(UnsupportedError, match="sparse=False") if level == "O2" else nullcontext():
            for index in ([1, 1], [2]):
                with amp.scale_loss(table(torch.tensor(index)).sum(), optimizer) as scaled:
                    scaled.backward()
        if level == "O1":
            optimizer.step()
            assert torch.equal(table.weight, before - torch.tensor([[0.0], [2.0], [1.0], [0.0]]))


# ---- around


def test_two_calls_of_initialize_keep_their_own_scales():
    first, its = start("O2")
    second, other = start("O1", loss_scale=4.0, num_losses=2)
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [4.0, 4.0]
    backward(first, its, bad=math.inf)
    its.step()
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [4.0, 4.0]
    with amp.scale_loss(loss_of(first), its) as scaled:
        assert scaled.item() == pytest.approx(loss_of(first).item() * SCALE / 2)
    backward(second, other, loss_id=1)
    assert torch.equal(gradient(other), X)
    with pytest.raises(AmpError, match="loss_id from 0 to 0"):
        backward(first, its, loss_id=1)


@pytest.mark.parametrize("make", [torch.amp.GradScaler, nc.GradScaler])
@pytest.mark.parametrize("unscale", [True, False])
def test_a_scaler_cannot_step_an_optimizer_with_masters(make, unscale):
    """It would unscale the batch norm's gradients, and step on scaled ones of all else."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, half_type=torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = make("cpu", init_scale=4.0)
    scaler.scale(model(torch.randn(3, 4)).square().sum()).backward()

    def step():
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)

    with pytest.raises(OrderError):
        step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("before", [True, False])
def test_schedulers_go_on_without_warnings(before):
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if not before:
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if before:
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for bad in (math.inf, None):
        backward(model, optimizer, bad=bad)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_names_that_scripts_reach_into(capsys):
    assert (amp._amp_state.opt_properties, amp._amp_state.loss_scalers) == (None, [])
    _, optimizer = start("O2", num_losses=2)
    assert (amp._amp_state.opt_properties.opt_level, len(amp._amp_state.loss_scalers)) == ("O2", 2)
    assert amp._amp_state.opt_properties.options["cast_model_type"] == torch.float16
    module = importlib.import_module("narrowcast.apex.amp._amp_state")
    assert module._amp_state is amp._amp_state
    for verbosity, text in ((0, "silent"), (1, "said")):
        amp._amp_state.verbosity = verbosity
        module.maybe_print(text, True)
    assert capsys.readouterr().err == "said\n"
    later = torch.nn.Linear(4, 1, bias=False).half()
    optimizer.add_param_group({"params": later.parameters()})
    optimizer._amp_lazy_init()
    assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}


@pytest.mark.parametrize(
    ("variable", "rank_of_group", "is_told"),
    [
        (None, None, True), ("", None, True), ("0", None, True), ("1", None, False),
        (None, 0, True), (None, 1, False), ("0", 1, False),
    ],
)  # fmt: skip
def test_messages_come_from_rank_0_alone(variable, rank_of_group, is_told, monkeypatch, capsys):
    """A group of processes knows its ranks, also where no launcher has set RANK, as in mp.spawn."""
    monkeypatch.delenv("RANK", raising=False)
    if variable is not None:
        monkeypatch.setenv("RANK", variable)
    if rank_of_group is not None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank_of_group)
    amp._amp_state.verbosity = 1
    importlib.import_module("narrowcast.apex.amp._amp_state").maybe_print("said")
    assert capsys.readouterr().err == ("said\n" if is_told else "")


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_with_a_graph_are_refused(level):
    model, optimizer = start(level)
    with (
        pytest.raises(AmpError, match=r"backward\(create_graph=True\) in a scale_loss block"),
        amp.scale_loss(loss_of(model).square(), optimizer) as scaled,
    ):
        scaled.backward(create_graph=True)
    assert model.weight.grad is None
    backward(model, optimizer)
    assert torch.equal(gradient(optimizer), X)


@LEVELS
def test_closures_are_refused(level, settings):
    model, optimizer = start(level, **settings)
    with pytest.raises(AmpError, match=r"SGD.step\(closure\) is not supported with a scaled loss"):
        optimizer.step(lambda: loss_of(model))
