"""The folder of one run: its capture, and whatever the script wants shown."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

from narrowcast.errors import FileError
from narrowcast.observe._op_trace_file import EXPLANATION

# Characters of up to four bytes each, and a file system's names end at 255 bytes.
_LONGEST_NAME = 40
_OF_A_RANK = re.compile(r"capture-rank(\d+)(-process\d+)?\.jsonl")


def make_run_folder(name: str, *, asked: Path | None = None, cache: Path | None = None) -> Path:
    """Create and return the folder of one run.

    Args:
        name: what ran; becomes part of the folder's name.
        asked: the very folder that the person asked for.
        cache: where to put a new folder when none was asked for; None: ``~/.cache/narrowcast``, or a
            temporary folder where that cannot be written (a run should not fail for want of a place
            that nobody named).

    Raises:
        FileError: when ``asked`` or ``cache`` was named and cannot be written.
    """
    if asked is not None:
        return _writable(asked)
    stamp = f"{name[:_LONGEST_NAME]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if cache is not None:
        return _writable(cache / "runs" / stamp)
    try:
        return _writable(Path.home() / ".cache" / "narrowcast" / "runs" / stamp)
    except (FileError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix=f"narrowcast-{stamp}-"))


def discard_captures(folder: Path, *, from_rank: int = 0) -> None:
    """Delete what an earlier run left in ``folder`` that was asked for again: captures, that of ``explain``
    too, and what ``compare`` kept of the output. Results of two runs are never mixed; what the script itself
    wrote stays.

    Args:
        folder: of a run that is about to start.
        from_rank: captures of a launcher's ranks below it stay, because they are overwritten by their own
            process, which may have started already.

    Raises:
        FileError: when one cannot be deleted.
    """
    stale = [path for path in folder.glob("capture-rank*.jsonl") if _rank_of(path) >= from_rank]
    stale += folder.glob("capture-process*.jsonl")
    stale.append(folder / EXPLANATION)
    if from_rank == 0:
        stale += [folder / name for name in ("capture.jsonl", "stdout.txt", "stderr.txt")]
    for path in stale:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"cannot delete what an earlier run left, {path}: {error.strerror}") from error


def _rank_of(path: Path) -> int:
    found = _OF_A_RANK.fullmatch(path.name)
    return int(found[1]) if found else -1


def _writable(folder: Path) -> Path:
    advice = "choose another with --run-dir, or set NARROWCAST_CACHE_DIR"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot create the folder {folder}: {error.strerror}; {advice}") from error
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FileError(f"cannot write in the folder {folder}: {error.strerror}; {advice}") from error
    return folder.resolve()
