"""Observe an unmodified script, and run it in mixed precision. Public: ``narrowcast.attached``."""

from narrowcast.attach._attachment import Attachment, attached, run_attached
from narrowcast.attach._files import READ_OF_AN_EARLIER_RUN, FilesSeen, FileWatch, read_files
from narrowcast.attach._recorder import call_site
from narrowcast.attach._regions import NAMED_NOTHING
from narrowcast.attach._run import Observer
from narrowcast.attach._script import Script, run_script

__all__ = [
    "NAMED_NOTHING",
    "READ_OF_AN_EARLIER_RUN",
    "Attachment",
    "FileWatch",
    "FilesSeen",
    "Observer",
    "Script",
    "attached",
    "call_site",
    "read_files",
    "run_attached",
    "run_script",
]
