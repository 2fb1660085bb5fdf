"""Starting the scripts of the tests of checkpoints, in processes of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 1800 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 240


def launched(script, *arguments, processes=None):
    """The lines that a script prints; it, and what it started, is killed past the limit.

    Args:
        processes: under torchrun, so many.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, "-W", "error"]
    if processes:
        command = [sys.executable, *torchrun]
    one = subprocess.Popen(
        [*command, str(SCRIPTS / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        out, err = one.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        _, err = one.communicate()
        pytest.fail(f"{script} {arguments} hung:\n{err[-3000:]}")
    assert one.returncode == 0, f"{script} {arguments} ended with {one.returncode}:\n{err[-6000:]}"
    return out.splitlines()


def facts_of(script, *arguments, processes=None):
    """The JSON that a script prints, a value a line."""
    lines = launched(script, *arguments, processes=processes)
    return [json.loads(line) for line in lines if line.startswith("{")]
