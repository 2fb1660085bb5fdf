"""O1: the type of the result of every function on apex's lists."""

import pytest
import torch
import torch.nn.functional as F

from listed_calls import FUNCTIONAL, TENSOR, TORCH, prepared
from narrowcast.apex.amp import lists
from narrowcast.errors import AmpError

CALLS = {
    "functional": (lists.functional_overrides, FUNCTIONAL),
    "torch": (lists.torch_overrides, TORCH),
    "tensor": (lists.tensor_overrides, TENSOR),
}
COMPARED = {"eq", "equal", "ge", "gt", "le", "lt", "ne"}
NOT_CALLED = {"cpu", "__ipow__"}  # tests of their own below


def names_on(*lists_of_a_module):
    return [
        pytest.param(module, name, id=f"{module}-{name}")
        for module, (door, _) in CALLS.items()
        for list_name in lists_of_a_module
        for name in getattr(door, list_name, ())
        if name not in NOT_CALLED
    ]


def call(module, name, *dtypes):
    """The result of the call; gradients have the types of what they are gradients of."""
    function, arguments = prepared(CALLS[module][1][name], *dtypes)
    if name.startswith("__i"):  # writes to its first argument
        arguments = [one.detach() for one in arguments]
    result = function(*arguments)
    if isinstance(result, torch.Tensor) and result.requires_grad:
        result.float().sum().backward()
        given = [one for one in arguments if isinstance(one, torch.Tensor) and one.grad is not None]
        assert all(one.grad.dtype == one.dtype for one in given)
    return result


@pytest.mark.parametrize(("module", "name"), names_on("FP16_FUNCS"))
def test_in_half(module, name, half):
    assert call(module, name, half).dtype == half
    assert call(module, name, torch.float32).dtype == half


@pytest.mark.parametrize(("module", "name"), names_on("FP32_FUNCS"))
def test_in_float32(module, name, half):
    assert call(module, name, half).dtype == torch.float32
    assert call(module, name, torch.float32).dtype == torch.float32


@pytest.mark.parametrize(("module", "name"), names_on("CASTS", "SEQUENCE_CASTS"))
def test_in_the_widest_type(module, name, half):
    word = name.strip("_")
    for first, second in ((half, half), (half, torch.float32), (torch.float32, half)):
        result = call(module, name, first, second)
        if word in COMPARED:
            assert result is True or result is False or result.dtype == torch.bool
            continue
        # 2 / x is x.reciprocal() * 2, and reciprocal is in float32.
        reciprocal = word in ("rdiv", "rtruediv")
        wider = first if first == second and not reciprocal else torch.float32
        in_place = name.startswith("__i")
        assert result.dtype == (first if in_place else wider), (first, second)


def test_functions_on_no_list_follow_pytorchs_table(half):
    x = torch.rand(2, 2)
    assert torch.einsum("ij,jk->ik", x, x).dtype == half
    assert torch.log1p(x.to(half)).dtype == torch.float32
    assert F.relu(x).dtype == torch.float32
    assert F.relu(x.to(half)).dtype == half


def test_what_goes_to_the_cpu_keeps_its_type(half):
    assert torch.ones(2, dtype=half).cpu().dtype == half


def test_a_power_in_place_makes_another_tensor(half):
    x = before = torch.full((2,), 3.0, dtype=half)
    x **= 2
    assert x.dtype == torch.float32
    assert x.tolist() == [9.0, 9.0]
    assert before.tolist() == [3.0, 3.0]


def test_binary_cross_entropy_refuses_half_and_says_what_to_do(half):
    x = torch.full((2,), 0.5, dtype=half)
    with pytest.raises(AmpError, match="Use binary_cross_entropy_with_logits") as caught:
        F.binary_cross_entropy(x, torch.ones(2, dtype=half))
    assert isinstance(caught.value, NotImplementedError)
    with pytest.raises(AmpError):
        torch.nn.BCELoss()(x, torch.ones(2))
    assert torch.nn.BCELoss()(x.float(), torch.ones(2)).dtype == torch.float32
