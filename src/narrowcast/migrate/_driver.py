"""Run the stages of a migration, one after the other, until nothing changes any more.

A stage is a function ``stage(source: Source, settings: Settings) -> Changes``. It gets one parsed file as the
stages before it left it, and returns the edits of its text and the findings. A stage must find nothing to
change in its own output. Lines in findings are those of the file as it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from narrowcast.migrate._torch_names import deprecated_names, to_narrowcast
from narrowcast.migrate.apex._branches import apex_branches
from narrowcast.migrate.apex._file import apex
from narrowcast.migrate.lint._scan import lint
from narrowcast.migrate.source._edits import Applied, Changes, Finding, Outcome, Settings, origin
from narrowcast.migrate.source._files import WORDS, FileOutcome, decoded, python_files
from narrowcast.migrate.source._tree import Source

Stage = Callable[[Source, Settings], Changes]
_STAGES: tuple[Stage, ...] = (apex_branches, apex, deprecated_names, lint, to_narrowcast)
# Each round follows from the one before; more would be a stage that undoes another.
_ROUNDS = 6


def migrate_files(
    paths: Iterable[Path], settings: Settings, *, progress: Callable[[str], None] = lambda _: None
) -> list[FileOutcome]:
    """Migrate each file of ``paths``, without writing it.

    Raises:
        FileError: a path is missing, or is a notebook.
    """
    files = python_files(paths)
    outcomes = []
    for number, path in enumerate(files, 1):
        progress(f"{number} of {len(files)}: {path}")
        outcomes.append(migrate_file(path, settings))
    return outcomes


def migrate_file(path: Path, settings: Settings) -> FileOutcome:
    """Migrate one file, without writing it. Why it cannot be read or parsed is in ``problem``."""
    try:
        data = path.read_bytes()
        if not WORDS.search(data):
            return FileOutcome(path=str(path))
        text = decoded(data)[0]
    except OSError as error:
        return FileOutcome(path=str(path), problem=f"cannot be read: {error.strerror}")
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        return FileOutcome(path=str(path), problem=f"cannot be decoded: {error}")
    try:
        outcome = migrate_text(text, settings, str(path))
    except SyntaxError as error:
        line = f" (line {error.lineno})" if error.lineno else ""
        return FileOutcome(path=str(path), problem=f"does not parse: {error.msg}{line}")
    except Exception as error:  # a bug here; the other files go on
        return FileOutcome(path=str(path), problem=f"narrowcast failed on it, please report: {error!r}")
    return FileOutcome(path=str(path), before=text, after=outcome.text, findings=outcome.findings)


def migrate_text(text: str, settings: Settings, path: str = "<text>") -> Outcome:
    """Migrate the text of one file.

    Raises:
        SyntaxError: it does not parse.
    """
    first = source = Source(path, text)
    trail: list[Applied] = []
    changed: set[tuple[int, str, str, bool]] = set()
    for _ in range(_ROUNDS):
        left: set[tuple[int, str, str, bool]] = set()
        before = source
        for stage in _STAGES:
            try:
                changes = stage(source, settings)
                found = [
                    (origin(trail, at), rule, message, fixed) for at, rule, message, fixed in changes.found
                ]
                changed |= {one for one in found if one[3]}
                left |= {one for one in found if not one[3]}
                if changes.edits:
                    trail.append(Applied(source.text, changes.edits))
                    source = Source(path, trail[-1].text)
            except SyntaxError as error:
                # Of the output of a stage: that of the file itself was raised before.
                raise RuntimeError(
                    f"{path}: the migrated text does not parse; nothing was changed"
                ) from error
        if source is before:
            break
    else:
        raise RuntimeError(f"{path}: the migration does not come to an end; nothing was changed")
    found_in_order = sorted(changed | left, key=lambda one: (one[0], not one[3], one[1:3]))
    return Outcome(text=source.text, findings=tuple(_finding(first, one) for one in found_in_order))


def _finding(source: Source, found: tuple[int, str, str, bool]) -> Finding:
    at, rule, message, fixed = found
    line, column = source.line_of(at)
    return Finding(path=source.path, line=line, column=column, rule=rule, message=message, fixed=fixed)
