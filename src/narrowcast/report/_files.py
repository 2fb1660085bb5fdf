"""What a page is made from: captures, and the pictures that a script saved in its run's folder."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.errors import FileError
from narrowcast.observe.capture import (
    COMPARISON,
    EXPLANATION,
    PAGE,
    RUN,
    Capture,
    ComparisonCapture,
    read_capture,
    read_comparison,
)
from narrowcast.observe.explanation import explained, read_explanation

_ENDINGS = {".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg"}
_LARGEST_BYTES = 2 * 2**20
_LARGEST_TOGETHER_BYTES = 9 * 2**19
_MOST = 60
_DEEPEST = 3
_MOST_FILES = 5_000
_TYPES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}

Found = ComparisonCapture | tuple[Capture, Path]


def find_capture(path: Path) -> Found:
    """Read a capture file, or the capture in the folder of a comparison or of a run.

    Raises ``FileError`` if there is no capture, or none that can be read.
    """
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
        inside = [name for name in (COMPARISON, RUN) if is_folder and (path / name).is_file()]
    except OSError as error:
        raise FileError(f"cannot read the capture {path}: {error.strerror}") from error
    if not inside and not is_file:
        wanted = f"{COMPARISON} (of narrowcast compare) or {RUN} (of narrowcast run)"
        if is_folder:
            page = f"; it has the page {path / PAGE}" if (path / PAGE).is_file() else ""
            raise FileError(f"there is no capture in {path}: expected {wanted}{page}")
        raise FileError(f"there is no capture {path}: expected a folder with {wanted} in it, or that file")
    file = path / inside[0] if inside else path
    if file.name == COMPARISON:
        return read_comparison(file.parent)
    capture = read_capture(file)
    if capture.start["kind"] == "compare":
        raise FileError(f"{file} is of a comparison: expected the name {COMPARISON}, with its runs beside it")
    return capture, file


def latest_capture(cache: Path | None) -> Path | None:
    """Return the folder in the cache whose comparison or run was written to last; None: it has none."""
    files = [f for name in (COMPARISON, RUN) for f in (cache / "runs").glob(f"*/{name}")] if cache else []
    return max(files, key=lambda file: file.stat().st_mtime).parent if files else None


def explanation_of(found: Found) -> dict[str, Any] | None:
    """Read what ``narrowcast explain`` found in a run; None if it did not watch this one."""
    if isinstance(found, ComparisonCapture):
        return None
    path = found[1].parent / EXPLANATION
    return explained(read_explanation(path)) if path.is_file() else None


# ---- pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture of one run: its ``data:`` address, or why it was left out."""

    run: str
    uri: str | None = None
    left_out: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Pictures by name, one of each run; ``more`` names do not fit in a page."""

    pairs: tuple[tuple[str, tuple[Picture, ...]], ...]
    more: int


def pictures(runs: Sequence[tuple[str, Path]], within: Path) -> Pictures:
    """Read pictures of ``runs`` (each a name and a folder), side by side by their names.

    Only files whose first bytes are those of a picture, and never through a symbolic link or outside of
    ``within``.
    """
    root, left_bytes = within.resolve(), _LARGEST_TOGETHER_BYTES
    found: dict[str, dict[str, Path]] = {}
    for run, folder in runs:
        # The folder itself may be a link that leads away.
        if folder.is_symlink() or not folder.resolve().is_relative_to(root):
            continue
        for path in _files(folder, _DEEPEST):
            found.setdefault(str(path.relative_to(folder)), {})[run] = path
    pairs = []
    for name in sorted(found)[:_MOST]:
        pair = []
        for run, _ in runs:
            data, problem = _content(found[name].get(run), left_bytes)
            left_bytes -= len(data)
            uri = f"data:{kind_of(data)};base64,{base64.b64encode(data).decode()}" if data else None
            pair.append(Picture(run=run, uri=uri, left_out=problem))
        pairs.append((name, tuple(pair)))
    return Pictures(pairs=tuple(pairs), more=max(0, len(found) - _MOST))


def _content(path: Path | None, most_bytes: int) -> tuple[bytes, str | None]:
    """The content of a picture; empty, with the reason, where it is left out."""
    if path is None:
        return b"", "this run saved none of this name"
    try:
        # A link that replaced the file since it was found is refused.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with open(os.open(path, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return b"", "it is not a file"
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        return b"", f"it cannot be read: {error.strerror}"
    if len(data) > _LARGEST_BYTES:
        return b"", f"larger than {_LARGEST_BYTES // 2**20} MiB"
    if kind_of(data) is None:
        return b"", "its content is not a picture"
    return (b"", "the page has no room left for it") if len(data) > most_bytes else (data, None)


def kind_of(data: bytes) -> str | None:
    """Return the media type by the first bytes; None if it is not a picture."""
    for start, kind in _TYPES.items():
        if data.startswith(start):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    head = data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    # In an <img> an SVG runs nothing and fetches nothing, so it need not be parsed to be safe.
    drawn = head.startswith(b"<svg") or (head.startswith(b"<?xml") and b"<svg" in head)
    return "image/svg+xml" if drawn else None


def _files(folder: Path, deepest: int) -> Iterator[Path]:
    """Files named like pictures, without links and folders that cannot be read."""
    try:
        with os.scandir(folder) as scanned:
            entries = sorted((entry for entry, _ in zip(scanned, range(_MOST_FILES), strict=False)), key=str)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and deepest > 1:
            yield from _files(folder / entry.name, deepest - 1)
        elif entry.is_file(follow_symlinks=False) and Path(entry.name).suffix.lower() in _ENDINGS:
            yield folder / entry.name
