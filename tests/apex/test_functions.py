"""Functions that users decorate or register, and lists that they edit."""

import types

import pytest
import torch
import torch.nn.functional as F
from o1 import begin, halves

from ended_apex import end_apex
from listed_calls import FUNCTIONAL, TENSOR, TORCH
from narrowcast.apex import amp
from narrowcast.apex.amp import _rules, lists
from narrowcast.errors import AmpError, PolicyError
from narrowcast.policy import base_of, resolved


@pytest.fixture(autouse=True)
def _lists_come_back():
    modules = (lists.functional_overrides, lists.torch_overrides, lists.tensor_overrides)
    before = [
        (module, name, found, list(found))
        for module in modules
        for name, found in vars(module).items()
        if name.endswith(("_FUNCS", "CASTS")) and not name.startswith("_")
    ]
    yield
    for module, name, found, entries in before:
        found[:] = entries
        setattr(module, name, found)


def first_type(x, y=None, *, more=None):
    return x.dtype, None if y is None else y.dtype, None if more is None else more["z"][0].dtype


@halves
def test_decorated_functions(half):
    in_half, in_float, widest = (
        decorate(first_type) for decorate in (amp.half_function, amp.float_function, amp.promote_function)
    )
    wide, low = torch.ones(2), torch.ones(2, dtype=half)
    more = {"z": [torch.ones(1)]}
    assert in_half(wide, low, more=more) == (torch.float32, half, torch.float32)  # nothing is in force
    begin(half)
    assert in_half.__name__ == "first_type"
    assert in_half(wide, low, more=more) == (half, half, half)
    assert in_float(low, wide) == (torch.float32, torch.float32, None)
    assert widest(low, wide) == (torch.float32, torch.float32, None)
    assert widest(low, low) == (half, half, None)
    assert in_half(torch.ones(1, dtype=torch.int64)) == (torch.int64, None, None)
    assert more["z"][0].dtype == torch.float32
    with amp.disable_casts():
        assert in_half(wide) == (torch.float32, None, None)
    end_apex()
    assert in_half(wide) == (torch.float32, None, None)


@halves
def test_registered_functions_of_other_modules(half):
    module = types.ModuleType("theirs")
    module.function = original = first_type
    wide, low = torch.ones(2), torch.ones(2, dtype=half)
    for register, wanted in (
        (amp.register_half_function, half),
        (amp.register_float_function, torch.float32),
        (amp.register_promote_function, torch.float32),
    ):
        register(module, "function")
        begin(half)
        assert module.function(wide, low) == (wanted, wanted, None)
        end_apex()
        assert module.function(wide, low) == original(wide, low)
    begin()
    assert module.function(wide, low) == original(wide, low)


@halves
def test_registered_functions_of_torch_come_before_the_lists(half):
    amp.register_half_function(torch.nn.functional, "softmax")
    amp.register_float_function(torch, "bmm")
    amp.register_float_function(torch.Tensor, "bmm")
    amp.register_float_function(torch.nn.functional, "binary_cross_entropy")
    amp.register_half_function(torch.nn.functional, "multi_head_attention_forward")
    begin(half)
    x = torch.full((1, 2, 2), 0.5)
    assert F.softmax(x, dim=0).dtype == x.softmax(0).dtype == half
    assert torch.bmm(x.to(half), x).dtype == torch.float32
    assert torch.nn.BCELoss()(x.to(half), x).dtype == torch.float32
    model = torch.nn.MultiheadAttention(4, 1)
    assert model(*[torch.ones(2, 1, 4)] * 3)[0].dtype == half
    end_apex()
    assert F.softmax(x.to(half), dim=0).dtype == half


def test_registering_what_is_not_there_or_too_late():
    with pytest.raises(ValueError, match=r"^expected the name of a function of 'torch', got 'sofmax'$"):
        amp.register_half_function(torch, "sofmax")
    begin()
    with pytest.raises(AmpError, match="'bmm' was registered after"):
        amp.register_half_function(torch, "bmm")


# Named a second time in ``listed_calls``: https://github.com/NVIDIA/apex/tree/22.04-dev/apex/amp/lists
def test_the_lists_are_those_of_apex():
    called = {_rules.FUNCTIONAL: FUNCTIONAL, _rules.TORCH: TORCH, _rules.TENSOR: TENSOR}
    besides = {_rules.FUNCTIONAL: {"binary_cross_entropy"}, _rules.TENSOR: {"cpu", "__ipow__"}}
    for module, casts in _rules._APEXS_LISTS.items():
        assert set(casts) == set(called[module]) | besides.get(module, set())


@halves
def test_lists_that_were_edited(half):
    lists.functional_overrides.FP32_FUNCS.remove("softmax")
    lists.functional_overrides.FP16_FUNCS.append("softmax")
    lists.torch_overrides.FP32_FUNCS += ["einsum"]  # binds a name of the module, too
    lists.torch_overrides.FP16_FUNCS = [n for n in lists.torch_overrides.FP16_FUNCS if n != "mm"]
    lists.tensor_overrides.FP32_FUNCS.append("mul")
    lists.functional_overrides.BANNED_FUNCS.clear()
    begin(half)
    x, low = torch.full((2, 2), 0.5), torch.full((2, 2), 0.5, dtype=half)
    assert F.softmax(x, 0).dtype == torch.softmax(x, 0).dtype == x.softmax(0).dtype == half
    assert F.softmin(low, 0).dtype == torch.float32
    assert torch.einsum("ij,jk->ik", low, low).dtype == torch.float32
    assert torch.mm(x, x).dtype == x.mm(x).dtype == torch.float32
    assert torch.mm(low, low).dtype == half
    assert torch.matmul(x, x).dtype == half
    assert (low * low).dtype == torch.float32
    assert F.binary_cross_entropy(low, low).dtype == half


EDITS = {
    "no such function": (
        lambda: lists.functional_overrides.FP32_FUNCS.append("sofmax"),
        "amp.lists names 'sofmax' of torch.nn.functional, for which there is no operator",
    ),
    "no operator": (lambda: lists.tensor_overrides.FP16_FUNCS.append("numpy"), "'numpy' of torch.Tensor"),
    "two modules disagree": (
        lambda: lists.torch_overrides.FP16_FUNCS.append("exp") or lists.tensor_overrides.CASTS.append("exp"),
        "asks for half for torch.exp and for the widest type for torch.Tensor.exp",
    ),
    "two lists": (
        lambda: lists.torch_overrides.FP16_FUNCS.append("exp") or lists.torch_overrides.CASTS.append("exp"),
        "expected 'exp' of torch on one list of amp.lists, got half and the widest type",
    ),
}


@pytest.mark.parametrize(("edit", "message"), EDITS.values(), ids=list(EDITS))
def test_a_list_that_cannot_be_followed(edit, message):
    edit()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PolicyError) as caught:
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert message in str(caught.value)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("mode", ["area", "nearest", "bilinear", "bicubic"])
def test_interpolation_in_every_mode(mode):
    begin()
    x = torch.ones(1, 1, 4, 4, dtype=torch.float16)
    assert F.interpolate(x, size=2, mode=mode).dtype == torch.float32
    assert torch.nn.Upsample(size=2, mode=mode)(x).dtype == torch.float32
    assert F.adaptive_avg_pool2d(x, 2).dtype == torch.float16


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hot_operators_have_no_kernel_in_python(device):
    policy, _ = _rules.plan("fp16", [device], {})
    kernels = {base_of(op) for op in resolved(policy, device, "fp16").kernels()}
    assert not {"linear", "matmul", "bmm", "addmm", "mm", "add", "mul", "div", "relu", "dropout"} & kernels
