"""Running a script as Python does, and putting back the files that it changes."""

from narrowcast.scripts._files import (
    OUTPUTS,
    FileWatch,
    bring_back,
    changed_files,
    has_files_to_move,
    locked_journal,
    only_run_in_folder,
    restore_files,
    restore_killed,
    set_aside,
)
from narrowcast.scripts._script import Script, run_script

__all__ = [
    "OUTPUTS",
    "FileWatch",
    "Script",
    "bring_back",
    "changed_files",
    "has_files_to_move",
    "locked_journal",
    "only_run_in_folder",
    "restore_files",
    "restore_killed",
    "run_script",
    "set_aside",
]
