"""What cannot be held is refused before anything changes."""

import copy
import pickle

import pytest
import torch

from narrowcast.errors import SettingError, UnsupportedError
from narrowcast.weights import held_by, hold


def sgd(*tensors, **settings):
    return torch.optim.SGD([torch.nn.Parameter(t) for t in tensors], lr=0.1, **settings)


LOW, DRAWN = torch.ones(2, dtype=torch.bfloat16), {"generator": torch.Generator()}


def assert_refused(error, words, optimizer, *args, **kwargs):
    before, hooks = vars(optimizer).keys(), len(optimizer._optimizer_step_pre_hooks)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(error, match=words):
        hold(optimizer, *args, **kwargs)
    assert vars(optimizer).keys() == before
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        assert all(a is b for a, b in zip(group["params"], parameters, strict=True))


def test_an_optimizer_is_held_once():
    optimizer = sgd(LOW)
    handle = hold(optimizer)
    assert held_by(optimizer) is handle
    assert_refused(SettingError, r"held already: call remove\(\)", optimizer, "kahan")
    handle.remove()
    assert held_by(optimizer) is None
    assert hold(optimizer, "kahan").updates == "kahan"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_held_optimizer_is_neither_copied_nor_pickled(copied):
    """A copy has no hooks: it would never write to the low parameters."""
    optimizer = sgd(LOW)
    handle = hold(optimizer)
    with pytest.raises(SettingError, match="can be neither copied nor pickled"):
        copied(optimizer)
    handle.remove()
    copied(optimizer)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "error", "words", "settings"),
    [
        (lambda: sgd(LOW), SettingError, 'updates="master".*Did you mean "masters"', {"updates": "master"}),
        (lambda: sgd(LOW.float()), SettingError, r"lower the model first", {}),
        (lambda: sgd(LOW), SettingError, "draws no random numbers", {"updates": "kahan"} | DRAWN),
        (lambda: sgd(LOW.to("meta")), SettingError, "generator is on cpu", {"updates": "stochastic"} | DRAWN),
        (lambda: torch.optim.SparseAdam([torch.nn.Parameter(LOW.clone())]), UnsupportedError, "use Adam", {}),
        (lambda: sgd(LOW, differentiable=True), UnsupportedError, "differentiable=False", {}),
        (lambda: sgd(LOW.clone().as_subclass(Subclass)), UnsupportedError, r"shape \(2,\) is a Subclass", {}),
    ],
    ids=["updates", "float32", "generator", "device", "sparse", "differentiable", "subclass"],
)
def test_what_cannot_be_held_is_refused(make, error, words, settings):
    assert_refused(error, words, make(), **settings)


@pytest.mark.parametrize(
    ("original", "updates", "words"),
    [
        (torch.ones(3), "masters", r"float32 tensor of that shape there, not float32 of shape \(3,\)"),
        (torch.ones(2, dtype=torch.float64), "masters", r"not float64 of shape \(2,\)"),
        (torch.ones(2), "stochastic", "keeps nothing of the originals"),
    ],
    ids=["shape", "dtype", "stochastic"],
)
def test_originals_that_do_not_fit_are_refused(original, updates, words):
    optimizer = sgd(LOW)
    (low,) = optimizer.param_groups[0]["params"]
    assert_refused(SettingError, words, optimizer, updates, originals={low: original})


def test_a_parameter_that_comes_twice_is_refused():
    low = torch.nn.Parameter(LOW.clone())
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([low, low], lr=0.1)
    words = r"shape \(2,\) comes twice"
    assert_refused(SettingError, words, optimizer)
    optimizer = torch.optim.SGD([low], lr=0.1)
    hold(optimizer)
    optimizer.add_param_group({"params": [low]})
    with pytest.raises(SettingError, match=words):
        optimizer.step()


class KeepsItsOwnList(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.mine = list(parameters)

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.mine:
                p.sub_(1.0)


def test_an_optimizer_that_writes_to_low_parameters_is_refused(updates):
    low = torch.nn.Parameter(LOW.clone())
    optimizer = KeepsItsOwnList([low])
    hold(optimizer, updates)
    with pytest.raises(UnsupportedError, match=r"KeepsItsOwnList wrote to a held parameter.*param_groups"):
        optimizer.step()
    assert low.tolist() == [0.0, 0.0]
