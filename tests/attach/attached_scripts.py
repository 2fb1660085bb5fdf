"""Scripts run in a process of their own, as a comparison runs them."""

import json
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import child_processes
from narrowcast.attach import read_files
from narrowcast.observe.capture import read_capture

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
        process = child_processes.start([*command, "script.py", *words], cwd=self.work, env=environment)
        return process, folder

    def run(self, text, *words, limit_s=child_processes.LIMIT_S, **settings):
        process, folder = self.start(text, *words, **settings)
        done = child_processes.end(process, limit_s=limit_s)
        return Ended(done.returncode, done.stdout.splitlines(), done.stderr, folder)
