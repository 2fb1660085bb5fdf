"""``narrowcast report``: what a capture says, as text, as JSON and as a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowcast.cli._output import NOT_WRITTEN, show, talk
from narrowcast.cli.run import JsonOption
from narrowcast.errors import FileError


def report(
    capture: Annotated[
        Path,
        typer.Argument(
            metavar="CAPTURE",
            help="The folder of a comparison or of a run, or the capture file in it.",
        ),
    ],
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
) -> int:
    """Show again what compare, run or explain found, and write it as a page that works offline."""
    from narrowcast.observe.capture import ComparisonCapture
    from narrowcast.report import (
        comparison_table,
        explain_text,
        explanation_of,
        find_capture,
        page_beside,
        page_of,
        run_block,
        run_summary,
        save_page,
        summary,
    )

    found = find_capture(capture)
    page = save_page(page_of(found), page_beside(found) if output is None else output)
    if isinstance(found, ComparisonCapture):
        numbers = summary(found, report=str(page))
        text = "" if as_json else comparison_table(numbers, color=sys.stdout.isatty())
    else:
        run, path = found
        try:
            watched = explanation_of(found)
        except FileError as error:
            watched = None
            talk(str(error))
        numbers = run_summary(run) | ({} if watched is None else {"explained": watched})
        numbers["report"] = str(page)
        if watched is None:
            text = run_block(run, capture_path=str(path))
        else:
            text = explain_text(watched, color=sys.stdout.isatty())
    if not show(_json(numbers) if as_json else text):
        return NOT_WRITTEN
    talk(f"the page is {page}")
    return 0


def _json(numbers: dict[str, Any]) -> str:
    return json.dumps(numbers, indent=2, allow_nan=False)
