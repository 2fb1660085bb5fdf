"""Mixed precision put under code that was not written for it, for as long as a ``with`` lasts."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from narrowcast.attach._backward import Backward
from narrowcast.attach._files import FileWatch
from narrowcast.attach._ledger import Ledger
from narrowcast.attach._patches import Patches
from narrowcast.attach._processes import Processes
from narrowcast.attach._regions import Regions
from narrowcast.attach._scale import RunningScale
from narrowcast.attach._seeds import shift_seeds
from narrowcast.attach._steps import Steps
from narrowcast.attach._stopping import Stopping
from narrowcast.attach._watcher import Watcher
from narrowcast.errors import OrderError
from narrowcast.observe.capture import CaptureWriter, start_event
from narrowcast.policy import Policy, with_fp32_weights
from narrowcast.scaling import Dynamic, LossScale, Off

_attached: Attachment | None = None


class Attachment:
    """Runs everything inside ``with`` in mixed precision, whoever wrote it.

    The outermost call of each module that holds parameters is a region of ``policy``, whose floating
    outputs are handed on in fp32. In fp16 the loss is scaled where the outermost backward starts, and each
    leaf's gradient is unscaled before it is accumulated; an optimizer step on gradients that overflowed
    is skipped, leaving parameters and state as they were. On leaving, torch is as it was before.

    Args:
        policy: a ``Policy`` or the name of a preset.
        loss_scale: a value from ``narrowcast.scaling``; None: ``Dynamic()`` in fp16, else ``Off()``.
        writer: where to write what happens; it is closed on leaving.
        tell: called with what a person should know at once and not at the end, as that a format is slow here.
        stop_after: end the script after so many optimizer steps, skipped ones included; 0: it ends by
            itself. Where it has made no optimizer, or a compiled function hides the steps, backwards are
            counted, and where it never went backward, the outermost calls of modules.
        watcher: told what the script does.
        seed_shift: added to every seed that the script sets for Python's, NumPy's or torch's random numbers.

    Attributes:
        facts: after leaving, the ``end`` event of the capture.
        exit_code: what that event is to say.
        at_end: called by ``leave_for_good``.

    Raises:
        OrderError: on entering, when another attachment is in force: there is one for the process.
        UnsupportedError: inside, before training that fp16 would get wrong (updates by hand, FSDP).
        ScaleCollapseError: inside, after 25 skipped steps of one optimizer in a row.
    """

    def __init__(
        self,
        policy: Policy | str = "auto",
        loss_scale: LossScale | None = None,
        *,
        writer: CaptureWriter | None = None,
        tell: Callable[[str], None] = lambda _: None,
        stop_after: int = 0,
        watcher: Watcher | None = None,
        seed_shift: int = 0,
    ) -> None:
        self.policy = with_fp32_weights(policy)
        self.facts: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.at_end: Callable[[], None] = lambda: None
        self._left_for_good = False
        self._forwards = self._backwards = 0
        self.aside: str | None = None
        self.scale = RunningScale(Off() if loss_scale is None else loss_scale)
        self.ledger = Ledger(writer)
        self._patches = Patches()
        self._watcher = watcher or Watcher()
        self._seed_shift = seed_shift
        self._stopping = Stopping(stop_after, self._close_before_the_end)
        self._regions = Regions(
            self.policy,
            loss_scale,
            self.scale,
            self.ledger,
            step_aside=self._step_aside,
            tell=tell,
            watcher=self._watcher,
            forward_ended=self._forward_ended,
        )
        self._backward = Backward(
            self.scale,
            self.ledger,
            self._regions.settle,
            self._regions.recomputation,
            backward_ended=self._backward_ended,
        )
        capture = None if writer is None else writer.path
        self._processes = Processes(
            self.ledger, attach_process, (self.policy, loss_scale, capture, stop_after, seed_shift)
        )
        self._steps = Steps(
            self.scale,
            self._backward.leaves,
            self.ledger,
            self._regions.parameter_names,
            self._stopping,
            self._watcher,
        )

    def __enter__(self) -> Self:
        global _attached  # noqa: PLW0603 (torch is patched once for the process)
        if _attached is not None:
            raise OrderError("an Attachment is in force already; leave it before entering another one")
        _attached = self
        self._regions.install(self._patches)
        self._backward.install(self._patches)
        self._steps.install(self._patches)
        self._processes.install(self._patches)
        self._patches.replace(os, "_exit", self._before_exit(os._exit))
        if self._seed_shift:
            shift_seeds(self._patches, self._seed_shift, self.ledger.note)
        self._watcher.attached(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _attached  # noqa: PLW0603
        _attached = None
        if not self._left_for_good:
            self._stopping.call_off()
        try:
            self._note_what_was_unusual()
        finally:
            self._patches.restore()
            self._regions.uninstall()
            self._steps.uninstall()
            self._backward.leaves.remove_hooks()
            self.ledger.final_scale = self.scale.value.scale if self.scale.active else None
            self.ledger.stopped = self._stopping.reached
            self.facts = self.ledger.close(self.exit_code)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were made since entering and are still there."""
        return list(self._steps.optimizers)

    def parameter_names(self) -> dict[int, str]:
        """``id`` of each parameter of the modules that were called -> its name, with the module's class."""
        return self._regions.parameter_names()

    def continue_in_fp32(self) -> None:
        """Open no region from now on, and scale no loss."""
        self._regions.continue_in_fp32()
        self.scale.value = Off()

    def continue_at_scale(self, scale: float) -> None:
        """Go on with another loss scale, by the same rule; one that never moves stays."""
        if isinstance(self.scale.value, Dynamic):
            self.scale.value = replace(self.scale.value, scale=scale)

    @property
    def loss_scale(self) -> float | None:
        """That of the next backward; None where losses are not scaled."""
        return self.scale.value.scale if self.scale.active else None

    def stop(self) -> None:
        """End the script here, as after ``stop_after`` steps.

        Raises:
            SystemExit: 0.
        """
        self._stopping.stop()

    def leave_for_good(self) -> None:
        """Leave, and call ``at_end``; what is not the first time does nothing."""
        if not self._left_for_good:
            self._left_for_good = True
            self.__exit__(None, None, None)
            self.at_end()

    def _backward_ended(self) -> None:
        """End a script whose steps cannot be seen after as many backwards as were asked for."""
        self._backwards += 1
        if not self._steps.are_seen and self._stopping.is_due(self._backwards):
            self._stopping.stop()

    def _forward_ended(self) -> None:
        """End a script that does not train after as many calls as were asked for."""
        if self._backwards or self._steps.made_any:
            return
        self._forwards += 1
        if self._stopping.is_due(self._forwards):
            self._stopping.stop()

    def _before_exit(self, original: Callable[[int], Any]) -> Callable[[int], Any]:
        @functools.wraps(original)
        def _exit(status: int) -> None:
            """A process that leaves without ending keeps what was seen of it."""
            with suppress(Exception):
                self.ledger.flush()
            original(status)

        return _exit

    def _close_before_the_end(self) -> None:
        self.exit_code = 0
        self.leave_for_good()

    def _step_aside(self, why: str) -> None:
        """Leave the rest to the script: no new region, no scaling, no skipping."""
        if self.aside is None:
            self.aside = self.ledger.aside = why
            so_far = self.ledger.steps + self.ledger.skipped_steps
            since = f" from step {so_far + 1} on" if so_far else ""
            self.ledger.note(f"{why}, so it was left to it{since}: nothing was added")
            self.scale.value = Off()
            for part in (self._regions, self._backward, self._steps, self._processes):
                part.set_aside = True

    def _note_what_was_unusual(self) -> None:
        if self.aside is not None:
            return
        self._regions.settle()
        if not self._regions.called_a_module and not self._processes.started:
            self.ledger.note("no module with parameters was called, so nothing ran in mixed precision")
        elif self.ledger.backwards and not self.ledger.steps + self.ledger.skipped_steps + self._steps.traced:
            self.ledger.note("no torch.optim.Optimizer stepped; updates, if any, were made by hand")


def exit_code(error: SystemExit) -> int:
    """With which Python ends for ``error``."""
    if error.code is None:
        return 0
    return int(error.code) if isinstance(error.code, int) else 1


@contextmanager
def attach_process(
    policy: Policy,
    loss_scale: LossScale | None,
    parents_capture: Path | None,
    stop_after: int,
    seed_shift: int,
    files: FileWatch | None,
    number: int,
) -> Iterator[None]:
    """Attach in a process that an attached script started as its ``number``-th.

    Its capture is ``capture-processN.jsonl`` beside its parent's; one that saw nothing is deleted again.
    """
    writer = None
    if parents_capture is not None:
        writer = CaptureWriter(parents_capture.with_stem(f"{parents_capture.stem}-process{number}"))
    if writer is not None:
        writer.write(start_event(sys.argv, policy.compute, process=number))
    if files is not None:
        files.install()
    attachment = Attachment(policy, loss_scale, writer=writer, stop_after=stop_after, seed_shift=seed_shift)
    attachment.exit_code = 1
    attachment.__enter__()
    try:
        yield
        attachment.exit_code = 0
    except SystemExit as error:
        attachment.exit_code = exit_code(error)
        raise
    finally:
        attachment.leave_for_good()
        if writer is not None and not attachment.ledger.devices and not attachment.ledger.backwards:
            writer.path.unlink(missing_ok=True)


def _in_a_forked_child() -> None:
    if _attached is not None:
        _attached.ledger.forget_writer()


os.register_at_fork(after_in_child=_in_a_forked_child)
