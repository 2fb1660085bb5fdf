"""What a person reads, made from captures alone; nothing here imports torch."""

from narrowcast.report._comparison import comparison_table
from narrowcast.report._doctor import doctor_text
from narrowcast.report._doctor_script import diagnosis_text
from narrowcast.report._doctor_script_advice import conclusion
from narrowcast.report._explain import check_text, explain_text, policies_text
from narrowcast.report._explain_differences import decided_sites, differences, differences_text
from narrowcast.report._explain_lock import Lock, facts_changed, lock_of, read_lock, write_lock
from narrowcast.report._files import explanation_of, find_capture, page_beside, page_of, save_page, write_page
from narrowcast.report._page import comparison_page, run_page
from narrowcast.report._printable import printable
from narrowcast.report._run_block import run_block
from narrowcast.report._run_summary import run_summary
from narrowcast.report._summary import empty_summary, summary

__all__ = [
    "Lock",
    "check_text",
    "comparison_page",
    "comparison_table",
    "conclusion",
    "decided_sites",
    "diagnosis_text",
    "differences",
    "differences_text",
    "doctor_text",
    "empty_summary",
    "explain_text",
    "explanation_of",
    "facts_changed",
    "find_capture",
    "lock_of",
    "page_beside",
    "page_of",
    "policies_text",
    "printable",
    "read_lock",
    "run_block",
    "run_page",
    "run_summary",
    "save_page",
    "summary",
    "write_lock",
    "write_page",
]
