"""The process of one run: ``python -m narrowcast.verify SETTINGS SCRIPT ARGS...``, see ``RunSettings``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from narrowcast.attach import Attachment, FileWatch, Observer, Script, run_attached
from narrowcast.errors import ScaleCollapseError, UnsupportedError
from narrowcast.observe.capture import RUN, CaptureWriter, start_event
from narrowcast.observe.profiling import LiveTensorBytes
from narrowcast.scaling import Dynamic, LossScale, parse
from narrowcast.verify._explain_probe import ExplainProbe
from narrowcast.verify._profile_probe import ProfileProbe
from narrowcast.verify.compare._probes import GradientProbe, MemoryProbe, OutputProbe, write_result
from narrowcast.verify.compare._runs import (
    EXPLAIN,
    FILES,
    GRADIENTS,
    MEMORY,
    OUTPUTS,
    PROFILE,
    RunSettings,
)

_PR_SET_PDEATHSIG = 1


def main(words: Sequence[str]) -> int:
    """Run the script that ``words`` name, as its settings say; its errors propagate."""
    _end_with_parent()
    settings = RunSettings.read(Path(words[0]))
    script, *arguments = words[1:]
    found = (Script.from_module if settings.is_module else Script.from_path)(script, arguments)
    folder = Path(settings.folder)
    writer = CaptureWriter(folder / RUN)
    writer.write(
        start_event(found.argv, settings.policy, loss_scale=settings.loss_scale, rank=0, seed=settings.seed)
    )
    os.environ["NARROWCAST_RUN_DIR"] = str(folder)
    observer, at_end = _observer(settings, folder, found.argv)
    attachment = Attachment(
        settings.policy,
        _loss_scale(settings),
        writer=writer,
        stop_after=settings.steps,
        observer=observer,
        seed_shift=settings.seed_shift,
    )
    FileWatch(folder / FILES, settings.earlier, own=[folder]).install()
    try:
        run_attached(found, attachment, seed=settings.seed + settings.seed_shift, at_end=at_end)
    except ScaleCollapseError as error:
        write_result(folder, {"collapsed": str(error)})
        raise
    return 0


def _end_with_parent() -> None:
    """End this process when its parent is killed, so that no run is left behind (Linux only)."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _loss_scale(settings: RunSettings) -> LossScale | None:
    if settings.start_scale is not None and not settings.at_step:
        return Dynamic(scale=settings.start_scale)
    return None if settings.loss_scale is None else parse(settings.loss_scale)


def _tensor_bytes(live: LiveTensorBytes, probe: MemoryProbe) -> dict[str, Any]:
    try:
        peak: int | None = live.peak_bytes
        reason = None
    except UnsupportedError as error:
        peak, reason = None, str(error)
    if peak == 0 or probe.elsewhere:
        peak, reason = None, "the script computes in another thread or process than its first"
    return {"peak_tensor_bytes": peak, "reason": reason}


def _observer(
    settings: RunSettings, folder: Path, argv: Sequence[str]
) -> tuple[Observer | None, Callable[[], None]]:
    """Return the observer for the purpose of the run, and what to call when the script has ended."""
    purpose = settings.purpose
    if purpose == MEMORY:
        live, memory = LiveTensorBytes(), MemoryProbe()
        live.__enter__()
        return memory, lambda: write_result(folder, _tensor_bytes(live, memory))
    if purpose == PROFILE:
        profile = ProfileProbe(folder)
        return profile, profile.finish
    if purpose == EXPLAIN:
        explain = ExplainProbe(folder, settings.policy, argv, settings.watched_steps)
        return explain, explain.finish
    if purpose == GRADIENTS:
        gradients = GradientProbe(
            folder,
            settings.role or "",
            Path(settings.reference or ""),
            at_step=settings.at_step,
            start_scale=settings.start_scale,
        )
        return gradients, gradients.finish
    return (OutputProbe(folder) if purpose == OUTPUTS else None), lambda: None
