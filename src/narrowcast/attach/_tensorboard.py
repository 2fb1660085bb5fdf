"""Events of a run as TensorBoard shows them: losses, loss scale, skipped steps, gradient norms, notes."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowcast.errors import FileError, MissingModuleError
from narrowcast.machine import first_line


class TensorBoard:
    """Writes events of a run, which the capture has too, to a file for TensorBoard.

    The horizontal axis counts backward passes for losses, and steps for everything else. An error ends the
    file, not the run.

    Args:
        folder: where the file goes. The file is made with the first event; for the folder see
            ``make_folder``.

    Attributes:
        error: what ended the file early, or None.

    Raises:
        MissingModuleError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        # Import it before the script runs, which may have a module of this name beside it.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingModuleError(
                f"--tensorboard needs the package tensorboard, which cannot be imported ({error}): "
                "pip install tensorboard"
            ) from None
        self._make_writer = SummaryWriter
        self._writer: Any = None
        self.folder = folder.resolve()  # the script may change its folder
        self.error: str | None = None
        self._began = time.time()
        self._steps = 0
        self._skipped_steps = 0

    def make_folder(self) -> None:
        """Make the folder, so that a wrong one is refused before the script starts.

        Raises:
            FileError: it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                f"cannot write to {self.folder}: {error.strerror}; choose another with --tensorboard"
            ) from error

    def write(self, events: Sequence[dict[str, Any]]) -> None:
        """Write events; they have reached the operating system when it returns."""
        if self.error is not None:
            return
        try:
            for event in events:
                self._write(event)
            if self._writer is not None:
                self._writer.flush()
        except Exception as error:  # a full disk, or a fault of ours: the run goes on
            self.error = first_line(error)

    def close(self, *, skipped_steps: int) -> None:
        """End the file. ``skipped_steps`` includes skips that became known only after the last step."""
        if self._writer is None or self.error is not None:
            return
        try:
            if skipped_steps != self._skipped_steps:
                self._scalar("narrowcast/skipped_steps", skipped_steps, self._steps, time.time())
            self._writer.close()
        except Exception as error:
            self.error = first_line(error)

    def _write(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "loss":
            wall_time_s = self._began + event["time_s"]
            self._scalar(f"loss/{event['site']}", event["value"], event["backward"], wall_time_s)
        elif kind == "step":
            self._write_step(event)
        elif kind == "note":
            # A story says where the infinity of a skipped step began.
            tag = "narrowcast/skips" if event.get("story") else "narrowcast/notes"
            # Indented, so that TensorBoard, which shows Markdown, keeps its lines.
            text = textwrap.indent(event["text"], "    ")
            self._opened().add_text(tag, text, self._steps)

    def _write_step(self, event: dict[str, Any]) -> None:
        self._steps += 1
        self._skipped_steps = event["skipped_steps"]
        wall_time_s = self._began + event["time_s"]
        self._scalar("narrowcast/skipped_steps", self._skipped_steps, self._steps, wall_time_s)
        if event["scale"] is not None:
            self._scalar("narrowcast/loss_scale", event["scale"], self._steps, wall_time_s)

        # Each optimizer has a norm of its own; the first has the short name, as most scripts have only one.
        if event["grad_norm"] is not None:
            tag = "narrowcast/grad_norm"
            if event["optimizer"] > 0:
                tag = f"narrowcast/optimizer{event['optimizer']}/grad_norm"
            self._scalar(tag, event["grad_norm"], self._steps, wall_time_s)

    def _scalar(self, tag: str, value: float, step: int, wall_time_s: float) -> None:
        self._opened().add_scalar(tag, value, step, walltime=wall_time_s)

    def _opened(self) -> Any:
        if self._writer is None:
            self._writer = self._make_writer(str(self.folder))
        return self._writer
