"""Examples run as a stranger would run them: in a process of their own, in any folder, warnings as errors."""

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from child_processes import finished

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(
    script: str, *options: str, folder: Path, processes: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``examples/SCRIPT`` with ``folder`` as current folder; as several processes by torchrun."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *options]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        command = [*launcher, "--nproc-per-node", str(processes), *command]
        environment = {"OMP_NUM_THREADS": "1", **environment}  # else torchrun sets it, and says so
    return _ended(command, folder, environment)


def _ended(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    outside = {
        k: v for k, v in os.environ.items() if k not in ("NARROWCAST_RUN_DIR", "MPLBACKEND", "DISPLAY")
    }
    return finished(command, cwd=folder, env=outside | environment)


def succeeded(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def doctor(script: str, *options: str, folder: Path) -> dict[str, Any]:
    """What ``narrowcast doctor --json`` finds in ``examples/SCRIPT``, which runs in FP32 and in bf16."""
    first = [sys.executable, "-m", "narrowcast", "doctor", "--budget-s", "0.3", "--policy", "bf16", "--json"]
    environment = {"NARROWCAST_CACHE_DIR": str(folder / "cache")}
    done = _ended([*first, str(EXAMPLES / script), *options], folder, environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)


def load(script: str) -> ModuleType:
    """Import ``examples/SCRIPT`` without running its main(); the modules beside it are its own alone."""
    path = EXAMPLES / script
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(path.parent)):
                del sys.modules[name]
    return module


def refused(script: str, *options: str) -> str:
    """The one line that ``examples/SCRIPT`` says of bad options before it ends with exit code 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ending:
        load(script).parse_arguments(list(options))
    assert ending.value.code == 2
    lines = said.getvalue().splitlines()
    assert lines[0].startswith("usage: ")
    return lines[-1].partition(": error: ")[2]


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Nested values and tensors, to the bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}/{index}")
    else:
        assert a == b, where
