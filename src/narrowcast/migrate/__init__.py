"""Rewrite apex's usual loop and deprecated names to ``torch.amp`` or narrowcast, and report mistakes."""

from narrowcast.migrate._migration import (
    as_json,
    diff_of,
    findings_text,
    migrate_file,
    migrate_files,
    migrate_text,
    passed_over_text,
    summary_text,
)
from narrowcast.migrate.source._files import FileOutcome, write

__all__ = [
    "FileOutcome",
    "as_json",
    "diff_of",
    "findings_text",
    "migrate_file",
    "migrate_files",
    "migrate_text",
    "passed_over_text",
    "summary_text",
    "write",
]
