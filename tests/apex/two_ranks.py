"""Runs a script of this folder's ``scripts`` on two processes, which find each other through a file."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def found_by_two_ranks(script, folder, *, timeout_s=240):
    """What each rank printed last, read as JSON; the script is called with its rank and the file."""
    files = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(2)]
    processes = []
    for rank, (out, err) in enumerate(files):
        with out.open("w") as stdout, err.open("w") as stderr:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "error", str(SCRIPTS / script), str(rank), str(folder / "store")],
                    stdout=stdout,
                    stderr=stderr,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            )
    end = time.monotonic() + timeout_s
    # One that failed leaves the other waiting for it.
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.poll() for process in processes):
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait()
    told = "\n".join(f"rank {rank}: {err.read_text()}" for rank, (_, err) in enumerate(files))
    assert [process.returncode for process in processes] == [0, 0], told
    return [json.loads(out.read_text().splitlines()[-1]) for out, _ in files]
