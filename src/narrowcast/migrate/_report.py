"""The output of a migration: a diff, findings line by line, a table of their counts, JSON."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any

from narrowcast.migrate.source._edits import Finding, Settings
from narrowcast.migrate.source._files import FileOutcome, folders_without_python, notebooks

_SCHEMA = 1
_NAMED = 3
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_COLORS = {"+++": "1", "---": "1", "@@": "36", "+": "32", "-": "31"}


def diff_of(outcome: FileOutcome, *, color: bool = False) -> str:
    """Return the change of one file as a unified diff; an empty string if nothing changes."""
    before, after = _LINE.findall(outcome.before), _LINE.findall(outcome.after)
    lines = []
    for line in unified_diff(before, after, outcome.path, outcome.path):
        ended = line.endswith(("\n", "\r"))
        text = line if ended else f"{line}\n\\ No newline at end of file\n"
        lines.append(_colored(text) if color else text)
    return "".join(lines)


def _colored(line: str) -> str:
    code = next((code for start, code in _COLORS.items() if line.startswith(start)), None)
    text = line.rstrip("\r\n")
    return line if code is None else f"\x1b[{code}m{text}\x1b[0m{line[len(text) :]}"


def findings_text(outcomes: Sequence[FileOutcome]) -> list[str]:
    """Return a line for each distinct finding of a file, with all its line numbers."""
    lines = []
    for outcome in outcomes:
        if outcome.problem is not None:
            lines.append(f"{outcome.path}: {outcome.problem}")
        places: dict[tuple[str, bool, str], list[Finding]] = defaultdict(list)
        for finding in outcome.findings:
            places[finding.rule, finding.fixed, finding.message].append(finding)
        for (rule, fixed, message), found in places.items():
            numbers = ",".join(dict.fromkeys(str(one.line) for one in found))
            state = "changed" if fixed else "left alone"
            lines.append(f"{outcome.path}:{numbers}: {rule}: {state}: {message}")
    return lines


def passed_over_text(paths: Sequence[Path]) -> list[str]:
    """Return a line for each folder of ``paths`` without Python files, and one for all notebooks."""
    lines = [f"no Python file in {folder}" for folder in folders_without_python(paths)]
    if found := notebooks(paths):
        names = ", ".join(map(str, found[:_NAMED]))
        more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        lines.append(f"{_counted(len(found), 'notebook')} not looked at: {names}{more}")
    return lines


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def summary_text(outcomes: Sequence[FileOutcome], *, written: bool = False, kept: int = 0) -> str:
    """Return a table of the rules with their counts, and the number of files.

    ``written``: the files were written, but for ``kept`` of them; otherwise they would be.
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
    """Return all of it for JSON; of the files only those with changes, findings or problems.

    Args:
        outcomes, settings: of a run.
        paths: that the run was given.
        written: the files that were written, in a run that writes.
    """
    shown = [one for one in outcomes if one.changes or one.findings or one.problem is not None]
    state = {} if written is None else {one.path: {"written": one.path in written} for one in shown}
    return {
        "schema": _SCHEMA,
        "target": settings.target,
        "files_looked_at": len(outcomes),
        "notebooks_not_looked_at": [str(one) for one in notebooks(paths)],
        "files": [one.as_dict() | {"diff": diff_of(one)} | state.get(one.path, {}) for one in shown],
    }
