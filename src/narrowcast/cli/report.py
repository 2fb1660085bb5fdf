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
from narrowcast.cli.run import CacheDirOption, JsonOption
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
    cache_dir: CacheDirOption = None,
) -> int:
    """Show again what compare, run or explain found, and write it as a self-contained HTML page.

    --list and --clean see NARROWCAST_CACHE_DIR or ~/.cache/narrowcast, not what --run-dir named.
    """
    if list_all or clean:
        return _list_all(cache_dir or cache_folder(), clean=clean)

    from narrowcast.report import find_capture, latest_capture, save_page

    if capture is None:
        capture = latest_capture(cache_dir or cache_folder())
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
    from narrowcast.observe.capture import ComparisonCapture
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
    run, path = found
    numbers = run_summary(run) | {"report": page}
    try:
        if watched := explanation_of(found):
            return numbers | {"explained": watched}, explain_text(watched, color=color)
    except FileError as error:
        talk(str(error))
    return numbers, run_block(run, capture_path=str(path))


def _list_all(cache: Path | None, *, clean: bool) -> int:
    """List the folders of captures with their time and size; delete them if the answer is yes."""
    ended_s = {path: _ended_s(path) for path in (cache / "runs").glob("*/")} if cache else {}
    folders = sorted(ended_s, key=lambda path: -ended_s[path])
    sizes = {path: sum(f.lstat().st_size for f in path.rglob("*") if f.is_file()) / 2**20 for path in folders}
    for path, mib in sizes.items():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(ended_s[path]))
        show(f"{when} {mib:10.2f} MiB  {path}")
    if not folders:
        talk("there are no captures" + (f" in {cache / 'runs'}" if cache else ""))
    elif clean and typer.confirm(f"Delete these {len(folders)} folders, {sum(sizes.values()):.1f} MiB?"):
        for path in folders:
            if any(path.rglob("files.jsonl")):
                talk(f"{path} stays: it has files of yours that are to be put back")
            elif any(map(_is_written, path.rglob("*.jsonl"))):
                talk(f"{path} stays: its run goes on")
            else:
                shutil.rmtree(path)
    return 0


def _ended_s(folder: Path) -> float:
    """Return when a folder's capture was written last; a later report writes its page anew."""
    captures = [path for path in folder.glob("*.jsonl") if path.is_file()]
    return max(path.stat().st_mtime for path in captures or [folder])


def _is_written(capture: Path) -> bool:
    """Return whether a process that writes this capture goes on."""
    try:
        with capture.open("r+b") as file:
            lock(file)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
