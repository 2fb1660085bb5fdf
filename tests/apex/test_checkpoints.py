"""A run that is saved and resumed by apex's documented calls continues to the bit, at every level."""

import copy
import io
from collections import OrderedDict
from itertools import product

import pytest
import torch
from o1 import HALVES

from ended_apex import end_apex
from narrowcast.apex import amp
from narrowcast.errors import ScaleError

STEPS = 10
BATCHES = torch.randn(STEPS, 6, 5, generator=torch.Generator().manual_seed(7))


def plain(seed):
    """A model with batch norm and a tied pair of weights, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 8),
        torch.nn.Linear(8, 8),
    )
    model[4].weight = model[3].weight
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def made(seed, level, *, num_losses=1, **settings):
    # O3's scale stays at 1 by default, where nothing could be saved wrongly.
    extra = {"loss_scale": "dynamic"} if level == "O3" else {}
    return amp.initialize(
        *plain(seed), opt_level=level, num_losses=num_losses, verbosity=0, **{**extra, **settings}
    )


def train(model, optimizer, steps, num_losses=1):
    """Two steps of each five are left out, those of the losses' own overflows."""
    for step in steps:
        optimizer.zero_grad()
        for loss_id in range(num_losses):
            loss = (model(BATCHES[step]) - loss_id).square().mean() / 64
            with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
                if amp._amp_state.opt_properties.opt_level != "O0" and step % 5 == 1 + loss_id:
                    model[0].weight.grad[0, 0] = float("inf")
        optimizer.step()


def everything(model, optimizer):
    """All numbers of a run, copied."""
    moments = [optimizer.state[p]["momentum_buffer"] for p in amp.master_params(optimizer)]
    return copy.deepcopy((model.state_dict(), moments, amp.state_dict()))


def check_same(found, wanted):
    for name, value in wanted[0].items():
        assert torch.equal(found[0][name], value), name
    for moment, its in zip(found[1], wanted[1], strict=True):
        assert torch.equal(moment, its)
    assert found[2] == wanted[2]


def saved(model, optimizer):
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, file
    )
    return file


def read(file):
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize(("level", "half"), [("O0", "fp16"), *product(("O1", "O2", "O3"), ("fp16", "bf16"))])
def test_resumed_at_five_of_ten_it_goes_on_to_the_bit(level, num_losses, half):
    settings = {"num_losses": num_losses, "half_type": HALVES[half]}
    model, optimizer = made(0, level, **settings)
    train(model, optimizer, range(5), num_losses)
    file = saved(model, optimizer)
    train(model, optimizer, range(5, STEPS), num_losses)
    wanted = everything(model, optimizer)
    # Both infinities that were planted, and under O1 an overflow of its own at first.
    assert level == "O0" or wanted[2]["loss_scaler0"]["loss_scale"] in (2.0**14, 2.0**13)
    for order in (("amp", "model", "optimizer"), ("model", "optimizer", "amp")):
        checkpoint = read(file)
        end_apex()
        model, optimizer = made(1, level, **settings)
        for name in order:
            {"amp": amp, "model": model, "optimizer": optimizer}[name].load_state_dict(checkpoint[name])
        train(model, optimizer, range(5, STEPS), num_losses)
        check_same(everything(model, optimizer), wanted)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_what_is_exported_is_float32_and_under_o2_the_masters(level):
    model, optimizer = made(0, level)
    train(model, optimizer, range(3))
    state = model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
    assert all(v.dtype == torch.float32 for v in model[3].state_dict().values())
    if level == "O2":
        (master,) = [p for p in amp.master_params(optimizer) if p.shape == (8, 5)]
        assert torch.equal(state["0.weight"], master)
        assert torch.equal(model[0].state_dict()["weight"], master)
        assert not torch.equal(state["0.weight"], model[0].weight.float())
        assert torch.equal(state["3.weight"], state["4.weight"])
        # A live tensor is what keep_vars asks for, frozen weights and buffers too.
        model[0].bias.requires_grad_(False)
        live = model.state_dict(keep_vars=True)
        assert live["0.weight"] is model[0].weight
        assert live["0.bias"] is model[0].bias
        model[0].bias.requires_grad_(True)
    before = copy.deepcopy(state)
    train(model, optimizer, range(3, 5))
    if level == "O2":
        # A copy: what was handed out does not change with the run.
        assert torch.equal(state["0.weight"], before["0.weight"])
        with torch.no_grad():
            model[0].weight.fill_(0.5)  # by hand, which its master does not know
        assert (model.state_dict()["0.weight"] == 0.5).all()


@pytest.mark.parametrize("how", ["before", "wrapped", "parts"])
def test_weights_load_before_initialize_and_through_wrappers(how):
    model, optimizer = made(0, "O2")
    train(model, optimizer, range(5))
    checkpoint = read(saved(model, optimizer))
    weights = checkpoint["model"]
    train(model, optimizer, range(5, STEPS))
    wanted = everything(model, optimizer)
    if how == "before":
        model, optimizer = plain(1)
        model.load_state_dict(weights)
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    else:
        model, optimizer = made(1, "O2")
        optimizer.load_state_dict(checkpoint["optimizer"])
    if how == "wrapped":
        torch.nn.DataParallel(model).load_state_dict({f"module.{name}": v for name, v in weights.items()})
    elif how == "parts":
        for number in (0, 1, 3, 4):
            of_part = {name[2:]: v for name, v in weights.items() if name.startswith(f"{number}.")}
            model[number].load_state_dict(of_part)
    amp.load_state_dict(checkpoint["amp"])
    train(model, optimizer, range(5, STEPS))
    check_same(everything(model, optimizer), wanted)


def apexs(state):
    """What apex saved of the same run: its half weights, widened."""
    return {
        name: value.half().float() if value.is_floating_point() and not name.startswith("1.") else value
        for name, value in state.items()
    }


def test_a_checkpoint_of_apex_loads():
    model, optimizer = made(0, "O2")
    train(model, optimizer, range(5))
    checkpoint = read(saved(model, optimizer))
    model, optimizer = made(1, "O2")
    model.load_state_dict(apexs(checkpoint["model"]))
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(OrderedDict(loss_scaler0={"loss_scale": 2048.0, "unskipped": 17}))
    assert scales() == [(2048.0, 17)]
    # Masters start from the weights, rounded as they are, and no bit of the model before is left.
    (master,) = [p for p in amp.master_params(optimizer) if p.shape == (8, 5)]
    assert torch.equal(master, checkpoint["model"]["0.weight"].half().float())
    train(model, optimizer, range(5, STEPS))


def state_of(*entries):
    return {
        f"loss_scaler{n}": {"loss_scale": scale, "unskipped": count}
        for n, (scale, count) in enumerate(entries)
    }


def scales():
    return [(scaler.loss_scale(), scaler._unskipped) for scaler in amp._amp_state.loss_scalers]


def test_another_number_of_losses_warns_and_loads_by_position():
    made(0, "O1", num_losses=2)
    with pytest.warns(UserWarning, match="holds 3 loss scales, and amp.initialize made 2"):
        amp.load_state_dict(state_of((4.0, 1), (8.0, 2), (16.0, 3)))
    assert scales() == [(4.0, 1), (8.0, 2)]
    with pytest.warns(UserWarning, match="holds 1 loss scales"):
        amp.load_state_dict(state_of((2.0, 5)))
    assert scales() == [(2.0, 5), (8.0, 2)]


def test_what_is_no_state_is_refused():
    made(0, "O1")
    with pytest.raises(ScaleError):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0}})
    assert scales() == [(65536.0, 0)]


def test_limits_of_this_run_hold_for_a_scale_that_is_loaded(capsys):
    made(0, "O1", max_loss_scale=1024.0, min_loss_scale=2.0, num_losses=2)
    assert scales() == [(1024.0, 0)] * 2
    amp._amp_state.verbosity = 1
    amp.load_state_dict(state_of((65536.0, 7), (1.0, 1)))
    assert scales() == [(1024.0, 7), (2.0, 1)]
    said = capsys.readouterr().err
    assert "loss scaler 0 is saved at 65536" in said
    assert "goes on at 2\n" in said


def test_a_static_scale_counts_on_and_is_loaded_as_it_is():
    made(0, "O1", loss_scale=128.0)
    amp.load_state_dict(state_of((64.0, 123456)))
    assert scales() == [(64.0, 123456)]
    assert amp.state_dict() == state_of((64.0, 123456))
    end_apex()
    # Where the scale moves, the next good block makes it grow.
    made(0, "O1")
    amp.load_state_dict(state_of((64.0, 123456)))
    amp._amp_state.loss_scalers[0].after_block(overflow=False)
    assert scales() == [(128.0, 0)]
