"""What cannot be held, said before anything changes."""

import pytest
import torch

from narrowcast.errors import SettingError, UnsupportedError
from narrowcast.weights import held_by, hold


def sgd(*tensors, **settings):
    return torch.optim.SGD([torch.nn.Parameter(t) for t in tensors], lr=0.1, **settings)


LOW = torch.ones(2, dtype=torch.bfloat16)


def refused(error, optimizer, *args, **kwargs):
    before, hooks = vars(optimizer).keys(), len(optimizer._optimizer_step_pre_hooks)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(error) as raised:
        hold(optimizer, *args, **kwargs)
    assert vars(optimizer).keys() == before
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        assert all(a is b for a, b in zip(group["params"], parameters, strict=True))
    return str(raised.value)


def test_a_way_that_does_not_exist():
    assert refused(SettingError, sgd(LOW), "master") == (
        'updates="master" is no way to keep updates. Did you mean "masters"? Known: masters, kahan, '
        "stochastic."
    )


def test_holding_twice():
    optimizer = sgd(LOW)
    handle = hold(optimizer)
    assert held_by(optimizer) is handle
    assert refused(SettingError, optimizer, "kahan") == (
        "this SGD is held already: call remove() on its handle before holding it another way"
    )
    handle.remove()
    assert held_by(optimizer) is None
    assert hold(optimizer, "kahan").updates == "kahan"


def test_nothing_to_hold():
    assert refused(SettingError, sgd(LOW.float())) == (
        "no parameter of this SGD is in bfloat16 or float16, so there is nothing to hold: lower the model "
        "first, with narrowcast.weights.lower"
    )


def test_generators_that_do_not_fit():
    assert refused(SettingError, sgd(LOW), "kahan", generator=torch.Generator()) == (
        'updates="kahan" draws no random numbers: leave out the generator'
    )
    low = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16, device="meta"))
    optimizer = torch.optim.SGD([low], lr=0.1)
    assert refused(SettingError, optimizer, "stochastic", generator=torch.Generator()) == (
        "the generator is on cpu, and a held parameter is on meta: pass one of that device, or None, which "
        "gives every device one of its own"
    )


def test_originals_that_do_not_fit():
    optimizer = sgd(LOW)
    (low,) = optimizer.param_groups[0]["params"]
    assert refused(SettingError, optimizer, "masters", originals={low: torch.ones(3)}) == (
        "the original of a parameter of shape (2,) on cpu must be a float32 tensor of that shape there, not "
        "float32 of shape (3,) on cpu"
    )
    assert "not float64 of shape (2,)" in refused(
        SettingError, optimizer, originals={low: torch.ones(2, dtype=torch.float64)}
    )
    assert refused(SettingError, optimizer, "stochastic", originals={low: torch.ones(2)}) == (
        'updates="stochastic" keeps nothing of the originals: leave them out, or use "masters" or "kahan"'
    )


def test_optimizers_that_cannot_be_held():
    low = torch.nn.Parameter(LOW.clone())
    assert refused(UnsupportedError, torch.optim.SparseAdam([low])) == (
        "SparseAdam takes sparse gradients, held weights dense ones: use Adam"
    )
    assert refused(UnsupportedError, sgd(LOW, differentiable=True)) == (
        "held weights cannot be differentiated through: set differentiable=False"
    )


def test_a_parameter_that_comes_twice():
    low = torch.nn.Parameter(LOW.clone())
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([low, low], lr=0.1)
    message = "a parameter of shape (2,) comes twice in this optimizer: leave it in one group only"
    assert refused(SettingError, optimizer) == message
    optimizer = torch.optim.SGD([low], lr=0.1)
    hold(optimizer)
    optimizer.add_param_group({"params": [low]})
    with pytest.raises(SettingError) as again:
        optimizer.step()
    assert str(again.value) == message


class Subclass(torch.Tensor):
    pass


def test_a_tensor_subclass():
    low = torch.nn.Parameter(LOW.clone().as_subclass(Subclass))
    assert refused(UnsupportedError, torch.optim.SGD([low], lr=0.1)) == (
        "a parameter of shape (2,) is a Subclass: plain tensors and DTensors can be held, so leave it out of "
        "this optimizer"
    )


class KeepsItsOwnList(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.mine = list(parameters)

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.mine:
                p.sub_(1.0)


@pytest.mark.parametrize("updates", ["masters", "kahan", "stochastic"])
def test_an_optimizer_that_writes_to_the_low_parameters_itself(updates):
    low = torch.nn.Parameter(LOW.clone())
    optimizer = KeepsItsOwnList([low])
    hold(optimizer, updates)
    with pytest.raises(UnsupportedError) as error:
        optimizer.step()
    assert str(error.value) == (
        "the step of KeepsItsOwnList wrote to a held parameter of shape (2,) itself, not through "
        "param_groups, so that its update would be lost: make the optimizer read its parameters from "
        "param_groups, or do not hold it"
    )
    assert low.tolist() == [0.0, 0.0]
