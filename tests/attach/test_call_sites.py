"""Which line a loss is called at: the script's own, whoever calls ``backward`` for it."""

import sys
import types
from pathlib import Path

import pytest
import torch

from narrowcast.attach import Attachment
from narrowcast.attach._recorder import call_site
from narrowcast.observe.capture import CaptureWriter, read_capture


def loss():
    return (torch.ones(3, requires_grad=True) * 2).sum()


@pytest.fixture
def losses(tmp_path):
    """Backwards seen while it is entered, and the sites of their losses."""

    class Seen:
        def __enter__(self):
            self.writer = CaptureWriter(tmp_path / "capture.jsonl")
            self.writer.write({"event": "start", "schema": 2, "kind": "run", "argv": [], "policy": "bf16",
                               "started": 0.0})  # fmt: skip
            self.attachment = Attachment("bf16", writer=self.writer)
            self.attachment.__enter__()
            return self

        def __exit__(self, *error):
            self.attachment.__exit__(None, None, None)

        @property
        def sites(self):
            return [event["site"] for event in read_capture(self.writer.path).of("loss")]

    return Seen()


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


def test_the_line_that_calls_backward(losses):
    with losses:
        loss().backward()
        first = here(-1)
        torch.autograd.backward([loss()])
        second = here(-1)
        for _ in range(2):
            list(map(torch.Tensor.backward, [loss()]))
        third = here(-1)
    assert losses.sites == [first, second, third, third]


@pytest.mark.parametrize("folder", [
    "/somewhere/lib/python3.11/site-packages/lightning/", "/usr/lib/python3/dist-packages/framework/",
])  # fmt: skip
def test_a_training_framework_is_passed_over(folder, losses):
    framework = compiled(f"{folder}trainer.py", "def fit(loss):\n    loss().backward()\n")
    with losses:
        framework.fit(loss)
        site = here(-1)
    assert losses.sites == [site]


def test_torchs_and_pythons_own_frames_are_passed_over(losses):
    inside = compiled(f"{Path(torch.__file__).parent}/made.py", "def call(f):\n    return f()\n")
    standard = compiled(f"{Path(types.__file__).parent}/made.py", "def call(f):\n    return f()\n")
    ours = compiled(
        f"{Path(call_site.__code__.co_filename).parent}/made.py", "def call(f):\n    return f()\n"
    )
    value = loss()
    with losses:
        inside.call(lambda: standard.call(lambda: ours.call(value.backward)))
        site = here(-1)
    assert losses.sites == [site]


@pytest.mark.parametrize("path", [
    "/home/someone/torch/train.py", "/home/someone/narrowcast/train.py",
    "/home/someone/my-site-packages-copy/train.py", "/home/someone/site-packages.py/train.py",
])  # fmt: skip
def test_a_folder_with_a_librarys_name_is_the_scripts(path, losses):
    script = compiled(path, "\n\ndef train(loss):\n    loss().backward()\n")
    with losses:
        script.train(loss)
    assert losses.sites == ["train.py:4"]


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
