"""A region in float32 computes in float32: half inputs are cast up, which torch leaves undone in silence."""

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, FP16, FP32, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc


@pytest.mark.parametrize("half", [BF16, FP16])
def test_a_half_tensor_through_an_fp32_layer(half):
    layer, x = nn.Linear(8, 8), torch.randn(2, 8).to(half)
    expected = F.linear(x.float(), layer.weight, layer.bias)
    with nc.autocast("cpu", FP32):
        assert torch.equal(layer(x), expected)
    with nc.autocast("cpu", half):
        inside = layer(x)
        with nc.autocast("cpu", FP32):
            assert torch.equal(layer(x), expected)
            assert layer(inside).dtype == FP32
        assert torch.equal(layer(x), inside)


def test_half_weights_are_cast_up_too():
    layer, x = nn.Linear(8, 8).to(BF16), torch.randn(2, 8)
    with nc.autocast("cpu", FP32):
        assert torch.equal(layer(x), F.linear(x, layer.weight.float(), layer.bias.float()))


def test_gradients_are_of_the_inputs_own_format_and_those_of_explicit_casts():
    x = torch.randn(4, 8, dtype=BF16, requires_grad=True)
    weight = torch.randn(3, 8, requires_grad=True)
    with nc.autocast("cpu", FP32):
        y = F.linear(x, weight)
    found = torch.autograd.grad(y.square().sum(), (x, weight))
    assert found[0].dtype == BF16
    assert_same(found, torch.autograd.grad(F.linear(x.float(), weight).square().sum(), (x, weight)))


def test_doubles_and_integers_stay():
    with nc.autocast("cpu", FP32):
        assert torch.mm(torch.ones(2, 2).double(), torch.ones(2, 2).double()).dtype == torch.float64
        assert torch.mm(torch.ones(2, 2).long(), torch.ones(2, 2).long()).dtype == torch.int64


def test_a_checkpoint_keeps_the_region_inside_it():
    layer = nn.Linear(8, 8)

    def block(x):
        with nc.autocast("cpu", FP32):
            return layer(x)

    x = torch.randn(2, 8, dtype=BF16, requires_grad=True)
    block(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with nc.autocast("cpu", BF16):
        y = checkpoint(block, x, use_reentrant=False)
    y.square().sum().backward()
    assert torch.equal(x.grad, expected)
