"""Policies take turns over one folder of Inductor's caches, each in processes of its own."""

import json
import os
import shutil
import sys

import pytest
from casting_cases import rules

import narrowcast as nc
from child_processes import output_of

# By nc.compile, and by torch.compile inside a region.
SCRIPT = """
import json, sys
import torch
import narrowcast as nc

torch.set_num_threads(1)
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Softmax(-1)), torch.randn(8, 16)
policy = nc.Policy.load(sys.argv[1])

def run(model, called):
    model.zero_grad()
    output = called(x)
    (output.float() * torch.arange(16)).square().sum().backward()
    return output.detach(), model[0].weight.grad.clone()

def compiled(x):
    with nc.autocast("cpu", policy=policy):
        return torch.compile(model)(x)

with nc.apply(model, policy):
    expected, expected_gradient = run(model, model)
called = compiled if sys.argv[2] == "a region" else nc.compile(model, policy)
output, gradient = run(model, called)
counters = torch._dynamo.utils.counters
print(json.dumps({
    "formats": [str(output.dtype), str(expected.dtype)],
    "error": (output.float() - expected.float()).abs().max().item(),
    "gradient_error": ((gradient - expected_gradient).norm() / expected_gradient.norm()).item(),
    "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
}))
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["nc.compile", "a region"])
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiler: Inductor needs g++")
def test_policies_share_one_cache_on_disk(tmp_path, way):
    """Each policy is the first of its process, and has the mark that another had in the one before."""
    policies = {
        "torch.float16": rules(nc.rule.op("softmax", compute="fp16")),
        "torch.float32": rules(nc.rule.op("softmax", compute="fp32"), nc.rule.op("linear", compute="fp32")),
    }
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    seen = []
    for name in [*policies, *policies]:
        policies[name].save(tmp_path / "policy.toml")
        said = output_of([sys.executable, script, tmp_path / "policy.toml", way], env=environment)
        found = json.loads(said.splitlines()[-1])
        assert found["formats"] == [name, name]
        # Where Inductor fuses, it leaves roundings out: one of bf16 apart, in values below 1.
        assert found["error"] <= 2**-8
        assert found["gradient_error"] <= 2**-6
        seen.append(found["hits"] > 0)
    # Another policy's graph is none of ours, and the cache was read.
    assert seen == [False, False, True, True]
