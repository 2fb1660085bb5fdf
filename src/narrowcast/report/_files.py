"""From a path to a capture, and from a capture to its page on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowcast._files import replacing
from narrowcast.errors import FileError
from narrowcast.observe.capture import (
    COMPARISON,
    EXPLANATION,
    RUN,
    Capture,
    ComparisonCapture,
    read_capture,
    read_comparison,
)
from narrowcast.observe.explanation import explained, read_explanation
from narrowcast.report._page import comparison_page, run_page

PAGE = "report.html"

Found = ComparisonCapture | tuple[Capture, Path]


def find_capture(path: Path) -> Found:
    """Read a capture file, or the capture in the folder of a comparison or of a run.

    Returns:
        The comparison; or the capture of a run and the path of its file.

    Raises:
        FileError: there is no capture, or none that can be read.
    """
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
        inside = [name for name in (COMPARISON, RUN) if is_folder and (path / name).is_file()]
    except OSError as error:
        raise FileError(f"cannot read the capture {path}: {error.strerror}") from error
    if not inside and not is_file:
        wanted = f"{COMPARISON} (of narrowcast compare) or {RUN} (of narrowcast run)"
        if is_folder:
            raise FileError(f"there is no capture in {path}: expected {wanted}")
        raise FileError(f"there is no capture {path}: expected a folder with {wanted} in it, or that file")
    file = path / inside[0] if inside else path
    if file.name == COMPARISON:
        return read_comparison(file.parent)
    capture = read_capture(file)
    if capture.start["kind"] == "compare":
        raise FileError(f"{file} is of a comparison: expected the name {COMPARISON}, with its runs beside it")
    return capture, file


def explanation_of(found: Found) -> dict[str, Any] | None:
    """Read what ``narrowcast explain`` found in a run; None if it did not watch this one.

    Raises:
        FileError: it was cut short, or cannot be read.
    """
    if isinstance(found, ComparisonCapture):
        return None
    path = found[1].parent / EXPLANATION
    return explained(read_explanation(path)) if path.is_file() else None


def write_page(folder: Path) -> Path:
    """Write the page of the comparison or run in ``folder`` beside its capture; return its path.

    Raises:
        FileError: there is no capture, or none that can be read; or the page cannot be written.
    """
    return save_page(find_capture(folder))


def save_page(found: Found, path: Path | None = None) -> Path:
    """Write the page of what ``find_capture`` returned, whole or not at all; return its path.

    Args:
        found: the comparison or run.
        path: where to write; None: ``report.html`` beside the capture.

    Raises:
        FileError: it cannot be written there.
    """
    if isinstance(found, ComparisonCapture):
        page, folder = comparison_page(found), found.folder
    else:
        page, folder = run_page(found[0], found[1].parent), found[1].parent
    path = folder / PAGE if path is None else path
    try:
        with replacing(path) as file:
            file.write(page.encode())
    except OSError as error:
        raise FileError(
            f"cannot write the page {path}: {error.strerror}; name another place with --output FILE"
        ) from error
    return path
