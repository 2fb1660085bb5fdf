"""Starting the scripts of the tests of checkpoints, in processes of their own."""

import json
import os
import sys
from pathlib import Path

import child_processes
from child_processes import finished

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 1800 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else child_processes.LIMIT_S


def launched(script, *arguments, processes=None):
    """The lines that a script prints.

    Args:
        processes: under torchrun, so many.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, "-W", "error"]
    if processes:
        command = [sys.executable, *torchrun]
    done = finished(
        [*command, SCRIPTS / script, *arguments],
        limit_s=LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{script} {arguments} ended with {done.returncode}:\n{done.stderr[-6000:]}"
    return done.stdout.splitlines()


def facts_of(script, *arguments, processes=None):
    """The JSON that a script prints, a value a line."""
    lines = launched(script, *arguments, processes=processes)
    return [json.loads(line) for line in lines if line.startswith("{")]
