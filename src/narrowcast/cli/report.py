"""``narrowcast report``: a capture as text, as JSON and as a page."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowcast._files import cache_folder, lock
from narrowcast.cli._output import show, show_result, talk
from narrowcast.cli.run import JsonOption
from narrowcast.errors import FileError


def report(
    capture: Annotated[
        Path | None,
        typer.Argument(
            metavar="CAPTURE",
            help="The folder of a comparison or of a run, or the capture file in it. Default: the latest.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where the page goes. Default: report.html beside the capture.",
            show_default=False,
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List all captures, the latest first.")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Delete all captures, after a question.")] = False,
) -> int:
    """Show again what compare, run or explain found, and write it as a self-contained HTML page.

    --list and --clean see NARROWCAST_CACHE_DIR or ~/.cache/narrowcast, not what --run-dir named.
    """
    if list_all or clean:
        return _list_all(cache_folder(), clean=clean)

    from narrowcast.report import find_capture, latest_capture, save_page

    if capture is None:
        capture = latest_capture(cache_folder())
    if capture is None:
        raise typer.BadParameter("none given; narrowcast compare train.py writes one", param_hint="'CAPTURE'")
    found = find_capture(capture)
    page = save_page(found, output)
    numbers, text = _numbers_and_text(found, str(page))
    show_result(numbers, lambda: text, as_json=as_json)
    talk(f"report: {page}")
    if open_page and typer.launch(str(page)) != 0:
        talk("cannot open a browser here")
    return 0


def _numbers_and_text(found: Any, page: str) -> tuple[dict[str, Any], str]:
    """Return what is shown of a capture, as JSON and as text."""
    from narrowcast.capture import ComparisonCapture
    from narrowcast.report import (
        comparison_table,
        explain_text,
        explanation_of,
        run_block,
        run_summary,
        summary,
    )

    color = sys.stdout.isatty()
    if isinstance(found, ComparisonCapture):
        numbers = summary(found, report=page)
        return numbers, comparison_table(numbers, color=color)

    run, path = found  # the capture of a run, and its file
    numbers = run_summary(run) | {"report": page}
    try:
        watched = explanation_of(found)
    except FileError as error:
        # A run whose explanation cannot be read is shown as a run.
        talk(str(error))
        watched = None
    if watched is not None:
        return numbers | {"explained": watched}, explain_text(watched, color=color)
    return numbers, run_block(run, capture_path=str(path))


# ---- all captures


def _list_all(cache: Path | None, *, clean: bool) -> int:
    """List the folders of captures with their time and size; delete them if the answer is yes."""
    from narrowcast.report import capture_folders, written_s

    folders = capture_folders(cache)
    if not folders:
        where = ""
        if cache is not None:
            where = f" in {cache / 'runs'}"
        talk(f"there are no captures{where}")
        return 0
    total_mib = 0.0
    for folder in folders:
        mib = _size_mib(folder)
        total_mib += mib
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written_s(folder)))
        show(f"{when} {mib:10.2f} MiB  {folder}")
    if clean and typer.confirm(f"Delete these {len(folders)} folders, {total_mib:.1f} MiB?"):
        for folder in folders:
            _delete(folder)
    return 0


def _size_mib(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def _delete(folder: Path) -> None:
    """Delete a folder, unless its run goes on or files are still to be put back from it."""
    if any(folder.rglob("files.jsonl")):
        talk(f"{folder} stays: it has files of yours that are to be put back")
    elif any(map(_is_written, folder.rglob("*.jsonl"))):
        talk(f"{folder} stays: its run goes on")
    else:
        shutil.rmtree(folder)


def _is_written(capture: Path) -> bool:
    """Return whether a process is still writing this capture: it holds a lock on the file until it ends."""
    try:
        with capture.open("r+b") as file:
            lock(file)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
