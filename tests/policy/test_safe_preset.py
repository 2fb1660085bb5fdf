"""Preset ``safe``: which operators mixed inputs stop is found anew, and its rules are those that help."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import narrowcast as nc
from child_processes import finished
from narrowcast.policy import PROMOTE, TABLES, Policy

# What stops and has no rule, and why it has none; see the comment at the preset.
WRITES_STATISTICS = {
    "nn.functional.batch_norm",
    "nn.functional.instance_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
}
TAKES_WIDE_PARAMETERS = {"native_layer_norm", "native_group_norm", "fake_quantize_per_channel_affine"}
EXPERIMENTS = {"nn.functional.linear_cross_entropy"}
HAS_NO_RULE = WRITES_STATISTICS | TAKES_WIDE_PARAMETERS | EXPERIMENTS
# There for what they compute in, not for what stops.
NORMS_AND_LOSS = {"layer_norm", "group_norm", "rms_norm", "binary_cross_entropy"}


@pytest.fixture(scope="module")
def found():
    script = Path(__file__).parent / "scripts" / "mixed_inputs.py"
    ended = finished([sys.executable, str(script)], limit_s=800)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.long
def test_nothing_stops_that_a_rule_could_help(found):
    stopped = {name for name, _, _ in found["stopped"]}
    assert len(stopped) > 60
    still = {one.split()[0] for one in found["still"]}
    assert {name for name in still if not name.rpartition(".")[2].startswith("_")} <= HAS_NO_RULE
    assert stopped >= WRITES_STATISTICS
    assert TAKES_WIDE_PARAMETERS & stopped  # in 2.11 not native_group_norm


@pytest.mark.long
def test_each_rule_helps_and_does_as_the_table_of_the_device_that_runs_it(found):
    for one in Policy.preset("safe").rules:
        if one.op in NORMS_AND_LOSS:
            continue
        helped = found["helped"][one.op]
        assert helped["cpu"] or helped["cuda"], f"nothing stops without {one}"
        if helped["cpu"] and helped["cuda"]:
            expected = PROMOTE
            assert one.op not in TABLES["cpu"], helped
            assert one.op not in TABLES["cuda"], helped
        else:
            expected = TABLES["cuda" if helped["cpu"] else "cpu"][one.op]
        assert one.compute == expected, one


# Operators below those that models call, in-place sums with dtype=, sparse gradients, a Python function, and
# one in place that has no fp16 kernel on a CPU.
NOT_PROMOTED = {
    *("_softmax_backward_data", "native_layer_norm", "native_group_norm", "cumprod_", "cumsum_"),
    *("nn.functional.embedding_bag", "nn.functional.linear_cross_entropy", "nn.functional.rrelu_"),
}
# Refused by the table; without a low kernel on a CPU (a softmax from fp16 to fp32: its backward pass), or
# without one in the backward pass of an empty matrix.
NOT_ON_CUDA = {
    *("nn.functional.binary_cross_entropy", "nn.functional.avg_pool3d"),
    "torch.ops.aten._safe_softmax.default",
    *("cholesky", "linalg.cholesky", "linalg.cholesky_ex"),
}


@pytest.mark.long
def test_what_runs_in_fp32_runs_with_promotion(found):
    assert found["tried"] > 30_000
    on_cuda = {f"{name} on cuda" for name in NOT_PROMOTED | NOT_ON_CUDA}
    assert set(found["with promotion"]) <= NOT_PROMOTED | on_cuda


X, Y = torch.randn(4, 6), torch.randn(4, 6)
INDEX = torch.tensor([1, 0])
CALLS = {
    "lerp": lambda a, b: torch.lerp(a, b, torch.tensor(0.25).to(a.dtype)),
    "index_add": lambda a, b: torch.index_add(a, 0, INDEX, b[:2]),
    "scatter": lambda a, b: torch.scatter(a, 0, INDEX[None], b),
    "tensordot": lambda a, b: torch.tensordot(a, b.T, dims=1),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "bilinear": lambda a, b: functional.bilinear(a, b, torch.ones(1, 6, 6).to(a.dtype)),
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=1),
    "complex": torch.complex,
    "solve": lambda a, b: torch.linalg.solve(a[:, :4], b),
}


@pytest.mark.parametrize("tables", ["native", "cuda"])
@pytest.mark.parametrize("name", CALLS)
def test_mixed_inputs_give_what_fp32_gives(name, tables):
    call = CALLS[name]
    policy = Policy(compute="bf16", tables=tables, rules=Policy.preset("safe").rules)
    narrow = X.to(torch.bfloat16)
    with nc.autocast("cpu", policy=policy):
        ours = call(narrow, Y), call(Y, narrow)
    by_hand = call(narrow.float(), Y), call(Y, narrow.float())
    assert all(torch.equal(one, other) for one, other in zip(ours, by_hand, strict=True))
    assert ours[0].dtype in (torch.float32, torch.complex64)


def test_products_that_cuda_has_on_its_table_are_in_the_lower_format():
    policy = Policy(compute="bf16", rules=Policy.preset("safe").rules)
    with nc.autocast("cpu", policy=policy):
        for given in (X, X.to(torch.bfloat16)):
            product = torch.mv(given, Y[0])
            assert product.dtype == torch.bfloat16
            assert torch.equal(product, torch.mv(X.to(torch.bfloat16), Y[0].to(torch.bfloat16)))
