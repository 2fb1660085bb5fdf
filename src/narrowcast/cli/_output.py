"""What a verb says: the answer on stdout, everything else on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

NOT_WRITTEN = 2
"""Exit code where the answer could not be written."""


def show(text: str) -> bool:
    """Print ``text``; with hyphens for lines, and a sign for all else, that stdout's encoding lacks.

    Returns whether it was written, with a line on stderr where not. Whoever read it may have gone, as
    ``head`` does: then nothing is wrong.
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
            talk(f"cannot write to stdout: {error.strerror}")
            return False
    return True


def talk(text: str) -> None:
    """A sentence on stderr, for a person; what follows its first line is shown as it is."""
    first, newline, rest = text.partition("\n")
    print(f"{_wrapped(f'narrowcast: {first}')}{newline}{rest}", file=sys.stderr)  # noqa: T201


def _wrapped(line: str) -> str:
    """``line`` in the terminal's width, further lines indented; paths and other words stay whole.

    80 columns where there is no terminal; ``COLUMNS`` says otherwise, as for every command.
    """
    return "\n".join(
        textwrap.wrap(
            line,
            shutil.get_terminal_size((80, 24)).columns,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    )
