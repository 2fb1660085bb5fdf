"""An unmodified script seen as events, and mixed precision put under it."""

from narrowcast.attach._attachment import Attachment
from narrowcast.attach._call_sites import call_site
from narrowcast.attach._execution import run_attached
from narrowcast.attach._files import READ_OF_AN_EARLIER_RUN, FilesSeen, FileWatch, read_files
from narrowcast.attach._rules import NAMED_NOTHING
from narrowcast.attach._script import Script, run_script, seed_everything
from narrowcast.attach._watcher import Attached, Watcher

__all__ = [
    "NAMED_NOTHING",
    "READ_OF_AN_EARLIER_RUN",
    "Attached",
    "Attachment",
    "FileWatch",
    "FilesSeen",
    "Script",
    "Watcher",
    "call_site",
    "read_files",
    "run_attached",
    "run_script",
    "seed_everything",
]
