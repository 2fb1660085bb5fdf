"""The events of a capture: losses with their sites, steps, forwards, in the order in which they happened."""

import functools
import json
import math
import sys
import time
import types
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from scenarios import data, network

from narrowcast.attach import Attachment
from narrowcast.attach._recorder import EventRecorder, call_site
from narrowcast.capture import read_capture


def events(writer, kind=None):
    capture = read_capture(writer.path)
    return list(capture.events) if kind is None else capture.of(kind)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_the_value_is_that_of_the_loss_bit_for_bit(policy, writer):
    model, (x, y) = network(), data()
    expected = []
    with Attachment(policy, writer=writer):
        for n in range(3):
            value = (model(x) - y).square().mean() * 10.0**n
            expected.append(float(value.detach()))
            value.backward()
            with torch.no_grad():
                value.zero_()  # too late to change what is recorded
    losses = events(writer, "loss")
    assert [loss["value"] for loss in losses] == expected
    assert [loss["backward"] for loss in losses] == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("value", [0.1, math.nan, math.inf, -math.inf])
def test_one_number_of_any_format_and_shape(value, dtype, shape, writer):
    weight = torch.full(shape, value, dtype=dtype, requires_grad=True)
    with Attachment("bf16", writer=writer):
        (weight * 1).backward()
    (loss,) = events(writer, "loss")
    assert loss["value"] == pytest.approx(float(torch.tensor(value, dtype=dtype)), rel=0, abs=0, nan_ok=True)
    json.loads(writer.path.read_text().splitlines()[1])


NOT_ONE_NUMBER = {
    "several": lambda weight: torch.autograd.backward([weight.sum(), (weight * 2).sum()]),
    "seeded": lambda weight: (weight * 2).backward(torch.ones(3)),
    "complex": lambda weight: (weight.sum() * 1j).backward(torch.tensor(1j)),
    "edge": lambda weight: torch.autograd.backward(torch.autograd.graph.get_gradient_edge(weight.sum())),
    "meta": lambda _: torch.ones(1, device="meta", requires_grad=True).sum().backward(),
}


@pytest.mark.parametrize("backward", NOT_ONE_NUMBER.values(), ids=NOT_ONE_NUMBER)
def test_what_is_not_one_number_gives_no_loss_and_is_counted(backward, writer):
    with Attachment("bf16", writer=writer) as attached:
        backward(torch.ones(3, requires_grad=True))
    assert events(writer, "loss") == []
    assert attached.facts["backwards"] == 1


def test_forwards_are_timed_until_the_first_backward(writer):
    model, (x, y) = network(), data()

    model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    with Attachment("bf16", writer=writer) as attached:
        with torch.no_grad():
            model.eval()(x)
        model.train()(x)
        (model(x) - y).square().mean().backward()
        model(x)
    forwards = events(writer, "forward")
    assert [(f["gradients"], f["training"]) for f in forwards] == [(False, False), (True, True), (True, True)]
    # The sleep is its least duration; the time of the event is that of its end.
    assert all(0.05 <= f["duration_s"] <= f["time_s"] for f in forwards)
    assert attached.facts["forwards"] == 3


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_events_stand_in_the_order_in_which_they_happened(policy, writer):
    model, (x, y) = network(), data()
    with Attachment(policy, writer=writer) as attached:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for n in range(3):
            (model(x) - y).square().mean().backward()
            if n == 1:
                attached.recorder.note("something unusual")
            optimizer.step()
            optimizer.zero_grad()
    kinds = [event["event"] for event in events(writer)]
    notes = [kind for kind in kinds if kind == "note"]
    wanted = ["loss", "step", "loss", "note", "step", "loss", "step", "end"]
    # fp16 may say before all else that it is slow here.
    begin = ["start", "device", *notes[1:], "forward"]
    assert kinds == begin + wanted
    times = [event["time_s"] for event in events(writer) if "time_s" in event]
    assert times == sorted(times)
    steps = events(writer, "step")
    assert [step["backward"] for step in steps] == [1, 2, 3]
    assert steps[0]["interval_s"] is None
    for before, after in pairwise(steps):
        assert after["interval_s"] == pytest.approx(after["time_s"] - before["time_s"], abs=0.05)


def test_values_on_a_device_are_read_once_a_second(writer):
    recorder, now, read = EventRecorder(writer, print), 100.0, []
    recorder._last_flush = recorder._started = now

    model = torch.nn.Linear(1, 1)

    def reading():
        read.append(now)
        return 0.5

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: now)
        for n in range(40):
            now = 100.0 + n / 10
            recorder.saw_forward(reading, model)
        recorder.flush()
    assert len(read) == 40
    assert len(set(read)) <= 5
    assert [forward["duration_s"] for forward in events(writer, "forward")] == [0.5] * 40


def test_memory_does_not_grow_with_the_backwards(writer):
    weight = torch.ones(1, requires_grad=True)
    with Attachment("fp16", writer=writer) as attached:
        for _ in range(3000):
            (weight * 2).sum().backward()
        assert len(attached.recorder._unwritten) <= 1024
        assert len(attached._backward.leaves._unread) <= 64
        assert len(attached._backward.leaves.factors) == 0
        assert len(attached._backward._retained) == 0
    assert len(events(writer, "loss")) == 3000


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_tensors_that_retained_their_gradients_are_forgotten(policy):
    model = network()
    with Attachment(policy) as attached:
        for _ in range(5):
            middle = model(data(4)[0])
            middle.retain_grad()
            middle.sum().backward()
        assert len(attached._backward._retained) == 1
        del middle
        assert len(attached._backward._retained) == 0


# ---- which line of the script called backward


def loss():
    return (torch.ones(3, requires_grad=True) * 2).sum()


def sites(writer):
    return [event["site"] for event in events(writer, "loss")]


def here(offset=0):
    """File, as a site names it, and line of the caller, or one so many lines from it."""
    path = Path(__file__)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(path.name)
    return f"{shown.as_posix()}:{sys._getframe(1).f_lineno + offset}"


def compiled(path, text):
    """``text`` as if it stood in the file ``path``: its names."""
    module = types.ModuleType("made")
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def test_the_line_that_calls_backward(writer):
    with Attachment("bf16", writer=writer):
        loss().backward()
        first = here(-1)
        torch.autograd.backward([loss()])
        second = here(-1)
        for _ in range(2):
            list(map(torch.Tensor.backward, [loss()]))
        third = here(-1)
    assert sites(writer) == [first, second, third, third]


def test_frames_of_libraries_torch_and_python_are_passed_over(writer):
    text = "def call(f):\n    return f()\n"
    folders = ["/lib/site-packages/lightning", "/usr/lib/dist-packages/framework"]
    folders += [
        Path(path).parent for path in (torch.__file__, types.__file__, call_site.__code__.co_filename)
    ]
    call = loss().backward
    for folder in folders:
        call = functools.partial(compiled(f"{folder}/made.py", text).call, call)
    with Attachment("bf16", writer=writer):
        call()
        site = here(-1)
    assert sites(writer) == [site]


@pytest.mark.parametrize("path", [
    "/home/someone/torch/train.py", "/home/someone/narrowcast/train.py",
    "/home/someone/my-site-packages-copy/train.py", "/home/someone/site-packages.py/train.py",
])  # fmt: skip
def test_a_folder_with_a_librarys_name_is_the_scripts(path, writer):
    script = compiled(path, "\n\ndef train(loss):\n    loss().backward()\n")
    with Attachment("bf16", writer=writer):
        script.train(loss)
    assert sites(writer) == ["train.py:4"]


def test_a_script_that_changes_its_folder_keeps_its_names(runs):
    ended = runs.run(
        """
        import os, torch
        os.chdir("/")
        torch.ones(3, requires_grad=True).sum().backward()
        """
    )
    assert (ended.code, ended.stderr) == (0, "")
    assert [event["site"] for event in ended.capture.of("loss")] == ["script.py:4"]


def test_an_adaptive_solver_calls_its_function_more_often():
    """Euler's method, its step halved until two halves agree with the whole to 1e-4, as rounding does not."""
    calls = {}
    for policy in ("fp32", "bf16"):
        torch.manual_seed(0)
        function = torch.nn.Sequential(torch.nn.Linear(64, 64))
        with torch.no_grad():
            function[0].weight.mul_(0.034)
            function[0].bias.add_(1.0)
        with Attachment(policy) as attached, torch.no_grad():
            y, left, step, tries = torch.linspace(-1, 1, 64), 1.0, 0.5, 0
            while left > 0:
                half = y + step / 2 * function(y)
                fine = half + step / 2 * function(half)
                step, tries = step / 2, tries + 1
                if (y + 2 * step * function(y) - fine).abs().max() < 1e-4:
                    y, left, step = fine, left - 2 * step, min(0.5, 4 * step)
        assert attached.facts["module_calls"] == 3 * 2 * tries
        calls[policy] = tries
    assert calls["bf16"] > 2 * calls["fp32"]
