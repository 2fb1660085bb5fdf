"""``shutdown`` undoes everything that ``initialize`` does, and errors leave nothing behind."""

import gc
import multiprocessing
import os
import weakref

import pytest
import torch
from dispatch_table import kernels

from narrowcast.apex import amp
from narrowcast.casting import _autocast, _kernels
from narrowcast.errors import NarrowcastError

LEVELS = ("O0", "O1", "O2", "O3")
NAMES = [
    *((torch.nn.functional, name) for name in dir(torch.nn.functional)),
    *((torch, name) for name in dir(torch) if callable(getattr(torch, name))),
    *((torch.Tensor, name) for name in dir(torch.Tensor)),
]


def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.BatchNorm1d(4))


def train(given, optimizer, **settings):
    """Three steps, of which the first may overflow."""
    amp.initialize(given, optimizer, verbosity=0, **settings)
    for _ in range(3):
        with amp.scale_loss(given(torch.randn(3, 4)).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()


def whole_state(optimizer):
    gc.collect()  # policies end with what holds them, and their kernels with them
    return {
        "functions": {(id(owner), name): getattr(owner, name) for owner, name in NAMES},
        "own names of tensors": set(vars(torch.Tensor)),
        "kernels": kernels(),
        "kernels of ours": sorted(op for one in _kernels._libraries.values() for op in one.installed),
        "engine": torch.autograd._engine_run_backward,
        "autocast": torch.is_autocast_enabled("cpu"),
        "optimizer": set(vars(optimizer)) - {"_opt_called"},  # torch's own mark for its schedulers
        "groups": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        "state": (amp._amp_state.opt_properties, amp._amp_state.handle, amp._amp_state.loss_scalers),
        "policies": list(_autocast._outside_rules),
    }


def compare(after, before):
    assert {key: after[key] for key in after if after[key] != before[key]} == {}


@pytest.mark.parametrize("level", LEVELS)
def test_the_process_is_as_before(level):
    given = model()
    optimizer = torch.optim.Adam(given.parameters())
    before = whole_state(optimizer)
    train(given, optimizer, opt_level=level)
    amp.shutdown()
    compare(whole_state(optimizer), before)
    if level != "O2":  # whose gradients end with the masters
        assert {one.grad.dtype for one in given.parameters()} == {torch.float32}
    amp.shutdown()


def test_masters_return_to_the_weights_in_full():
    given = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.Adam(given.parameters(), lr=2.0**-14)
    train(given, optimizer, opt_level="O2")
    (master,) = amp.master_params(optimizer)
    full, moment = master.detach().clone(), optimizer.state[master]["exp_avg"].clone()
    amp.shutdown()
    assert optimizer.param_groups[0]["params"][0] is given.weight
    assert torch.equal(given.weight, full)
    assert torch.equal(optimizer.state[given.weight]["exp_avg"], moment)


@pytest.mark.parametrize("level", [*LEVELS, "off"])
def test_models_and_optimizers_can_be_freed(level):
    given = model()
    optimizer = torch.optim.Adam(given.parameters())
    weak = [weakref.ref(one) for one in (given, given[0].weight, optimizer)]
    settings = {"enabled": False} if level == "off" else {"opt_level": level}
    train(given, optimizer, **settings)
    del given, optimizer
    gc.collect()
    assert [one() for one in weak] == [None, None, None]
    amp.shutdown()


def test_a_model_that_is_initialized_again_has_the_latest():
    given = model()
    amp.initialize(given, opt_level="O1", verbosity=0)
    amp.initialize(given, opt_level="O1", half_type=torch.bfloat16, verbosity=0)
    given[0].register_forward_hook(lambda _m, _a, output: seen.append(output.dtype))
    seen = []
    given(torch.ones(2, 4))
    assert seen == [torch.bfloat16]
    amp.shutdown()
    given(torch.ones(2, 4))
    assert seen[1:] == [torch.float32]


@pytest.mark.parametrize(("where", "level"), [("twice", "O1"), ("twice", "O2"), ("losses", "O3")])
def test_what_raises_leaves_nothing(where, level):
    given = model()
    optimizer = torch.optim.Adam(given.parameters())
    before = whole_state(optimizer)
    weights = {name: value.clone() for name, value in given.state_dict().items()}
    settings = {"num_losses": 0} if where == "losses" else {}
    optimizers = [optimizer] * (1 + (where == "twice"))
    with pytest.raises(NarrowcastError):
        amp.initialize(given, optimizers, opt_level=level, verbosity=0, **settings)
    compare(whole_state(optimizer), before)
    assert all(torch.equal(weights[name], value) for name, value in given.state_dict().items())
    assert amp._amp_state.loss_scalers == []


def _in_the_child(results):
    results.put(str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="gpu: no fork here")
def test_a_forked_process_casts_nothing_outside_of_models():
    amp.initialize(model(), opt_level="O1", verbosity=0)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_in_the_child, args=(results,))
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
    assert results.get() == "torch.float32"
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
