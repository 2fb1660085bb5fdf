"""Scripts run in a process of their own, as a comparison runs them."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from narrowcast.attach import read_files
from narrowcast.observe import read_capture

DRIVER = Path(__file__).parent / "scripts" / "attached.py"


@dataclass(frozen=True)
class Ended:
    """A process that ended, and the folder of its run."""

    code: int
    lines: list[str]
    stderr: str
    folder: Path

    @property
    def capture(self):
        return read_capture(self.folder / "capture.jsonl")

    @property
    def files(self):
        return read_files(self.folder / "files.jsonl")

    @property
    def at_end_was_called(self):
        return (self.folder / "at_end").exists()


class Runs:
    """Runs scripts in ``folder / "work"``, each run with a folder of its own beside it."""

    def __init__(self, folder):
        self.work = folder / "work"
        self.work.mkdir()
        self._folder = folder
        self._count = 0

    def start(self, text, *words, policy="bf16", stop_after=0, seed_shift=0, patience_s=60, earlier=None):
        self._count += 1
        folder = self._folder / f"run-{self._count}"
        folder.mkdir()
        (self.work / "script.py").write_text(textwrap.dedent(text))
        settings = {
            "folder": str(folder),
            "policy": policy,
            "stop_after": stop_after,
            "seed_shift": seed_shift,
            "patience_s": patience_s,
            "watch_files": earlier is not None,
            "earlier": earlier,
        }
        command = [sys.executable, "-W", "error::RuntimeWarning", str(DRIVER), json.dumps(settings)]
        # Not under ~/.cache, whose files belong to nobody.
        environment = os.environ | {"XDG_CACHE_HOME": str(self._folder / "cache")}
        process = subprocess.Popen(
            [*command, "script.py", *words],
            cwd=self.work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return process, folder

    def run(self, text, *words, timeout_s=100, **settings):
        process, folder = self.start(text, *words, **settings)
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return Ended(process.returncode, out.splitlines(), err, folder)
