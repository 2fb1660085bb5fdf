"""``compare`` on a GPU: the allocator's peaks, events for forward times, the same certificate."""

import pytest
from training_scripts import trains

from narrowcast.report import summary

pytestmark = pytest.mark.gpu

TRAINS = trains(
    "nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512)).cuda()",
    'x = torch.randn(4096, 512, device="cuda")',
    "loss = nn.functional.mse_loss(net(x), x.sin())",
    steps=20,
    optimizer="torch.optim.AdamW(net.parameters(), 1e-3, fused=True)",
)
COMPUTES = """
    import torch
    net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
    with torch.inference_mode():
        for _ in range(20):
            net(torch.randn(4096, 512, device="cuda"))
"""


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_training_on_a_gpu_is_right_and_takes_less_memory(policy, compared):
    found = summary(compared(TRAINS, policy=policy))
    assert found["certificate"]["verdict"] == "pass", found["certificate"]["reason"]
    # No run of its own: the allocator tells it of every run.
    assert 0 < found["mixed"]["peak_tensor_bytes"] < found["fp32"]["peak_tensor_bytes"]
    assert found["fp32"]["steps"] == 20


def test_a_script_that_computes_on_a_gpu_is_timed_by_events(compared):
    found = summary(compared(COMPUTES))
    assert (found["kind"], found["output"]["verdict"]) == ("inference", "pass")
    assert 0 < found["mixed"]["forward_time_s_median"] < 1
