"""``tables="cuda"`` on the CPU: operators compute in the formats in which they would on a GPU.

The oracle is the call outside of regions, of inputs cast by hand as CUDA's table says. That the table is what
a GPU does is held by ``tests/policy`` against the dispatcher and by the GPU tests of ``test_torch_op_lists``.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from op_lists import (
    BF16,
    CPU_LISTS,
    CUDA_LISTS,
    FP16,
    FP32,
    MODULES,
    AutocastCPUTestLists,
    AutocastTestLists,
    cast,
    check,
    entries,
    halves_as,
    lists_of,
    same,
    variants,
)

import narrowcast as nc
from narrowcast.casting import watch_ops
from narrowcast.casting.kernels import _operators
from narrowcast.errors import UnsupportedError
from narrowcast.policy import FP32_APPEND_DTYPE, TABLES, native_table

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
# What no CPU can run: cuDNN's and the fused kernels; torch's entry for einsum is malformed, ours is below.
NOT_HERE = {"cudnn_convolution", "cudnn_convolution_transpose", "einsum"}


@functools.cache
def policy_of(compute, *rules):
    """Kept while this file's tests run: to install its kernels for each of them takes long."""
    return nc.Policy(compute=NAMES[compute], tables="cuda", rules=rules)


@pytest.fixture(scope="module", autouse=True)
def _no_policy_stays():
    yield
    policy_of.cache_clear()


def region(compute, *rules):
    return nc.autocast("cpu", policy=policy_of(compute, *rules))


def shipped(names):
    return [one for one in entries(AutocastTestLists, names) if one.id.partition("-")[2] not in NOT_HERE]


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:(?s)Using torch.cross without:UserWarning")
@pytest.mark.parametrize("compute", [BF16, FP16])
@pytest.mark.parametrize(("name", "position"), shipped([*CUDA_LISTS, "torch_need_autocast_promote"]))
def test_the_lists_that_torch_ships_for_cuda(name, position, compute):
    op, args, *rest = getattr(lists_of(AutocastTestLists, "cpu"), name)[position]
    rest = [] if name not in CUDA_LISTS or name.endswith("fp16") else rest
    module, run_as = MODULES[name.split("_")[0]], CUDA_LISTS.get(name, FP32) or compute
    check((op, halves_as(args, compute), *rest), module, [lambda: region(compute)], run_as=run_as)


def other_calls():
    """Operator of CUDA's table that no list of torch's reaches on a CPU -> a call of it."""
    torch.manual_seed(0)
    x, y, image, heads = torch.randn(8, 8), torch.rand(8, 8), torch.randn(1, 2, 8, 8), torch.randn(1, 2, 4, 8)
    line, box, ones = image[0], torch.randn(1, 2, 4, 4, 4), torch.ones(8)
    c = torch._C._nn
    return {
        "_upsample_bicubic2d_aa": lambda t: c._upsample_bicubic2d_aa(t(image), [16, 16], False),
        "_upsample_bilinear2d_aa": lambda t: c._upsample_bilinear2d_aa(t(image), [16, 16], False),
        "_upsample_nearest_exact1d": lambda t: c._upsample_nearest_exact1d(t(line), [16]),
        "_upsample_nearest_exact2d": lambda t: c._upsample_nearest_exact2d(t(image), [16, 16]),
        "_upsample_nearest_exact3d": lambda t: c._upsample_nearest_exact3d(t(box), [8, 8, 8]),
        "upsample_bicubic2d": lambda t: c.upsample_bicubic2d(t(image), [16, 16], False),
        "upsample_bilinear2d": lambda t: c.upsample_bilinear2d(t(image), [16, 16], False),
        "upsample_linear1d": lambda t: c.upsample_linear1d(t(line), [16], False),
        "upsample_nearest1d": lambda t: c.upsample_nearest1d(t(line), [16]),
        "upsample_nearest2d": lambda t: c.upsample_nearest2d(t(image), [16, 16]),
        "upsample_nearest3d": lambda t: c.upsample_nearest3d(t(box), [8, 8, 8]),
        "upsample_trilinear3d": lambda t: c.upsample_trilinear3d(t(box), [8, 8, 8], False),
        "einsum": lambda t: torch.einsum("ij,kj->ik", t(x), t(y)),
        "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(*map(t, [heads] * 3)),
        "native_layer_norm": lambda t: torch.native_layer_norm(t(x), [8], t(ones), None, 1e-5)[0],
        "pow.Scalar": lambda t: torch.pow(2.0, t(x)),
        "frobenius_norm.dim": lambda t: torch.ops.aten.frobenius_norm.dim(t(x), [0]),
        "nuclear_norm": lambda t: torch.ops.aten.nuclear_norm.default(t(x)),
        "nuclear_norm.dim": lambda t: torch.ops.aten.nuclear_norm.dim(t(x), [0, 1]),
        "huber_loss": lambda t: F.huber_loss(t(x), t(y)),
        "nll_loss2d": lambda t: F.nll_loss(t(image), torch.zeros(1, 8, 8, dtype=torch.int64)),
        "layer_norm": lambda t: F.layer_norm(t(x), (8,), t(ones)),
        "linear": lambda t: F.linear(t(x), t(y)),
        # Since torch 2.15.
        **{op: lambda t: torch.ops.aten.linalg_matrix_sqrth(t(torch.eye(8)))
           for op in ("linalg_matrix_sqrth",) if hasattr(torch.ops.aten, op)},
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*_norm is deprecated")
@pytest.mark.parametrize("given", [FP32, BF16, FP16])
@pytest.mark.parametrize("compute", [BF16, FP16])
@pytest.mark.parametrize("name", other_calls())
def test_an_operator_of_the_table(name, compute, given):
    call, kind = other_calls()[name], native_table("cuda")[name]
    run_as = compute if kind == "lower" else FP32
    expected = call(lambda tensor: tensor.to(given).to(run_as))
    with region(compute):
        ours = call(lambda tensor: tensor.to(given))
    assert same(ours, expected)


# ---- operators that take a dtype


X = torch.linspace(-1, 1, 16).reshape(4, 4)
SETTING = {
    "softmax.int": lambda t, **k: torch.softmax(t, -1, **k),
    "log_softmax.int": lambda t, **k: torch.log_softmax(t, -1, **k),
    "cumsum": lambda t, **k: torch.cumsum(t, 0, **k),
    "cumprod": lambda t, **k: torch.cumprod(t, 0, **k),
    "prod": torch.prod,
    "prod.dim_int": lambda t, **k: torch.prod(t, 0, **k),
    "sum": torch.sum,
    "sum.dim_IntList": lambda t, **k: torch.sum(t, 0, **k),
    "linalg_vector_norm": torch.linalg.vector_norm,
    "linalg_matrix_norm": lambda t, **k: torch.linalg.matrix_norm(t, 2, **k),
    "linalg_matrix_norm.str_ord": lambda t, **k: torch.linalg.matrix_norm(t, "fro", **k),
}


@pytest.mark.parametrize("given", [FP16, BF16, FP32])
@pytest.mark.parametrize("name", SETTING)
def test_a_dtype_that_nobody_gave_is_fp32(name, given):
    assert native_table("cuda")[name] == "fp32 by dtype="
    if name == "linalg_matrix_norm" and given != FP32:
        with pytest.raises(RuntimeError, match="Low precision dtypes not supported"):
            SETTING[name](X.to(given), dtype=FP32)
        return  # torch's own, whatever the dtype
    with region(BF16):
        ours = SETTING[name](X.to(given))
    expected = SETTING[name](X.to(given), dtype=FP32)
    assert ours.dtype == expected.dtype == FP32
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("wanted", [FP16, BF16, FP32, torch.float64])
@pytest.mark.parametrize("name", [one for one in SETTING if "norm" not in one])
def test_a_dtype_that_the_caller_gave_counts(name, wanted):
    with region(BF16):
        ours = SETTING[name](X.half(), dtype=wanted)
    assert ours.dtype == wanted
    assert same(ours, SETTING[name](X.half(), dtype=wanted))


@pytest.mark.parametrize("given", [torch.float64, torch.int64, torch.complex64])
@pytest.mark.parametrize("name", ["sum", "cumsum", "prod", "sum.dim_IntList"])
def test_a_dtype_is_set_for_what_may_be_cast_alone(name, given):
    with region(BF16):
        ours = SETTING[name](X.to(given))
    assert same(ours, SETTING[name](X.to(given)))


def test_a_dtype_by_position():
    softmax = torch.ops.aten.softmax.int
    with region(BF16):
        assert softmax(X.half(), -1, None).dtype == FP32
        assert softmax(X.half(), -1, FP16).dtype == FP16
        assert softmax(X.half(), dim=-1).dtype == FP32


@pytest.mark.parametrize("given", [FP16, BF16, FP32])
def test_norm_by_its_overload_with_a_dtype(given):
    aten = torch.ops.aten
    calls = [
        (lambda t: aten.norm.Scalar(t, 2), lambda t: t.norm(2)),
        (aten.norm.Scalar, lambda t: t.norm(2)),
        (lambda t: aten.norm.ScalarOpt_dim(t, 2, [0], True), lambda t: t.norm(2, 0, keepdim=True)),
        (lambda t: aten.norm.ScalarOpt_dim(t, None, [0]), lambda t: t.norm(2, 0)),
        (torch.norm, torch.norm),
        (lambda t: torch.norm(t, dim=0), lambda t: torch.norm(t, dim=0)),
    ]
    for call, by_hand in calls:
        with region(BF16):
            ours = call(X.to(given))
        assert same(ours, by_hand(X.to(given).float()))
    with region(BF16):
        assert aten.norm.Scalar(X.double(), 2).dtype == torch.float64


# ---- what is refused, and what CUDA's table does not have


def test_binary_cross_entropy_is_refused_with_two_ways_out():
    with region(FP16), pytest.raises(UnsupportedError, match="use binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(X.sigmoid(), X.sigmoid())
    with region(FP16, nc.rule.op("binary_cross_entropy", compute="fp32")):
        assert F.binary_cross_entropy(X.half().sigmoid(), X.sigmoid()).dtype == FP32
    with region(FP16):
        assert F.binary_cross_entropy_with_logits(X, X.sigmoid()).dtype == FP32
        with nc.autocast("cpu", enabled=False):
            F.binary_cross_entropy(X.sigmoid(), X.sigmoid())


def test_what_a_rule_refuses_is_not_advised():
    """binary_cross_entropy_with_logits is the way out for binary_cross_entropy, not for itself."""
    name = "binary_cross_entropy_with_logits"
    with region(FP16, nc.rule.op(name, compute="refuse")), pytest.raises(UnsupportedError) as refused:
        F.binary_cross_entropy_with_logits(X, X.sigmoid())
    assert str(refused.value).startswith(f"{name} was called, which is refused here (")
    assert "; use" not in str(refused.value)


def cpu_alone():
    """Entries of the CPU's lists whose operators CUDA's table does not have."""
    listed = {op.partition(".")[0] for op in native_table("cuda")}
    return [
        one
        for one in entries(AutocastCPUTestLists, [name for name in CPU_LISTS if name.endswith("fp32")])
        if one.id.partition("-")[2] not in listed
    ]


def outcome(call):
    """What a call returns, or the kind of its error: many of these have no kernel for half formats."""
    torch.manual_seed(0)
    try:
        return call()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("compute", [BF16, FP16])
@pytest.mark.parametrize(("name", "position"), cpu_alone())
def test_what_only_the_cpus_table_has_is_not_cast(name, position, compute):
    op, args, *kwargs = getattr(lists_of(AutocastCPUTestLists, "cpu"), name)[position]
    kwargs = kwargs[0] if kwargs and isinstance(kwargs[0], dict) else {}
    for variant, given in itertools.product(variants(op, MODULES[name.split("_")[0]]), (compute, FP32)):
        inputs = cast(args, given)
        expected = outcome(lambda variant=variant, inputs=inputs: variant(*inputs, **kwargs))
        with region(compute):
            ours = outcome(lambda variant=variant, inputs=inputs: variant(*inputs, **kwargs))
        assert same(ours, expected) if not isinstance(expected, str) else ours == expected


def test_composites_that_only_the_cpus_table_has_are_taken_apart():
    """cross_entropy asks log_softmax for its own format, and then reaches nll_loss, which is in fp32."""
    logits, targets, seen = X.bfloat16(), torch.arange(4), {}
    with region(BF16), watch_ops(lambda call: seen.setdefault(call.op, (call.dtype, call.enclosing))):
        loss = F.cross_entropy(logits, targets)
    by_hand = F.nll_loss(logits.log_softmax(-1, dtype=BF16).float(), targets)
    assert loss.dtype == FP32
    assert torch.equal(loss, by_hand)
    assert seen["nll_loss"] == (FP32, ("cross_entropy_loss", "nll_loss_nd"))
    with nc.autocast("cpu", BF16):
        assert torch.equal(F.cross_entropy(logits, targets), F.cross_entropy(logits.float(), targets))


def test_promotion_that_only_the_cpus_table_has():
    """cat and stack promote by themselves on CUDA, which gives the same."""
    with region(BF16):
        assert torch.cat([X.bfloat16(), X]).dtype == FP32
        assert torch.stack([X.half(), X.half()]).dtype == FP16
        with pytest.raises(RuntimeError, match=r"same dtype|same scalar type"):
            torch.index_copy(X, 0, torch.tensor([0]), X[:1].half())


# ---- everything that the table lists


NEVER_ON_A_CPU = {
    "_scaled_dot_product_flash_attention",  # inside scaled_dot_product_attention, on CUDA
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "_convolution.deprecated",  # no binding in Python
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_cudnn_rnn",
}


def test_every_operator_of_the_table_was_called():
    """That nothing is left out of the tests above, by their names and torch's."""
    called = {*other_calls(), *SETTING, "norm.Scalar", "norm.ScalarOpt_dim", "binary_cross_entropy"}
    for one in shipped([*CUDA_LISTS, "torch_need_autocast_promote"]):
        called.add(one.id.partition("-")[2])
    table = {op for op in native_table("cuda") if "imname" not in op and op not in NEVER_ON_A_CPU}
    bases = {op.partition(".")[0] for op in called}
    assert {op for op in table if op not in called and op.partition(".")[0] not in bases} == set()


def test_every_norm_of_a_table_has_an_overload_with_dtype():
    norms = {op for table in TABLES.values() for op, kind in table.items() if kind == FP32_APPEND_DTYPE}
    assert norms == set(_operators._APPENDED)
