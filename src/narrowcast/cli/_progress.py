"""Progress of what takes long, on a terminal alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

_SILENT_S = 2.0


@contextmanager
def shown_progress() -> Iterator[Callable[[str], None]]:
    """What shows a line of progress on a terminal, once two seconds have passed."""
    from rich.console import Console
    from rich.text import Text

    from narrowcast.report import printable

    console, start = Console(stderr=True), time.monotonic()
    with ExitStack() as stack:
        status = console.status("")
        shown = False

        def progress(text: str) -> None:
            nonlocal shown
            if time.monotonic() - start > _SILENT_S and console.is_terminal:
                status.update(Text(printable(text)[: console.width - 4]))
                if not shown:
                    shown = True
                    stack.enter_context(status)

        yield progress
