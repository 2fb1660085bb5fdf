"""What a migration says: a diff, findings line by line, a table of their numbers, JSON."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import narrowcast.apex
from narrowcast.migrate._apex_plan import is_apex
from narrowcast.migrate._changes import Finding
from narrowcast.migrate._diff import unified_diff
from narrowcast.migrate._files import FileOutcome, folders_without_python, notebooks
from narrowcast.migrate._settings import Settings
from narrowcast.migrate._source import Imported, Source

_SCHEMA = 1
_NAMED = 3
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_COLORS = {"+++": "1", "---": "1", "@@": "36", "+": "32", "-": "31"}


def diff_of(outcome: FileOutcome, *, color: bool = False) -> str:
    """The change of one file as a unified diff; empty where nothing changes."""
    before, after = _LINE.findall(outcome.before), _LINE.findall(outcome.after)
    lines = []
    for line in unified_diff(before, after, outcome.path):
        ended = line.endswith(("\n", "\r"))
        text = line if ended else f"{line}\n\\ No newline at end of file\n"
        lines.append(_colored(text) if color else text)
    return "".join(lines)


def _colored(line: str) -> str:
    code = next((code for start, code in _COLORS.items() if line.startswith(start)), None)
    text = line.rstrip("\r\n")
    return line if code is None else f"\x1b[{code}m{text}\x1b[0m{line[len(text) :]}"


def findings_text(outcomes: Sequence[FileOutcome]) -> list[str]:
    """A line for each thing that is told of a file, with all the lines where it is."""
    told = []
    for outcome in outcomes:
        if outcome.problem is not None:
            told.append(f"{outcome.path}: {outcome.problem}")
        places: dict[tuple[str, bool, str], list[Finding]] = defaultdict(list)
        for finding in outcome.findings:
            places[finding.rule, finding.fixed, finding.message].append(finding)
        for (rule, fixed, message), found in places.items():
            lines = ",".join(dict.fromkeys(str(one.line) for one in found))
            told.append(f"{outcome.path}:{lines}: {rule}: {'changed' if fixed else 'left alone'}: {message}")
    return told


def passed_over_text(paths: Sequence[Path]) -> list[str]:
    """A line for each folder among ``paths`` without a Python file, and one for their notebooks."""
    told = [f"no Python file in {folder}" for folder in folders_without_python(paths)]
    if found := notebooks(paths):
        names = ", ".join(map(str, found[:_NAMED]))
        more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        told.append(f"{_counted(len(found), 'notebook')} not looked at: {names}{more}")
    return told


def apex_left_text(outcomes: Sequence[FileOutcome], settings: Settings) -> str | None:
    """How many files still import of apex what narrowcast answers for, and what runs them; None for none."""
    count = sum(any(_is_answered(one.full) for one in _imports(outcome)) for outcome in outcomes)
    if not count:
        return None
    left = f"{_counted(count, 'file')} still {'imports' if count == 1 else 'import'} apex"
    other = "" if settings.target == "narrowcast" else ", or migrate with --to narrowcast"
    return f"{left}: run {'it' if count == 1 else 'them'} with python -m narrowcast.apex{other}"


def _imports(outcome: FileOutcome) -> list[Imported]:
    return Source(outcome.path, outcome.after).imports if "apex" in outcome.after else []


def _is_answered(full: str) -> bool:
    part = full.split(".")[1:2]
    return is_apex(full) and (part in ([], ["*"]) or part[0] in narrowcast.apex.__all__)


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def summary_text(outcomes: Sequence[FileOutcome], *, written: bool = False, kept: int = 0) -> str:
    """A table of the rules, with how often each was found, and how many files that concerns.

    ``written``: the files were changed but for ``kept`` of them; otherwise they would be.
    """
    counts: dict[str, Counter[bool]] = defaultdict(Counter)
    for outcome in outcomes:
        for finding in outcome.findings:
            counts[finding.rule][finding.fixed] += 1
    width = max([len(rule) for rule in counts] + [4])
    lines = [f"{'rule':<{width}}  {'changed':>8}  {'left alone':>10}"] if counts else []
    for rule, count in sorted(counts.items()):
        lines.append(f"{rule:<{width}}  {count[True]:>8}  {count[False]:>10}")
    changed = sum(one.changes for one in outcomes) - kept
    problems = sum(one.problem is not None for one in outcomes)
    missed = (f", {kept} not written" if kept else "") + (f", {problems} not looked at" if problems else "")
    files = _counted(len(outcomes), "file")
    lines.append(f"{files}, {changed} {'changed' if written else 'to change'}{missed}")
    return "\n".join(lines)


def as_json(
    outcomes: Sequence[FileOutcome],
    settings: Settings,
    paths: Sequence[Path],
    *,
    written: Collection[str] | None = None,
) -> dict[str, Any]:
    """All of it; of files only those of which there is something to tell.

    Args:
        outcomes, settings: of a run.
        paths: that it was given.
        written: the files that were, in a run that writes.
    """
    told = [one for one in outcomes if one.changes or one.findings or one.problem is not None]
    did = {} if written is None else {one.path: {"written": one.path in written} for one in told}
    return {
        "schema": _SCHEMA,
        "target": settings.target,
        "files_looked_at": len(outcomes),
        "notebooks_not_looked_at": [str(one) for one in notebooks(paths)],
        "files": [one.as_dict() | {"diff": diff_of(one)} | did.get(one.path, {}) for one in told],
    }
