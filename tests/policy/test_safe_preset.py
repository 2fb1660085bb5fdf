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
    ended = finished([sys.executable, str(script)])
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
            assert one.op not in TABLES["cpu"]
            assert one.op not in TABLES["cuda"]
        else:
            expected = TABLES["cuda" if helped["cpu"] else "cpu"][one.op]
        assert one.compute == expected, one


X, Y = torch.randn(4, 6), torch.randn(4, 6)
INDEX = torch.tensor([1, 0])
CALLS = {
    "lerp": lambda a, b: torch.lerp(a, b, torch.tensor(0.25).to(a.dtype)),
    "index_add": lambda a, b: torch.index_add(a, 0, INDEX, b[:2]),
    "index_copy": lambda a, b: torch.index_copy(a, 0, INDEX, b[:2]),
    "index_put": lambda a, b: torch.index_put(a, (INDEX,), b[:2]),
    "scatter": lambda a, b: torch.scatter(a, 0, INDEX[None], b),
    "scatter_reduce": lambda a, b: torch.scatter_reduce(a, 0, INDEX[None], b, "sum"),
    "masked_scatter": lambda a, b: torch.masked_scatter(a, a > 0, b),
    "tensordot": lambda a, b: torch.tensordot(a, b.T, dims=1),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "bilinear": lambda a, b: functional.bilinear(a, b, torch.ones(1, 6, 6).to(a.dtype)),
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=1),
    "complex": torch.complex,
    "solve": lambda a, b: torch.linalg.solve(a[:, :4], b),
    "embedding_bag": lambda a, b: functional.embedding_bag(
        INDEX[None], a, per_sample_weights=b[:1, :2], mode="sum"
    ),
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


@pytest.mark.parametrize("name", ["lerp", "index_add", "scatter", "tensordot", "dot"])
def test_inputs_of_one_format_stay_in_it(name):
    policy = Policy(compute="bf16", rules=Policy.preset("safe").rules)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        with nc.autocast("cpu", policy=policy):
            assert CALLS[name](X.to(dtype), Y.to(dtype)).dtype == dtype


def test_products_that_cuda_has_on_its_table_are_in_the_lower_format():
    policy = Policy(compute="bf16", rules=Policy.preset("safe").rules)
    with nc.autocast("cpu", policy=policy):
        for given in (X, X.to(torch.bfloat16)):
            product = torch.mv(given, Y[0])
            assert product.dtype == torch.bfloat16
            assert torch.equal(product, torch.mv(X.to(torch.bfloat16), Y[0].to(torch.bfloat16)))
