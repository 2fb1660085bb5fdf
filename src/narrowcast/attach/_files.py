"""Which files a script writes, and whether it reads one that an earlier run of it wrote.

A script that resumes from what it saved does other work the second time it runs; a comparison of two such
runs compares nothing.
"""

from __future__ import annotations

import getpass
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.attach._native_files import NativeFiles
from narrowcast.attach._patches import Patches

_WRITES = os.O_WRONLY | os.O_RDWR
# Compiled code, read by later runs and meant to be, and what only keeps two from writing at once.
_NO_DATA = (".pyc", ".pyo", ".so", ".pyd", ".lock")
_CACHES_NAMED_BY = (
    "CUDA_CACHE_PATH", "HF_HOME", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)  # fmt: skip

READ_OF_AN_EARLIER_RUN = 97
"""Exit code of a process that was ended because it read what an earlier run wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSeen:
    """What ``read_files`` found.

    Attributes:
        written: absolute paths, each once, in the order of the first write.
        read: file of an earlier run that this one read, and that run's name; None: it read none.
    """

    written: tuple[str, ...]
    read: tuple[str, str] | None


class FileWatch:
    """Writes down, as it happens, which files a process and those that it starts by multiprocessing write.

    One that reads a file of ``earlier`` before the run wrote it is ended at once, with the code
    ``READ_OF_AN_EARLIER_RUN``: nothing that it would do after that is worth a comparison.

    Seen is what Python opens, renames and links, SQLite's databases, and what torch, safetensors and h5py
    open by native code. Not seen is other native code (Parquet files, OpenCV's pictures) and other programs.

    Audit hooks cannot be removed: for a process that runs one script. A copy by pickle goes on in another.

    Args:
        log: where to write it.
        earlier: files that earlier runs wrote, absolute -> name of that run.
        own: folders whose files are nobody else's.
    """

    def __init__(self, log: Path, earlier: Mapping[str, str], own: Iterable[Path] = ()) -> None:
        self._earlier = dict(earlier)
        self._written: set[str] = set()
        # By its path each time: a script may close files that it has not opened, and open its own in place.
        self._log = os.path.realpath(log)
        self._apart = tuple(os.path.realpath(folder) + os.sep for folder in [*own, *_cache_folders()])
        log.write_bytes(b"")

    def install(self) -> None:
        """Begin, for as long as the process lives."""
        global _in_force  # noqa: PLW0603 (as an audit hook is: for the process, and for good)
        _in_force = self
        native = NativeFiles(self._wrote, self._reads)

        def audit(event: str, args: tuple[Any, ...]) -> None:
            if event == "open":
                self._opened(args[0], args[2])
            elif event == "import":
                native.importing(args[0])
            elif event in ("os.rename", "os.link", "os.symlink"):
                self._placed(args[1], args[0])
            elif event == "sqlite3.connect":
                self._opened(args[0], os.O_RDWR)

        sys.addaudithook(audit)
        native.install(Patches())

    def _opened(self, path: Any, flags: Any) -> None:
        if isinstance(path, int) or not isinstance(flags, int):
            return
        if flags & _WRITES and _is_folder(path):
            return  # a temporary file without a name, which is opened by its folder
        if flags & (os.O_RDWR | os.O_WRONLY) == os.O_RDWR and not flags & os.O_TRUNC:
            self._reads(path)  # read and written: what was there matters
        if flags & _WRITES:
            self._wrote(path)
        else:
            self._reads(path)

    def _wrote(self, path: Any) -> None:
        name = self._known_as(path)
        if name is not None and (os.access(name, os.W_OK) or not os.path.exists(name)):
            self._note_written(name)

    def _placed(self, path: Any, source: Any) -> None:
        """What is called ``source`` gets this name, which may have been a link's until now."""
        with suppress(TypeError, ValueError, OSError):
            folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
            placed, origin = self._known_as(folder), self._known_as(source)
            if placed is None or name.endswith(_NO_DATA):
                return
            if origin in self._earlier and origin not in self._written:
                self._earlier[os.path.join(placed, name)] = self._earlier[origin]
            else:
                self._note_written(os.path.join(placed, name))

    def _note_written(self, name: str) -> None:
        if name not in self._written:
            self._written.add(name)
            self._tell({"wrote": name})

    def _reads(self, path: Any) -> None:
        if not self._earlier:
            return
        name = self._known_as(path)
        places = [] if name is None else _with_parents(name)
        earlier = next((self._earlier[place] for place in places if place in self._earlier), None)
        if name is None or earlier is None or not self._written.isdisjoint(places) or not _holds_data(name):
            return
        # Another process of this run may have written it since this one was started.
        if not set(read_files(Path(self._log)).written).isdisjoint(places):
            return
        self._tell({"read": name, "run": earlier})
        os._exit(READ_OF_AN_EARLIER_RUN)

    def _known_as(self, path: Any) -> str | None:
        """The one name of a file; None: it does not matter who wrote it."""
        with suppress(TypeError, ValueError, OSError):
            text = os.fsdecode(path)
            if text.endswith(_NO_DATA) or text.startswith(("/dev/", "/proc/", "/sys/")):
                return None
            name = os.path.realpath(text)
            apart = name == self._log or f"{name}{os.sep}".startswith(self._apart) or "__pycache__" in name
            return None if apart else name
        return None

    def _tell(self, line: dict[str, str]) -> None:
        with suppress(OSError):  # the script cleared the folder
            log = os.open(self._log, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(log, (json.dumps(line) + "\n").encode())  # whole: other processes write here too
            finally:
                os.close(log)


def read_files(log: Path) -> FilesSeen:
    """What a ``FileWatch`` wrote down; a line cut short is left out."""
    written: dict[str, None] = {}
    read = None
    with suppress(OSError):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                seen = json.loads(line)
                if "wrote" in seen:
                    written[seen["wrote"]] = None
                elif read is None:
                    read = (seen["read"], seen["run"])
    return FilesSeen(written=tuple(written), read=read)


_in_force: FileWatch | None = None


def watch_in_force() -> FileWatch | None:
    """What watches this process, for one that it starts."""
    return _in_force


def _is_folder(path: Any) -> bool:
    with suppress(TypeError, ValueError):
        return os.path.isdir(path)
    return False


def _with_parents(name: str) -> list[str]:
    """A file and the folders that it is in: one of them may have been given its name whole."""
    places = [name]
    while (parent := os.path.dirname(places[-1])) != places[-1]:
        places.append(parent)
    return places


def _holds_data(name: str) -> bool:
    """Whether there is anything to read: a folder, a pipe, an empty or a missing file tell nothing."""
    try:
        status = os.stat(name)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _cache_folders() -> list[Path]:
    """Where programs keep what they could make or fetch again, on this machine and for this user."""
    folders = []
    with suppress(RuntimeError, KeyError, OSError):  # no home, no name
        home = Path.home()
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache"))
        folders += [home / ".triton", home / ".nv", home / "Library" / "Caches"]
        folders.append(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
    folders += [Path(os.environ[name]) for name in _CACHES_NAMED_BY if os.environ.get(name)]
    return folders
