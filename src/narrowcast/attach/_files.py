"""Which files a script writes, and whether it reads one that an earlier run of it wrote.

A script that resumes from what it saved does other work when it runs again: two such runs cannot be compared.
"""

from __future__ import annotations

import functools
import getpass
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_WRITES = os.O_WRONLY | os.O_RDWR
# Compiled code, which later runs are meant to read, and locks.
_NO_DATA = (".pyc", ".pyo", ".so", ".pyd", ".lock")
_CACHES_NAMED_BY = (
    "CUDA_CACHE_PATH", "HF_HOME", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)  # fmt: skip

READ_OF_AN_EARLIER_RUN = 97
"""Exit code of a process that was ended because it read a file that an earlier run wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSeen:
    """Result of ``read_files``.

    Attributes:
        written: absolute paths, each once, in the order of the first write.
        read: file of an earlier run that this run read, and the name of that run; None: it read none.
    """

    written: tuple[str, ...]
    read: tuple[str, str] | None


class FileWatch:
    """Log the files that a process writes, and those that processes which it starts by multiprocessing write.

    A process that reads a file of ``earlier`` before this run wrote it is ended at once with exit code
    ``READ_OF_AN_EARLIER_RUN``.

    It sees the files that Python opens and renames, and ``torch.save``. It does not see links, nor files that
    other native code (safetensors, h5py, SQLite) or other programs open.

    Audit hooks cannot be removed, so use it in a process that runs one script. It can be pickled.

    Args:
        log: where to write.
        earlier: files that earlier runs wrote, absolute -> name of that run.
        own: folders that belong to this run alone; files in them are ignored.
    """

    def __init__(self, log: Path, earlier: Mapping[str, str], own: Iterable[Path] = ()) -> None:
        self._earlier = dict(earlier)
        self._written: set[str] = set()
        # Kept as a path, not an open file: scripts exist that close file descriptors they did not open.
        self._log = os.path.realpath(log)
        self._ignored = tuple(os.path.realpath(folder) + os.sep for folder in [*own, *_cache_folders()])
        log.write_bytes(b"")

    def install(self) -> None:
        """Begin; lasts as long as the process."""
        global _in_force  # noqa: PLW0603 (an audit hook belongs to the process, for good)
        _in_force = self
        save = torch.save

        @functools.wraps(save)
        def watched_save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, str | os.PathLike):  # which torch opens in C++
                self._wrote(f)
            save(obj, f, *args, **kwargs)

        torch.save = torch.serialization.save = watched_save

        def audit(event: str, args: tuple[Any, ...]) -> None:
            if event == "open":
                self._opened(args[0], args[2])
            elif event == "os.rename":
                self._wrote(args[1])

        sys.addaudithook(audit)

    def _opened(self, path: Any, flags: Any) -> None:
        if isinstance(path, int) or not isinstance(flags, int):
            return
        update = flags & os.O_RDWR and not flags & os.O_TRUNC  # the old content matters
        if update or not flags & _WRITES:
            self._reads(path)
        # A folder is opened for writing by a temporary file without a name (O_TMPFILE).
        if flags & _WRITES and not os.path.isdir(path):
            self._wrote(path)

    def _wrote(self, path: Any) -> None:
        name = self._real_path(path)
        if name is not None and name not in self._written:
            self._written.add(name)
            self._log_line({"wrote": name})

    def _reads(self, path: Any) -> None:
        name = self._real_path(path) if self._earlier else None
        if name is None:
            return
        places = [name, *map(str, Path(name).parents)]  # a folder may have been renamed with its files
        earlier = next((self._earlier[place] for place in places if place in self._earlier), None)
        if earlier is None or not self._written.isdisjoint(places):
            return
        if not os.path.isfile(name) or not os.path.getsize(name):
            return
        # Another process of this run may have written it since this process was started.
        if set(read_files(Path(self._log)).written).isdisjoint(places):
            self._log_line({"read": name, "run": earlier})
            os._exit(READ_OF_AN_EARLIER_RUN)

    def _real_path(self, path: Any) -> str | None:
        """Return the absolute path of a file, links resolved; None if it is to be ignored."""
        with suppress(TypeError, ValueError, OSError):
            text = os.fsdecode(path)
            if text.endswith(_NO_DATA) or text.startswith(("/dev/", "/proc/", "/sys/")):
                return None
            name = os.path.realpath(text)
            ignored = (
                name == self._log or f"{name}{os.sep}".startswith(self._ignored) or "__pycache__" in name
            )
            return None if ignored else name
        return None

    def _log_line(self, line: dict[str, str]) -> None:
        with suppress(OSError):  # the script deleted the folder
            log = os.open(self._log, os.O_WRONLY | os.O_APPEND)
            try:
                # In one piece: other processes write here too.
                os.write(log, (json.dumps(line) + "\n").encode())
            finally:
                os.close(log)


def read_files(log: Path) -> FilesSeen:
    """Read the log of a ``FileWatch``; a truncated line is ignored."""
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
    """Return the ``FileWatch`` of this process, for a process that it starts."""
    return _in_force


def _cache_folders() -> list[Path]:
    """Return the cache folders of this user on this machine."""
    folders = []
    with suppress(RuntimeError, KeyError, OSError):  # no home, no name
        home = Path.home()
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache"))
        folders += [home / ".triton", home / ".nv", home / "Library" / "Caches"]
        folders.append(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
    folders += [Path(os.environ[name]) for name in _CACHES_NAMED_BY if os.environ.get(name)]
    return folders
