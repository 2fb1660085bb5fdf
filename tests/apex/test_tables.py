"""The rules that the lists come to on each device, from PyTorch's own table of it."""

from functools import partial

import listed_calls
import pytest
import torch
from listed_calls import FUNCTIONAL, TENSOR, TORCH

import narrowcast as nc
from narrowcast.apex import amp
from narrowcast.apex.amp import _rules, lists
from narrowcast.apex.amp._rules import plan
from narrowcast.policy import overloads_of

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
NOT_BY_RULES = {*_rules._WHOLE, "cpu"}
# A method of torch.Tensor is called by the same operator as the function of torch.
CALLS = {**TENSOR, **TORCH, **FUNCTIONAL}
FUNCTIONS, METHODS = lists.functional_overrides, lists.tensor_overrides
IN_HALF = [*FUNCTIONS.FP16_FUNCS, *METHODS.FP16_FUNCS]
IN_FLOAT = [name for name in (*FUNCTIONS.FP32_FUNCS, *METHODS.FP32_FUNCS) if name not in NOT_BY_RULES]
MIXED = ["addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot", "add", "div", "mul", "cat", "stack"]
HOT = (
    "linear",
    "matmul",
    "bmm",
    "baddbmm",
    "addmm",
    "mm",
    "conv2d",
    "add",
    "mul",
    "div",
    "cat",
    "relu",
    "dropout",
)


_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"
_OF_TORCH = {
    "FP16_FUNCS": f"{_CONVOLUTIONS} prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm",
    "FP32_FUNCS": """acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod
        cumsum dist norm prod std sum var renorm""",
    "CASTS": "addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne",
    "SEQUENCE_CASTS": "cat stack",
}
# As apex had them: https://github.com/NVIDIA/apex/tree/22.04-dev/apex/amp/lists
APEXS = {
    "functional_overrides": {
        "FP16_FUNCS": f"{_CONVOLUTIONS} linear",
        "FP32_FUNCS": """interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm
            group_norm local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss
            cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss
            multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss
            binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss""",
        "BANNED_FUNCS": "binary_cross_entropy",
    },
    "torch_overrides": _OF_TORCH,
    "tensor_overrides": {
        "FP16_FUNCS": f"__matmul__ {_OF_TORCH['FP16_FUNCS']}",
        "FP32_FUNCS": f"__ipow__ __pow__ __rpow__ cpu {_OF_TORCH['FP32_FUNCS']}",
        "CASTS": f"""__add__ __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__
            __le__ __lt__ __mul__ __ne__ __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__
            {_OF_TORCH["CASTS"]}""",
        "SEQUENCE_CASTS": "",
    },
}


@pytest.mark.parametrize("module", APEXS)
def test_the_lists_are_apexs(module):
    found = getattr(amp.lists, module)
    assert set(found.__all__) == {"MODULE", *APEXS[module]}
    for name, words in APEXS[module].items():
        entries = [entry if isinstance(entry, str) else entry[0] for entry in getattr(found, name)]
        there = [
            word for word in words.split() if module != "tensor_overrides" or hasattr(torch.Tensor, word)
        ]
        assert sorted(entries) == sorted(there), name


def kinds(device):
    policy, _ = plan("fp16", [device], {})
    return {rule.op: rule.compute for rule in policy.rules}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hot_operators_have_no_kernel_in_python(device):
    named = kinds(device)
    rare = (".dtype", ".padding")  # overloads of their own, not on every table
    assert not [op for name in HOT for op in overloads_of(name) if op in named and not op.endswith(rare)]


def test_what_differs_on_cuda():
    named = kinds("cuda")
    assert not {"softmax.int", "layer_norm", "exp", "sum", "group_norm"} & set(named)
    in_float = {"gelu", "cross_entropy_loss", "grid_sampler", "std.correction", "binary_cross_entropy"}
    assert {named[op] for op in in_float} == {"fp32"}
    not_listed = {"log1p", "rms_norm", "cdist", "einsum", "scaled_dot_product_attention", "huber_loss"}
    assert {named[op] for op in not_listed} == {"as-is"}
    assert not {"lstm.input", "_cudnn_rnn", "lstm_cell", "_thnn_fused_lstm_cell"} & {
        op for op, kind in named.items() if kind == "as-is"
    }


def test_recurrent_layers_on_a_cpu():
    named = kinds("cpu")
    assert {named[op] for op in ("lstm.input", "lstm.data", "gru.input", "lstm_cell", "rnn_relu_cell")} == {
        "lower"
    }


def test_every_name_on_a_list_has_its_call():
    called = {_rules.FUNCTIONAL: FUNCTIONAL, _rules.TORCH: TORCH, _rules.TENSOR: TENSOR}
    for module, kinds_of in _rules._ORIGINAL.items():
        assert set(kinds_of) - set(called[module]) <= {"cpu", "__ipow__", "binary_cross_entropy"}


@pytest.fixture(params=HALVES, scope="module")
def by_cudas_table(request):
    """On a CPU, the rules for CUDA on top of CUDA's table."""
    policy, _ = plan(request.param, ["cuda"], {}, apart="this test")
    with nc.autocast("cpu", policy=nc.Policy(compute=request.param, tables="cuda", rules=policy.rules)):
        yield HALVES[request.param]


def result(name, *dtypes):
    function, arguments = CALLS[name](partial(listed_calls.tensor, dtype=torch.float32))
    floating = [one for one in arguments if isinstance(one, torch.Tensor) and one.is_floating_point()]
    cast = {id(one): one.detach().to(dtypes[min(i, len(dtypes) - 1)]) for i, one in enumerate(floating)}
    return function(*(cast.get(id(one), one) for one in arguments)).dtype


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
