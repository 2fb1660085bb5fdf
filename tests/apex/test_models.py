"""Models under O0, O2 and O3: weights, inputs, outputs, copies, and what is freed."""

import copy
import gc
import io
import weakref
from collections import namedtuple

import pytest
import torch
from o1 import halves

from narrowcast.apex import amp

Pair = namedtuple("Pair", "left right")


class Model(torch.nn.Module):
    """Hands on what it is given, so that tests see it, beside a product with a batch norm."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("table", torch.ones(2))
        self.seen = None

    def forward(self, x, *others, **named):
        self.seen = (x, *others, named)
        return self.norm(self.linear(x)), others, named


def initialize(model, level, half=None, **settings):
    if level != "O0" and half is not None:
        settings["cast_model_type"] = half
    return amp.initialize(model, opt_level=level, verbosity=0, **settings)


@halves
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("keep", [None, True, False])
def test_weights(level, keep, half):
    settings = {} if keep is None else {"keep_batchnorm_fp32": keep}
    model = initialize(Model(), level, half, **settings)
    wide = torch.float32 if level == "O0" else half
    norm = torch.float32 if (level == "O2" if keep is None else keep) else wide
    assert model.linear.weight.dtype == model.linear.bias.dtype == model.table.dtype == wide
    assert model.norm.weight.dtype == model.norm.running_mean.dtype == norm
    assert model.count.dtype == torch.int64


@halves
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_inputs_and_outputs_wherever_they_are(level, half):
    model = initialize(Model(), level, half)
    wide = torch.ones(2, 3)
    given = (wide, [wide, wide.double()], Pair(wide, torch.arange(2)))
    named = {"mask": {"a": wide.half()}, "text": "as it is"}
    output, others, returned = model(*given, **named)
    inside = torch.float32 if level == "O0" else half
    x, many, pair, its = model.seen
    assert x.dtype == many[0].dtype == many[1].dtype == pair.left.dtype == its["mask"]["a"].dtype == inside
    assert isinstance(pair, Pair)
    assert pair.right.dtype == torch.int64
    assert its["text"] == "as it is"
    assert output.dtype == others[0][0].dtype == others[1].left.dtype == torch.float32
    assert returned["mask"]["a"].dtype == torch.float32
    assert given[1][1].dtype == torch.float64
    assert named["mask"]["a"].dtype == torch.float16
    assert model.forward(wide)[0].dtype == torch.float32


def test_a_batch_of_an_unknown_class_is_cast_by_its_own_to():
    class Batch:
        def __init__(self, x):
            self.x = x

        def to(self, dtype):
            return Batch(self.x.to(dtype))

    class Reads(Model):
        def forward(self, batch):
            return super().forward(batch.x)

    model = initialize(Reads(), "O3")
    assert model(Batch(torch.ones(2, 3)))[0].dtype == torch.float32
    assert model.seen[0].dtype == torch.float16


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_outputs_in_a_type_that_was_asked_for(level):
    model = initialize(Model(), level, cast_model_outputs=torch.bfloat16)
    output, others, _ = model(torch.ones(2, 3), torch.ones(1))
    assert output.dtype == others[0].dtype == torch.bfloat16


@halves
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_copies_are_models_of_their_own(level, half):
    model = initialize(Model(), level, half)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    expected = model(torch.ones(2, 3))[0]
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        assert torch.equal(other(torch.ones(2, 3))[0], expected)
        assert other.seen is not None
        with torch.no_grad():
            other.linear.weight.zero_()
            other.linear.bias.zero_()
        assert torch.equal(other.eval()(torch.ones(2, 3))[0], other(torch.zeros(2, 3))[0])
        assert {one.dtype for one in other.state_dict().values()} <= {torch.float32, torch.int64}
    assert torch.equal(model.train()(torch.ones(2, 3))[0], expected)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "off"])
def test_models_and_optimizers_can_be_freed(level):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    weak = [weakref.ref(one) for one in (model, model.weight, optimizer)]
    settings = {"enabled": False} if level == "off" else {"opt_level": level}
    amp.initialize(model, optimizer, verbosity=0, **settings)
    with amp.scale_loss(model(torch.randn(3, 4)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    del model, optimizer, loss
    gc.collect()
    assert [one() for one in weak] == [None, None, None]
