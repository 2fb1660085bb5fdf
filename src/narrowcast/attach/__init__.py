"""Observe an unmodified script, and run it in mixed precision. Public: ``narrowcast.attached``."""

from narrowcast.attach._attachment import Attachment, attached, run_attached
from narrowcast.attach._files import (
    OUTPUTS,
    FileWatch,
    bring_back,
    changed_files,
    folder_of_one,
    has_files_to_move,
    locked_journal,
    restore_files,
    restore_killed,
    set_aside,
)
from narrowcast.attach._module_rules import RULE_NOTE
from narrowcast.attach._recorder import call_site
from narrowcast.attach._run import Observer
from narrowcast.attach._script import Script, run_script
from narrowcast.attach._torch_internals import is_functorch_wrapped

__all__ = [
    "OUTPUTS",
    "RULE_NOTE",
    "Attachment",
    "FileWatch",
    "Observer",
    "Script",
    "attached",
    "bring_back",
    "call_site",
    "changed_files",
    "folder_of_one",
    "has_files_to_move",
    "is_functorch_wrapped",
    "locked_journal",
    "restore_files",
    "restore_killed",
    "run_attached",
    "run_script",
    "set_aside",
]
