"""The files of a migration: found, read as they are, and written so that no moment has half of one."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import re
import stat
import tempfile
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.errors import FileError
from narrowcast.migrate._changes import Finding, Outcome
from narrowcast.migrate._settings import Settings

_SKIPPED = {"__pycache__", "node_modules", "site-packages"}
# A file without any of these has nothing that a stage looks for.
_WORDS = re.compile(
    rb"\bapex\b|\bamp\b|autocast|GradScaler|custom_fwd|custom_bwd|unscale_|\.scale\(|\bStepper\b"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOutcome:
    """One file that was looked at.

    Attributes:
        path: as it was found.
        before, after: its text, with its own line ends and without a byte order mark; equal where nothing
            changes.
        findings: in the order of their lines.
        problem: why it was not looked at, as that it does not parse; None where it was.
    """

    path: str
    before: str = ""
    after: str = ""
    findings: tuple[Finding, ...] = ()
    problem: str | None = None

    @property
    def changes(self) -> bool:
        """Whether the migration changes it."""
        return self.before != self.after

    def as_dict(self) -> dict[str, Any]:
        """All of it but the text, as JSON has it."""
        return {
            "path": self.path,
            "changes": self.changes,
            "problem": self.problem,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def python_files(paths: Iterable[Path]) -> list[Path]:
    """The files among ``paths`` and the ``*.py`` in folders among them, each once, in the order of names.

    Hidden folders, environments and caches are passed over, where they were not named themselves, and so are
    links in folders: what they lead to may lie outside, and is looked at where that is named too.

    Raises:
        FileError: a path is missing, or is a notebook.
    """
    found: dict[str, Path] = {}
    for path in paths:
        if path.is_dir():
            inside = _walk(path)
        elif path.suffix == ".ipynb":
            raise FileError(
                f"{path} is a notebook, and only Python files can be migrated: write its cells to one "
                f"(jupyter nbconvert --to script {path}), and migrate that"
            )
        elif path.exists():
            inside = iter([path])
        elif str(path) == "-":
            raise FileError("expected files and folders, and - is none: to see a diff of stdin, /dev/stdin")
        else:
            raise FileError(f"expected files and folders, and {path} does not exist")
        for file in inside:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def folders_without_python(paths: Iterable[Path]) -> list[Path]:
    """The folders among ``paths`` in which no file is looked at."""
    return [path for path in paths if path.is_dir() and next(_walk(path), None) is None]


def notebooks(paths: Iterable[Path]) -> list[Path]:
    """The notebooks in folders among ``paths`` that hold a word which is looked for in Python files."""
    found: dict[str, Path] = {}
    for file in (file for path in paths if path.is_dir() for file in _walk(path, ".ipynb")):
        with contextlib.suppress(OSError):
            if _WORDS.search(file.read_bytes()):
                found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _walk(folder: Path, ending: str = ".py") -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name[0] != "." and name not in _SKIPPED and not Path(root, name, "pyvenv.cfg").exists()
        )
        listed = (Path(root, name) for name in sorted(files) if name.endswith(ending))
        yield from (path for path in listed if path.is_file() and not path.is_symlink())


def migrate_file(path: Path, settings: Settings) -> FileOutcome:
    """What the migration makes of one file; nothing is written.

    What cannot be read, decoded, parsed or rewritten is told of in ``problem``.
    """
    try:
        data = path.read_bytes()
        if not _WORDS.search(data):
            return FileOutcome(path=str(path))
        text = _decoded(data)[0]
    except OSError as error:
        return FileOutcome(path=str(path), problem=f"cannot be read: {error.strerror}")
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        return FileOutcome(path=str(path), problem=f"cannot be decoded: {error}")
    try:
        outcome = migrate_text(text, settings, str(path))
    except SyntaxError as error:
        return FileOutcome(path=str(path), problem=f"does not parse: {_where(error)}")
    except Exception as error:  # of this package, not of the file: the other files go on
        return FileOutcome(path=str(path), problem=f"narrowcast failed on it, please report: {error!r}")
    return FileOutcome(path=str(path), before=text, after=outcome.text, findings=outcome.findings)


def migrate_text(text: str, settings: Settings, path: str = "<text>") -> Outcome:
    """What the migration makes of the text of one file.

    Raises:
        SyntaxError: it does not parse.
        MissingModuleError: LibCST is not installed.
    """
    require_libcst()
    from narrowcast.migrate import _driver

    return _driver.migrate_text(text, settings, path)


def _where(error: SyntaxError) -> str:
    return f"{error.msg} (line {error.lineno})" if error.lineno else str(error.msg)


def _decoded(data: bytes) -> tuple[str, str, bytes]:
    """The text of a file, its encoding and its byte order mark."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    encoding = "utf-8" if mark else encoding
    return data[len(mark) :].decode(encoding), encoding, mark


def write(outcome: FileOutcome) -> None:
    """Put the new text in the place of the old one: written beside it and renamed, with its permissions.

    Where ``path`` is a link, the file that it leads to is replaced. Encoding, byte order mark and line ends
    stay.

    Raises:
        FileError: it cannot be written, or is no longer what was read; it is as it was.
    """
    path = Path(outcome.path).resolve()
    try:
        data = path.read_bytes()
        text, encoding, mark = _decoded(data)
        if text != outcome.before:
            raise FileError(f"{outcome.path} was changed meanwhile: migrate it again")
        _replace(path, mark + outcome.after.encode(encoding))
    except OSError as error:
        raise FileError(f"cannot write {outcome.path}: {error.strerror}") from error


def _replace(path: Path, data: bytes) -> None:
    before = path.stat()
    if not before.st_mode & stat.S_IWUSR:  # renaming would not ask
        raise PermissionError(errno.EACCES, "it is read-only")
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        made = os.stat(beside)
        if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
            with contextlib.suppress(PermissionError):
                os.chown(beside, before.st_uid, before.st_gid)
        os.chmod(beside, stat.S_IMODE(before.st_mode))
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def migrate_files(
    paths: Iterable[Path], settings: Settings, *, progress: Callable[[str], None] = lambda _: None
) -> list[FileOutcome]:
    """What the migration makes of each file; nothing is written.

    Raises:
        FileError: a path is missing, or is a notebook.
        MissingModuleError: LibCST is not installed.
    """
    files = python_files(paths)
    require_libcst()
    outcomes = []
    for number, path in enumerate(files, 1):
        progress(f"{number} of {len(files)}: {path}")
        outcomes.append(migrate_file(path, settings))
    return outcomes


def require_libcst() -> None:
    """Refuse to go on without LibCST.

    Raises:
        MissingModuleError: it is not installed; the message has the command that installs it.
    """
    from narrowcast.errors import MissingModuleError

    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise MissingModuleError(
            "expected LibCST, which migrate rewrites with, and it is not installed: "
            "pip install 'narrowcast[migrate]'"
        ) from error
