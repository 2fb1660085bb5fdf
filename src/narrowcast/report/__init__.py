"""What a person reads, made from captures alone; nothing here imports torch."""

from narrowcast.report._comparison import comparison_table
from narrowcast.report._doctor import doctor_text
from narrowcast.report._printable import printable
from narrowcast.report._run_block import run_block
from narrowcast.report._summary import summary

__all__ = ["comparison_table", "doctor_text", "printable", "run_block", "summary"]
