"""Run the stages of a migration, and report the result: a diff, findings, counts, JSON.

A stage is a function ``stage(source: Source, target: Target) -> Changes``. It gets one parsed file, as
changed by the stages before it, and returns the edits of its text and the findings. A stage must find nothing
to change in its own output. Findings give the lines of the file as it was read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any

from narrowcast.migrate._lint import lint
from narrowcast.migrate._torch_names import deprecated_names, to_narrowcast
from narrowcast.migrate.apex._file import apex
from narrowcast.migrate.source._edits import Applied, Changes, Finding, Outcome, Target, origin
from narrowcast.migrate.source._files import (
    WORDS,
    FileOutcome,
    decoded,
    folders_without_python,
    notebooks,
    python_files,
)
from narrowcast.migrate.source._tree import Source

Stage = Callable[[Source, Target], Changes]
_STAGES: tuple[Stage, ...] = (apex, deprecated_names, lint, to_narrowcast)
_JSON_SCHEMA = 1
_MAX_NOTEBOOKS_NAMED = 3
# Not str.splitlines(keepends=True), which also ends lines at form feeds and other separators.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
# ANSI colors of the lines of a diff, by how a line begins. The first match counts.
_COLORS = {"+++": "1", "---": "1", "@@": "36", "+": "32", "-": "31"}


def migrate_files(
    paths: Iterable[Path], target: Target, *, progress: Callable[[str], None] = lambda _: None
) -> list[FileOutcome]:
    """Migrate each file of ``paths``, without writing it.

    Raises:
        FileError: a path is missing, or is a notebook.
    """
    files = python_files(paths)
    outcomes = []
    for number, path in enumerate(files, 1):
        progress(f"{number} of {len(files)}: {path}")
        outcomes.append(migrate_file(path, target))
    return outcomes


def migrate_file(path: Path, target: Target) -> FileOutcome:
    """Migrate one file, without writing it. If it cannot be read or parsed, ``problem`` says why."""
    try:
        data = path.read_bytes()
        text = decoded(data)[0]
    except OSError as error:
        return FileOutcome(path=str(path), problem=f"cannot be read: {error.strerror}")
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        return FileOutcome(path=str(path), problem=f"cannot be decoded: {error}")

    try:
        # Most files match none of the words, and no stage needs to run on them.
        if not WORDS.search(data):
            Source(str(path), text)  # raises if it does not parse
            return FileOutcome(path=str(path))
        outcome = migrate_text(text, target, str(path))
    except SyntaxError as error:
        problem = f"does not parse: {error.msg}"
        if error.lineno:
            problem += f" (line {error.lineno})"
        return FileOutcome(path=str(path), problem=problem)
    except Exception as error:  # a bug in narrowcast must not end the migration of the other files
        return FileOutcome(path=str(path), problem=f"narrowcast failed on it, please report: {error!r}")
    return FileOutcome(path=str(path), before=text, after=outcome.text, findings=outcome.findings)


def migrate_text(text: str, target: Target, path: str = "<text>") -> Outcome:
    """Migrate the text of one file.

    Raises:
        SyntaxError: it does not parse.
    """
    as_read = Source(path, text)
    # The source as the stages so far have changed it, and their edits in order. By these edits an offset in
    # the changed text leads back to its line in the file as it was read.
    source = as_read
    trail: list[Applied] = []
    findings: list[Finding] = []
    for stage in _STAGES:
        changes = stage(source, target)
        for report in changes.reports:
            line, column = as_read.line_of(origin(trail, report.offset))
            finding = Finding(
                path=path,
                line=line,
                column=column,
                rule=report.rule,
                message=report.message,
                fixed=report.fixed,
            )
            findings.append(finding)

        # The next stage sees the new text.
        if changes.edits:
            trail.append(Applied(source.text, changes.edits))
            try:
                source = Source(path, trail[-1].text)
            except SyntaxError as error:
                message = f"{path}: the migrated text does not parse; nothing was changed"
                raise RuntimeError(message) from error

    # At one place, findings that were fixed come first.
    findings.sort(
        key=lambda finding: (finding.line, finding.column, not finding.fixed, finding.rule, finding.message)
    )
    return Outcome(text=source.text, findings=tuple(dict.fromkeys(findings)))


# ---- reports


def diff_of(outcome: FileOutcome, *, color: bool = False) -> str:
    """Return the change of one file as a unified diff; an empty string if nothing changes."""
    before = _LINE.findall(outcome.before)
    after = _LINE.findall(outcome.after)
    lines = []
    for line_of_diff in unified_diff(before, after, outcome.path, outcome.path):
        line = line_of_diff
        # git marks a missing line end in this way, and can then apply the diff.
        if not line.endswith(("\n", "\r")):
            line += "\n\\ No newline at end of file\n"
        if color:
            line = _colored(line)
        lines.append(line)
    return "".join(lines)


def _colored(line: str) -> str:
    text = line.rstrip("\r\n")
    line_end = line[len(text) :]
    for start, code in _COLORS.items():
        if line.startswith(start):
            return f"\x1b[{code}m{text}\x1b[0m{line_end}"
    return line


def findings_text(outcomes: Sequence[FileOutcome]) -> list[str]:
    """Return a line for each distinct finding of a file, with all its line numbers."""
    lines = []
    for outcome in outcomes:
        if outcome.problem is not None:
            lines.append(f"{outcome.path}: {outcome.problem}")
        line_numbers: dict[tuple[str, bool, str], list[str]] = defaultdict(list)
        for finding in outcome.findings:
            line_numbers[finding.rule, finding.fixed, finding.message].append(str(finding.line))
        for (rule, is_fixed, message), numbers in line_numbers.items():
            state = "changed" if is_fixed else "left alone"
            numbers_text = ",".join(dict.fromkeys(numbers))
            lines.append(f"{outcome.path}:{numbers_text}: {rule}: {state}: {message}")
    return lines


def passed_over_text(paths: Sequence[Path]) -> list[str]:
    """Return a line for each folder of ``paths`` without Python files, and one for all notebooks."""
    lines = []
    for folder in folders_without_python(paths):
        lines.append(f"no Python file in {folder}")
    paths_of_notebooks = [str(path) for path in notebooks(paths)]
    if paths_of_notebooks:
        names = ", ".join(paths_of_notebooks[:_MAX_NOTEBOOKS_NAMED])
        if len(paths_of_notebooks) > _MAX_NOTEBOOKS_NAMED:
            names += f", and {len(paths_of_notebooks) - _MAX_NOTEBOOKS_NAMED} more"
        lines.append(f"{_counted(len(paths_of_notebooks), 'notebook')} not looked at: {names}")
    return lines


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def summary_text(outcomes: Sequence[FileOutcome], *, written: bool = False, kept: int = 0) -> str:
    """Return a table of the rules with their counts, and the number of files.

    ``written``: whether this run wrote the files. ``kept``: how many of those with changes it did not write.
    """
    counts: dict[str, Counter[bool]] = defaultdict(Counter)
    for outcome in outcomes:
        for finding in outcome.findings:
            counts[finding.rule][finding.fixed] += 1

    lines = []
    if counts:
        width = max(map(len, [*counts, "rule"]))
        lines.append(f"{'rule':<{width}}  {'changed':>8}  {'left alone':>10}")
        for rule, count in sorted(counts.items()):
            lines.append(f"{rule:<{width}}  {count[True]:>8}  {count[False]:>10}")

    # ``changes`` is a bool, so this counts files, as the line after it does.
    changed = sum(outcome.changes for outcome in outcomes) - kept
    problems = sum(outcome.problem is not None for outcome in outcomes)
    last = f"{_counted(len(outcomes), 'file')}, {changed} {'changed' if written else 'to change'}"
    if kept:
        last += f", {kept} not written"
    if problems:
        last += f", {problems} not looked at"
    lines.append(last)
    return "\n".join(lines)


def as_json(
    outcomes: Sequence[FileOutcome],
    target: Target,
    paths: Sequence[Path],
    *,
    written: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the result of a run as a dictionary for JSON.

    Files without changes, findings or problems are left out.

    Args:
        outcomes: what became of each file.
        target: what the files were migrated to.
        paths: the files and folders that the run was given.
        written: the files that it wrote, which may be none; None if it was not to write.
    """
    files = []
    for outcome in outcomes:
        if not outcome.changes and not outcome.findings and outcome.problem is None:
            continue
        entry = outcome.as_dict() | {"diff": diff_of(outcome)}
        if written is not None:
            entry["written"] = outcome.path in written
        files.append(entry)
    return {
        "schema": _JSON_SCHEMA,
        "target": target,
        "files_looked_at": len(outcomes),
        "notebooks_not_looked_at": [str(path) for path in notebooks(paths)],
        "files": files,
    }
