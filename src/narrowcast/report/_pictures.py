"""Pictures that a script saved in its run's folder, checked and ready to stand inside a page."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_ENDINGS = {".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg"}
_LARGEST_BYTES = 2 * 2**20
_LARGEST_TOGETHER_BYTES = 9 * 2**19
_MOST = 60
_DEEPEST = 3
_MOST_FILES = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture of one run.

    Attributes:
        run: name of the run.
        uri: the picture itself as a ``data:`` address; None: it was left out.
        left_out: why, in a few words; None: it is there.
    """

    run: str
    uri: str | None
    left_out: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The pictures with one name, of one FP32 and one mixed run; of a single run, one of them."""

    name: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What a page shows.

    Attributes:
        pairs: by name.
        more: how many names were not shown, since a page has room for so many.
    """

    pairs: tuple[Pair, ...]
    more: int


def pictures(runs: Sequence[tuple[str, Path]], within: Path) -> Pictures:
    """Pictures of ``runs`` (each a name and a folder) side by side by their names.

    Only files that are what their first bytes say, and never through a symbolic link or out of ``within``.
    """
    root = within.resolve()
    found: dict[str, dict[str, Path]] = {}
    for run, folder in runs:
        # Its own name may be a link that leads away.
        if folder.is_symlink() or not folder.resolve().is_relative_to(root):
            continue
        for path in _files(folder, _DEEPEST):
            found.setdefault(str(path.relative_to(folder)), {})[run] = path
    names = sorted(found)
    room = _Room()
    pairs = [
        Pair(name=name, pictures=tuple(room.take(run, found[name].get(run)) for run, _ in runs))
        for name in names[:_MOST]
    ]
    return Pictures(pairs=tuple(pairs), more=max(0, len(names) - _MOST))


class _Room:
    """What is left of a page's room for pictures."""

    def __init__(self) -> None:
        self._left_bytes = _LARGEST_TOGETHER_BYTES

    def take(self, run: str, path: Path | None) -> Picture:
        if path is None:
            return Picture(run=run, uri=None, left_out="this run saved none of this name")
        try:
            data = _content(path)
        except OSError as error:
            return Picture(run=run, uri=None, left_out=f"it cannot be read: {error.strerror}")
        if data is None:
            return Picture(run=run, uri=None, left_out=f"larger than {_LARGEST_BYTES // 2**20} MiB")
        kind = kind_of(data)
        if kind is None:
            return Picture(run=run, uri=None, left_out="its content is none of a picture")
        if len(data) > self._left_bytes:
            return Picture(run=run, uri=None, left_out="the page has no room left for it")
        self._left_bytes -= len(data)
        return Picture(run=run, uri=f"data:{kind};base64,{base64.b64encode(data).decode()}", left_out=None)


def kind_of(data: bytes) -> str | None:
    """The media type that the first bytes tell; None for all that is no picture."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    head = data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    # In an <img> an SVG runs nothing and fetches nothing, so it need not be parsed to be safe.
    drawn = head.startswith(b"<svg") or (head.startswith(b"<?xml") and b"<svg" in head)
    return "image/svg+xml" if drawn else None


def _files(folder: Path, deepest: int) -> Iterator[Path]:
    """Files that are called like pictures; links are passed over, and so is what cannot be read."""
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


def _content(path: Path) -> bytes | None:
    """What is in the file; None where that is too much. A link that took its place meanwhile is refused."""
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(opened, "rb") as file:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is no file")
        return None if found.st_size > _LARGEST_BYTES else file.read(_LARGEST_BYTES)
