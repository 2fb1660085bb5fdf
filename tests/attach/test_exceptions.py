"""An exception at any place of an attachment leaves torch as it was, and the capture closed."""

import json
import math

import pytest
import torch
import torch.utils.checkpoint
from scenarios import data, network

from narrowcast.attach import Attachment, Observer
from narrowcast.attach._attachment import _entered
from narrowcast.attach._run import Patches
from narrowcast.capture import read_capture
from narrowcast.errors import UnsupportedError


class InjectedError(Exception):
    pass


def train():
    """Reach every function that an attachment replaces and that a script in one process calls."""
    model, (x, y) = network(), data(8)
    x.requires_grad_()  # torch warns of a module hook otherwise
    model.register_full_backward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for _ in range(2):
        model.zero_grad()
        middle = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        middle.retain_grad()
        middle.register_hook(lambda gradient: gradient)
        torch.autograd.grad(model(x).sum(), model[0].weight)
        (middle - y).square().mean().backward()
        optimizer.step()

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)
    return [p.detach().clone() for p in model.parameters()], model


def places(monkeypatch):
    """Everything that is replaced: owner and name -> what stands there without an attachment."""
    found, replace = {}, Patches.replace

    def noting(self, owner, name, value):
        found.setdefault((owner, name), vars(owner).get(name))
        replace(self, owner, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(Patches, "replace", noting)
        with Attachment("fp16"):
            pass
    return found


def raising_at(call, original):
    calls = iter(range(call + 1))

    def wrapper(*args, **kwargs):
        if next(calls, None) == call:
            raise InjectedError
        return original(*args, **kwargs)

    return wrapper


@pytest.mark.long
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_an_exception_anywhere_leaves_torch_as_it_was(policy, monkeypatch):
    found = places(monkeypatch)
    assert len(found) > 15
    with Attachment(policy):
        expected, _ = train()
    observed = [(Observer, name) for name in ("attached", "called", "returned", "stepped")]
    raised = set()
    for owner, name in [*found, *observed, (Patches, "replace"), (Attachment, "_note_what_was_unusual")]:
        for call in range(25 if owner is Patches else 3):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, raising_at(call, getattr(owner, name)))
                try:
                    with Attachment(policy):
                        train()
                except InjectedError:
                    raised.add(name)
            for (place, word), before in found.items():
                assert vars(place).get(word) is before, f"{word} after {name} raised"
            assert not torch.is_autocast_enabled("cpu")
            assert torch.backends.mha.get_fastpath_enabled()
            assert not hasattr(torch.optim.SGD.step, "narrowcast_wraps")
            with Attachment(policy):
                again, model = train()
            assert all(map(torch.equal, again, expected)), f"after {name} raised"
            assert not any(p._backward_hooks for p in model.parameters())
    assert {"__call__", "backward", "grad", "checkpoint", "attached", "stepped", "replace"} <= raised


def test_what_cannot_be_read_or_undone_is_named(writer, monkeypatch):
    def broken():
        raise RuntimeError("broken\nwith pages of advice")

    monkeypatch.setattr(torch, "get_num_threads", broken)
    monkeypatch.setattr("narrowcast.attach._recorder._peak_resident_bytes", broken)
    backward = torch.autograd.backward
    with Attachment("bf16", writer=writer) as attached:
        attached.recorder._add("step", interval_s=broken)
        attached._steps.uninstall, uninstall = broken, attached._steps.uninstall
    uninstall()
    assert torch.autograd.backward is backward
    end = json.loads(writer.path.read_text().splitlines()[-1])
    assert (end["event"], end["peak_resident_bytes"]) == ("end", None)
    assert end["versions"]["threads"] == "unreadable (broken)"
    told = writer.path.read_text()
    for said in ("threads is unreadable", "peak_resident_bytes is unreadable", "a step could not be read"):
        assert said in told
    assert "on leaving, broken failed: broken" in told


@pytest.mark.parametrize(
    ("policy", "error", "noted"),
    [
        ("fp16", None, True),
        ("bf16", ValueError("nan"), True),
        ("fp32", ValueError("nan"), False),
        ("fp16", UnsupportedError("ours"), False),
        ("fp16", FileNotFoundError("train.csv"), False),
    ],
)
def test_an_error_that_the_format_may_have_caused_is_noted(policy, error, noted):
    attachment = Attachment(policy)

    def script():
        y = network()(data(8)[0])
        if error is not None:
            raise error
        torch.nn.functional.binary_cross_entropy(y * math.nan, torch.ones_like(y))

    with pytest.raises(type(error or RuntimeError())), _entered(attachment):
        script()
    attachment.__exit__(None, None, None)
    assert any("--policy fp32 shows" in note for note in attachment.notes) == noted


@pytest.mark.parametrize(("ended_with", "code"), [(None, 0), (3, 3), (True, 1), (False, 0), ("failed", 1)])
def test_the_exit_code_in_the_capture_is_that_of_the_process(ended_with, code, writer):
    attachment = Attachment("bf16", writer=writer)
    with pytest.raises(SystemExit), _entered(attachment):
        raise SystemExit(ended_with)
    attachment.leave_for_good()
    assert read_capture(writer.path).end["exit_code"] == code
