"""The hard cases on a GPU, where hooks run in other threads and fp16 has instructions."""

import pytest
import torch
import torch.nn.functional as F
from scenarios import SCENARIOS, data, network
from test_overflow import all_finite
from test_scenarios import AMPLIFICATION, relative_error, tolerance
from torch import nn

from narrowcast.attach import Attachment
from narrowcast.capture import read_capture
from narrowcast.scaling import Dynamic

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_the_gpu():
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_training_ends_where_fp32_ends(name, policy):
    expected = SCENARIOS[name]()
    with Attachment(policy, Dynamic(scale=2.0**8) if policy == "fp16" else None) as attached:
        found = SCENARIOS[name]()
    assert relative_error(found.first_gradients, expected.first_gradients) < tolerance(policy)
    # The GPU draws other initial weights: six other draws on a CPU came to 2.7, and L-BFGS to 13.
    limit = AMPLIFICATION.get(name, 8.0) * tolerance(policy)
    assert 0 < relative_error(found.parameters, expected.parameters) < limit
    assert all(map(all_finite, found.optimizers))
    assert list(attached.recorder.devices) == ["cuda"]


@pytest.mark.parametrize("fused", [True, False])
def test_a_planted_overflow_is_skipped(fused):
    model, (x, y) = network(), data()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        for factor in (1.0, 1e6, 1.0):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) * factor).backward()
            optimizer.step()
            unchanged = all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
            assert unchanged == (factor > 1)
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (2, 1)
    assert attached.facts["peak_tensor_bytes"] > 0


def test_a_fused_step_in_bf16_is_skipped_on_the_device():
    model, (x, y), told = network(), data(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    with Attachment("bf16", tell=told.append) as attached:
        for factor in (1.0, float("inf"), 1.0):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) * factor).backward()
            optimizer.step()
            unchanged = all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
            assert unchanged == (factor > 1)
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (2, 1)
    assert any("step 2, of AdamW, was skipped" in note for note in told)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_only_fp16_waits_and_once_a_step(policy, counted_waits):
    """fp16 decides on the host whether a step is taken, as torch's scaler does for optimizers of any kind."""
    model, (x, y) = network(), data()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    with Attachment(policy):
        for _ in range(3):
            with counted_waits() as waits:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
    assert waits.count == (policy == "fp16")


def test_auto_takes_what_the_gpu_computes_in():
    with Attachment("auto") as attached:
        network()(data()[0])
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    assert attached.recorder.devices["cuda"]["format"] == ("bf16" if native else "fp16")


def test_losses_are_those_at_backward_and_read_later(writer):
    """Changed in place by the script before they are read from the device."""
    weight = torch.full((1,), 3.0, device="cuda", requires_grad=True)
    model = nn.Linear(1, 1, device="cuda")
    with Attachment("bf16", writer=writer):
        model(weight)
        for factor in (1.0, 2.0):
            value = (weight * factor).sum()
            value.backward()
            with torch.no_grad():
                value.zero_()
    capture = read_capture(writer.path)
    assert [loss["value"] for loss in capture.of("loss")] == [3.0, 6.0]
    assert all(0 < forward["duration_s"] < 60 for forward in capture.of("forward"))


def test_nothing_is_read_or_launched_while_a_graph_is_recorded(writer):
    weight = torch.full((1,), 3.0, device="cuda", requires_grad=True)
    model = nn.Linear(1, 1, device="cuda")
    with Attachment("bf16", writer=writer) as attached:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                (model(weight[None]).sum() + weight.sum()).backward()
        torch.cuda.synchronize()
        (weight * 1).sum().backward()  # waits to be read
        attached.recorder._last_flush -= 10
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (model(weight[None]).sum() + weight.sum()).backward()
            attached.recorder.note("said while recording")
        graph.replay()
    capture = read_capture(writer.path)
    assert len(capture.of("loss")) == 4
    assert attached.facts["backwards"] == 5
    assert "said while recording" in [note["text"] for note in capture.of("note")]
