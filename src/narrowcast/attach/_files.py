"""Files of the user that the run of a script changes: copied aside before, and put back after.

So ``compare`` leaves them as they were, and each of its runs finds the same files.
"""

from __future__ import annotations

import filecmp
import functools
import getpass
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from narrowcast._files import cache_folder, lock
from narrowcast.attach._run import Call, Patches
from narrowcast.attach._torch_internals import native_writers
from narrowcast.errors import FileError, few

JOURNAL = "files.jsonl"
"""Name of the journal in the folder of a run; it is deleted when everything was put back."""
OUTPUTS = "narrowcast-outputs"
"""Folder, in that of a run, of the files that it wrote."""
_COPIES = "narrowcast-originals"
_HIDDEN = ".narrowcast-originals-"
# Marks the folder of a run whose files were set aside, so that those in their places are not its own.
_AWAY = "narrowcast-away"
_POLL_S = 0.2

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Audit events that change a name: places of the path and of its folder's descriptor in their arguments.
_CHANGES: dict[str, tuple[tuple[int, int], ...]] = {
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.symlink": ((1, 2),),
}
# Compiled code, which later runs are meant to read, and locks.
_NO_DATA = (".pyc", ".pyo", ".so", ".pyd", ".lock")
_CACHES_NAMED_BY = (
    "CUDA_CACHE_PATH", "HF_HOME", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)  # fmt: skip


class FileWatch:
    """Copy what this process changes aside, before it does, and log it in a journal for ``restore_files``.

    So do processes that it starts by fork or multiprocessing. It sees the files that Python opens for
    writing, truncates, renames, links and removes, those of sqlite3, and what torch and safetensors save.
    It does not see files that other native code (h5py) or other programs open. Caches, devices, locks stay.

    Audit hooks cannot be removed, so use it in a process that runs one script. It can be pickled.

    Args:
        folder: of the run, for the journal; files in it are ignored. Copies of files on another file system
            are in a hidden folder there, so that they can be renamed.
    """

    in_force: FileWatch | None = None  # in this process

    def __init__(self, folder: Path) -> None:
        # Kept as a path, not an open file: scripts exist that close file descriptors they did not open.
        self._folder = os.path.realpath(folder)
        self._hidden = f"{_HIDDEN}{uuid.uuid4().hex}"
        self._kept: set[str] = set()
        cwd = os.path.realpath(os.getcwd())
        caches = (os.path.realpath(each) + os.sep for each in _cache_folders())
        # Some set HF_HOME to the disk that holds all of their work.
        caches = (each for each in caches if not f"{cwd}{os.sep}".startswith(each))
        self._ignored = (self._folder + os.sep, *caches)
        Path(folder, JOURNAL).write_text(json.dumps({"cwd": cwd}) + "\n")

    def install(self) -> None:
        """Begin; lasts as long as the process."""
        FileWatch.in_force = self
        for owner, name, place in native_writers():
            Patches().wrap(owner, name, functools.partial(self._write, place))
        sys.addaudithook(self._audit)

    def _write(self, place: int, writer: Call, *args: Any, **kwargs: Any) -> Any:
        path = args[place] if len(args) > place else kwargs.get("filename")
        if isinstance(path, str | os.PathLike):  # not a buffer
            self._keep(path)
        return writer(*args, **kwargs)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "os.truncate" or (event == "open" and isinstance(args[2], int) and args[2] & _WRITES):
            self._keep(args[0])  # of a descriptor nothing: it was opened before
        elif event in _CHANGES:
            for path, folder in _CHANGES[event]:
                self._keep(args[path], args[folder], follow=False, whole=event == "os.rename")
        elif event in ("tempfile.mkdtemp", "tempfile.mkstemp"):  # come before what creates it
            self._keep(args[0], is_temporary=True)
        elif event == "sqlite3.connect":
            name = os.fsdecode(args[0])
            name = unquote(urlsplit(name).path) if name.startswith("file:") else name
            for ending in ("", "-journal", "-wal", "-shm"):
                self._keep(name + ending)

    def _keep(
        self, path: Any, folder: int | None = -1, *, follow: bool = True, whole: bool = False, **facts: Any
    ) -> None:
        """Log what ``path`` is now, once, with a copy of a file; of a ``whole`` folder all that is in it."""
        name = self._name(path, folder, follow=follow)
        if name is None or name in self._kept:
            return
        try:
            about = os.lstat(name)
        except OSError:
            self._log(name, was="nothing", **facts)
            return
        if stat.S_ISREG(about.st_mode):
            self._log(name, was="file", owner=(about.st_uid, about.st_gid))
        elif stat.S_ISLNK(about.st_mode):
            self._log(name, was="link", target=os.readlink(name))
        elif stat.S_ISDIR(about.st_mode):
            self._log(name, was="folder", mode=stat.S_IMODE(about.st_mode))
            for each in os.scandir(name) if whole else ():
                self._keep(each.path, follow=False, whole=True)

    def _name(self, path: Any, folder: int | None, *, follow: bool) -> str | None:
        """Return the absolute path of a file, links resolved; None if it is to be ignored."""
        with suppress(TypeError, ValueError, OSError):
            text = os.fsdecode(path).rstrip("/")
            if folder not in (None, -1):
                text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
            name = os.path.realpath(text if follow else os.path.dirname(text))
            name = name if follow else os.path.join(name, os.path.basename(text))
            ignored = name.endswith(_NO_DATA) or name.startswith(("/dev/", "/proc/", "/sys/"))
            ignored = ignored or f"{name}{os.sep}".startswith(self._ignored) or "__pycache__" in name
            ignored = ignored or f"{os.sep}{_HIDDEN}" in name
            return None if ignored else name
        return None

    def _log(self, path: str, **facts: Any) -> None:
        """Write a line of the journal, after the copy of the file that it names."""
        copies = place_of_copies(path, self._folder, self._hidden)
        facts["copy"] = os.path.join(copies, uuid.uuid4().hex)
        try:
            if facts["was"] == "file":
                os.makedirs(copies, exist_ok=True)
                _copy(path, facts["copy"])
            descriptor = os.open(os.path.join(self._folder, JOURNAL), os.O_WRONLY | os.O_APPEND)
            with open(descriptor, "ab") as journal:
                # In one piece: other processes write here too. A line of its own, even after one cut short.
                journal.write(f"\n{json.dumps({'path': path, **facts})}\n".encode())
        except OSError as error:
            why = f"narrowcast cannot copy it to {self._folder} ({error.strerror}), so it stays as it is"
            raise OSError(error.errno, why, path) from None
        self._kept.add(path)


def _copy(path: str, to: str) -> None:
    """Copy a file; again if it is another one by then, since another run had its turn meanwhile."""
    while True:
        before = os.stat(path)
        shutil.copy2(path, to)
        if os.path.samestat(before, os.stat(path)):
            return


def place_of_copies(path: str, folder: str, hidden: str) -> str:
    """Return the folder of the copy of ``path``: in that of the run, if a rename can move the file there.

    Else one named ``hidden``, as near to the root of the file system as can be: scripts that list their own
    folders do not find it.
    """
    inside = os.path.join(folder, _COPIES)
    parent = os.path.dirname(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    device = _device_of(parent)
    if device == _device_of(folder):
        return inside
    for ancestor in [*reversed(Path(parent).parents), Path(parent)]:
        if _device_of(str(ancestor)) == device and os.access(ancestor, os.W_OK | os.X_OK):
            return os.path.join(ancestor, hidden)
    return inside


def _device_of(folder: str) -> int:
    return os.stat(folder).st_dev


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


# ---- after the run


def changed_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the journal of a run: path -> its first line, which tells what was there before the run.

    What is in a folder that the run created is not listed. ``is_temporary`` in a line: ``tempfile`` made the
    name, which no other run has.
    """
    lines: dict[str, dict[str, Any]] = {}
    with suppress(OSError):
        for text in (folder / JOURNAL).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):  # truncated
                line = json.loads(text)
                path = line.get("path", "")
                new = (str(each) for each in Path(path).parents if str(each) in lines)
                if path not in lines and not any(lines[each]["was"] == "nothing" for each in new):
                    lines[path] = line
    return lines


def _moves(line: dict[str, Any]) -> bool:
    """Return whether what a line of the journal names is exchanged when runs take turns.

    Folders stay, since what is in them is exchanged, and so do temporary files: no other run has their names.
    """
    return line["was"] != "folder" and not line.get("is_temporary")


def _own(line: dict[str, Any]) -> str:
    """Return where that which a run wrote is while the run stands still."""
    return f"{line['copy']}.own"


def has_files_to_move(folder: Path) -> bool:
    """Return whether the run in ``folder`` has changed files that another one would see."""
    return any(path and _moves(line) for path, line in changed_files(folder).items())


def set_aside(folder: Path) -> str | None:
    """Put files back as they were before the run in ``folder``, which stands still, until ``bring_back``.

    Everything is renamed: what a process has open stays open, and a kill leaves each file in one of its
    places, where ``restore_files`` finds it.

    Returns:
        Why that cannot be; then nothing was moved.
    """
    lines = changed_files(folder)
    lines.pop("", None)
    for path, line in lines.items():
        if line["was"] == "folder" and (os.path.islink(path) or not os.path.isdir(path)):
            return f"the script replaces or removes a folder ({Path(path).name})"
    moved = []
    try:
        for path, line in lines.items():
            if not _moves(line):
                continue
            if os.path.lexists(path):
                os.makedirs(os.path.dirname(line["copy"]), exist_ok=True)
                os.rename(path, _own(line))
            moved.append((path, line))
            _put_back(path, line)
    except OSError as error:
        for before, its_line in moved:
            _bring_back(before, its_line)
        return f"the script changes a file that cannot be renamed ({Path(path).name}: {error.strerror})"
    (folder / _AWAY).touch()
    return None


def bring_back(folder: Path) -> None:
    """Undo ``set_aside``, before the run in ``folder`` goes on: no other run's files are in their places now.

    Raises:
        FileError: one cannot be renamed; ``restore_files`` knows where each of them is.
    """
    (folder / _AWAY).unlink(missing_ok=True)
    path = ""
    try:
        for path, line in changed_files(folder).items():
            if path and _moves(line):
                _bring_back(path, line)
    except OSError as error:
        raise FileError(f"cannot put {path} back for the run in {folder}: {error.strerror}") from error


def _bring_back(path: str, line: dict[str, Any]) -> None:
    """Exchange what was there before the run for what the run has there, unless that is nothing."""
    if line["was"] == "file" and not os.path.lexists(line["copy"]):
        os.rename(path, line["copy"])
    elif line["was"] == "link" and os.path.islink(path):
        os.unlink(path)
    if os.path.lexists(_own(line)):
        os.rename(_own(line), path)


def restore_files(folder: Path) -> list[str]:
    """Move what the run in ``folder`` wrote to its ``outputs``, and put back what was there before.

    After a kill it can be called again: a copy is deleted once its file is back, the journal last.

    Returns:
        Where the files and folders that were moved had been.

    Raises:
        FileError: one cannot be moved or put back; its copy stays.
    """
    lines = changed_files(folder)
    cwd = lines.pop("", {}).get("cwd", "/")
    if (folder / _AWAY).exists():  # everything else is in its place, or is another run's
        in_place = {path: line for path, line in lines.items() if not _moves(line)}
    else:
        in_place = lines
    moved, path = [], ""
    try:
        for path, line in in_place.items():
            if not _is_as_before(path, line) and os.path.lexists(path):
                _move(path, path, folder / OUTPUTS, cwd)
                moved.append(path)
        for path, line in lines.items():
            if os.path.lexists(_own(line)):
                _move(_own(line), path, folder / OUTPUTS, cwd)
                moved.append(path)
        for path, line in sorted(in_place.items()):  # a folder before what is in it
            _put_back(path, line)
    except (OSError, shutil.Error) as error:
        why = getattr(error, "strerror", None) or error
        place = os.path.dirname(lines[path]["copy"])
        raise FileError(
            f"cannot put {path} back as it was before the run in {folder}: {why}. Its content is in {place}; "
            f"{folder / JOURNAL} tells which file it is, and deleting that gives it up"
        ) from error
    for place in {os.path.dirname(line["copy"]) for line in lines.values()}:
        if os.path.basename(place).startswith((_COPIES, _HIDDEN)):
            shutil.rmtree(place, ignore_errors=True)
    (folder / _AWAY).unlink(missing_ok=True)
    (folder / JOURNAL).unlink(missing_ok=True)
    return moved


def _is_as_before(path: str, line: dict[str, Any]) -> bool:
    is_link = os.path.islink(path)
    if line["was"] == "nothing":
        with suppress(OSError):
            os.rmdir(path)  # an empty folder is no output
        return not os.path.lexists(path)
    if line["was"] == "link":
        return is_link and os.readlink(path) == line["target"]
    if line["was"] == "folder":
        return os.path.isdir(path) and not is_link
    if not os.path.exists(line["copy"]):  # put back before a kill, or while the run stands still
        return True
    return os.path.isfile(path) and not is_link and filecmp.cmp(path, line["copy"], shallow=False)


def _move(path: str, name: str, outputs: Path, cwd: str) -> None:
    """Move a file or a folder that was ``name``; what was in ``cwd`` keeps its relative path."""
    inside = Path(name).is_relative_to(cwd)
    to = outputs / (os.path.relpath(name, cwd) if inside else f"absolute{name}")
    if to.is_dir() and not to.is_symlink():  # from a move that was killed
        shutil.rmtree(to)
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, to)


def _put_back(path: str, line: dict[str, Any]) -> None:
    if line["was"] == "folder":
        Path(path).mkdir(mode=line["mode"], parents=True, exist_ok=True)
    elif line["was"] == "link" and not os.path.lexists(path):
        os.symlink(line["target"], path)
    elif line["was"] == "file" and (copy := Path(line["copy"])).exists():
        if os.path.lexists(path):  # as before: only its time may differ
            shutil.copystat(copy, path)
            copy.unlink()
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(copy, path)
        with suppress(PermissionError):
            os.chown(path, *line["owner"])


# ---- after a kill


def _register() -> Path:
    """Return the folder in which runs that go on are named; without a home, one that cannot be made."""
    return (cache_folder() or Path(os.devnull)) / "running"


@contextmanager
def folder_of_one(tell: Callable[[str], None]) -> Iterator[None]:
    """Wait for the end of others' runs in the working folder, whose files would pass for the user's."""
    here = hashlib.sha256(os.fsencode(os.getcwd())).hexdigest()[:32]
    with ExitStack() as stack:
        with suppress(OSError):
            _register().mkdir(parents=True, exist_ok=True)
            turn = stack.enter_context((_register() / f"{here}.turn").open("wb"))
            # Ranks of one job run together, as does what a script in a run starts: they would wait for ever.
            alone = os.environ.get("RANK", "0") == "0" and "NARROWCAST_RUN_DIR" not in os.environ
            while alone and not _locked(turn):
                tell("waiting for another run in this folder to end")
                time.sleep(_POLL_S)
            restore_killed(tell)
        yield


@contextmanager
def registered(folder: Path) -> Iterator[None]:
    """Name the folder of a run where ``restore_killed`` finds it; a lock tells that the run goes on."""
    entry = None
    with ExitStack() as stack:
        # Without a folder for it, only a kill goes without a remedy.
        with suppress(OSError):
            _register().mkdir(parents=True, exist_ok=True)
            entry = _register() / f"{uuid.uuid4().hex}.run"
            file = stack.enter_context(entry.open("xb", buffering=0))
            lock(file)
            file.write(os.fsencode(folder))
        try:
            yield
        finally:
            if entry is not None and not (folder / JOURNAL).exists():
                entry.unlink(missing_ok=True)


def _locked(file: IO[bytes]) -> bool:
    with suppress(BlockingIOError):
        lock(file)
        return True
    return False


def restore_killed(tell: Callable[[str], None]) -> None:
    """Put back the files of runs that were killed; ``tell`` gets a line for each that had changed some."""
    entries: list[Path] = []
    with suppress(OSError):
        entries = sorted(_register().glob("*.run"))
    for entry in entries:
        with suppress(OSError), entry.open("r+b") as file:
            lock(file)
            folder = Path(os.fsdecode(file.read()))
            try:
                changed = restore_files(folder)
            except FileError as error:
                tell(str(error))
                continue
            entry.unlink()
            if changed:
                where = f"what it had written is in {folder / OUTPUTS}"
                tell(f"a run was killed; files are as before it now, and {where}: {few(changed, 5)}")
