"""The rules that the lists become on each device, beside PyTorch's own table of it."""

import pytest
import torch
from o1 import HALVES

import narrowcast as nc
from listed_calls import FUNCTIONAL, TENSOR, TORCH, prepared
from narrowcast.apex.amp import _rules, lists
from narrowcast.apex.amp._rules import plan
from narrowcast.policy import overloads_of

NOT_BY_RULES = {*_rules._WHOLE, "cpu"}
# A method of torch.Tensor is called by the same operator as the function of torch.
CALLS = {**TENSOR, **TORCH, **FUNCTIONAL}
FUNCTIONS, METHODS = lists.functional_overrides, lists.tensor_overrides
IN_HALF = [*FUNCTIONS.FP16_FUNCS, *METHODS.FP16_FUNCS]
IN_FLOAT = [name for name in (*FUNCTIONS.FP32_FUNCS, *METHODS.FP32_FUNCS) if name not in NOT_BY_RULES]
MIXED = ["addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot", "add", "div", "mul", "cat", "stack"]


def kinds(device):
    policy, _ = plan("fp16", [device], {})
    return {rule.op: rule.compute for rule in policy.rules}


def test_what_differs_on_cuda():
    named = kinds("cuda")
    assert not {"softmax.int", "layer_norm", "exp", "sum", "group_norm"} & set(named)
    in_float = {"gelu", "cross_entropy_loss", "grid_sampler", "std.correction", "binary_cross_entropy"}
    assert {named[op] for op in in_float} == {"fp32"}
    not_listed = {"log1p", "cdist", "einsum", "scaled_dot_product_attention", "huber_loss"}
    assert {named[op] for op in not_listed} == {"as-is"}
    recurrent = {"lstm.input", "_cudnn_rnn", "lstm_cell", "_thnn_fused_lstm_cell"}
    assert not recurrent & {op for op, kind in named.items() if kind == "as-is"}
    recurrent = ("lstm.input", "lstm.data", "gru.input", "lstm_cell", "rnn_relu_cell")
    assert {kinds("cpu")[op] for op in recurrent} == {"lower"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hot_operators_have_no_kernel_in_python(device):
    named = kinds(device)
    rare = (".dtype", ".padding")  # overloads of their own, not on every table
    hot = ("linear", "matmul", "bmm", "addmm", "mm", "conv2d", "add", "mul", "div", "cat", "relu", "dropout")
    assert not [op for name in hot for op in overloads_of(name) if op in named and not op.endswith(rare)]


def test_the_lists_are_those_of_apex():
    """``listed_calls`` names them a second time: https://github.com/NVIDIA/apex/tree/22.04-dev/apex/amp/lists"""
    called = {_rules.FUNCTIONAL: FUNCTIONAL, _rules.TORCH: TORCH, _rules.TENSOR: TENSOR}
    besides = {_rules.FUNCTIONAL: {"binary_cross_entropy"}, _rules.TENSOR: {"cpu", "__ipow__"}}
    for module, kinds_of in _rules._ORIGINAL.items():
        assert set(kinds_of) == set(called[module]) | besides.get(module, set())


@pytest.fixture(params=HALVES, scope="module")
def by_cudas_table(request):
    """On a CPU, the rules for CUDA on top of CUDA's table."""
    policy, _ = plan(request.param, ["cuda"], {})
    with nc.autocast("cpu", policy=nc.Policy(compute=request.param, tables="cuda", rules=policy.rules)):
        yield HALVES[request.param]


def result(name, *dtypes):
    function, arguments = prepared(CALLS[name], *dtypes)
    with torch.no_grad():  # in-place forms write to their first argument
        return function(*arguments).dtype


@pytest.mark.parametrize("name", IN_HALF)
def test_half_on_cuda(name, by_cudas_table):
    assert result(name, by_cudas_table) == result(name, torch.float32) == by_cudas_table


@pytest.mark.parametrize("name", IN_FLOAT)
def test_float32_on_cuda(name, by_cudas_table):
    assert result(name, by_cudas_table) == result(name, torch.float32) == torch.float32


@pytest.mark.parametrize("name", MIXED)
def test_the_widest_type_on_cuda(name, by_cudas_table):
    assert result(name, by_cudas_table) == by_cudas_table
    assert result(name, by_cudas_table, torch.float32) == torch.float32
