"""The process of one run: ``python -m narrowcast.verify.compare._child FILE`` with ``RunSettings``."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from narrowcast.attach import Attachment, FileWatch, Script, run_attached
from narrowcast.errors import ScaleCollapseError
from narrowcast.observe.capture import RUN, CaptureWriter, start_event
from narrowcast.scaling import Dynamic, parse
from narrowcast.verify._diagnosis import ProfileProbe
from narrowcast.verify._explain import ExplainProbe
from narrowcast.verify.compare._probes import GradientProbe, MemoryProbe, OutputProbe, Probe, TimedProbe
from narrowcast.verify.compare._runs import Purpose, RunSettings, write_result

_PR_SET_PDEATHSIG = 1
_PROBES: dict[str, type[Probe]] = {
    Purpose.TIMED: TimedProbe,
    Purpose.MEMORY: MemoryProbe,
    Purpose.OUTPUTS: OutputProbe,
    Purpose.PROFILE: ProfileProbe,
    Purpose.SHARES: ProfileProbe,
    Purpose.EXPLAIN: ExplainProbe,
    **dict.fromkeys((Purpose.REFERENCE, Purpose.EXACT, Purpose.MIXED), GradientProbe),
}


def main(words: Sequence[str]) -> int:
    """Run a script by the settings in the file ``words[0]``; its errors propagate."""
    end_with_parent()
    settings = RunSettings.read(Path(words[0]))
    script, *arguments = settings.target
    found = (Script.from_module if settings.is_module else Script.from_path)(script, arguments)
    folder = settings.folder
    writer = CaptureWriter(folder / RUN)
    scale, seed = settings.loss_scale, settings.seed
    writer.write(start_event(found.argv, settings.policy, loss_scale=scale, rank=0, seed=seed))
    os.environ["NARROWCAST_RUN_DIR"] = str(folder)
    rule = None if scale is None else parse(scale)
    if settings.start_scale is not None and not settings.at_steps[0]:
        rule = Dynamic(scale=settings.start_scale)
    probe = _PROBES[settings.purpose](settings, found.argv)
    attachment = Attachment(
        settings.policy,
        rule,
        writer=writer,
        stop_after=settings.steps,
        observer=probe,
        seed_shift=settings.seed_shift,
    )
    FileWatch(folder).install()
    try:
        run_attached(found, attachment, seed=seed + settings.seed_shift, at_end=probe.finish)
    except ScaleCollapseError as error:
        write_result(folder, {"collapsed": str(error)})
        raise
    return 0


def end_with_parent() -> None:
    """End this process when its parent is killed, so that no run is left behind (Linux only)."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    gc.freeze()  # else the collections at the end of the process take half a second, for objects of torch
    sys.exit(main(sys.argv[1:]))
