"""Mixed precision under code that was not written for it: in a ``with`` block, a script, or its processes."""

from __future__ import annotations

import atexit
import functools
import itertools
import multiprocessing
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from narrowcast.attach._backward import Backward
from narrowcast.attach._recorder import EventRecorder
from narrowcast.attach._regions import ScriptRegions
from narrowcast.attach._run import AttachedRun, Observer, Patches, RunningScale, Stopping
from narrowcast.attach._seeds import seed_everything, shift_seeds
from narrowcast.attach._steps import Steps
from narrowcast.attach._tensorboard import TensorBoard
from narrowcast.capture import CaptureWriter, start_event
from narrowcast.errors import NarrowcastError, OrderError, UnsupportedError, not_copied
from narrowcast.machine import first_line
from narrowcast.policy import Policy, policy_name, with_fp32_weights
from narrowcast.scaling import Dynamic, LossScale, Off, check_loss_scale
from narrowcast.scripts import FileWatch, Script, run_script

_INTERRUPTED = 130  # the exit code that shells give a process ended by Ctrl-C


class Attachment:
    """What ``attached`` returns, with more arguments for the commands.

    Args:
        policy: as for ``attached``.
        loss_scale: as for ``attached``.
        writer: of the capture; it is closed on leaving.
        tell: called with notes that should be shown at once, such as a format that is slow here.
        tell_story: called with what was found when a skipped step was run again; by default ``tell``.
        stop_after: end the script after so many optimizer steps, skipped ones included; 0: it ends by
            itself. Without an optimizer, or if a compiled function hides the steps, backwards are counted;
            without backwards, outermost calls of modules.
        is_training: the script is known to train, so calls of modules before its first backward are not
            counted as steps.
        observer: called while the script runs.
        seed_shift: added to every seed that the script sets for Python's, NumPy's or torch's random numbers.
        explains_skips: run a skipped step again, and say where its first infinity or NaN arose.
        in_python: whether a program made it, not a command: notes then name arguments in place of options.
        board: shows the events of the capture in TensorBoard too; it needs a ``writer``.

    Attributes:
        facts: after leaving, the ``end`` event of the capture.
        exit_code: with which the script ended, for that event; None if no script was run.
        at_end: called by ``leave_for_good``.
    """

    __reduce_ex__ = not_copied("what nc.attached returns", "call nc.attached again")
    _in_force: Attachment | None = None  # torch is patched once for the process

    def __init__(
        self,
        policy: Policy | str = "auto",
        loss_scale: LossScale | None = None,
        *,
        writer: CaptureWriter | None = None,
        tell: Callable[[str], None] = lambda _: None,
        tell_story: Callable[[str], None] | None = None,
        stop_after: int = 0,
        is_training: bool = False,
        observer: Observer | None = None,
        seed_shift: int = 0,
        explains_skips: bool = False,
        in_python: bool = False,
        board: TensorBoard | None = None,
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.at_end: Callable[[], None] = lambda: None
        self._left_for_good = False
        self._trained_elsewhere = False
        self._ranks: _OwnRanks | None = None
        self._seed_shift = seed_shift
        self._patches = Patches()

        # What the parts share, and the parts.
        run = AttachedRun(
            policy=with_fp32_weights(policy),
            asked_scale=loss_scale,
            scale=RunningScale(Off() if loss_scale is None else check_loss_scale(loss_scale)),
            recorder=EventRecorder(writer, tell, in_python=in_python, board=board),
            observer=observer or Observer(),
            stopping=Stopping(stop_after, self._close_before_the_end, counts_calls=not is_training),
            explains_skips=explains_skips,
            tell_story=tell_story or tell,
        )
        self.policy = run.policy
        self.scale = run.scale
        self.recorder = run.recorder
        self._observer = run.observer
        self._stopping = run.stopping
        self._regions = ScriptRegions(run)
        self._backward = Backward(run, self._regions)
        self._steps = Steps(run, self._backward.leaves, self._regions)

        # A process that the script spawns is attached with the same settings.
        settings = _ChildSettings(
            policy=self.policy,
            loss_scale=loss_scale,
            stop_after=stop_after,
            seed_shift=seed_shift,
            capture=None if writer is None else writer.path,
            board_folder=None if board is None else board.folder,
        )
        self._processes = _ChildProcesses(self.recorder, settings)

    def __repr__(self) -> str:
        counts = f"steps={self.recorder.steps}, skipped_steps={self.recorder.skipped_steps}"
        state = "left" if self.facts else "not entered"
        if Attachment._in_force is self:
            state = "in force"
        return f"<nc.attached {policy_name(self.policy)}, {state}: {counts}>"

    def __enter__(self) -> Self:
        if Attachment._in_force is not None:
            raise OrderError("an Attachment is in force already; leave it before entering another one")
        Attachment._in_force = self
        try:
            self._regions.install(self._patches)
            self._backward.install(self._patches)
            self._steps.install(self._patches)
            # Every kind of process of multiprocessing begins here.
            self._patches.wrap(multiprocessing.process.BaseProcess, "start", self._processes.start)
            self._patches.wrap(os, "_exit", self._before_exit)
            if self._seed_shift:
                shift_seeds(self._patches, self._seed_shift, self.recorder.note)
            self._observer.attached(self)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        Attachment._in_force = None
        # ``leave_for_good`` keeps the deadline: the script's exit handlers may still go on for ever.
        if not self._left_for_good:
            self._stopping.cancel()
        undo: tuple[Callable[[], None], ...] = (
            self._note_what_was_unusual,
            self._patches.restore,
            self._regions.uninstall,
            self._steps.uninstall,
            self._backward.leaves.remove_hooks,
        )
        for part in undo:
            try:
                part()
            except Exception as error:  # the other parts still have to be undone, and the report written
                self.recorder.note(f"on leaving, {part.__name__} failed: {first_line(error)}")
        self.facts = self.recorder.close(
            exit_code=self.exit_code,
            stopped=self._stopping.reached,
            final_scale=self.loss_scale,
            elsewhere=self._trained_elsewhere,
        )

    @property
    def left_alone(self) -> str | None:
        """Why narrowcast did nothing more for the code inside; None if it did."""
        return self.recorder.left_alone

    @property
    def notes(self) -> list[str]:
        """Sentences on what was unusual, as ``narrowcast run`` prints them at the end."""
        return list(self.recorder.notes)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were made since entering and still exist."""
        return list(self._steps.optimizers)

    def parameter_names(self) -> dict[int, str]:
        """Return ``id`` of each parameter of the modules that were called -> its name with the class."""
        return self._regions.parameter_names()

    def continue_in_fp32(self) -> None:
        """Open no region from now on, and scale no loss."""
        self._regions.continue_in_fp32()
        self.scale.value = Off()

    def continue_by_policy(self, scale: LossScale) -> None:
        """Open regions again after ``continue_in_fp32``, with the loss scale ``scale``."""
        self._regions.continue_by_policy()
        self.scale.value = scale

    def pause_regions(self, paused: bool) -> None:
        """Open no region while ``paused``.

        A module whose first call comes during the pause gets its rules only by ``continue_by_policy``.
        """
        self._regions.in_fp32 = paused

    def continue_at_scale(self, scale: float) -> None:
        """Continue with another loss scale by the same rule; a fixed scale stays."""
        if isinstance(self.scale.value, Dynamic):
            self.scale.value = replace(self.scale.value, scale=scale)

    @property
    def loss_scale(self) -> float | None:
        """The scale of the next backward; None if losses are not scaled."""
        return self.scale.of_next

    @property
    def scale_of_gradients(self) -> float | None:
        """The scale of the latest backward; None if losses are not scaled."""
        return self.scale.of_gradients

    def stop(self) -> None:
        """End the script here by ``SystemExit(0)``, as after ``stop_after`` steps."""
        self._stopping.stop()

    def leave_for_good(self) -> None:
        """Leave, and call ``at_end``; only the first call does something."""
        if not self._left_for_good:
            self._left_for_good = True
            self.__exit__(None, None, None)
            self.at_end()

    def watch_ranks(self, script: Script, again: Sequence[str]) -> None:
        """Attach in processes in which ``script`` starts itself as another rank."""
        ranks = _OwnRanks(self.recorder, script, again)
        self._patches.wrap(subprocess.Popen, "__init__", ranks.start)
        self._ranks = ranks

    def _ranks_started_others(self) -> bool:
        return self._ranks is not None and self._ranks.started_another_script

    def _before_exit(self, original: Callable[[int], Any], status: int) -> None:
        """Write what was recorded, since a process that calls ``os._exit`` runs no exit handlers."""
        with suppress(Exception):
            self.recorder.flush()
        original(status)

    def _close_before_the_end(self) -> None:
        self.exit_code = 0
        self.leave_for_good()

    def _note_what_was_unusual(self) -> None:
        recorder = self.recorder
        if recorder.left_alone is not None:
            return
        self._steps.note_what_was_lost()
        self._regions.note_many_calls()
        if self._backward.before_modules and self._regions.called_a_module:
            recorder.note(
                "backward was called before any module, so what it trains ran in fp32: module(x) runs in "
                "mixed precision, module.forward(x) does not"
            )
        self._trained_elsewhere = self._processes.trained()
        stepped = recorder.steps or recorder.skipped_steps or self._stopping.traced_steps
        if not (self._regions.called_a_module or self._trained_elsewhere or self._processes.started):
            recorder.note(_NOTHING_WAS_CALLED + (_ELSEWHERE if self._ranks_started_others() else ""))
        elif recorder.backwards and not stepped and not self.exit_code:
            recorder.note("no torch.optim.Optimizer stepped; updates, if any, were made by hand")


def attached(
    policy: Policy | str = "auto", loss_scale: LossScale | None = None, *, explain_skips: bool = True
) -> Attachment:
    """Return a context manager that runs the code inside it as ``narrowcast run`` runs a script::

        with nc.attached("bf16") as run:
            train(model)  # plain FP32 code
        print(run.facts["steps"], run.notes)

    Use it in a notebook, or for training code of a library that you cannot edit. The outermost call of each
    module that holds parameters is a region of ``policy``, whose floating outputs are returned in fp32. In
    fp16 the loss is scaled where the outermost backward starts, and gradients are unscaled before the code
    inside can read them; an optimizer step on gradients that overflowed is skipped. On leaving, torch is as
    it was before. If the code inside uses autocast or a ``GradScaler`` itself, nothing is added, and
    ``run.left_alone`` is the reason.

    Args:
        policy: a ``Policy`` or the name of a preset.
        loss_scale: a value from ``narrowcast.scaling``; None: ``Dynamic()`` in fp16, else ``Off()``.
        explain_skips: run a skipped step again, and note where its first infinity or NaN arose
            (docs/stepper.md). Code in ``forward`` then runs again too.

    Raises:
        ScaleError: ``loss_scale`` is not a loss scale.
        OrderError: on entering, if another is in force.
        UnsupportedError: inside, before training that fp16 would get wrong (updates by hand, FSDP).
        ScaleCollapseError: inside, after 25 skipped steps of one optimizer in a row.
    """
    return Attachment(policy, loss_scale, explains_skips=explain_skips, in_python=True)


# ---- a whole script


def run_attached(
    script: Script,
    attachment: Attachment,
    *,
    seed: int | None = None,
    at_end: Callable[[], None],
    again: Sequence[str] = (),
) -> None:
    """Run ``script`` as ``__main__`` under ``attachment``, which is not entered yet; its errors propagate.

    The attachment is left, and ``at_end`` called, when Python itself would end: after the error was shown,
    and after the end of the script's threads, which may train until then. With a ``seed``, Python, NumPy and
    torch are seeded before the script starts. ``again`` are the words before the script in a command that
    runs it like this; without them, a script that starts ranks of its own is refused.
    """
    process = os.getpid()

    def leave() -> None:
        if os.getpid() == process:  # not in a child that the script forked
            attachment.leave_for_good()

    if seed is not None:
        seed_everything(seed)
    attachment.at_end = at_end
    try:
        with _entered(attachment):
            attachment.watch_ranks(script, again)
            run_script(script)
    finally:
        # Registered after the handlers of the script, and so called before them.
        atexit.register(leave)


@contextmanager
def _entered(attachment: Attachment) -> Iterator[None]:
    """Enter an attachment, which is left later, and set the exit code that Python will end with."""
    attachment.__enter__()
    attachment.exit_code = 1
    try:
        yield
        attachment.exit_code = 0
    except SystemExit as error:
        # As Python ends: with 0 for None, and 1 for a message.
        if isinstance(error.code, int):
            attachment.exit_code = int(error.code)  # a bool too, as of ``sys.exit(not passed)``
        else:
            attachment.exit_code = int(error.code is not None)
        raise
    except KeyboardInterrupt:
        attachment.exit_code = _INTERRUPTED
        raise
    except (RuntimeError, ValueError, ArithmeticError) as error:
        # The cause may be a NaN of the low format, where a function checks its input, as binary_cross_entropy
        # does.
        low_formats = {device["format"] for device in attachment.recorder.devices.values()} - {"fp32"}
        if low_formats and not isinstance(error, NarrowcastError):
            advice = "--policy fp32 shows whether it does so in FP32 too"
            attachment.recorder.note(f"the script stopped with {type(error).__name__}; {advice}")
        raise


# ---- processes that a script starts

# Started by libraries to load data, to serve objects or to compile; they do not train.
_OF_LIBRARIES = ("torch.utils.data.", "multiprocessing.managers", "torch._inductor.")


_NOTHING_WAS_CALLED = "no module with parameters was called, so nothing ran in mixed precision"
_ELSEWHERE = (
    "; a script that was started in another process was left in FP32: have its launcher start narrowcast, as "
    "in accelerate launch -m narrowcast run SCRIPT"
)
_OWN_PROCESS = (
    "the script started itself as another process, which was left in FP32: have it start narrowcast run there"
)
_OWN_RANK = (
    "expected a script whose ranks a launcher starts, got one that starts rank {rank} itself, which would "
    "train in FP32: write torchrun --nproc-per-node {ranks} -m narrowcast in place of narrowcast, and the "
    "rest of the command as it is"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChildSettings:
    """What ``_call_attached`` needs to attach in a spawned process, to which it is pickled.

    Attributes:
        policy: that of the parent, and so are ``loss_scale``, ``stop_after`` and ``seed_shift``.
        capture: path of the parent's capture; None: the child writes none either.
        board_folder: that of the parent's files for TensorBoard; None: the child writes none either.
        files: watches the files that the child changes; None: they are not watched.
        number: of the child, from 0.
        counts: steps taken and steps skipped by the child, in memory that its parent reads too.
    """

    policy: Policy
    loss_scale: LossScale | None
    stop_after: int
    seed_shift: int
    capture: Path | None
    board_folder: Path | None
    files: FileWatch | None = None
    number: int = 0
    counts: Any = None


class _ChildProcesses:
    """Attach in processes that a script spawns, which inherit nothing; a forked process inherits everything.

    ``start`` wraps that of ``multiprocessing``, which every kind of process uses.
    """

    def __init__(self, recorder: EventRecorder, settings: _ChildSettings) -> None:
        self._recorder = recorder
        self._settings = settings
        self._numbers = itertools.count()
        self._counts: list[Any] = []  # ``_ChildSettings.counts`` of each process
        self.started = False  # whether one was spawned

    def trained(self) -> bool:
        """Return whether a process took or skipped a step; note how many steps there were."""
        trained = [counts for counts in self._counts if any(counts)]
        if trained:
            taken = sum(counts[0] for counts in trained)
            skipped = sum(counts[1] for counts in trained)
            self._recorder.note(
                f"processes of the script, {len(trained)} of them, took {taken} optimizer steps and skipped "
                f"{skipped}, which are not counted above"
            )
        return bool(trained)

    def start(self, original: Callable[..., None], process: Any) -> None:
        # Processes of libraries stay as they are.
        target = getattr(process, "_target", None)
        module = getattr(target, "__module__", None) or ""
        if module.startswith(_OF_LIBRARIES) or self._recorder.left_alone is not None:
            original(process)
            return
        counts = multiprocessing.RawArray("q", 2)  # steps taken and skipped
        self._counts.append(counts)

        # A forked process inherits this attachment, and finds in its recorder where to count.
        # ``_start_method`` of a plain ``Process`` is None: it starts by the script's method, or the default.
        start_method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
        if start_method == "fork":
            before = self._recorder.shared
            self._recorder.shared = counts
            try:
                original(process)
            finally:
                self._recorder.shared = before
            return

        # A spawned process inherits nothing: it calls a target that attaches there.
        if target is None:
            self._recorder.note(
                f"the process {type(process).__name__} has a run method of its own and was left in FP32"
            )
            original(process)
            return
        number = next(self._numbers)
        settings = replace(self._settings, files=FileWatch.in_force, number=number, counts=counts)
        process._target = functools.partial(_call_attached, target, settings)
        original(process)
        self.started = True
        self._recorder.note(
            "the script started processes of its own: they run in mixed precision too, each with a "
            "capture (capture-process0.jsonl and so on) beside this one"
        )


def _call_attached(target: Callable[..., Any], settings: _ChildSettings, /, *args: Any, **kwargs: Any) -> Any:
    """Attach in a process that an attached script spawned, and call the target of the process.

    Its capture is ``capture-processN.jsonl`` beside its parent's, where N is the number of the process; it is
    deleted again if it records nothing. Its files for TensorBoard are in ``processN`` in the folder of its
    parent.
    """
    process = f"process{settings.number}"
    writer = None
    if settings.capture is not None:
        writer = CaptureWriter(settings.capture.with_stem(f"{settings.capture.stem}-{process}"))
        writer.write(start_event(sys.argv, settings.policy.compute, process=settings.number))
    board = None
    if settings.board_folder is not None:
        board = TensorBoard(settings.board_folder / process)
    if settings.files is not None:
        settings.files.install()
    attachment = Attachment(
        settings.policy,
        settings.loss_scale,
        writer=writer,
        stop_after=settings.stop_after,
        seed_shift=settings.seed_shift,
        board=board,
    )
    attachment.recorder.shared = settings.counts
    try:
        with _entered(attachment):
            return target(*args, **kwargs)
    finally:
        attachment.leave_for_good()
        recorder = attachment.recorder
        if writer is not None and not recorder.devices and not recorder.backwards:
            writer.path.unlink(missing_ok=True)


class _OwnRanks:
    """Attach in processes in which the script starts itself again, as Lightning's launcher starts ranks.

    ``start`` wraps ``subprocess.Popen.__init__``, and puts ``again`` before the script in the command.

    Attributes:
        started_another_script: whether the script started another one, as a launcher does.
    """

    def __init__(self, recorder: EventRecorder, script: Script, again: Sequence[str]) -> None:
        self._recorder = recorder
        self._script = script
        self._again = again
        self.started_another_script = False

    def start(
        self, original: Callable[..., None], process: Any, args: Any, *more: Any, **options: Any
    ) -> None:
        if self._recorder.left_alone is None and self._is_own(args, options.get("cwd")):
            environment = options.get("env") or os.environ
            # A launcher sets another rank in the environment of each process that it starts.
            rank = _rank_in(environment)
            if rank == _rank_in(os.environ):
                self._recorder.note(_OWN_PROCESS, at_once=True)
            elif self._again:
                args = [*self._again, *args[1:]]
            else:
                ranks = environment.get("WORLD_SIZE", "N")
                raise UnsupportedError(_OWN_RANK.format(rank=rank, ranks=ranks))
        elif _starts_a_script(args):
            self.started_another_script = True
        original(process, args, *more, **options)

    def _is_own(self, args: Any, cwd: Any) -> bool:
        """Return whether a command is ``python script arguments...``, or that with ``-m module``."""
        if not isinstance(args, list | tuple) or len(args) < 2 or args[0] != sys.executable:
            return False
        spec = self._script.spec
        if spec is not None:
            return list(args[1:3]) == ["-m", spec.name]
        path = os.path.join(cwd or os.getcwd(), args[1])
        return os.path.realpath(path) == os.path.realpath(self._script.file)


def _starts_a_script(args: Any) -> bool:
    """Return whether a command runs a Python script without narrowcast."""
    if not isinstance(args, list | tuple) or not args or args[0] != sys.executable:
        return False
    words = [word for word in args[1:] if isinstance(word, str)]
    return any(word.endswith(".py") for word in words) and "narrowcast" not in words


def _rank_in(environment: Mapping[str, str]) -> str:
    return environment.get("RANK") or environment.get("LOCAL_RANK") or "0"


def _in_a_forked_child() -> None:
    if Attachment._in_force is not None:
        Attachment._in_force.recorder.forget_writer()


os.register_at_fork(after_in_child=_in_a_forked_child)
