"""``narrowcast report``: a capture as text, as JSON and as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from narrowcast.cli._output import show_result, talk
from narrowcast.cli.run import JsonOption
from narrowcast.errors import FileError


def report(
    capture: Annotated[
        Path | None,
        typer.Argument(
            metavar="CAPTURE",
            help="The folder of a comparison or of a run, or the capture file in it.",
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
) -> int:
    """Show again what compare, run or explain found, and write it as a self-contained HTML page."""
    from narrowcast.observe.capture import ComparisonCapture
    from narrowcast.report import (
        comparison_table,
        explain_text,
        explanation_of,
        find_capture,
        run_block,
        run_summary,
        save_page,
        summary,
    )

    if capture is None:
        raise typer.BadParameter("none given; narrowcast compare train.py writes one", param_hint="'CAPTURE'")
    found = find_capture(capture)
    page = save_page(found, output)
    color = sys.stdout.isatty()
    if isinstance(found, ComparisonCapture):
        numbers = summary(found, report=str(page))
        text = comparison_table(numbers, color=color)
    else:
        run, path = found
        numbers = run_summary(run) | {"report": str(page)}
        text = run_block(run, capture_path=str(path))
        try:
            if watched := explanation_of(found):
                numbers["explained"] = watched
                text = explain_text(watched, color=color)
        except FileError as error:
            talk(str(error))
    show_result(numbers, lambda: text, as_json=as_json)
    talk(f"report: {page}")
    return 0
