"""The process of one run: ``python -m narrowcast.verify.runs._child FILE`` with ``RunSettings``.

On Linux ``_server`` forks it and calls ``main``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from narrowcast.attach import Attachment, run_attached
from narrowcast.capture import RUN, CaptureWriter, start_event
from narrowcast.errors import ScaleCollapseError
from narrowcast.scaling import Dynamic, parse
from narrowcast.scripts import FileWatch, Script
from narrowcast.verify.runs._probes import Probe
from narrowcast.verify.runs._runs import Purpose, RunSettings, write_result

_PR_SET_PDEATHSIG = 1
_LAST_PORT = 65_535
# Named by strings, since the probes of ``doctor`` and ``explain`` are in modules that import this package.
_GRADIENTS = "narrowcast.verify.runs._probes:GradientProbe"
_PROFILE = "narrowcast.verify._diagnosis:ProfileProbe"
_PROBES: dict[str, str] = {
    Purpose.TIMED: "narrowcast.verify.runs._probes:TimedProbe",
    Purpose.MEMORY: "narrowcast.verify.runs._probes:MemoryProbe",
    Purpose.OUTPUTS: "narrowcast.verify.runs._probes:OutputProbe",
    Purpose.REFERENCE: _GRADIENTS,
    Purpose.EXACT: _GRADIENTS,
    Purpose.MIXED: _GRADIENTS,
    Purpose.PROFILE: _PROFILE,
    Purpose.SHARES: _PROFILE,
    Purpose.EXPLAIN: "narrowcast.verify._explain:ExplainProbe",
    Purpose.RANGES: "narrowcast.verify._ranges:RangesProbe",
}


def main(words: Sequence[str]) -> int:
    """Run a script by the settings in the file ``words[0]``; its errors propagate."""
    end_with_parent()
    settings = RunSettings.read(Path(words[0]))
    name, *arguments = settings.target
    find = Script.from_module if settings.is_module else Script.from_path
    script = find(name, arguments)
    folder = settings.folder
    writer = CaptureWriter(folder / RUN)
    scale, seed = settings.loss_scale, settings.seed
    writer.write(start_event(script.argv, settings.policy, loss_scale=scale, rank=0, seed=seed))
    os.environ["NARROWCAST_RUN_DIR"] = str(folder)
    _take_own_port(settings.number)
    scale_rule = None if scale is None else parse(scale)
    if settings.start_scale is not None and settings.at_steps[0] == 0:
        # Gradients are kept from the first step on, before a dynamic scale has settled: start at the one that
        # an earlier run has found.
        scale_rule = Dynamic(scale=settings.start_scale)
    probe_class: type[Probe] = pkgutil.resolve_name(_PROBES[settings.purpose])
    probe = probe_class(settings, script.argv)
    attachment = Attachment(
        settings.policy,
        scale_rule,
        writer=writer,
        stop_after=settings.steps,
        is_training=settings.is_training,
        observer=probe,
        seed_shift=settings.seed_shift,
    )
    FileWatch(folder).install()
    try:
        run_attached(script, attachment, seed=seed + settings.seed_shift, at_end=probe.finish)
    except ScaleCollapseError as error:
        write_result(folder, {"collapsed": str(error)})
        raise
    return 0


def _take_own_port(number: int) -> None:
    """Let the ranks of this run meet at a port of their own.

    At one port for all runs, a rank may begin this run while rank 0 is still ending the run before. The rank
    would connect to that run, and wait for ever.
    """
    port = os.environ.get("MASTER_PORT", "")
    if not port.isdecimal():
        return
    own_port = int(port) + number
    if own_port > _LAST_PORT:
        own_port = int(port) - number
    os.environ["MASTER_PORT"] = str(own_port)
    # The store of ``torchrun`` at the old port belongs to the job. Rank 0 serves the store of this run.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def end_with_parent() -> None:
    """End this process when its parent is killed, so that no run is left behind (Linux only)."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    gc.freeze()  # else the collections at the end of the process take half a second, for objects of torch
    sys.exit(main(sys.argv[1:]))
