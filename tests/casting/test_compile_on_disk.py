"""Two policies take turns over one folder of Inductor's caches, each in processes of its own."""

import json
import os
import shutil
import sys

import pytest

from child_processes import finished

SCRIPT = """
import json, sys
import torch
from torch import nn
import narrowcast as nc

torch.set_num_threads(1)
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.softmax(self.linear(x), -1)

model, x = Model(), torch.randn(8, 16)
policy = nc.Policy.load(sys.argv[1])

def run(model):
    model.zero_grad()
    output = model(x)
    (output.float() * torch.arange(16)).square().sum().backward()
    return output.detach(), model.linear.weight.grad if hasattr(model, "linear") else None

with nc.apply(model, policy):
    expected, expected_gradient = run(model)
    expected_gradient = expected_gradient.clone()
output, gradient = run(nc.compile(model, policy))
counters = torch._dynamo.utils.counters
print(json.dumps({
    "format": str(output.dtype),
    "expected": str(expected.dtype),
    "error": (output.float() - expected.float()).abs().max().item(),
    "gradient_error": ((gradient - expected_gradient).norm() / expected_gradient.norm()).item(),
    "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
}))
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiler: Inductor needs g++")
def test_two_policies_over_one_cache(tmp_path):
    import narrowcast as nc

    policies = {
        "torch.float16": nc.Policy(compute="bf16", rules=(nc.rule.op("softmax", compute="fp16"),)),
        "torch.bfloat16": nc.Policy(compute="bf16"),
    }
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    seen = []
    for name in [*policies, *policies]:
        policies[name].save(tmp_path / "policy.toml")
        done = finished([sys.executable, script, tmp_path / "policy.toml"], env=environment)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["format"] == found["expected"] == name
        # Where Inductor fuses, it leaves roundings out: one of bf16 apart, in values below 1.
        assert found["error"] <= 2**-8
        assert found["gradient_error"] <= 2**-6
        seen.append(found["hits"])
    assert seen[:2] == [0, 0]  # another policy's graph is none of ours
    assert min(seen[2:]) > 0  # and the caches were there to be read
