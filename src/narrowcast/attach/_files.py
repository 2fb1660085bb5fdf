"""Which files a script writes, and whether it reads one that an earlier run of it wrote.

A script that resumes from what it saved does other work the second time it runs; a comparison of two such
runs compares nothing.
"""

from __future__ import annotations

import functools
import getpass
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowcast.attach._patches import Patches

_WRITES = os.O_WRONLY | os.O_RDWR
# Compiled code, and what fonts and kernels are kept in: read by later runs, and meant to be.
_BYTECODE = (".pyc", ".pyo", ".so", ".pyd")
_CACHES = ("torch", "torch_extensions", "triton", "matplotlib", "fontconfig", "narrowcast", "pip")
# They write by C++, where Python's audit hooks see nothing: the function and where its path stands.
_NATIVE_WRITERS: tuple[tuple[Any, str, int], ...] = ((torch, "save", 1), (torch.jit, "save", 1))
_NATIVE_READERS: tuple[tuple[Any, str, int], ...] = ((torch.jit, "load", 0),)

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
    """Writes down, as it happens, which files this process and those it forks write.

    One that reads a file of ``earlier`` before writing it is ended at once, with the code
    ``READ_OF_AN_EARLIER_RUN``: nothing that it would do after that is worth a comparison.

    Audit hooks cannot be removed: for a process that runs one script.

    Args:
        log: where to write it.
        earlier: files that earlier runs wrote, absolute -> name of that run.
        own: folders whose files are nobody else's.
    """

    def __init__(self, log: Path, earlier: Mapping[str, str], own: Iterable[Path] = ()) -> None:
        self._earlier = dict(earlier)
        self._written: set[str] = set()
        self._apart = tuple(os.path.realpath(folder) + os.sep for folder in [*own, *_cache_folders()])
        # Appended to by forked children too, in one write each.
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o644)

    def install(self) -> None:
        """Begin, for as long as the process lives."""
        patches = Patches()
        for owner, name, position in _NATIVE_WRITERS:
            patches.replace(owner, name, _telling(getattr(owner, name), position, self._wrote))
        for owner, name, position in _NATIVE_READERS:
            patches.replace(owner, name, _telling(getattr(owner, name), position, self._reads))
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            self._opened(args[0], args[2])
        elif event in ("os.rename", "os.link", "os.symlink"):
            self._wrote(args[1])

    def _opened(self, path: Any, flags: Any) -> None:
        if isinstance(path, int) or not isinstance(flags, int):
            return
        if flags & (os.O_RDWR | os.O_WRONLY) == os.O_RDWR and not flags & os.O_TRUNC:
            self._reads(path)  # read and written: what was there matters
        if flags & _WRITES:
            self._wrote(path)
        else:
            self._reads(path)

    def _wrote(self, path: Any) -> None:
        name = self._known_as(path)
        if name is not None and name not in self._written:
            self._written.add(name)
            self._tell({"wrote": name})

    def _reads(self, path: Any) -> None:
        if not self._earlier:
            return
        name = self._known_as(path)
        if name is None or name in self._written or name not in self._earlier:
            return
        self._tell({"read": name, "run": self._earlier[name]})
        os._exit(READ_OF_AN_EARLIER_RUN)

    def _known_as(self, path: Any) -> str | None:
        """The one name of a file; None: it does not matter who wrote it."""
        with suppress(TypeError, ValueError, OSError):
            text = os.fsdecode(path)
            if text.endswith(_BYTECODE) or text.startswith(("/dev/", "/proc/", "/sys/")):
                return None
            name = os.path.realpath(text)
            return None if name.startswith(self._apart) or "__pycache__" in name else name
        return None

    def _tell(self, line: dict[str, str]) -> None:
        with suppress(OSError):  # the script closed every file that it could find
            os.write(self._log, (json.dumps(line) + "\n").encode())


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


def _telling(original: Callable[..., Any], position: int, tell: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def native(*args: Any, **kwargs: Any) -> Any:
        path = args[position] if len(args) > position else kwargs.get("f")
        if isinstance(path, str | bytes | os.PathLike):
            tell(path)
        return original(*args, **kwargs)

    return native


def _cache_folders() -> list[Path]:
    """Where compilers and font finders keep what they made, on this machine and for this user."""
    folders = []
    with suppress(RuntimeError, KeyError, OSError):  # no home, no name
        home = Path.home()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
        folders += [cache / name for name in _CACHES]
        folders += [home / ".triton", home / ".nv", home / "Library" / "Caches"]
        folders.append(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
    named = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR", "CUDA_CACHE_PATH")
    folders += [Path(os.environ[name]) for name in named if os.environ.get(name)]
    return folders
