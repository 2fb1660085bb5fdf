"""Where the arguments of a call stand in the text, brackets around them included."""

from __future__ import annotations

import ast

from narrowcast.migrate._source import Source

_BLANKS = " \t\f\r\n\\"


def open_bracket(source: Source, call: ast.Call) -> int:
    """The character after the opening bracket of a call."""
    at = _skip(source.text, source.span(call.func)[1])
    while source.text[at] != "(":
        at = _skip(source.text, at + 1)  # brackets around what is called
    return at + 1


def argument_starts(source: Source, call: ast.Call) -> list[int]:
    """Where each argument begins, by place in the text: before ``name=`` and ``**``, and before brackets."""
    ends = [source.span(node)[1] for node in _in_order(call)]
    starts = [_skip(source.text, open_bracket(source, call))] if ends else []
    for end in ends[:-1]:
        starts.append(_skip(source.text, _after_comma(source.text, end)))
    return starts


def after_arguments(source: Source, call: ast.Call) -> int:
    """Where the last argument ends, brackets around it included, a comma and what follows left out."""
    close = source.span(call)[1] - 1
    at = last = source.span(_in_order(call)[-1])[1]
    while at < close:
        at = _skip(source.text, at)
        if source.text[at] != ")" or at >= close:
            break
        at = last = at + 1
    return last


def argument_spans(source: Source, call: ast.Call) -> list[tuple[ast.expr | ast.keyword, int, int]]:
    """Each argument, with where its text begins and ends."""
    nodes = _in_order(call)
    starts = argument_starts(source, call)
    found = []
    for index, (node, start) in enumerate(zip(nodes, starts, strict=True)):
        if index + 1 == len(nodes):
            end = after_arguments(source, call)
        else:
            end = _after_comma(source.text, source.span(node)[1]) - 1
            while source.text[end - 1] in _BLANKS:
                end -= 1
        found.append((node, start, end))
    return found


def argument(call: ast.Call, place: int | None, name: str) -> ast.expr | None:
    """An argument by its place or its name; None where it is not given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if place is not None and place < len(call.args):
        return call.args[place]
    return None


def is_plain(call: ast.Call) -> bool:
    """Whether each argument of a call is written out: no ``*`` and no ``**``."""
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    return not starred and all(keyword.arg is not None for keyword in call.keywords)


def _in_order(call: ast.Call) -> list[ast.expr | ast.keyword]:
    found: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _skip(text: str, at: int) -> int:
    """The next character that is neither blank nor in a comment."""
    while at < len(text):
        if text[at] == "#":
            while text[at] not in "\r\n":
                at += 1
        elif text[at] in _BLANKS:
            at += 1
        else:
            break
    return at


def _after_comma(text: str, at: int) -> int:
    while text[at := _skip(text, at)] != ",":
        at += 1
    return at + 1
