"""Files of the user that the run of a script changes: copied before, and put back after.

So ``compare`` leaves them as they were, and each of its runs finds the same files.
"""

from __future__ import annotations

import filecmp
import functools
import getpass
import hashlib
import importlib
import importlib.util
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
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

import torch

from narrowcast._files import cache_folder, lock
from narrowcast.errors import FileError, few

JOURNAL = "files.jsonl"
"""Name of the journal in the folder of a run; it is deleted when everything was put back."""
OUTPUTS = "narrowcast-outputs"
"""Folder, in that of a run, of the files that it wrote."""
# Folders of copies: the name of that in the folder of a run, and how those on other file systems begin.
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
_NO_FOLDER = (None, -1)  # what an audit event has where no descriptor of a folder was given
# Compiled code, which later runs are meant to read, and locks.
_NO_DATA = (".pyc", ".pyo", ".so", ".pyd", ".lock")
_OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/")
_CACHES_NAMED_BY = (
    "CUDA_CACHE_PATH",
    "HF_HOME",
    "MPLCONFIGDIR",
    "NUMBA_CACHE_DIR",
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedPath:
    """A line of the journal: what a path was before the run changed it.

    Attributes:
        path: absolute, with links resolved.
        was: ``"file"``, which may be a link, ``"folder"`` or ``"nothing"``.
        copy: where the file as it was is kept until it is put back.
        owner: user and group of a file.
        mode: permissions of a folder.
        is_temporary: whether ``tempfile`` made the name, so that no other run uses it.
    """

    path: str
    was: str
    copy: str
    owner: tuple[int, int] | None = None
    mode: int | None = None
    is_temporary: bool = False

    @property
    def is_exchanged(self) -> bool:
        """Whether it is exchanged when runs take turns.

        Folders stay, since what is in them is exchanged, and so do temporary files.
        """
        return self.was != "folder" and not self.is_temporary

    @property
    def own(self) -> str:
        """Where the file that the run wrote is kept while the run stands still."""
        return f"{self.copy}.own"


class FileWatch:
    """Copy each file before this process changes it, and log it in a journal for ``restore_files``.

    It also watches processes that this one starts by fork or multiprocessing. It sees the files that Python
    opens for writing, truncates, renames, links and removes, databases of sqlite3, and what torch and
    safetensors save. It does not see files that other native code (h5py) or other programs open. Files that
    are named by a folder's descriptor, as ``shutil.rmtree`` does, it sees only on Linux, and never if
    ``os.open`` opens them with ``dir_fd``, which its audit event does not tell. Caches, devices and locks
    stay.

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
        # Folders in ``_kept`` that were logged without their content. A rename moves the content too, so it
        # is logged and copied then.
        self._not_entered: set[str] = set()

        # Paths that begin like these are ignored: the run's own folder, and caches.
        cwd = os.path.realpath(os.getcwd())
        ignored = [self._folder + os.sep]
        for cache in _cache_folders():
            start = os.path.realpath(cache) + os.sep
            # Not a cache that holds the working folder: some set HF_HOME to the disk with all of their work.
            if not f"{cwd}{os.sep}".startswith(start):
                ignored.append(start)
        self._ignored = tuple(ignored)
        Path(folder, JOURNAL).write_text(json.dumps({"cwd": cwd}) + "\n")

    def install(self) -> None:
        """Begin; lasts as long as the process."""
        FileWatch.in_force = self
        for owner, name, place in native_writers():
            setattr(owner, name, self._watched(getattr(owner, name), place))
        sys.addaudithook(self._audit)

    def _watched(self, writer: Callable[..., Any], place: int) -> Callable[..., Any]:
        @functools.wraps(writer)
        def write(*args: Any, **kwargs: Any) -> Any:
            path = args[place] if len(args) > place else kwargs.get("filename")
            if isinstance(path, str | os.PathLike):  # not a buffer
                self._keep(path)
            return writer(*args, **kwargs)

        return write

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITES:
                self._keep(path)
        elif event == "os.truncate":
            self._keep(args[0])  # ignores a descriptor: its file was kept when it was opened
        elif event in _CHANGES:
            moves_content = event == "os.rename"
            for path_at, folder_at in _CHANGES[event]:
                self._keep(args[path_at], args[folder_at], follow=False, whole=moves_content)
        elif event in ("tempfile.mkdtemp", "tempfile.mkstemp"):  # raised before the event that creates it
            self._keep(args[0], is_temporary=True)
        elif event == "sqlite3.connect":
            # MLflow's tracking and Optuna's studies use it. SQLite writes the other files beside a database.
            database = os.fsdecode(args[0])
            if database.startswith("file:"):
                database = unquote(urlsplit(database).path)
            for ending in ("", "-journal", "-wal", "-shm"):
                self._keep(database + ending)

    def _keep(
        self,
        path: Any,
        folder: int | None = None,
        *,
        follow: bool = True,
        whole: bool = False,
        is_temporary: bool = False,
    ) -> None:
        """Log what ``path`` is now, the first time, and copy it if it is a file.

        ``whole``: whether all that is in a folder is logged and copied too.
        """
        name = self._name(path, folder, follow=follow)
        if name is None:
            return
        if name not in self._kept:
            self._keep_itself(name, is_temporary=is_temporary)
        if name not in self._not_entered:
            return

        # A folder may be logged long before it is renamed, as by ``os.makedirs(..., exist_ok=True)``. Once it
        # is seen empty, whatever comes into it is the run's own and needs no copy, even if it is renamed.
        has_content = _is_folder_with_content(name)
        if whole or not has_content:
            self._not_entered.discard(name)
        if whole and has_content:
            for entry in os.scandir(name):
                self._keep(entry.path, follow=False, whole=True)

    def _keep_itself(self, name: str, *, is_temporary: bool) -> None:
        """Log what ``name`` is now, and copy it if it is a file; what is in a folder is not logged."""
        copies = place_of_copies(name, self._folder, self._hidden)
        copy = os.path.join(copies, uuid.uuid4().hex)
        try:
            status = os.lstat(name)
        except OSError:
            self._log(ChangedPath(path=name, was="nothing", copy=copy, is_temporary=is_temporary))
            return
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            self._log(ChangedPath(path=name, was="file", copy=copy, owner=(status.st_uid, status.st_gid)))
        elif stat.S_ISDIR(status.st_mode):
            self._log(ChangedPath(path=name, was="folder", copy=copy, mode=stat.S_IMODE(status.st_mode)))
            self._not_entered.add(name)

    def _name(self, path: Any, folder: int | None, *, follow: bool) -> str | None:
        """Return the absolute path of a file, links resolved; None if it is to be ignored.

        ``follow``: whether the last part of the path is resolved too; not where a link itself is changed.
        """
        try:
            text = os.fsdecode(path).rstrip("/")
            if folder not in _NO_FOLDER:
                text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
            if follow:
                name = os.path.realpath(text)
            else:
                name = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
        except (TypeError, ValueError, OSError):
            # A descriptor of a file, no path that could exist, or a folder's descriptor elsewhere than on
            # Linux, which alone has /proc/self/fd.
            return None
        return None if self._is_ignored(name) else name

    def _is_ignored(self, name: str) -> bool:
        if name.endswith(_NO_DATA) or name.startswith(_OF_THE_SYSTEM) or "__pycache__" in name:
            return True
        return f"{name}{os.sep}".startswith(self._ignored) or f"{os.sep}{_HIDDEN}" in name

    def _log(self, changed: ChangedPath) -> None:
        """Write a line of the journal, after the copy of the file that it names."""
        try:
            if changed.was == "file":
                os.makedirs(os.path.dirname(changed.copy), exist_ok=True)
                _copy(changed.path, changed.copy)
            descriptor = os.open(os.path.join(self._folder, JOURNAL), os.O_WRONLY | os.O_APPEND)
            with open(descriptor, "ab") as journal:
                # In one write, since other processes write here too. It begins with a line break: a kill may
                # have cut the line before it short.
                journal.write(f"\n{json.dumps(asdict(changed))}\n".encode())
        except OSError as error:
            why = f"narrowcast cannot copy it to {self._folder} ({error.strerror}), so it stays as it is"
            raise OSError(error.errno, why, changed.path) from None
        self._kept.add(changed.path)


def native_writers() -> list[tuple[Any, str, int]]:
    """Return what opens files in C++ or Rust, which raises no audit event: owner, name, place of the path.

    ``torch.save``, ``torch.export.save``, ``torch.package`` and ``torch.jit.save`` end in those of torch.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/serialization.py (_open_zipfile_writer_file)
    writers: list[tuple[Any, str, int]] = [
        (torch._C, "PyTorchFileWriter", 0),
        (torch._C.ScriptModule, "save", 1),
        (torch._C.ScriptFunction, "save", 1),
    ]
    if importlib.util.find_spec("safetensors") is not None:
        writers.append((importlib.import_module("safetensors"), "serialize_file", 1))
    return writers


def _is_folder_with_content(path: str) -> bool:
    """Return whether ``path`` is a folder, and not a link to one, with something in it."""
    if os.path.islink(path):
        return False
    try:
        with os.scandir(path) as entries:
            return any(True for _ in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # it cannot be read: then copying its content must fail, not be left out
        return True


def _copy(path: str, to: str) -> None:
    """Copy a file.

    A run may be made to stand still in the middle of this. The run whose turn it is then may write to the
    file and exchange it. So copy again if another file is there after the copy.
    """
    while True:
        before = os.lstat(path)
        Path(to).unlink(missing_ok=True)
        shutil.copy2(path, to, follow_symlinks=False)
        if os.path.samestat(before, os.lstat(path)):
            return


def place_of_copies(path: str, folder: str, hidden: str) -> str:
    """Return the folder for the copy of ``path``: one in ``folder``, the run's, if a rename reaches it.

    Otherwise it is one named ``hidden``, as near to the root of the file system of ``path`` as can be, where
    scripts that list their own folders do not find it.
    """
    inside = os.path.join(folder, _COPIES)

    # The nearest folder that exists tells on which file system the file is or will be.
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
    """Return the usual places of caches, and those that variables of the environment name."""
    folders = []
    with suppress(RuntimeError, KeyError, OSError):  # no home, no name
        home = Path.home()
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache"))
        folders += [home / ".triton", home / ".nv", home / "Library" / "Caches"]
        folders.append(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
    folders += [Path(os.environ[name]) for name in _CACHES_NAMED_BY if os.environ.get(name)]
    return folders


# ---- after the run


def changed_files(folder: Path) -> dict[str, ChangedPath]:
    """Read the journal of a run: path -> its first line, which tells what was there before the run.

    What is in a folder that the run created is not listed.
    """
    return _read_journal(folder)[1]


def _read_journal(folder: Path) -> tuple[str, dict[str, ChangedPath]]:
    """Return the folder in which the run started, and what ``changed_files`` returns."""
    cwd = "/"
    changed: dict[str, ChangedPath] = {}
    try:
        text = (folder / JOURNAL).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return cwd, changed
    for line in text.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:  # empty, or cut short by a kill
            continue
        if "cwd" in fields:
            cwd = fields["cwd"]
            continue
        entry = ChangedPath(**fields)
        if entry.path not in changed and not _is_in_a_new_folder(entry.path, changed):
            changed[entry.path] = entry
    return cwd, changed


def _is_in_a_new_folder(path: str, changed: dict[str, ChangedPath]) -> bool:
    for folder in Path(path).parents:
        parent = changed.get(str(folder))
        if parent is not None and parent.was == "nothing":
            return True
    return False


def has_files_to_move(folder: Path) -> bool:
    """Return whether the run in ``folder`` has changed files that another one would see."""
    return any(entry.is_exchanged for entry in changed_files(folder).values())


def set_aside(folder: Path) -> str | None:
    """Put files back as they were before the run in ``folder``, while that run stands still.

    ``bring_back`` undoes it. Everything is renamed: what a process has open stays open, and a kill leaves
    each file in one of its places, where ``restore_files`` finds it.

    Returns:
        None, or why the files cannot be put back; then nothing was moved.
    """
    changed = changed_files(folder)
    for entry in changed.values():
        if entry.was == "folder" and (os.path.islink(entry.path) or not os.path.isdir(entry.path)):
            return f"the script replaces or removes a folder ({Path(entry.path).name})"

    # Move away what the run wrote at each path, then put back what was there before.
    moved: list[ChangedPath] = []
    for entry in changed.values():
        if not entry.is_exchanged:
            continue
        try:
            if os.path.lexists(entry.path):
                os.makedirs(os.path.dirname(entry.copy), exist_ok=True)
                os.rename(entry.path, entry.own)
            moved.append(entry)
            _put_back(entry)
        except OSError as error:
            for other in moved:
                _bring_back(other)
            name = Path(entry.path).name
            return f"the script changes a file that cannot be renamed ({name}: {error.strerror})"
    (folder / _AWAY).touch()
    return None


def bring_back(folder: Path) -> None:
    """Undo ``set_aside``, before the run in ``folder`` goes on. Other runs must have set theirs aside.

    Raises:
        FileError: one cannot be renamed; ``restore_files`` knows where each of them is.
    """
    (folder / _AWAY).unlink(missing_ok=True)
    for entry in changed_files(folder).values():
        if not entry.is_exchanged:
            continue
        try:
            _bring_back(entry)
        except OSError as error:
            raise FileError(
                f"cannot put {entry.path} back for the run in {folder}: {error.strerror}"
            ) from error


def _bring_back(entry: ChangedPath) -> None:
    """Move what was there before the run to its copy again, and what the run has there to its place."""
    if entry.was == "file" and not os.path.lexists(entry.copy):
        os.rename(entry.path, entry.copy)
    if os.path.lexists(entry.own):
        os.rename(entry.own, entry.path)


def restore_files(folder: Path) -> list[str]:
    """Move what the run wrote to ``narrowcast-outputs`` in ``folder``; put back what was there before.

    After a kill it can be called again: a copy is deleted once its file is back, the journal last.

    Returns:
        Where the files and folders that were moved had been.

    Raises:
        FileError: one cannot be moved or put back; its copy stays.
    """
    cwd, changed = _read_journal(folder)
    # The paths at which the run's own files may be. While these are set aside, the file at an exchanged path
    # is the user's or another run's: leave it.
    at_their_paths = list(changed.values())
    if (folder / _AWAY).exists():
        at_their_paths = [entry for entry in at_their_paths if not entry.is_exchanged]

    # First move away what the run wrote, wherever that is; then put back what was there before.
    moved = []
    current: ChangedPath | None = None  # for the message of an error
    try:
        # Each folder before its content: a link that replaced a folder must go before the paths of the old
        # content lead through it, to files of the user.
        at_their_paths.sort(key=attrgetter("path"))
        for current in at_their_paths:
            if current.was == "nothing":
                with suppress(OSError):  # not empty, or no folder
                    os.rmdir(current.path)  # an empty folder is no output
            if os.path.lexists(current.path) and not _is_as_before(current):
                _move(current.path, current.path, folder / OUTPUTS, cwd)
                moved.append(current.path)
        for current in changed.values():
            if os.path.lexists(current.own):
                _move(current.own, current.path, folder / OUTPUTS, cwd)
                moved.append(current.path)
        for current in at_their_paths:
            _put_back(current)
    except (OSError, shutil.Error) as error:
        assert current is not None
        why = getattr(error, "strerror", None) or error
        raise FileError(
            f"cannot put {current.path} back as it was before the run in {folder}: {why}. Its content is in "
            f"{os.path.dirname(current.copy)}; {folder / JOURNAL} tells which file it is, and deleting that "
            "gives it up"
        ) from error

    # The journal goes last: after a kill it says what is left to do.
    for place in {os.path.dirname(entry.copy) for entry in changed.values()}:
        if os.path.basename(place).startswith((_COPIES, _HIDDEN)):
            shutil.rmtree(place, ignore_errors=True)
    (folder / _AWAY).unlink(missing_ok=True)
    (folder / JOURNAL).unlink(missing_ok=True)
    return moved


def _is_as_before(entry: ChangedPath) -> bool:
    """Compare the kind and the content of a path with those before the run; its time may differ."""
    path, copy = entry.path, entry.copy
    if entry.was == "nothing":
        return not os.path.lexists(path)
    if entry.was == "folder":
        return os.path.isdir(path) and not os.path.islink(path)
    if not os.path.lexists(copy):  # put back before a kill, or while the run stands still
        return True
    if os.path.islink(path) or os.path.islink(copy):
        return os.path.islink(path) and os.path.islink(copy) and os.readlink(path) == os.readlink(copy)
    return os.path.isfile(path) and filecmp.cmp(path, copy, shallow=False)


def _move(path: str, name: str, outputs: Path, cwd: str) -> None:
    """Move what is at ``path`` into ``outputs``. The run wrote it as ``name``.

    Its place there is ``name`` relative to ``cwd``, or below ``absolute`` if ``name`` is not in ``cwd``.
    """
    inside = Path(name).is_relative_to(cwd)
    wanted = outputs / (os.path.relpath(name, cwd) if inside else f"absolute{name}")

    # A folder there is from a move that was killed. It may hold the only copy of what that has moved, so
    # leave it and take another name.
    to = wanted
    number = 1
    while to.is_dir() and not to.is_symlink():
        number += 1
        to = wanted.with_name(f"{wanted.name}-{number}")
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, to)


def _put_back(entry: ChangedPath) -> None:
    """Put back what was there before the run. What the run wrote there has been moved away."""
    path, copy = Path(entry.path), entry.copy
    if entry.was == "folder":
        assert entry.mode is not None
        if not path.is_dir():
            path.mkdir(parents=True)
            path.chmod(entry.mode)  # ``mkdir`` would apply the umask
        return
    if entry.was == "nothing" or not os.path.lexists(copy):
        return
    if os.path.lexists(path):  # as before: only its time may differ
        shutil.copystat(copy, path, follow_symlinks=False)
        os.unlink(copy)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(copy, path)
    if entry.owner is not None:
        with suppress(PermissionError):
            os.chown(path, *entry.owner, follow_symlinks=False)


# ---- runs that go on, and runs that were killed


@contextmanager
def only_run_in_folder(tell: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of the working folder during the block, and call ``restore_killed`` before it.

    If another run has the lock, wait for its end, so that the files that it has changed are not taken for the
    user's.
    """
    cache = cache_folder()
    # Ranks of one job run together, and so do a run and a comparison that its script starts. If they waited
    # for each other, they would wait for ever.
    waits = os.environ.get("RANK", "0") == "0" and "NARROWCAST_RUN_DIR" not in os.environ
    with ExitStack() as stack:
        if cache is not None and waits:
            here = hashlib.sha256(os.fsencode(os.getcwd())).hexdigest()[:32]
            with suppress(OSError):  # where no file can be written or locked, nobody waits
                (cache / "running").mkdir(parents=True, exist_ok=True)
                turn = stack.enter_context((cache / "running" / f"{here}.turn").open("wb"))
                while not _try_lock(turn):
                    tell("waiting for another run in this folder to end")
                    time.sleep(_POLL_S)
        restore_killed(tell)
        yield


@contextmanager
def locked_journal(folder: Path) -> Iterator[None]:
    """Lock the journal of a run while the run goes on, so that ``restore_killed`` leaves it alone."""
    with (folder / JOURNAL).open("ab") as journal:
        with suppress(OSError):  # some file systems have no locks
            lock(journal)
        yield


def _try_lock(file: IO[bytes]) -> bool:
    """Lock ``file`` until it is closed; return whether that was possible, or another process holds it."""
    with suppress(BlockingIOError):
        lock(file)
        return True
    return False


def restore_killed(tell: Callable[[str], None]) -> None:
    """Put back the files of runs that were killed; ``tell`` gets a line for each that had changed some.

    It finds those whose folder is in the cache folder. One that ``--run-dir`` named is put back by the next
    comparison in that folder.
    """
    cache = cache_folder()
    if cache is None:
        return
    runs = cache / "runs"
    for path in sorted([*runs.glob(f"*/{JOURNAL}"), *runs.glob(f"*/*/{JOURNAL}")]):
        with suppress(OSError), path.open("r+b") as journal:
            lock(journal)  # raises OSError while the run goes on
            try:
                changed = restore_files(path.parent)
            except FileError as error:
                tell(str(error))
                continue
            if changed:
                where = f"what it had written is in {path.parent / OUTPUTS}"
                tell(f"a run was killed; files are as before it now, and {where}: {few(changed, 5)}")
