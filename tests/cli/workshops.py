"""Scripts in a folder of their own, run by Python and by ``narrowcast run``, each in a fresh process."""

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import child_processes
from kept_rates import keep_rates
from narrowcast.capture import read_capture
from narrowcast.machine._environment import table_format

END_BLOCK = re.compile(r"^narrowcast: .*\n(?:  .*\n)*?  capture: (.*)\n", re.MULTILINE)
# Where the CPU of a test machine is slow in a format, every command that uses it says so.
SLOW_HERE = re.compile(r"^narrowcast: note: \S+ on this CPU .*\n", re.MULTILINE)
# So wide that no message is wrapped: test_output.py tests how they are.
WIDE = "10000"


@dataclass(frozen=True)
class Ended:
    """A process that ended: what it wrote, and the block that ``narrowcast run`` added, apart."""

    code: int
    stdout: str
    stderr: str
    block: str
    captures: tuple[Path, ...]

    @property
    def capture(self):
        (path,) = self.captures
        return read_capture(path)


class Workshop:
    """A folder with scripts in it, and ways to run them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.cache = folder / "cache"
        self.folder.mkdir()
        # What the table says, so that no command measures.
        speed = 0.5 if table_format("cpu").format == "fp32" else 2.0
        assert keep_rates(self.cache, (speed, speed, speed)) is None
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("NARROWCAST_", "PYTEST_"))}
        self.environment = outside | {"NARROWCAST_CACHE_DIR": str(self.cache), "COLUMNS": WIDE}

    def write(self, name: str, *texts: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(t if isinstance(t, bytes) else textwrap.dedent(t).encode() for t in texts))
        return path

    def start(self, *command: str, **settings) -> subprocess.Popen:
        environment = self.environment | settings.pop("environment", {})
        given = {"cwd": self.folder, "env": environment, "encoding": "utf-8", "errors": "surrogateescape"}
        return child_processes.start(command, **(given | settings))

    def end(self, process: subprocess.Popen, stdin: str = "") -> Ended:
        done = child_processes.end(process, stdin)
        found = [Path(line) for line in END_BLOCK.findall(done.stderr)]
        block = "".join(match[0] for match in END_BLOCK.finditer(done.stderr))
        stderr = SLOW_HERE.sub("", END_BLOCK.sub("", done.stderr))
        return Ended(done.returncode, done.stdout, stderr, block, tuple(found))

    def python(self, *words: str, stdin: str = "", **settings) -> Ended:
        return self.end(self.start(sys.executable, *words, **settings), stdin)

    def narrowcast(self, *words: str, stdin: str = "", **settings) -> Ended:
        return self.end(self.start(sys.executable, "-m", "narrowcast", *words, **settings), stdin)

    def both(self, *words: str, options=(), stdin: str = "", **settings) -> tuple[Ended, Ended]:
        """The same words after ``python`` and after ``narrowcast run``, at the same time."""
        plain = self.start(sys.executable, *words, **settings)
        ours = self.start(sys.executable, "-m", "narrowcast", "run", *options, *words, **settings)
        return self.end(plain, stdin), self.end(ours, stdin)
