"""Hand-written mistakes with mixed precision: found, told with a reason, and mended where that is sure.

A mistake is told where it holds for certain on a path through a function. Where another file, a call out of
sight or an open condition decides, nothing is said.
"""

from __future__ import annotations

import ast
import re
from weakref import WeakKeyDictionary

from narrowcast.migrate._changes import Changes
from narrowcast.migrate._mistakes_fixes import Fix, Fixes
from narrowcast.migrate._mistakes_flow import Flow, Seen
from narrowcast.migrate._mistakes_names import Script
from narrowcast.migrate._mistakes_places import mistakes_of_places
from narrowcast.migrate._mistakes_reach import Reach
from narrowcast.migrate._mistakes_rules import RULES, ignored, without_effect
from narrowcast.migrate._settings import Settings
from narrowcast.migrate._source import Source

IGNORE = "ignore"
_TELLING = re.compile(r"GradScaler|autocast|unscale_|\.scale\(|\bamp\b|\bStepper\b")
# Two stages ask for those of what apex became. A mistake knows of nodes and not of their file, which so goes.
_KEPT: WeakKeyDictionary[Source, tuple[Seen, ...]] = WeakKeyDictionary()


def mistakes(source: Source, settings: Settings) -> Changes:
    """The mistakes of one file, as they stand in it."""
    changes = Changes()
    if not _TELLING.search(source.text):
        return changes
    for at, said in without_effect(source.text):
        if not _is_in_a_string(at, source):
            changes.tell(at, IGNORE, said, fixed=False)
    found = all_mistakes(source)
    if not found:
        return changes
    fixes = Fixes(Script(source))
    taken: list[Fix] = []
    for seen in found:
        if _is_ignored(seen, source):
            continue
        fix = fixes.of(seen)
        if fix is not None and fix not in taken:
            # What meets another fix waits for the next round, which sees the lines as they are by then.
            if any(fix.lines & other.lines for other in taken):
                fix = None
            else:
                taken.append(fix)
                for start, end, text in fix.edits:
                    changes.replace((start, end), text)
        rule = RULES[seen.rule]
        said = rule.reason
        if fix is None:
            said += f"; {rule.advice.format(scaler=seen.scaler, optimizer=seen.optimizer or 'optimizer')}"
        changes.tell(source.start(seen.node), rule.name, said, fixed=fix is not None)
    return changes


def all_mistakes(source: Source) -> tuple[Seen, ...]:
    """The mistakes of one file, those too that a comment switches off."""
    if not _TELLING.search(source.text):
        return ()
    if source not in _KEPT:
        _KEPT[source] = tuple(_seen(Script(source)))
    return _KEPT[source]


def _seen(script: Script) -> list[Seen]:
    """Every mistake of a file, one a line and rule, in the order of its lines."""
    seen = list(mistakes_of_places(script))
    if script.scalers:
        reach = Reach(script)
        for function in script.functions():
            if function in script.scaling_functions:
                seen += Flow(script, reach, function).follow()
    first: dict[tuple[int, str], Seen] = {}
    for one in sorted(seen, key=lambda one: script.source.start(one.node)):
        first.setdefault((_lines(one.node)[0], one.rule), one)
    return list(first.values())


def _lines(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.end_lineno  # type: ignore[attr-defined]


def _is_ignored(seen: Seen, source: Source) -> bool:
    first, last = _lines(seen.node)
    begin = source.starts[first - 1]
    end = source.starts[last] if last < len(source.starts) else len(source.text)
    return any(ignored(seen.rule, line) for line in source.text[begin:end].splitlines())


def _is_in_a_string(at: int, source: Source) -> bool:
    strings = (node for node in source.nodes if isinstance(node, ast.JoinedStr | ast.Constant))
    return any(start <= at < end for start, end in map(source.span, strings))
