"""Scripts rewritten: apex and deprecated names to ``torch.amp`` or narrowcast, and mistakes found."""

from narrowcast.migrate._changes import Finding, Outcome
from narrowcast.migrate._files import FileOutcome, migrate_file, migrate_files, migrate_text, write
from narrowcast.migrate._report import (
    apex_left_text,
    as_json,
    diff_of,
    findings_text,
    passed_over_text,
    summary_text,
)
from narrowcast.migrate._settings import Settings, Target

__all__ = [
    "FileOutcome",
    "Finding",
    "Outcome",
    "Settings",
    "Target",
    "apex_left_text",
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
