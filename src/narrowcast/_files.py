"""Atomic writes: a reader of a path sees the old content or the new, never a part of either.

The folder where narrowcast keeps files of its own is here too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def cache_folder() -> Path | None:
    """Return where rates and runs are kept: ``NARROWCAST_CACHE_DIR``, or in ~/.cache; None without a home."""
    named = named_cache_folder()
    if named is not None:
        return named
    try:
        return Path.home() / ".cache" / "narrowcast"
    except RuntimeError:  # no home folder is known
        return None


def named_cache_folder() -> Path | None:
    """Return the folder that ``NARROWCAST_CACHE_DIR`` names; None if it is not set."""
    name = os.environ.get("NARROWCAST_CACHE_DIR")
    return Path(name) if name else None


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces ``path`` when the block ends without an exception.

    The content is written to a temporary file beside ``path``, flushed to the disk and renamed. Until then
    the previous content stays; an exception, a full disk or a kill leaves it as it was. A symbolic link keeps
    pointing to its target; the new file has the owner and the permissions of the old one. Temporary files of
    writers that were killed are removed; those of running writers are locked and stay. A device or a pipe is
    not replaced but written, as ``open`` writes it.

    Example::

        with replacing("policy.toml") as file:
            file.write(text.encode())

    Raises:
        OSError: the file cannot be written; ``path`` is unchanged.
    """
    if _is_device_or_pipe(path):
        # A rename would put a file in the place of /dev/null, or of a pipe that somebody reads.
        with open(path, "wb") as device:
            yield device
        return

    target = Path(path).resolve()
    # File systems allow names of 255 bytes: 40 characters, of up to 4 bytes each, leave room for the rest.
    prefix = f".{target.name[:40]}."
    part = target.with_name(f"{prefix}{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            with contextlib.suppress(OSError):  # some file systems have no locks
                lock(file)
            _remove_abandoned(target.parent, prefix, part)
            yield file
            file.flush()
            os.fsync(file.fileno())
            _copy_owner_and_mode(target, part)
            # Still locked: another writer would remove an unlocked file as abandoned.
            if os.name == "posix":
                os.replace(part, target)
        if os.name != "posix":  # Windows cannot rename an open file, and ``lock`` does nothing there
            os.replace(part, target)
        sync_folder(target.parent)
    except OSError as error:
        # The error of a write, as on a full disk, has no file name.
        error.filename = error.filename or str(target)
        raise
    finally:
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk; otherwise a power failure may undo a rename.

    On Windows, and on file systems that cannot sync folders, it does nothing.
    """
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # CIFS and some FUSE file systems refuse to sync a folder. PostgreSQL ignores these two errors too:
        # https://github.com/postgres/postgres/blob/REL_17_0/src/common/file_utils.c
        if error.errno not in (errno.EBADF, errno.EINVAL):
            raise
    finally:
        os.close(descriptor)


def _is_device_or_pipe(path: str | os.PathLike[str]) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:  # no file at this path yet, or none that can be written
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _copy_owner_and_mode(source: Path, destination: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # the first file at this path
        old = source.stat()
        new = destination.stat()
        if os.name == "posix" and (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            with contextlib.suppress(PermissionError):
                os.chown(destination, old.st_uid, old.st_gid)
        os.chmod(destination, stat.S_IMODE(old.st_mode))


def _remove_abandoned(folder: Path, prefix: str, own: Path) -> None:
    """Remove the temporary files of killed writers of the same target, all but ``own``."""
    with contextlib.suppress(OSError):  # a folder may be writable and not readable
        for path in folder.iterdir():
            is_temporary = path.name.startswith(prefix) and path.name.endswith(".part")
            # The prefix is not enough: ".a.", that of the target "a", is also the beginning of
            # ".a.b.<uuid>.part", which belongs to the target "a.b". Its name is longer.
            if is_temporary and len(path.name) == len(own.name) and path != own:
                # ``lock`` raises if a writer that is still running holds the lock, and if there are no locks.
                with contextlib.suppress(OSError), path.open("r+b") as file:
                    lock(file)
                    path.unlink()


def lock(file: IO[bytes]) -> None:
    """Lock a file until it is closed or its process ends.

    Raises:
        OSError: another process holds the lock, or the file system has no locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows refuses to remove a file that another process has open
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
