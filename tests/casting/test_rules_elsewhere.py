"""Kernels of ours where no rule is in force: everything is as PyTorch's own autocast does it.

A policy gives every operator a kernel, by rules for a module that nobody calls. Then nothing may differ: in a
region of that policy, and in one of torch.autocast beside it.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from casting_cases import BF16, FP16, composites, rules
from op_lists import check_cpu_entry, cpu_entries, same

import narrowcast as nc
from child_processes import finished
from narrowcast.casting import PolicyRegion
from narrowcast.policy import base_of, native_table

# Of torch, once: a bf16 LSTM without projections has no kernel of oneDNN on some CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def policies():
    """Kernels on what PyTorch casts and on composites; the long test puts one on every operator."""
    ops = sorted({base_of(op) for op in native_table("cpu")} | set(RULED))
    given = [nc.rule.module("elsewhere", op=op, compute="fp32", output="fp32") for op in ops]
    made = {BF16: rules(*given), FP16: rules(*given, compute="fp16")}
    for dtype, policy in made.items():
        PolicyRegion(policy, {"cpu": dtype})
    return made


def ways(policy, region):
    """Our kernels with a policy that decides nothing here, and without any policy in this thread."""
    return [lambda: PolicyRegion(policy, {"cpu": region}), lambda: torch.autocast("cpu", region)]


@pytest.mark.parametrize("region", [BF16, FP16])
@pytest.mark.parametrize(("name", "position"), cpu_entries())
def test_every_op_of_torchs_lists(policies, name, position, region):
    check_cpu_entry(name, position, region, ways(policies[region], region))


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_sample_of_every_operator(device):
    """In a process of its own, since torch's test tools change more than ours may."""
    formats = ["bf16", "fp16"] if device == "cpu" else ["bf16"]
    done = finished([sys.executable, str(SCRIPTS / "every_sample.py"), device, *formats], limit_s=400)
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout).values():
        assert found["operators"] > 500
        assert found["compared"] > (3000 if device == "cpu" else 2000)
        assert found["differing"] == {}


def seeded(function):
    torch.manual_seed(1)
    return function()


@pytest.fixture(scope="module")
def natively():
    """The composites under torch.autocast before there is any kernel of ours."""
    with torch.autocast("cpu", BF16, cache_enabled=False):
        return {name: seeded(function).detach() for name, function in composites().items()}


@pytest.fixture(scope="module")
def beside(natively, policies):
    """Those, and a policy by which each of their operators has a kernel."""
    return natively, policies[BF16]


@pytest.mark.parametrize("name", composites())
def test_composites_are_as_without_the_kernels(beside, name):
    natively, policy = beside
    for region in ways(policy, BF16):
        with region():
            assert same(seeded(composites()[name]).detach(), natively[name])


RULED = (
    *("einsum", "lstm", "gru", "linear", "matmul", "mm", "addmm", "bmm", "softmax", "log_softmax"),
    *("layer_norm", "native_layer_norm", "instance_norm", "batch_norm", "cross_entropy_loss"),
    *("cosine_similarity", "scaled_dot_product_attention", "pairwise_distance", "bilinear", "tensordot"),
)
