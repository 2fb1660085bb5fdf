"""The finite check against ``torch.isfinite``, and gradients that are divided by a scale of the caller's."""

import math

import pytest
import torch

from narrowcast.gradients import nonfinite_flags, unscale_by


def test_nan_infinity_and_large_finite_values():
    largest = torch.finfo(torch.float32).max
    sparse = torch.sparse_coo_tensor([[1, 1]], [1.0, float("inf")], (3,), check_invariants=True)
    tensors = [
        torch.tensor([1.0, float("nan")]),
        torch.tensor([-float("inf"), 0.0]),
        torch.tensor([largest, -largest]),
        torch.tensor([]),
        torch.tensor([1.0], dtype=torch.float16),
        torch.tensor([float("inf")], dtype=torch.bfloat16),
        sparse,
        torch.tensor([complex(0.0, float("nan"))]),
        torch.tensor([-0.0, 1e-45]),
    ]
    flags = nonfinite_flags(tensors)
    assert flags.read() == [True, True, False, False, False, True, True, True, False]
    assert nonfinite_flags([]).read() == []


def test_16_bit_patterns():
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        # Every infinity, every NaN within 64 of one, and numbers of every exponent.
        near = torch.arange(2**16) % (2**7 if dtype == torch.bfloat16 else 2**10) < 64
        values = torch.cat([values[near & ~values.isfinite()], values[::61]])
        flags = nonfinite_flags(list(values.split(1))).read()
        assert flags == (~torch.isfinite(values)).tolist()


# ---- unscale_by

INF = math.inf


def optimizer_with(*gradients):
    parameters = [torch.nn.Parameter(torch.zeros_like(g.to_dense())) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    parameters.append(torch.nn.Parameter(torch.zeros(1)))
    return torch.optim.SGD(parameters, lr=1.0), parameters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [2.0**16, 2.0**-16, 1.0, 3.0])
def test_gradients_are_divided_and_rounded_once(dtype, scale):
    values = torch.tensor([3.0, -0.0, 1.5, -96.0, 2.0**-10], dtype=dtype) * (
        2.0**6 if scale > 1 else 2.0**-14
    )
    optimizer, (parameter, _) = optimizer_with(values)
    assert unscale_by(optimizer, scale).item() == 0.0
    # torch multiplies by the float32 next to the inverse, in float32 and wider, and rounds to the format.
    inverse = torch.tensor(1.0 / scale, dtype=torch.float32)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(parameter.grad, (values.to(wide) * inverse.to(wide)).to(dtype))
    assert torch.signbit(parameter.grad[1])


@pytest.mark.parametrize("scale", [2.0**16, 1.0])
@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
def test_one_value_that_is_not_finite_is_found(bad, scale):
    for place in range(3):
        gradients = [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.float64)]
        gradients[place][1] = bad
        optimizer, _ = optimizer_with(*gradients)
        found = unscale_by(optimizer, scale)
        assert found > 0
        assert (found.dtype, found.shape) == (torch.float32, ())


def test_a_small_scale_may_make_gradients_infinite():
    optimizer, _ = optimizer_with(torch.tensor([2.0**15], dtype=torch.float16))
    assert unscale_by(optimizer, 2.0**-2) > 0
    optimizer, _ = optimizer_with(torch.tensor([2.0**15], dtype=torch.float16))
    assert unscale_by(optimizer, 1.0) == 0


def test_sparse_gradients_in_fp16_are_summed_first():
    largest = torch.finfo(torch.float16).max
    values = torch.tensor([largest, largest], dtype=torch.float16)
    gradient = torch.sparse_coo_tensor([[1, 1]], values, (3,), check_invariants=True)
    optimizer, _ = optimizer_with(gradient)
    assert unscale_by(optimizer, 2.0) > 0


def test_without_gradients_nothing_is_found():
    optimizer, _ = optimizer_with()
    assert unscale_by(optimizer, 8.0) == 0
