"""O1: the cast of a weight is never stale, and its gradient reaches the weight."""

import pytest
import torch
from o1 import halves, initialize

import narrowcast as nc
from narrowcast.apex import amp


class Weighted(torch.nn.Module):
    """One weight through a half, a float or a promoting function."""

    def __init__(self, kind, dtype):
        super().__init__()
        self.kind = kind
        self.weight = torch.nn.Parameter(torch.full((2, 2), 3.0, dtype=dtype))

    def forward(self, x):
        if self.kind == "half":
            return torch.mm(x, self.weight)
        if self.kind == "float":
            return (self.weight + 0).pow(2) * x.float()
        return torch.mul(x, self.weight)


@halves
@pytest.mark.parametrize("kind", ["half", "float", "promote"])
@pytest.mark.parametrize("wide", [True, False], ids=["fp32 weights", "half weights"])
def test_training_evaluation_training(kind, wide, half):
    dtype = torch.float32 if wide else half
    model = Weighted(kind, dtype)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, half_type=half, loss_scale=1.0)
    x = torch.ones(2, 2, dtype=half)

    def run(train):
        """What comes out, and the gradient of its sum."""
        model.weight.grad = None
        with torch.set_grad_enabled(train):
            output = model(x)
        if train:
            with amp.scale_loss(output.float().sum(), optimizer) as loss:
                loss.backward()
            assert model.weight.grad.dtype == dtype
        return output, model.weight.grad

    first, gradient = run(train=True)
    assert first.dtype == {"half": half, "float": torch.float32, "promote": dtype}[kind]
    assert torch.equal(run(train=False)[0], first)
    again, second_gradient = run(train=True)
    assert torch.equal(again, first)
    assert torch.equal(gradient, second_gradient)
    assert bool((gradient != 0).all())
    optimizer.step()
    assert not torch.equal(run(train=True)[0], first)


WRITES = {
    "an optimizer's step": lambda model: torch.optim.SGD(model.parameters(), lr=1.0).step(),
    "load_state_dict": lambda model: model.load_state_dict({"weight": torch.full((2, 2), 5.0)}),
    "copy_": lambda model: model.weight.copy_(torch.full((2, 2), 5.0)),
    "data and drop_casts": lambda model: (model.weight.data.fill_(5.0), nc.casting.drop_casts()),
}


@halves
@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_two_calls_takes_effect(write, half):
    model = initialize(Weighted("half", torch.float32), half)
    x = torch.ones(2, 2)
    before = model(x)
    model.weight.grad = torch.full((2, 2), -2.0)
    with torch.no_grad():
        WRITES[write](model)
    after = model(x)
    assert before.tolist() == [[6.0, 6.0], [6.0, 6.0]]
    assert after.tolist() == [[10.0, 10.0], [10.0, 10.0]]


@halves
def test_weights_swapped_through_data_for_an_evaluation(half):
    model = initialize(Weighted("half", torch.float32), half)
    x, trained = torch.ones(2, 2), model.weight.detach().clone()
    assert model(x)[0, 0].item() == 6.0
    with torch.no_grad():
        model.weight.data.fill_(5.0)
        assert model(x)[0, 0].item() == 10.0
        model.weight.data.copy_(trained)
    assert model(x)[0, 0].item() == 6.0
