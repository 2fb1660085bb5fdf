"""Find Python files, read them, and write them atomically."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import re
import stat
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from narrowcast._files import replacing
from narrowcast.errors import FileError
from narrowcast.migrate.source._edits import Finding

_SKIPPED = {"__pycache__", "node_modules", "site-packages"}
# No stage finds anything in a file that matches none of these.
WORDS = re.compile(
    rb"\bapex\b|\bamp\b|autocast|GradScaler|custom_fwd|custom_bwd|unscale_|\.scale\(|\bStepper\b"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOutcome:
    """What a migration makes of one file: its text before and after, or why it could not be migrated."""

    path: str
    before: str = ""
    after: str = ""
    findings: tuple[Finding, ...] = ()
    problem: str | None = None

    @property
    def changes(self) -> bool:
        """Whether the migration changes the file."""
        return self.before != self.after

    def as_dict(self) -> dict[str, Any]:
        """Return all of it but the text, for JSON."""
        return {
            "path": self.path,
            "changes": self.changes,
            "problem": self.problem,
            "findings": [asdict(finding) for finding in self.findings],
        }


def python_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files in ``paths`` and the ``*.py`` in folders of ``paths``, each once.

    They are in the order of ``paths``, and sorted inside each folder. Hidden folders, environments, caches
    and symbolic links inside a folder are skipped, unless they are in ``paths`` themselves.

    Raises:
        FileError: a path is missing, or is a notebook.
    """
    by_target: dict[str, Path] = {}  # by the file that a link leads to
    for path in paths:
        if path.is_dir():
            inside = _files_in(path)
        elif path.suffix == ".ipynb":
            raise FileError(
                f"{path} is a notebook, and only Python files can be migrated: write its cells to one "
                f"(jupyter nbconvert --to script {path}), and migrate that"
            )
        elif path.exists():
            inside = iter([path])
        elif str(path) == "-":
            raise FileError("expected files and folders, got -: to see a diff of stdin, give /dev/stdin")
        else:
            raise FileError(f"expected files and folders, and {path} does not exist")
        for file in inside:
            by_target.setdefault(os.path.realpath(file), file)
    return list(by_target.values())


def folders_without_python(paths: Iterable[Path]) -> list[Path]:
    """Return the folders among ``paths`` that hold no Python file to migrate."""
    return [path for path in paths if path.is_dir() and next(_files_in(path), None) is None]


def notebooks(paths: Iterable[Path]) -> list[Path]:
    """Return the notebooks in folders of ``paths`` that contain one of the words a migration looks for."""
    by_target: dict[str, Path] = {}  # by the file that a link leads to
    for path in paths:
        if not path.is_dir():
            continue
        for file in _files_in(path, ".ipynb"):
            with contextlib.suppress(OSError):
                if WORDS.search(file.read_bytes()):
                    by_target.setdefault(os.path.realpath(file), file)
    return list(by_target.values())


def _files_in(folder: Path, ending: str = ".py") -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        # os.walk goes on into the folders that stay in this list.
        folders[:] = sorted(name for name in folders if not _is_skipped(Path(root, name)))
        for name in sorted(files):
            path = Path(root, name)
            # Skip the broken links by which editors lock files, and pipes, which would block the reader.
            if name.endswith(ending) and path.is_file() and not path.is_symlink():
                yield path


def _is_skipped(folder: Path) -> bool:
    is_environment = (folder / "pyvenv.cfg").exists()
    return folder.name.startswith(".") or folder.name in _SKIPPED or is_environment


def decoded(data: bytes) -> tuple[str, str, bytes]:
    """Return the text of a file, its encoding and its byte order mark.

    Raises:
        SyntaxError, UnicodeDecodeError, LookupError: an unknown encoding, or bytes that are not in it.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    mark = b""
    if data.startswith(codecs.BOM_UTF8):
        mark, encoding = codecs.BOM_UTF8, "utf-8"
    return data[len(mark) :].decode(encoding), encoding, mark


def write(outcome: FileOutcome) -> None:
    """Write the new text atomically. Encoding, byte order mark, owner and permissions stay.

    The target of a symbolic link is replaced, not the link.

    Raises:
        FileError: the file cannot be written, or has changed since it was read; it stays as it is.
    """
    path = Path(outcome.path).resolve()
    try:
        text, encoding, mark = decoded(path.read_bytes())
        if text != outcome.before:
            raise FileError(f"{outcome.path} has changed since it was read: migrate it again")
        # A rename would replace a read-only file too.
        if not path.stat().st_mode & stat.S_IWUSR:
            raise PermissionError(errno.EACCES, "it is read-only")
        with replacing(path) as file:
            file.write(mark + outcome.after.encode(encoding))
    except OSError as error:
        raise FileError(f"cannot write {outcome.path}: {error.strerror}") from error
