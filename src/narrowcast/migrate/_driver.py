"""The stages of a migration, one after the other, until nothing changes any more.

A stage is a function ``stage(source: Source, settings: Settings) -> Changes``: it looks at one parsed file
and says which pieces of text it wants replaced (``Changes.replace``, ``.insert``), and what a person should
know (``Changes.tell(offset, rule, message, fixed=...)``; offsets are those of ``source.text``). A stage
sees the text as the stages before it left it; lines in findings are those of the file as it was read.

How ``mistakes`` plugs in: ``_mistakes.py`` has ``mistakes(source, settings) -> Changes``, which comes after
the rewriting of apex and of the deprecated names, so that it meets ``torch.amp`` (and ``narrowcast``)
alone. A fix is ``changes.replace(source.span(node), "...")`` and ``changes.tell(source.start(node), rule,
message, fixed=True)``. ``source.names.full(node)`` is the full name of an imported thing
(``"torch.amp.GradScaler"``), by scope; ``source.calls()`` walks the calls of imported things. Rules have
names in kebab case. All stages run again on what they made: a stage must find nothing to change in its own
output.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from narrowcast.migrate._apex import apex
from narrowcast.migrate._apex_branches import apex_branches
from narrowcast.migrate._changes import Applied, Changes, Finding, Outcome, origin
from narrowcast.migrate._cuda_amp import cuda_amp
from narrowcast.migrate._mistakes import mistakes
from narrowcast.migrate._settings import Settings
from narrowcast.migrate._source import Source
from narrowcast.migrate._to_narrowcast import to_narrowcast

Stage = Callable[[Source, Settings], Changes]
_STAGES: tuple[Stage, ...] = (apex_branches, apex, cuda_amp, mistakes, to_narrowcast)
# Each round follows from the one before; more would be a stage that undoes another.
_ROUNDS = 6


def migrate_text(text: str, settings: Settings, path: str = "<text>") -> Outcome:
    """Rewrite the text of one file.

    Raises:
        SyntaxError: it does not parse.
    """
    with _no_collection():
        return _migrate(text, settings, path)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's collector of cycles, which went through all syntax trees again and again.

    No cycle is left behind: trees hold none, and what is kept with a file does not refer to it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _migrate(text: str, settings: Settings, path: str) -> Outcome:
    first = source = Source(path, text)
    trail: list[Applied] = []
    fixed: list[tuple[int, str, str, bool]] = []
    # What a stage found nothing to change in: it need not look again.
    seen: dict[Stage, tuple[Source, Changes]] = {}
    for _ in range(_ROUNDS):
        left: list[tuple[int, str, str, bool]] = []
        before = source.text
        for stage in _STAGES:
            looked, changes = seen.get(stage, (None, Changes()))
            if looked is not source:
                changes = _changes(stage, source, settings)
                seen[stage] = source, changes
            told = [(origin(trail, at), rule, message, mends) for at, rule, message, mends in changes.found]
            fixed += [one for one in told if one[3]]
            left += [one for one in told if not one[3]]
            if changes.edits:
                trail.append(Applied(source.text, changes.edits))
                source = changes.made or _parsed(path, trail[-1].text)
        if source.text == before:
            break
    else:
        raise RuntimeError(f"{path}: the migration does not come to an end; nothing was changed")
    told = sorted({*fixed, *left}, key=lambda one: (one[0], not one[3], one[1:3]))
    return Outcome(text=source.text, findings=tuple(_finding(first, one) for one in told))


def _changes(stage: Stage, source: Source, settings: Settings) -> Changes:
    """What a stage wants. A SyntaxError in it is about what it made, and no fault of the file."""
    try:
        return stage(source, settings)
    except SyntaxError as error:
        raise _broken(source.path) from error


def _parsed(path: str, text: str) -> Source:
    try:
        return Source(path, text)
    except SyntaxError as error:
        raise _broken(path) from error


def _broken(path: str) -> RuntimeError:
    return RuntimeError(f"{path}: what the migration made does not parse; nothing was changed")


def _finding(source: Source, told: tuple[int, str, str, bool]) -> Finding:
    at, rule, message, fixed = told
    line, column = source.line_of(at)
    return Finding(path=source.path, line=line, column=column, rule=rule, message=message, fixed=fixed)
