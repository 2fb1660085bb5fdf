"""What a person reads, made from captures alone; nothing here imports torch."""

from narrowcast.report._comparison import comparison_table
from narrowcast.report._doctor import doctor_text
from narrowcast.report._doctor_script import diagnosis_text
from narrowcast.report._doctor_script_advice import conclusion
from narrowcast.report._files import find_capture, page_beside, page_of, save_page, write_page
from narrowcast.report._page import comparison_page, run_page
from narrowcast.report._printable import printable
from narrowcast.report._run_block import run_block
from narrowcast.report._run_summary import run_summary
from narrowcast.report._summary import empty_summary, summary

__all__ = [
    "comparison_page",
    "comparison_table",
    "conclusion",
    "diagnosis_text",
    "doctor_text",
    "empty_summary",
    "find_capture",
    "page_beside",
    "page_of",
    "printable",
    "run_block",
    "run_page",
    "run_summary",
    "save_page",
    "summary",
    "write_page",
]
