"""``narrowcast doctor``: what this machine has, what does not fit together, and how fast each format is."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowcast.cli.run import CacheDirOption

UNUSABLE = 1
NOT_WRITTEN = 2
_SILENT_S = 2.0


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of the text.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again, even if rates are kept from an earlier time.")
    ] = False,
    budget_s: Annotated[float, typer.Option("--budget-s", hidden=True)] = 15.0,
    cache_dir: CacheDirOption = None,
) -> int:
    """Say what this machine computes fast, by measuring it, and what does not fit together.

    About ten seconds; rates are kept for the next time. Exit code 1: a device that torch cannot use.
    """
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        # The one verb that is for this: a library that torch needs may be missing, or torch itself.
        _talk(f"torch cannot be imported ({error}). To install it: pip install --upgrade torch")
        return UNUSABLE
    from narrowcast.machine import Budget, Examination, require_torch

    require_torch()
    settings = Examination(cache=_cache_folder(cache_dir), fresh=fresh, budget=Budget(device_s=budget_s))
    found = _examine(settings)
    for note in found["notes"]:
        _talk(f"note: {note}")
    if as_json:
        text = json.dumps(found, indent=2, allow_nan=False)
    else:
        from narrowcast.report import doctor_text

        text = doctor_text(found, color=sys.stdout.isatty())
    if not _show(text):
        return NOT_WRITTEN
    return UNUSABLE if any(wrong["severity"] == "error" for wrong in found["mismatches"]) else 0


def _examine(settings: Any) -> dict[str, Any]:
    """Examine this machine, with progress on a terminal once it has taken two seconds."""
    from rich.console import Console
    from rich.text import Text

    from narrowcast.machine import examine
    from narrowcast.report import printable

    console, start = Console(stderr=True), time.monotonic()
    with ExitStack() as stack:
        status = console.status("")
        shown = False

        def progress(text: str) -> None:
            nonlocal shown
            if time.monotonic() - start > _SILENT_S and console.is_terminal:
                status.update(Text(printable(f"measuring {text}")[: console.width - 4]))
                if not shown:
                    shown = True
                    stack.enter_context(status)

        return examine(settings, progress=progress)


def _cache_folder(asked: Path | None) -> Path | None:
    if asked is not None:
        return asked
    try:
        return Path.home() / ".cache" / "narrowcast"
    except RuntimeError:
        return None


def _show(text: str) -> bool:
    """Print ``text``; with hyphens for lines, and a sign for all else, that stdout's encoding lacks.

    Returns whether it was written; whoever read it may have gone, or the disk be full.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace("\u2500", "-").encode(encoding, errors="replace").decode(encoding)
    try:
        print(text, flush=True)  # noqa: T201
    except OSError as error:
        # Python flushes once more as it ends, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            _talk(f"cannot write to stdout: {error.strerror}")
            return False
    return True


def _talk(text: str) -> None:
    print(f"narrowcast: {text}", file=sys.stderr)  # noqa: T201
