"""Operators on a GPU: their time is that of the device, and backward in other threads is seen."""

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.observe.op_trace import OpTrace, trace_events
from narrowcast.policy import as_policy

pytestmark = pytest.mark.gpu


def test_products_take_the_time_of_the_device():
    policy = as_policy("bf16")
    model = nn.Sequential(nn.Linear(2048, 2048), nn.LayerNorm(2048), nn.Linear(2048, 2048)).cuda()
    x = torch.randn(4096, 2048, device="cuda")

    def step():
        with nc.autocast("cuda", policy=policy):
            loss = model(x).float().square().mean()
        loss.backward()

    step()
    with OpTrace(policy, "cuda") as trace:
        trace.paths.add_model(model)
        step()
    events = trace_events(trace.take(), trace.rules.unreached(), {})
    sites = [event for event in events if event["event"] == "site"]
    linear = [site for site in sites if site["op"] == "linear"]
    assert [(site["path"], site["computes"]) for site in linear] == [("0", "bf16"), ("2", "bf16")]
    (norm,) = [site for site in sites if site["op"] == "layer_norm"]
    assert (norm["computes"], norm["outputs"], norm["because"]) == (
        "fp32",
        ["fp32"],
        "PyTorch's table for cuda",
    )
    (backward,) = [site for site in sites if site["phase"] == "backward" and site["op"] == "mm"]
    assert backward["calls"] == 3
    totals = events[-1]
    # 2 * 4096 * 2048 * 2048 operations, five times; a GPU does at most 3e15 of them a second.
    assert totals["product_s"] > 5 * 2 * 4096 * 2048 * 2048 / 3e15
    assert totals["product_s"] <= totals["duration_s"]
    assert totals["narrow_product_s"] == pytest.approx(totals["product_s"])


def test_what_is_captured_into_a_graph_is_watched_without_events():
    x = torch.randn(64, 64, device="cuda")
    x @ x
    with OpTrace(as_policy("bf16"), "cuda") as trace:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x @ x
    assert any(event.get("op") == "mm" for event in trace_events(trace.take(), [], {}))
