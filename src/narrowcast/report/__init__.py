"""Tables, sentences and pages made from captures, their files, and lock files; nothing here imports torch."""

from narrowcast.report._doctor import doctor_page, doctor_text
from narrowcast.report._doctor_script import conclusion, diagnosis_page, diagnosis_text
from narrowcast.report._explain import check_text, explain_text, policies_text
from narrowcast.report._explanation import explained, percent, read_explanation
from narrowcast.report._files import (
    capture_folders,
    explanation_of,
    find_capture,
    latest_capture,
    save_page,
    write_page,
    written_s,
)
from narrowcast.report._lock import (
    Lock,
    decided_sites,
    differences,
    facts_changed,
    lock_of,
    read_lock,
    write_lock,
)
from narrowcast.report._ranges import ranges_page, ranges_text
from narrowcast.report._run import run_block, run_summary
from narrowcast.report._summary import summary
from narrowcast.report._table import comparison_table
from narrowcast.report._text import printable, speed_text

__all__ = [
    "Lock",
    "capture_folders",
    "check_text",
    "comparison_table",
    "conclusion",
    "decided_sites",
    "diagnosis_page",
    "diagnosis_text",
    "differences",
    "doctor_page",
    "doctor_text",
    "explain_text",
    "explained",
    "explanation_of",
    "facts_changed",
    "find_capture",
    "latest_capture",
    "lock_of",
    "percent",
    "policies_text",
    "printable",
    "ranges_page",
    "ranges_text",
    "read_explanation",
    "read_lock",
    "run_block",
    "run_summary",
    "save_page",
    "speed_text",
    "summary",
    "write_lock",
    "write_page",
    "written_s",
]
