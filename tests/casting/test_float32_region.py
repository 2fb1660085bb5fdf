"""A region in float32 computes in float32: half inputs are cast up, which torch leaves undone in silence."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


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
    y.square().sum().backward()
    got = x.grad, weight.grad
    x.grad = weight.grad = None
    F.linear(x.float(), weight).square().sum().backward()
    assert got[0].dtype == BF16
    assert torch.equal(got[0], x.grad)
    assert torch.equal(got[1], weight.grad)


def test_doubles_and_integers_stay():
    with nc.autocast("cpu", FP32):
        assert torch.mm(torch.ones(2, 2).double(), torch.ones(2, 2).double()).dtype == torch.float64
        assert torch.mm(torch.ones(2, 2).long(), torch.ones(2, 2).long()).dtype == torch.int64


def test_every_16_bit_pattern_is_widened_exactly():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for half in (BF16, FP16):
        values = bits.view(half)
        with nc.autocast("cpu", FP32):
            widened = torch.cat([values, torch.zeros(1)])[:-1]
        assert torch.equal(
            widened.view(torch.int32)[~widened.isnan()], values.float().view(torch.int32)[~widened.isnan()]
        )
        assert torch.equal(widened.isnan(), values.isnan())


def test_a_checkpoint_keeps_the_region_inside_it_and_the_one_around_it():
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
    x.grad = None
    with nc.autocast("cpu", FP32):
        y = checkpoint(layer, x, use_reentrant=False)
    assert y.dtype == FP32
    y.square().sum().backward()
    assert torch.equal(x.grad, expected)
