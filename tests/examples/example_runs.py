"""Examples run as a stranger would run them: in a process of their own, in any folder, warnings as errors."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *options: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    outside = {
        k: v for k, v in os.environ.items() if k not in ("NARROWCAST_RUN_DIR", "MPLBACKEND", "DISPLAY")
    }
    return subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / script, *options],
        cwd=folder,
        env=outside | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()
