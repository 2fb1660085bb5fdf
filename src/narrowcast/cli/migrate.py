"""``narrowcast migrate``: rewrites apex's usual loop and deprecated names, and reports mistakes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from narrowcast.cli._output import CHECK_FAILED, NOT_WRITTEN, show, show_json, shown_progress, talk
from narrowcast.cli.run import JsonOption
from narrowcast.errors import FileError

NOT_LOOKED_AT = 3


def migrate(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="Python files, and folders with *.py in them.")
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
    """Rewrite apex's usual loop and deprecated names of torch.amp, and report mistakes in mixed precision.

    Prints a diff on stdout, and on stderr what was changed or left alone and why. Everything else in a file
    stays byte for byte. Running it again changes nothing.

    Exit code 1: with --check, a file would change. 2: a path is missing, or a file cannot be written. 3: a
    file cannot be read or parsed, or narrowcast fails on it; the others are migrated.
    """
    if write and check:
        raise typer.BadParameter("one of them at a time", param_hint="'--write' or '--check'")

    from narrowcast import migrate as migration

    with shown_progress() as progress:
        outcomes = migration.migrate_files(paths, to, progress=progress)
    for line in migration.findings_text(outcomes) + migration.passed_over_text(paths):
        talk(line)

    changed = [outcome for outcome in outcomes if outcome.changes]
    shown = changed
    not_written = 0
    if write:
        shown = []  # those that can be written
        for outcome in changed:
            try:
                migration.write(outcome)
                shown.append(outcome)
            except FileError as error:
                talk(str(error))
                not_written += 1

    names = [outcome.path for outcome in shown]
    if as_json:
        show_json(migration.as_json(outcomes, to, paths, written=set(names) if write else None))
    elif names and (write or check):
        show("\n".join(names))
    elif names:
        diffs = [migration.diff_of(outcome, color=sys.stdout.isatty()) for outcome in shown]
        show("".join(diffs).rstrip("\n"))
    # ``talk`` would wrap the first line of the table.
    print(migration.summary_text(outcomes, written=write, kept=not_written), file=sys.stderr)  # noqa: T201

    if not_written:
        return NOT_WRITTEN
    if check and changed:
        return CHECK_FAILED
    for outcome in outcomes:
        if outcome.problem is not None:
            return NOT_LOOKED_AT
    return 0
