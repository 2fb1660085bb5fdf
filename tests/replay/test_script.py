"""A replay under ``run`` and ``nc.attached``: interrupted, killed, on a full disk, in many scripts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.attach import Attachment
from narrowcast.capture import CaptureWriter, read_capture, start_event
from narrowcast.report import run_block
from narrowcast.report._page import run_page
from narrowcast.scaling import Static

STEPS = 8
BAD = 4


class Net(nn.Module):
    """Dropout, and an exponential that overflows fp16 where an input is 12; it counts its calls."""

    def __init__(self, raised=None):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.leave = nn.Linear(8, 1)
        with torch.no_grad():
            self.enter.weight.copy_(torch.eye(8))
        self.raised = raised
        self.calls_in_step = 0

    def forward(self, x):
        self.calls_in_step += 1
        if self.raised is not None and self.calls_in_step > 1:
            raise self.raised()
        return self.leave(nn.functional.dropout(self.norm(self.enter(x).exp()), 0.5))


def trained(raised=None, *, explain_skips=True, **options):
    """Train with one bad batch; return what is left, and the attachment."""
    torch.manual_seed(0)
    model = Net(raised)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    attachment = Attachment("fp16", Static(scale=8.0), explains_skips=explain_skips, **options)
    with attachment as run:
        for number in range(STEPS):
            x = torch.rand(4, 8)
            if number == BAD:
                x[1] = 12.0
            model.calls_in_step = 0
            optimizer.zero_grad()
            model(x).square().mean().backward()
            try:
                optimizer.step()
            except KeyboardInterrupt:
                assert number == BAD
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    for state in optimizer.state_dict()["state"].values():
        tensors += state.values()
    return tensors, run


def same(left, right):
    # Statistics of a batch norm hold NaN after the bad batch.
    return [tensor.numpy().tobytes() for tensor in left] == [tensor.numpy().tobytes() for tensor in right]


def test_a_replay_leaves_the_counts_and_every_bit_of_a_run():
    plain, without = trained(explain_skips=False)
    explained, run = trained()
    assert same(explained, plain)
    assert any("narrowcast repeated it" in note for note in run.notes)
    assert not any("narrowcast repeated it" in note for note in without.notes)
    for fact in ("steps", "skipped_steps", "backwards", "module_calls"):
        assert run.facts[fact] == without.facts[fact]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, ValueError])
def test_an_error_in_a_replay_changes_no_bit(raised):
    plain, _ = trained(explain_skips=False)
    interrupted, run = trained(raised)
    assert same(interrupted, plain)
    assert run.facts["steps"] == STEPS - 1
    told = [note for note in run.notes if "step 5 was skipped at a loss scale" in note]
    assert len(told) == (raised is not KeyboardInterrupt)


def test_a_full_disk_ends_the_capture_and_not_the_replay(tmp_path, monkeypatch):
    plain, _ = trained(explain_skips=False)
    writer = CaptureWriter(tmp_path / "capture.jsonl")
    writer.write(start_event(["train.py"], "fp16"))

    class Full:
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            real.close()

    real = writer._file
    monkeypatch.setattr(writer, "_file", Full())
    told = []
    explained, _ = trained(writer=writer, tell=told.append)
    assert writer.error.errno == errno.ENOSPC
    assert same(explained, plain)
    assert any("narrowcast repeated it" in text for text in told)


KILLED = """
    import os, signal, sys, torch
    from torch import nn

    class Net(nn.Linear):
        calls = 0
        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x).exp()

    torch.manual_seed(0)
    model = Net(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        model.calls = 0
        x = torch.rand(2, 4) * (1e3 if step == 2 else 1)
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        torch.save(model.state_dict(), sys.argv[1])
        print("saved", step, flush=True)
    """


@pytest.mark.long
def test_a_run_killed_in_a_replay_leaves_the_checkpoint_of_the_step_before(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(KILLED))

    def run(name, *options):
        words = ["--policy", "fp16", "--loss-scale", "8", "--run-dir", tmp_path / name, *options]
        command = [sys.executable, "-m", "narrowcast", "run", *words, script, tmp_path / f"{name}.pt"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done, torch.load(tmp_path / f"{name}.pt")

    killed, of_killed = run("killed")
    whole, of_whole = run("whole", "--no-replay")
    assert killed.returncode == -signal.SIGKILL
    assert killed.stdout.split() == ["saved", "0", "saved", "1"]
    assert whole.returncode == 0, whole.stderr
    # Step 3 of 4 was skipped, and the last one moved the weights.
    script.write_text(script.read_text().replace("range(4)", "range(2)"))
    _, of_two = run("two", "--no-replay")
    assert all(torch.equal(of_killed[name], of_two[name]) for name in of_two)
    assert not torch.equal(of_killed["weight"], of_whole["weight"])


# ---- scripts of many kinds


def test_two_optimizers_on_one_pass_have_a_story_each():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 1)})
    both = [torch.optim.SGD(part.parameters(), 0.1) for part in model.values()]
    with nc.attached("fp16", Static(scale=8.0)) as run:
        loss = model["b"](model["a"](torch.full((2, 4), 1e6))).sum()
        loss.backward()
        for optimizer in both:
            optimizer.step()
    stories = [note for note in run.notes if "narrowcast repeated it" in note]
    assert len(stories) == 2
    assert all("the cast to fp16, of values from 1e+06 to 1e+06" in story for story in stories)
    assert not any("undecided" in story for story in stories)


class Branches(nn.Module):
    """Two layers; the backward pass of each multiplies gradients by 300."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        return (self.a(x) * 300).sum() + (self.b(x) * 300).sum()


def test_optimizers_that_skip_one_backward_pass_have_a_story_each():
    """The first skip has the next steps hold gradients; the calls of this step were made without."""
    model = Branches()
    both = [torch.optim.SGD(part.parameters(), 0.0) for part in (model.a, model.b)]
    with nc.attached("fp16", Static(scale=1.0)) as run:
        for _ in range(2):
            for optimizer in both:
                optimizer.zero_grad()
            (model(torch.full((2, 4), 1e-3)) * 1000).backward()
            for optimizer in both:
                optimizer.step()
    stories = [note for note in run.notes if "narrowcast repeated it" in note]
    assert len(stories) == 2
    assert all("where    backward pass of Branches" in story for story in stories)


def test_batched_gradients_pass_while_gradients_are_held():
    """They have no storage whose bytes could be counted."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with nc.attached("fp16", Static(scale=1.0)) as run:
        run._regions.explainer.recording.hold_gradients(True)
        run._regions.explainer.recording.clear()
        x = torch.ones(1, 4, requires_grad=True)
        y = model(x)
        seeds = torch.eye(4).reshape(4, 1, 4)
        (rows,) = torch.autograd.grad(y, x, seeds, is_grads_batched=True, retain_graph=True)
        (y.sum() * torch.inf).backward()
        optimizer.step()
    assert rows.shape == (4, 1, 4)
    assert rows.isfinite().all()
    (story,) = [note for note in run.notes if "narrowcast repeated it" in note]
    assert "undecided: a gradient that arrived at an output could not be held" in story


def test_an_optimizer_that_evaluates_again_is_not_explained():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) * torch.inf).sum()
        loss.backward()
        return loss

    with nc.attached("fp16", Static(scale=8.0)) as run:
        optimizer.step(closure)
    assert run.facts["skipped_steps"] == 1
    assert not any("narrowcast repeated it" in note for note in run.notes)


def test_evaluation_and_a_step_that_was_taken_hold_nothing():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nc.attached("bf16") as run:
        recording = run._regions.explainer.recording
        model(torch.ones(2, 4)).sum().backward()
        assert len(recording.recorded_step().calls) == 1
        optimizer.step()
        assert recording.recorded_step().calls == []
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert recording.recorded_step().calls == []
        model(torch.ones(2, 4))
    assert recording.recorded_step().calls == []


def test_without_replay_nothing_is_held():
    model = nn.Linear(4, 1)
    with nc.attached("bf16", explain_skips=False) as run:
        model(torch.ones(2, 4)).sum().backward()
        assert run._regions.explainer.recording.recorded_step().calls == []


def test_a_call_under_vmap_is_held_without_harm():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nc.attached("bf16") as run:
        torch.vmap(model)(torch.ones(3, 2, 4)).sum().backward()
        optimizer.step()
    assert run.facts["steps"] == 1


def test_the_advice_for_a_script_is_what_the_command_takes(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    torch.nn.init.constant_(model[0].weight, 1e4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Attachment("fp16", Static(scale=8.0), explains_skips=True) as run:
        model(torch.full((2, 4), 100.0)).sum().backward()
        optimizer.step()
    (story,) = [note for note in run.notes if "narrowcast repeated it" in note]
    advice = next(line for line in story.splitlines() if "--policy p.toml" in line)
    lines = advice.partition("of the lines ")[2].partition(";")[0]
    file = tmp_path / "policy.toml"
    file.write_text(lines.replace(", compute", "\ncompute", 1).replace(", rule", "\nrule", 1))
    policy = nc.Policy.load(file)
    assert policy.rules
    assert policy.compute == "fp16"
    with Attachment(policy, Static(scale=8.0)), torch.no_grad():
        assert model(torch.full((2, 4), 100.0)).isfinite().all()


def test_a_rule_is_advised_beside_those_that_the_policy_has(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    torch.nn.init.constant_(model[0].weight, 1e4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    file = tmp_path / "policy.toml"
    file.write_text('version = 1\ncompute = "fp16"\n[[rule]]\nmodule = "1"\ncompute = "fp32"\n')
    with Attachment(file, Static(scale=8.0), explains_skips=True) as run:
        model(torch.full((2, 4), 100.0)).sum().backward()
        optimizer.step()
        assert model[1](torch.ones(1, 4)).dtype == torch.float32  # its own rule still holds
    (story,) = [note for note in run.notes if "narrowcast repeated it" in note]
    advice = next(line for line in story.splitlines() if "[[rule]]" in line)
    lines = advice.partition("these lines at its end: ")[2].partition(";")[0]
    file.write_text(file.read_text() + lines.replace(", ", "\n"))
    policy = nc.Policy.load(file)
    assert len(policy.rules) == 2
    with Attachment(policy, Static(scale=8.0)), torch.no_grad():
        assert model(torch.full((2, 4), 100.0)).isfinite().all()


def test_the_line_that_calls_a_plain_container_is_that_of_the_script():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nc.attached("fp16", Static(scale=8.0)) as run:
        model(torch.full((2, 4), 1e6)).sum().backward()  # this line
        optimizer.step()
    (story,) = [note for note in run.notes if "narrowcast repeated it" in note]
    assert "test_script.py:" in story
    assert "# this line" in story


def test_a_report_shows_a_story_line_by_line(tmp_path):
    writer = CaptureWriter(tmp_path / "capture.jsonl")
    writer.write(start_event(["train.py"], "fp16"))
    trained(writer=writer)
    capture = read_capture(writer.path)
    lines = run_block(capture).splitlines()
    assert all(len(line) < 80 for line in lines)
    begins = lines.index("  note: step 5 was skipped at a loss scale of 8. narrowcast repeated it:")
    assert lines[begins + 1].startswith("        where forward pass of Net, test_script.py:")
    assert any(line.startswith("        verdict precision: in fp32") for line in lines)
    # Shown once while it ran, so the end of run leaves it out.
    assert "narrowcast repeated it" not in run_block(capture, with_told=False)
    assert "repeated it:<br>" in run_page(capture, tmp_path)
