"""FP32 by ops that round once: against float64 as the oracle, and what it tells from a gradient."""

import pytest
import torch
from torch import nn

from narrowcast.verify._dispatch_modes import ExactOps

ULP = 2.0**-23


@pytest.mark.parametrize(
    "compute",
    [
        nn.functional.gelu,
        lambda x: x.reshape(1024, 1024) @ x.reshape(1024, 1024),
        lambda x: nn.functional.layer_norm(x.reshape(4, -1), (1 << 18,)),
        lambda x: torch.logsumexp(x.reshape(1024, 1024), 0),
        lambda x: x.reshape(1024, 1024).softmax(1),
    ],
)
def test_an_op_is_that_of_float64_rounded_once(compute):
    x = torch.randn(1 << 20) + 3
    with ExactOps():
        exact = compute(x)
    assert exact.dtype == torch.float32
    assert torch.equal(exact, compute(x.double()).float())
    assert not torch.equal(exact, compute(x))


def test_backward_is_exact_too_and_in_the_formats_that_it_has():
    x = torch.randn(64, 256, requires_grad=True)
    weight = torch.randn(8, 256, requires_grad=True)
    with ExactOps():
        nn.functional.linear(x, weight).square().sum().backward()
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    nn.functional.linear(wide_x, wide_weight).square().sum().backward()
    assert x.grad.dtype == torch.float32
    # Three roundings to fp32 on the way of numbers that are not small against their sum.
    for mine, oracle in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert (mine - oracle).norm() <= 2 * ULP * oracle.norm()


def test_what_cannot_be_exact_is_as_it_is():
    x = torch.randn(64)
    torch.manual_seed(5)
    plain = torch.randn_like(x), nn.functional.dropout(x, 0.5)
    torch.manual_seed(5)
    with ExactOps():
        drawn = torch.randn_like(x), nn.functional.dropout(x, 0.5)
        assert x.view(8, 8).data_ptr() == x.data_ptr()
        whole = torch.arange(5) + 1
        assert (x.bfloat16() + x.bfloat16()).dtype == torch.bfloat16
        assert (x.double() + 1).dtype == torch.float64
        written = x.clone().add_(1)
    assert all(torch.equal(a, b) for a, b in zip(plain, drawn, strict=True))
    assert whole.tolist() == [1, 2, 3, 4, 5]
    assert torch.equal(written, x + 1)


def test_an_op_without_a_float64_kernel_falls_back():
    with ExactOps():
        got = torch.fake_quantize_per_tensor_affine(torch.linspace(-1, 1, 9), 0.1, 0, -8, 7)
    assert torch.equal(got, torch.fake_quantize_per_tensor_affine(torch.linspace(-1, 1, 9), 0.1, 0, -8, 7))
