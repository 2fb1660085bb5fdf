"""The folder of one run: its capture, and whatever the script wants shown."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from narrowcast.errors import RunFolderError


def make_run_folder(name: str, *, asked: Path | None = None, cache: Path | None = None) -> Path:
    """Create and return the folder of one run.

    Args:
        name: what ran; becomes part of the folder's name.
        asked: the very folder that the person asked for.
        cache: where to put a new folder when none was asked for; None: ``~/.cache/narrowcast``, or a
            temporary folder where that cannot be written (a run should not fail for want of a place
            that nobody named).

    Raises:
        RunFolderError: when ``asked`` or ``cache`` was named and cannot be written.
    """
    if asked is not None:
        return _writable(asked)
    stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if cache is not None:
        return _writable(cache / "runs" / stamp)
    try:
        return _writable(Path.home() / ".cache" / "narrowcast" / "runs" / stamp)
    except (RunFolderError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix=f"narrowcast-{stamp}-"))


def _writable(folder: Path) -> Path:
    advice = "choose another with --run-dir, or set NARROWCAST_CACHE_DIR"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"cannot create the folder {folder}: {error.strerror}; {advice}") from error
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunFolderError(f"cannot write in the folder {folder}: {error.strerror}; {advice}") from error
    return folder.resolve()
