"""O1: recurrent cells and layers in half, whatever goes in, and gradients in the weights' type."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from narrowcast.apex import amp

SIZES = {"batch": 2, "inputs": 3, "hidden": 4, "steps": 5}


def tensors(values):
    return [values] if isinstance(values, torch.Tensor) else [one for part in values for one in tensors(part)]


def close(results, expected, half):
    # Each of at most 5 steps rounds sums of at most 7 products, and states, to half; the state's error of one
    # step goes into the next, undamped at worst: 5 steps * 4 roundings of numbers below 4.
    tolerance = 5 * 4 * 4 * torch.finfo(half).eps
    for result, wanted in zip(tensors(results), tensors(expected), strict=True):
        assert result.dtype == half
        torch.testing.assert_close(result.float(), wanted.float(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", ["RNNCell", "RNNCell relu", "GRUCell", "LSTMCell"])
def test_cells(kind, half):
    options = {"nonlinearity": "relu"} if "relu" in kind else {}
    model = getattr(torch.nn, kind.split()[0])(SIZES["inputs"], SIZES["hidden"], **options)
    inputs = [torch.randn(SIZES["batch"], SIZES["inputs"]) for _ in range(SIZES["steps"])]

    def run(dtype):
        states = [None]
        for x in inputs:
            states.append(model(x.to(dtype), states[-1]))
        return states[1:]

    with amp.disable_casts():
        expected = run(torch.float32)
    for given in (torch.float32, half):
        results = run(given)
        close(results, expected, half)
    sum(one.float().sum() for one in tensors(results)).backward()
    assert {one.grad.dtype for one in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("packed", [False, True], ids=["tensor", "packed"])
@pytest.mark.parametrize("kind", ["RNN", "RNN relu", "GRU", "LSTM"])
def test_layers(kind, packed, bidirectional, half):
    options = {"nonlinearity": "relu"} if "relu" in kind else {}
    layer = getattr(torch.nn, kind.split()[0])
    model = layer(SIZES["inputs"], SIZES["hidden"], num_layers=2, bidirectional=bidirectional, **options)
    x = torch.randn(SIZES["steps"], SIZES["batch"], SIZES["inputs"], requires_grad=True)

    def run():
        output, state = model(pack_padded_sequence(x, [5, 3]) if packed else x)
        return tensors(((pad_packed_sequence(output)[0] if packed else output), state))

    with amp.disable_casts():
        expected = run()
        (expected_gradient,) = torch.autograd.grad(sum(one.sum() for one in expected), x)
    results = run()
    close(results, expected, half)
    with torch.no_grad():
        assert {one.dtype for one in run()} == {half}
    sum(one.float().sum() for one in results).backward()
    assert {one.grad.dtype for one in (x, *model.parameters())} == {torch.float32}
    # Backward goes through 5 steps and 2 layers, each with its rounding of numbers below 4.
    torch.testing.assert_close(x.grad, expected_gradient, atol=2 * 5 * 4 * 4 * torch.finfo(half).eps, rtol=0)
