"""What a verb prints: results on stdout; messages and progress on stderr."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import typer

from narrowcast.errors import ScriptError

CHECK_FAILED = 1
NOT_WRITTEN = 2
SCRIPT_FAILED = 3
"""Exit codes of all verbs but ``run``; 2 is also that of wrong use."""

# Progress: on a terminal it is shown after so many seconds, elsewhere a line is printed every so many.
_SILENT_S = 2.0
_LINE_EVERY_S = 10.0
_LONGEST_LINE = 66  # without "narrowcast: ", which ``talk`` adds


def show(text: str) -> None:
    """Print ``text`` on stdout.

    Characters that the encoding of stdout lacks become "?", and drawn lines hyphens. If stdout cannot be
    written, the command ends with a message and exit code 2. A pipe that was closed, as ``head`` does, is no
    error.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace("\u2500", "-").encode(encoding, errors="replace").decode(encoding)
    try:
        print(text, flush=True)  # noqa: T201
    except OSError as error:
        # Python flushes once more at exit, and would report the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            talk(f"cannot write to stdout: {error.strerror}")
            raise typer.Exit(NOT_WRITTEN) from None


def show_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout."""
    show(json.dumps(value, indent=2, allow_nan=False))


def show_result(value: Any, text: Callable[[], str], *, as_json: bool) -> None:
    """Print ``value`` as JSON, or ``text()``, on stdout."""
    if as_json:
        show_json(value)
    else:
        show(text())


def talk(text: str) -> None:
    """Print a message on stderr. Its first line is wrapped to the terminal; further lines stay as they are.

    Without a terminal the width is 80 columns; ``COLUMNS`` overrides both. Paths and other words stay whole.
    """
    first, newline, rest = text.partition("\n")
    lines = textwrap.wrap(
        f"narrowcast: {first}",
        shutil.get_terminal_size((80, 24)).columns,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    said = "\n".join(lines)
    print(f"{said}{newline}{rest}", file=sys.stderr)  # noqa: T201


@contextmanager
def shown_progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line of progress on a terminal, once two seconds have passed.

    Where stderr is no terminal, it prints a line every ten seconds.

    SIGTERM, as ``timeout`` sends it, raises SystemExit in the block, which ends the processes it started.
    A script that fails in the block ends the command with its message and exit code 3.
    """
    from rich.console import Console
    from rich.text import Text

    from narrowcast.report import printable

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    console, start = Console(stderr=True), time.monotonic()
    with ExitStack() as stack:
        earlier = signal.signal(signal.SIGTERM, end)
        stack.callback(signal.signal, signal.SIGTERM, earlier)
        status = console.status("")
        shown, last = False, start

        def progress(text: str) -> None:
            nonlocal shown, last
            if not console.is_terminal:
                if time.monotonic() - last >= _LINE_EVERY_S:
                    last = time.monotonic()
                    talk(printable(text)[:_LONGEST_LINE])
            elif time.monotonic() - start > _SILENT_S:
                status.update(Text(printable(text)[: console.width - 4]))
                if not shown:
                    shown = True
                    stack.enter_context(status)

        try:
            yield progress
        except ScriptError as error:
            stack.close()  # removes the line of progress
            talk(str(error))
            raise typer.Exit(SCRIPT_FAILED) from None
