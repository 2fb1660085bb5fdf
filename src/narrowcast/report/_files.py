"""From a path to a capture, and from a capture to its page on disk."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def find_capture(path: Path) -> ComparisonCapture | tuple[Capture, Path]:
    """Read what a person pointed at: a capture file, or the folder of a comparison or of a run.

    Returns:
        The comparison; or the capture of a run and the path of its file.

    Raises:
        FileError: there is no capture, or none that can be read.
    """
    try:
        folder, file = path.is_dir(), path.is_file()
        compared = folder and (path / COMPARISON).is_file()
        ran = folder and (path / RUN).is_file()
    except OSError as error:
        raise FileError(f"cannot read the capture {path}: {error.strerror}") from error
    if compared:
        return read_comparison(path)
    if ran:
        return read_capture(path / RUN), path / RUN
    if folder:
        raise FileError(
            f"there is no capture in {path}: expected {COMPARISON} (of narrowcast compare) or {RUN} (of "
            "narrowcast run)"
        )
    if not file:
        raise FileError(
            f"there is no capture {path}: expected the folder of a comparison or of a run, or its "
            f"{COMPARISON} or {RUN}"
        )
    if path.name == COMPARISON:
        return read_comparison(path.parent)
    capture = read_capture(path)
    if capture.start["kind"] == "compare":
        raise FileError(
            f"{path} is of a comparison, whose runs are found beside it: give its folder, and let the file "
            f"be called {COMPARISON}"
        )
    return capture, path


def explanation_of(found: ComparisonCapture | tuple[Capture, Path]) -> dict[str, Any] | None:
    """What ``narrowcast explain`` found, of a run that it watched; None of any other.

    Raises:
        FileError: it was cut short, or cannot be read.
    """
    if isinstance(found, ComparisonCapture):
        return None
    path = found[1].parent / EXPLANATION
    return explained(read_explanation(path)) if path.is_file() else None


def page_of(found: ComparisonCapture | tuple[Capture, Path]) -> str:
    """The page of what ``find_capture`` returned."""
    if isinstance(found, ComparisonCapture):
        return comparison_page(found)
    capture, path = found
    return run_page(capture, path.parent)


def page_beside(found: ComparisonCapture | tuple[Capture, Path]) -> Path:
    """Where the page of what ``find_capture`` returned goes when nobody says otherwise."""
    return (found.folder if isinstance(found, ComparisonCapture) else found[1].parent) / PAGE


def write_page(folder: Path, *, output: Path | None = None) -> Path:
    """Write the page of the comparison or run in ``folder``, whole or not at all, and return where it is.

    Args:
        folder: of a comparison or a run, or a capture file.
        output: where to write; None: ``report.html`` beside the capture.

    Raises:
        FileError: there is no capture, or none that can be read.
        FileError: the page cannot be written.
    """
    found = find_capture(folder)
    return save_page(page_of(found), page_beside(found) if output is None else output)


def save_page(page: str, path: Path) -> Path:
    """Write ``page``, so that at ``path`` there is never half of one.

    Raises:
        FileError: it cannot be written there; the message names ``--output``.
    """
    part = path.parent / f".{path.name[:100]}.{os.getpid()}.part"
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.write(page)
        part.replace(path)
    except OSError as error:
        _forget(part)
        raise FileError(
            f"cannot write the page {path}: {error.strerror}; name another place with --output FILE"
        ) from error
    except BaseException:
        _forget(part)
        raise
    return path


def _forget(part: Path) -> None:
    with suppress(OSError):
        part.unlink()
