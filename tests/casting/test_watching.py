"""Seeing every operator where autocast decides about it."""

import gc

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, COMPILES, FP16, FP32, assert_same, composites, rules
from dispatch_table import changes_since, kernels, whole_table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.casting import ops_under_way, watch_ops
from narrowcast.casting.kernels import _watching
from narrowcast.errors import OrderError

# Of torch, once: a bf16 LSTM without projections has no kernel of oneDNN on some CPUs.
pytestmark = [*COMPILES, pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")]
rule = nc.rule
X = torch.linspace(-1, 1, 16).reshape(4, 4)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def watched(function, region, **settings):
    seen = []
    with watch_ops(seen.append, **settings), region:
        function()
    return seen


def named(seen, op):
    return [call for call in seen if call.op == op]


def test_each_call_is_told_with_its_decision():
    softmax = rule.op("softmax", compute="fp16")
    policy = rules(softmax)
    out = []
    seen = watched(lambda: out.append((X @ X).softmax(-1)), nc.autocast("cpu", policy=policy))
    product, ruled = named(seen, "matmul")[0], named(seen, "softmax.int")[0]
    assert (product.dtype, product.rule, product.because) == (BF16, None, "PyTorch's table for cpu")
    assert (ruled.dtype, ruled.rule, ruled.because) == (FP16, softmax, "softmax: fp16")
    assert all(one is X for one in product.inputs)
    assert ruled.inputs[0].dtype == BF16
    assert ruled.outputs[0] is out[0]
    assert (product.listed, product.composite, ruled.listed) == (True, False, True)


def test_composites_and_what_they_are_made_of():
    seen = watched(lambda: torch.einsum("ij,jk->ik", X, X), nc.autocast("cpu", BF16))
    einsum, product = named(seen, "einsum")[0], named(seen, "bmm")[0]
    assert einsum.composite
    assert not einsum.listed
    assert einsum.because == "unlisted: in the formats that come"
    assert (product.dtype, product.enclosing) == (BF16, ("einsum",))
    assert seen[-1] is einsum
    lstm = nn.LSTM(4, 4, proj_size=2)  # a bf16 one without has no kernel on some CPUs
    seen = watched(lambda: lstm(X), nc.autocast("cpu", BF16))
    assert all(call.enclosing == ("lstm.input",) for call in named(seen, "linear"))
    assert named(seen, "linear") or named(seen, "mkldnn_rnn_layer")


def test_what_runs_inside_an_operator_that_was_cast_is_not_seen():
    seen = watched(lambda: F.linear(X, X), nc.autocast("cpu", BF16))
    assert [call.op for call in seen] == ["linear"]


def test_operators_without_any_decision_are_seen():
    seen = watched(lambda: X.add(1).relu(), nc.autocast("cpu", BF16))
    assert [(call.op, call.dtype, call.listed) for call in seen] == [
        ("add.Tensor", None, False),
        ("relu", None, False),
    ]


def test_promotion_and_the_table_of_cuda():
    seen = watched(lambda: torch.cat([X, X.half()]), nc.autocast("cpu", BF16))
    assert named(seen, "cat")[0].dtype == FP32
    region = nc.autocast("cpu", policy=POLICIES["another table"])
    seen = watched(lambda: F.cross_entropy(X, torch.arange(4)), region)
    assert named(seen, "cross_entropy_loss")[0].composite
    assert named(seen, "nll_loss")[0].enclosing == ("cross_entropy_loss", "nll_loss_nd")
    softmax = named(watched(lambda: X.half().softmax(-1), region), "softmax.int")[0]
    assert (softmax.dtype, softmax.because) == (FP32, "PyTorch's table for cuda")


POLICIES = {
    "none": rules(),
    "operators": rules(rule.op("softmax", compute="fp16"), rule.op("mm", compute="fp32")),
    "another table": rules(tables="cuda"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "name", ["transformer, quick", "lstm", "cross_entropy", "interpolate", "sparse", "a number", "gradients"]
)
def test_watching_changes_nothing(name, policy):
    function = composites()[name]
    with nc.autocast("cpu", policy=POLICIES[policy]):
        expected = function()
    seen, found = [], []
    with watch_ops(seen.append), nc.autocast("cpu", policy=POLICIES[policy]):
        found.append(function())
    assert_same(found[0], expected)
    assert seen


def test_nothing_is_left_behind():
    gc.collect()
    nc.policy.every_operator()
    before = whole_table()
    with watch_ops(lambda call: None):
        assert len(kernels()) > 1500
    assert changes_since(before) == {}


def test_nothing_is_told_afterwards_under_a_mode():
    """There PyTorch calls the kernel that was registered last, though it was taken away."""
    policy = rules(rule.op("softmax", compute="fp16"))
    with nc.autocast("cpu", policy=policy):
        seen = watched(lambda: X.softmax(-1), Passing())
        told = len(seen)
        with Passing():
            assert X.softmax(-1).dtype == FP16
    assert len(seen) == told > 0


@pytest.mark.long
def test_policies_come_and_go_meanwhile():
    gc.collect()
    before, seen = whole_table(), []
    with watch_ops(seen.append):
        for compute, expected in (("fp16", FP16), ("fp32", FP32), ("bf16", BF16)):
            policy = rules(rule.op("erfinv", compute=compute))
            with nc.autocast("cpu", policy=policy):
                assert X.erfinv().dtype == expected
            del policy
            gc.collect()
        with nc.autocast("cpu", BF16):
            assert X.erfinv().dtype == FP32
    assert [call.dtype for call in named(seen, "erfinv")] == [FP16, FP32, BF16, None]
    assert changes_since(before) == {}


def test_a_policy_may_be_freed_while_kernels_are_put_back(monkeypatch):
    ending, register = [rules(rule.op("lgamma", compute="fp16"))], _watching.register_kernel
    nc.autocast("cpu", policy=ending[0])

    def freeing(op, key, kernel, library):
        if library is not None:
            ending.clear()
            gc.collect()
            monkeypatch.setattr(_watching, "register_kernel", register)
        return register(op, key, kernel, library)

    seen = []
    with watch_ops(seen.append):
        monkeypatch.setattr(_watching, "register_kernel", freeing)
        with nc.autocast("cpu", policy=rules(rule.op("digamma", compute="fp16"))):
            X.digamma()
    assert len(named(seen, "digamma")) == 1


def test_torch_func_computes_after_a_trace_as_before_it():
    """Where operators are first called under ``vmap`` while they are traced."""
    policy = rules(rule.op("softmax", compute="fp32"))

    def products(rows):
        return torch.vmap(lambda row: row @ X)(rows)

    with nc.autocast("cpu", policy=policy):
        with watch_ops(lambda call: None):
            expected = products(X)
        assert_same(products(X), expected)
    assert expected.dtype == BF16


def test_a_second_watcher_is_refused():
    seen = []
    with watch_ops(seen.append), nc.autocast("cpu", BF16):
        with pytest.raises(OrderError, match="other trace"), watch_ops(seen.append):
            pytest.fail("two watchers")
        X @ X
    assert [call.op for call in seen] == ["matmul"]


def test_ops_under_way():
    seen = []
    with watch_ops(lambda call: seen.append((call.op, ops_under_way()))), nc.autocast("cpu", BF16):
        torch.special.softmax(X, -1)
    assert seen == [
        ("_softmax", ("special_softmax", "softmax.int")),
        ("softmax.int", ("special_softmax",)),
        ("special_softmax", ()),
    ]


def test_what_a_kernel_calls_is_seen_where_it_is_cast():
    """relu calls clamp_min, and a sparse product a dense one, which autocast casts."""
    seen = watched(lambda: torch.sparse.mm(X.to_sparse(), X), nc.autocast("cpu", BF16))
    assert [call.enclosing for call in named(seen, "addmm")] == [("_sparse_mm", "_sparse_addmm")]
    assert not named(seen, "add.Tensor")


def test_what_a_listener_computes_with_autocast_off_is_not_seen():
    seen = []

    def listener(call):
        with torch.autocast("cpu", enabled=False):
            seen.append(call.outputs[0].float().sum().item())

    with watch_ops(listener), nc.autocast("cpu", BF16):
        X @ X
    assert len(seen) == 1


def test_compiled_code_is_traced_as_without_it():
    compiled = torch.compile(lambda x: torch.einsum("ij,jk->ik", x, x).softmax(-1), backend="aot_eager")
    seen = []
    with watch_ops(seen.append), nc.autocast("cpu", policy=POLICIES["operators"]):
        assert compiled(X).dtype == FP16
