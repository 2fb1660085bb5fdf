"""Text that a script wrote, made safe to show in a table or a line."""

from __future__ import annotations

import re

_ESCAPE_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles and links
)


def printable(text: str) -> str:
    """``text`` without terminal sequences (colour, cursor, links), any other control character written out.

    White space becomes a space. Markup such as ``[red]`` stays as it is, since nothing here reads it.
    """
    return "".join(map(_shown, _ESCAPE_SEQUENCE.sub("", text)))


def _shown(character: str) -> str:
    if character.isspace():
        return " "
    return character if character.isprintable() else character.encode("unicode_escape").decode()
