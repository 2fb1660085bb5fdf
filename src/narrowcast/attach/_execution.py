"""A script run under an attachment, from its first line to after its last thread."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

from narrowcast.attach._attachment import Attachment, exit_code
from narrowcast.attach._script import Script, run_script, seed_everything

_INTERRUPTED = 130


def run_attached(
    script: Script, attachment: Attachment, *, seed: int | None = None, at_end: Callable[[], None]
) -> None:
    """Run ``script`` as ``__main__`` under ``attachment``; whatever it raises comes out.

    The attachment is left when Python itself would end: after the error was shown and the script's threads
    have ended, which train as part of it until then.

    Args:
        script: what to run.
        attachment: not entered yet.
        seed: of Python, NumPy and torch, before the script starts; None: they are left alone.
        at_end: called after the attachment was left.
    """
    process = os.getpid()
    if seed is not None:
        seed_everything(seed)
    attachment.at_end = at_end
    attachment.__enter__()
    attachment.exit_code = 1
    try:
        run_script(script)
        attachment.exit_code = 0
    except SystemExit as error:
        attachment.exit_code = exit_code(error)
        raise
    except KeyboardInterrupt:
        attachment.exit_code = _INTERRUPTED
        raise
    finally:
        # Python calls what was registered, the latest first: this before the script's own.
        atexit.register(_leave, attachment, process)


def _leave(attachment: Attachment, process: int) -> None:
    if os.getpid() == process:  # and not a child that the script forked, which ends in the middle of the run
        attachment.leave_for_good()
