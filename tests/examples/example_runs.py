"""Examples run as a stranger would run them: in a process of their own, in any folder, warnings as errors."""

import contextlib
import importlib.util
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401 - it sets variables of the environment as it is imported
import torch
from torch.utils._pytree import tree_flatten_with_path

from child_processes import finished

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(
    script: str, *options: str, folder: Path, processes: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``examples/SCRIPT`` with ``folder`` as current folder; as several processes by torchrun.

    One that needs no process of its own runs in this one, for to import torch and matplotlib takes seconds.
    """
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *options]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        command = [*launcher, "--nproc-per-node", str(processes), *command]
        environment = {"OMP_NUM_THREADS": "1", **environment}  # else torchrun sets it, and says so
    elif "--processes" not in options and "PYTHONPATH" not in environment:
        return _ended_here(script, options, folder, environment)
    return _ended(command, folder, environment)


def _ended_here(
    script: str, options: Sequence[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    path, code = EXAMPLES / script, 0
    said, complained = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, _own_modules(path.parent):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(path), *options])
        for name in ("NARROWCAST_RUN_DIR", "MPLBACKEND", "DISPLAY"):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as ending:
                code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
                if isinstance(ending.code, str):
                    sys.stderr.write(f"{ending.code}\n")
    return subprocess.CompletedProcess([script], code, said.getvalue(), complained.getvalue())


def _ended(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    outside = {
        k: v for k, v in os.environ.items() if k not in ("NARROWCAST_RUN_DIR", "MPLBACKEND", "DISPLAY")
    }
    return finished(command, cwd=folder, env=outside | environment)


def succeeded(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def load(script: str) -> ModuleType:
    """Import ``examples/SCRIPT`` without running its main(); the modules beside it are its own alone."""
    path = EXAMPLES / script
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with _own_modules(path.parent):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _own_modules(folder: Path) -> Iterator[None]:
    """What is imported from ``folder`` is forgotten at the end: two examples may each have an ``updates``."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


def refused(script: str, *options: str) -> str:
    """The one line that ``examples/SCRIPT`` says of bad options before it ends with exit code 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ending:
        load(script).parse_arguments(list(options))
    assert ending.value.code == 2
    lines = said.getvalue().splitlines()
    assert lines[0].startswith("usage: ")
    return lines[-1].partition(": error: ")[2]


def assert_same(a: Any, b: Any) -> None:
    """Nested values and tensors, to the bit."""
    first, second = tree_flatten_with_path(a)[0], tree_flatten_with_path(b)[0]
    assert [where for where, _ in first] == [where for where, _ in second]
    for (where, x), (_, y) in zip(first, second, strict=True):
        assert type(x) is type(y), where
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype, where
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, where
