"""The process that a comparison starts for each of its runs: one script, watched in one way.

Started as ``python -m narrowcast.verify SETTINGS SCRIPT ARGS...``, where SETTINGS is a file that a
``RunSettings`` wrote.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from narrowcast.attach import Attachment, FileWatch, Observer, Script, run_attached
from narrowcast.errors import ScaleCollapseError, UnsupportedError
from narrowcast.observe.capture import RUN, CaptureWriter, start_event
from narrowcast.observe.profiling import LiveTensorBytes
from narrowcast.scaling import Dynamic, LossScale, parse
from narrowcast.verify._explain_probe import ExplainProbe
from narrowcast.verify._probes import GradientProbe, MemoryProbe, OutputProbe, write_result
from narrowcast.verify._profile_probe import ProfileProbe

FILES = "files.jsonl"
SETTINGS = "narrowcast-run.json"
_PR_SET_PDEATHSIG = 1
TIMED, MEMORY, GRADIENTS, OUTPUTS, PROFILE = "timed", "memory", "gradients", "outputs", "profile"
EXPLAIN = "explain"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How one run of a comparison is made.

    Attributes:
        purpose: ``TIMED``, ``MEMORY``, ``GRADIENTS``, ``OUTPUTS``, ``PROFILE`` or ``EXPLAIN``.
        policy: what it runs in.
        loss_scale: in a command line's words; None: as ``run`` decides.
        seed: before the script starts.
        seed_shift: added to the seeds that the script sets itself.
        steps: after which it is ended; 0: it ends by itself.
        is_module: the script is the name of a module, as for ``python -m``.
        folder: of this run.
        earlier: files that earlier runs wrote -> name of the run.
        role: of a run that keeps gradients.
        reference: folder of the reference of such a run.
        at_step: optimizer steps before such a run holds updates back.
        start_scale: loss scale with which such a run begins; None: as ``loss_scale`` says.
        watched_steps: how many steps are watched to explain them.
    """

    purpose: str
    policy: str
    loss_scale: str | None
    seed: int
    seed_shift: int
    steps: int
    is_module: bool
    folder: str
    earlier: dict[str, str]
    role: str | None = None
    reference: str | None = None
    at_step: int = 0
    start_scale: float | None = None
    watched_steps: int = 0

    def write(self) -> Path:
        """Write them into their folder; returns the file."""
        path = Path(self.folder) / SETTINGS
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def is_in(cls, path: Path) -> bool:
        """Whether the file was written by ``write``."""
        try:
            cls.read(path)
        except (OSError, ValueError, TypeError):
            return False
        return True


def main(words: Sequence[str]) -> int:
    """Run the script that ``words`` name, as its settings say; what it raises comes out."""
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
    observer, at_end = _observing(settings, folder, found.argv)
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
    """Where Linux can do that: a comparison that is killed leaves no run behind that nobody waits for."""
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


def _observing(
    settings: RunSettings, folder: Path, argv: Sequence[str]
) -> tuple[Observer | None, Callable[[], None]]:
    """Who looks on, and what is left to do when the script has ended."""
    if settings.purpose == MEMORY:
        live, memory_probe = LiveTensorBytes(), MemoryProbe()
        live.__enter__()
        return memory_probe, lambda: write_result(folder, _tensor_bytes(live, memory_probe))
    if settings.purpose == PROFILE:
        profiled = ProfileProbe(folder)
        return profiled, profiled.finish
    if settings.purpose == EXPLAIN:
        explaining = ExplainProbe(folder, settings.policy, argv, settings.watched_steps)
        return explaining, explaining.finish
    if settings.purpose == GRADIENTS:
        assert settings.role is not None
        assert settings.reference is not None
        probe = GradientProbe(
            folder,
            settings.role,
            Path(settings.reference),
            at_step=settings.at_step,
            start_scale=settings.start_scale,
        )
        return probe, probe.finish
    return (OutputProbe(folder) if settings.purpose == OUTPUTS else None), lambda: None
