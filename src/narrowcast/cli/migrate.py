"""``narrowcast migrate``: rewrites scripts from apex and deprecated names, and reports mistakes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from narrowcast.cli._output import NOT_WRITTEN, show, shown_progress, talk
from narrowcast.cli.run import JsonOption

if TYPE_CHECKING:
    from narrowcast.migrate import FileOutcome

WOULD_CHANGE = 1
NOT_LOOKED_AT = 3


def migrate(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Python files, and folders with *.py in them."),
    ],
    write: Annotated[
        bool, typer.Option("--write", help="Write the files instead of showing a diff.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only name the files; exit code 1 where one would change.")
    ] = False,
    to: Annotated[
        Literal["torch", "narrowcast"],
        typer.Option("--to", help="What to migrate to: torch.amp, or narrowcast's own names."),
    ] = "torch",
    as_json: JsonOption = False,
) -> int:
    """Rewrite apex and deprecated names of torch.amp, and report mistakes in mixed precision.

    Prints a diff on stdout, and on stderr what was changed or left alone and why. Everything else in a file
    stays byte for byte. Running it again changes nothing.

    Exit code 1: with --check, a file would change. 2: a path is missing, or a file cannot be written. 3: a
    file cannot be read or does not parse; the others are migrated.
    """
    if write and check:
        raise typer.BadParameter("one of them at a time", param_hint="'--write' or '--check'")

    from narrowcast.migrate import (
        Settings,
        diff_of,
        findings_text,
        migrate_files,
        passed_over_text,
        summary_text,
    )
    from narrowcast.migrate import as_json as json_of

    settings = Settings(target=to)
    with shown_progress() as progress:
        outcomes = migrate_files(paths, settings, progress=progress)
    changed = [outcome for outcome in outcomes if outcome.changes]
    for line in findings_text(outcomes) + passed_over_text(paths):
        talk(line)
    kept = _write(changed) if write else []
    changed = [outcome for outcome in changed if outcome not in kept]
    if as_json:
        done = {outcome.path for outcome in changed} if write else None
        text = json.dumps(json_of(outcomes, settings, paths, written=done), indent=2, allow_nan=False)
    elif write or check:
        text = "\n".join(outcome.path for outcome in changed)
    else:
        text = "".join(diff_of(outcome, color=sys.stdout.isatty()) for outcome in changed).rstrip("\n")
    if text and not show(text):
        return NOT_WRITTEN
    print(summary_text(outcomes, written=write, kept=len(kept)), file=sys.stderr)  # noqa: T201
    if kept:
        return NOT_WRITTEN
    if check and changed:
        return WOULD_CHANGE
    return NOT_LOOKED_AT if any(outcome.problem is not None for outcome in outcomes) else 0


def _write(changed: Sequence[FileOutcome]) -> list[FileOutcome]:
    """Write the changed files; returns those that could not be written, each with a message."""
    from narrowcast.errors import FileError
    from narrowcast.migrate import write

    kept = []
    for outcome in changed:
        try:
            write(outcome)
        except FileError as error:
            talk(str(error))
            kept.append(outcome)
    return kept
