"""Scripts run as a comparison runs them, in forked processes; this module is imported there too."""

import json
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

from narrowcast.attach import Attachment, _run, run_attached
from narrowcast.capture import CaptureWriter, read_capture, start_event
from narrowcast.scripts import FileWatch, Script


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
    def at_end_was_called(self):
        return (self.folder / "at_end").exists()


class Runs:
    """Runs scripts in ``folder / "work"``, each run with a folder of its own beside it."""

    def __init__(self, server, folder):
        self._server = server
        self.work = folder / "work"
        self.work.mkdir()
        self._folder = folder
        self._count = 0

    def run(self, text, *words, policy="bf16", stop_after=0, patience_s=60, watched=False, limit_s=60):
        self._count += 1
        folder = self._folder / f"run-{self._count}"
        folder.mkdir()
        (self.work / "script.py").write_text(textwrap.dedent(text))
        settings = {
            "folder": str(folder),
            "policy": policy,
            "stop_after": stop_after,
            "patience_s": patience_s,
            "watched": watched,
        }
        # Not under ~/.cache, whose files belong to nobody.
        environment = os.environ | {"XDG_CACHE_HOME": str(self._folder / "cache")}
        done = self._server.run(
            "attached_scripts:run_here",
            [json.dumps(settings), "script.py", *words],
            folder=folder,
            cwd=self.work,
            env=environment,
            limit_s=limit_s,
        )
        return Ended(done.returncode, done.stdout.splitlines(), done.stderr, folder)


def run_here(words):
    """Run a script in this process; the first of ``words`` is JSON."""
    settings = json.loads(words[0])
    script = Script.from_path(words[1], words[2:])
    folder = Path(settings["folder"])
    writer = CaptureWriter(folder / "capture.jsonl")
    writer.write(start_event(script.argv, settings["policy"]))
    _run._PATIENCE_S = settings["patience_s"]
    if settings["watched"]:
        FileWatch(folder).install()
    attachment = Attachment(
        settings["policy"],
        writer=writer,
        stop_after=settings["stop_after"],
    )
    run_attached(script, attachment, at_end=lambda: (folder / "at_end").write_text("called"))
