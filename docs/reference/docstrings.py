"""Docstrings in the reference: what they mark as a block of code with two colons becomes one in Markdown."""

import re

import griffe


class LiteralBlocks(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"::(?=\n\n? *\n? {4})", ":", obj.docstring.value)
