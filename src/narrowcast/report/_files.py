"""Write pages beside captures, and find captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowcast._files import replacing
from narrowcast.capture import (
    COMPARISON,
    EXPLANATION,
    PAGE,
    RUN,
    Capture,
    ComparisonCapture,
    read_capture,
    read_comparison,
)
from narrowcast.errors import FileError
from narrowcast.report._explanation import explained, read_explanation
from narrowcast.report._page import comparison_page, run_page

Found = ComparisonCapture | tuple[Capture, Path]

_EXPECTED = f"{COMPARISON} (of narrowcast compare) or {RUN} (of narrowcast run)"


def find_capture(path: Path) -> Found:
    """Read a capture file, or the capture in the folder of a comparison or of a run.

    Raises ``FileError`` if there is no capture, or none that can be read.
    """
    file = path
    if path.is_dir():
        file = path / COMPARISON
        if not file.is_file():
            file = path / RUN
        if not file.is_file():
            problem = f"there is no capture in {path}: expected {_EXPECTED}"
            # doctor writes a page without a capture.
            if (path / PAGE).is_file():
                problem += f"; it has the page {path / PAGE}"
            raise FileError(problem)
    elif not path.is_file():
        raise FileError(f"there is no capture {path}: expected a folder with {_EXPECTED} in it, or that file")

    if file.name == COMPARISON:
        return read_comparison(file.parent)
    capture = read_capture(file)
    if capture.start["kind"] == "compare":
        raise FileError(f"{file} is of a comparison: expected the name {COMPARISON}, with its runs beside it")
    return capture, file


def capture_folders(cache: Path | None) -> list[Path]:
    """Return the folders of captures in the cache, the latest capture first."""
    if cache is None:
        return []
    return sorted((cache / "runs").glob("*/"), key=written_s, reverse=True)


def written_s(folder: Path) -> float:
    """Return when a folder's capture was written last, in seconds since 1970."""
    # Pages do not count: a report that is made later writes them again.
    captures = list(folder.glob("*.jsonl"))
    return max(path.stat().st_mtime for path in captures or [folder])


def latest_capture(cache: Path | None) -> Path | None:
    """Return the folder in the cache whose comparison or run was written last, or None if there is none."""
    for folder in capture_folders(cache):
        if (folder / COMPARISON).is_file() or (folder / RUN).is_file():
            return folder
    return None


def explanation_of(found: Found) -> dict[str, Any] | None:
    """Read what ``narrowcast explain`` found in a run; None if it did not watch this one."""
    if isinstance(found, ComparisonCapture):
        return None
    _, capture_file = found
    path = capture_file.parent / EXPLANATION
    return explained(read_explanation(path)) if path.is_file() else None


def save_page(found: Found, path: Path | None = None) -> Path:
    """Write the page of what ``find_capture`` returned, whole or not at all; return its path.

    Without ``path`` it is ``report.html`` beside the capture. Raises ``FileError`` if it cannot be written.
    """
    if isinstance(found, ComparisonCapture):
        page, folder = comparison_page(found), found.folder
    else:
        capture, capture_file = found
        folder = capture_file.parent
        page = run_page(capture, folder)
    try:
        return write_page(page, folder / PAGE if path is None else path)
    except FileError as error:
        elsewhere = f"to write it elsewhere: narrowcast report {folder} --output FILE"
        raise FileError(f"{error}; {elsewhere}") from error


def write_page(page: str, path: Path) -> Path:
    """Write a page whole or not at all; return its path. Raises ``FileError`` if it cannot be written."""
    try:
        with replacing(path) as file:
            file.write(page.encode())
    except OSError as error:
        raise FileError(f"cannot write the page {path}: {error.strerror}") from error
    return path
