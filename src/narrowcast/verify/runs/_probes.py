"""Observers in the process of a run: they keep gradients or outputs, count memory, or find its steps."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from narrowcast.attach import Attachment, Observer, call_site, is_functorch_wrapped
from narrowcast.casting import tensors_inside
from narrowcast.errors import UnsupportedError
from narrowcast.gradients import nonfinite_flags, parameters_of
from narrowcast.machine import memory_bytes
from narrowcast.observe.profiling import LiveTensorBytes
from narrowcast.policy import format_name
from narrowcast.verify.certificate._dispatch_modes import ExactOps, Fp32Draws
from narrowcast.verify.certificate._sums import FEWEST_BATCHES
from narrowcast.verify.compare._samples import Minibatches
from narrowcast.verify.runs._inputs import most_rounded_column
from narrowcast.verify.runs._model_state import (
    each_once,
    fingerprint,
    put_back,
    random_fingerprint,
    some_values,
)
from narrowcast.verify.runs._runs import (
    MEMORY,
    MOVES,
    MOVES_FILE,
    PAUSED,
    STEPS,
    STEPS_AFTER_THE_END,
    TENSORS,
    UNTIL,
    GradientFacts,
    OutputFacts,
    Purpose,
    RunSettings,
    shared_numbers,
    tensors_at,
    write_result,
)

# After so many held-back steps of one optimizer the probe no longer waits for the others.
_MOST_STEPS = 64
# For so many held-back steps the probe waits until the loss scale no longer overflows. They are fewer than
# the skips in a row that raise ScaleCollapseError.
_MOST_OVERFLOWS = 20
# After so many calls of modules the probe no longer waits for a step.
_MOST_CALLS = 4096
# Calls of each module whose outputs are kept.
_OUTPUTS = 3
# The outputs of so many modules are kept, of those that are called first.
MOST_MODULES = 16
# A timed run that is told to end takes at least so many steps.
_FEWEST_STEPS = 3
# A weight whose relative change in a few steps is larger has moved by more than fp32's rounding.
_MOVES_CLEARLY = 1e-6
# Never closed: dispatch modes that are entered here hold until the process ends.
_until_the_end = ExitStack()


class Probe(Observer):
    """Observe a run for one purpose, and write what was seen into its folder."""

    attachment: Attachment

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        self.settings = settings
        self.argv = argv
        self.folder = settings.folder

    def attached(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def finish(self) -> None:
        """Write what is known; called when the script has ended."""


class StepProbe(Probe):
    """Call ``boundary`` at the end of each training step, until ``done`` is set.

    A training step is everything between two steps of one optimizer, loading and evaluation included. That
    optimizer is the first one that steps; if it stops stepping, as after a search for the learning rate, or
    is gone, as where each epoch makes one of its own, the next one. Without an optimizer, a step is
    everything between two calls of one outermost module: the first that was called twice.

    Attributes:
        unit: what is counted, ``"step"`` or ``"call"``.
    """

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        super().__init__(settings, argv)
        self.done = False
        self.unit = "step"
        self._pace: weakref.ref[torch.optim.Optimizer] | None = None
        # Of other optimizers, since the last step of ``pace``.
        self._steps_of_others: dict[torch.optim.Optimizer, int] = {}
        self._pacing_module: weakref.ref[torch.nn.Module] | None = None
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    @property
    def pace(self) -> torch.optim.Optimizer | None:
        """The optimizer whose steps are counted."""
        return None if self._pace is None else self._pace()

    def returned(self, module: torch.nn.Module, output: Any) -> None:
        # An optimizer that is gone by now had steps.
        if self.done or self.attachment.optimizers or self._pace is not None:
            return
        self.unit = "call"
        if self._pacing_module is None and module in self._called:
            self._pacing_module = weakref.ref(module)
        self._called.add(module)
        if self._pacing_module is not None and self._pacing_module() is module:
            self.boundary()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self.done:
            return
        # The script called modules before it made its optimizer.
        if self.unit == "call":
            self.unit = "step"
            self.restart()
        if self.pace is None:
            self._pace = weakref.ref(optimizer)
        if optimizer is not self.pace:
            steps = self._steps_of_others.get(optimizer, 0) + 1
            self._steps_of_others[optimizer] = steps
            if steps <= STEPS_AFTER_THE_END:
                return
            self._pace = weakref.ref(optimizer)
            self.pace_changed()
        self._steps_of_others.clear()
        self.boundary()

    def boundary(self) -> None:
        """Handle the end of a step."""

    def restart(self) -> None:
        """Drop what was seen, since the calls so far were not steps."""

    def pace_changed(self) -> None:
        """Handle that the steps of another optimizer are counted from now on."""


class TimedProbe(StepProbe):
    """Pause or end the run at the step that the parent names."""

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        super().__init__(settings, argv)
        self._numbers = shared_numbers(settings.folder)

    def restart(self) -> None:
        self._numbers[STEPS] = 0

    def boundary(self) -> None:
        self._numbers[STEPS] += 1
        # 0: go on to the end of the script. Below 0: end now, but not before a few steps are taken.
        until = self._numbers[UNTIL]
        if until < 0 and self._numbers[STEPS] >= _FEWEST_STEPS:
            self.attachment.stop()
        if 0 < until <= self._numbers[STEPS]:
            self._pause()

    def _pause(self) -> None:
        """Stop this process and all that it started, until the parent names another step.

        Waiting in Python would not do: workers of data loaders would go on, and load ahead.
        """
        began = time.perf_counter()
        # The wait for the GPU is part of the time of the steps so far.
        waited_s = 0.0
        on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        share = _peak_resident_bytes() / (memory_bytes() or math.inf)
        if on_gpu:
            torch.cuda.synchronize()
            waited_s = time.perf_counter() - began
            _, gpu_bytes = torch.cuda.mem_get_info()
            share = max(share, torch.cuda.max_memory_reserved() / gpu_bytes)
        self.attachment.recorder.flush()
        self._numbers[MEMORY] = int(1000 * share)
        self._numbers[PAUSED] = 1

        # The parent repeats SIGCONT, which may come before this process has stopped itself.
        while 0 < self._numbers[UNTIL] <= self._numbers[STEPS]:
            os.killpg(os.getpgrp(), signal.SIGSTOP)
        self._numbers[PAUSED] = 0
        # The wait is recorded by itself, so it must not lengthen the first step after the pause.
        self.attachment.recorder.paused(time.perf_counter() - began, waited_s)


def _peak_resident_bytes() -> int:
    """Return the most memory that this process had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return 1024 * peak  # elsewhere it is in KiB


class MemoryProbe(Probe):
    """Count the bytes of this thread's tensors on the CPU; no number if the script computes elsewhere."""

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        super().__init__(settings, argv)
        self._counted_thread = threading.get_ident()
        self._elsewhere = False
        self._live = LiveTensorBytes()
        self._live.__enter__()

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_cpu = all(parameter.is_cpu for parameter in module.parameters())
        if not on_cpu or threading.get_ident() != self._counted_thread:
            self._elsewhere = True

    def finish(self) -> None:
        peak: int | None = None
        reason: str | None = None
        try:
            peak = self._live.peak_bytes
        except UnsupportedError as error:
            reason = str(error)
        if peak == 0 or self._elsewhere:
            peak = None
            where = "in another thread or process than its first, or on another device than the CPU"
            reason = f"the script computes {where}"
        write_result(self.folder, {"peak_tensor_bytes": peak, "reason": reason})


class _ProbedThread(threading.local):
    """Whether the dispatch modes of a probe were entered in a thread; each thread has modes of its own."""

    has_modes = False


class GradientProbe(Probe):
    """Hold updates back at some steps, and keep the gradients that each optimizer would have used.

    A batch is what one step of an optimizer sees, accumulation included. There are three runs:

    - ``REFERENCE``: in FP32, four batches;
    - ``MIXED``: under the policy, the same four;
    - ``EXACT``: in FP32 by ops that round only their result, the first batch.

    ``MIXED`` and ``EXACT`` load the weights of ``REFERENCE``. Between two compared steps all three train on
    the same batches in mixed precision, or in FP32 where the CPU only emulates the format. At the end
    ``REFERENCE`` and ``MIXED`` take a few steps more, and keep how these move the weights.
    """

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        super().__init__(settings, argv)
        self._role = settings.purpose
        self._process = os.getpid()
        self._first_to_step: weakref.ref[torch.optim.Optimizer] | None = None
        # Steps of others than that one, while updates are held back and none of it was.
        self._steps_of_others = 0
        self._drops_gradients = False
        self._thread = _ProbedThread()
        self._draws = Fp32Draws()
        self._exact = ExactOps()  # type: ignore[no-untyped-call]
        self._steps = 0  # that updated weights
        self._later_at_steps = list(settings.at_steps)
        self._all_facts: list[GradientFacts] = []
        self._wait_for_next()

    def _wait_for_next(self) -> None:
        """Wait for the next step at which updates are held back; forget what belongs to the previous one."""
        self._at_step = self._later_at_steps.pop(0)
        self._is_holding = False
        self._calls = 0
        self._minibatches = Minibatches(lambda: self.attachment.optimizers)
        self._modules: list[torch.nn.Module] = []
        # Weights and buffers of these modules, by ``id``, with the name in the module.
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}
        # Each buffer with its values before the first batch.
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Held-back steps of each optimizer, in the order in which they first stepped.
        self._held_steps: dict[torch.optim.Optimizer, int] = {}
        # How many optimizers there were at the first of these steps.
        self._optimizers_at_first = 1
        # Held-back steps of all of them, and how many there were at the last one of each.
        self._all_held = 0
        self._last_held: dict[torch.optim.Optimizer, int] = {}
        self._steps_of_others = 0
        # Optimizers whose gradients overflowed in a compared batch, and have not been finite since.
        self._overflowed: set[torch.optim.Optimizer] = set()
        # Weights when updates go on at the end, to keep how far they move; None until then.
        self._weights_before: dict[str, torch.Tensor] | None = None
        # Steps of the first optimizer that steps after that.
        self._moves = 0
        self._moves_by: torch.optim.Optimizer | None = None
        self._moves_of_others = 0
        self._facts = GradientFacts(at_step=self._at_step, steps_before=self._steps)
        self._all_facts.append(self._facts)
        self._kept_folder = tensors_at(self.folder, self._at_step)
        self._kept_folder.mkdir(parents=True, exist_ok=True)
        self._reference_folder = tensors_at(self.folder.parent / Purpose.REFERENCE, self._at_step)

    def attached(self, attachment: Attachment) -> None:
        super().attached(attachment)
        # Before the script enters modes of its own, as to count operations: torch leaves the latest first.
        self._draws.paused = self._exact.paused = True
        self._enter_modes()
        # A compiled graph would hide draws of random numbers, and modes are an error to a full graph.
        torch.compiler.set_stance("force_eager")
        if self.settings.math_attention:
            _until_the_end.enter_context(sdpa_kernel(SDPBackend.MATH))
        # Where the CPU emulates the format, a step takes minutes: only the compared steps use it.
        attachment.pause_regions(bool(self.settings.fp32_because))
        if not self._at_step:
            self._begin_to_hold()

    def _enter_modes(self) -> None:
        """Enter the dispatch modes in this thread; each thread has its own."""
        self._thread.has_modes = True
        _until_the_end.enter_context(self._draws)
        if self._role == Purpose.EXACT:
            _until_the_end.enter_context(self._exact)

    def _begin_to_hold(self) -> None:
        """Hold updates back from now on, and drop earlier gradients."""
        self._is_holding = True
        self.attachment.pause_regions(False)
        self._backwards_before = self.attachment.recorder.backwards
        # The script may still read the gradients of the step that ends now.
        self._drops_gradients = True
        self._exact.paused = self._draws.paused
        # FP32 runs have no loss scale while they hold updates back, and ``_train_on`` restores this one. The
        # mixed run goes on with the scale that it has.
        self._scale = self.attachment.scale.value
        if self._role != Purpose.MIXED:
            self.attachment.continue_in_fp32()
        elif self.settings.start_scale is not None:
            self.attachment.continue_at_scale(min(self._scale.scale, self.settings.start_scale))

    def _train_on(self) -> None:
        """Train up to the next step at which updates are held back: by the policy, or in FP32 if emulated."""
        if self._role != Purpose.MIXED:
            self.attachment.continue_by_policy(self._scale)
        if self.settings.fp32_because:
            self.attachment.pause_regions(True)
        self._wait_for_next()

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_holding:
            return
        # Only from the first call on: random numbers drawn before are the same in all runs.
        if self._draws.paused:
            self._draws.paused = self._exact.paused = False
        if not self._thread.has_modes:
            self._enter_modes()
        # Equal inputs of the first call show that two runs have the same batch.
        if self._facts.batch is None:
            self._facts.batch = fingerprint([args, kwargs], floating=False)
            self._facts.batch_values = some_values([args, kwargs])
            if self._role == Purpose.REFERENCE:
                self._see_inputs([args, kwargs])
        self._minibatches.called(args, kwargs)
        if module not in self._modules:
            self._first_call(module)
        # A script that trains without torch.optim would go on to its end.
        if torch.is_grad_enabled():
            self._calls += 1
        if self._calls > _MOST_CALLS:
            if self._weights_before is None:
                reason = f"No optimizer stepped within {_MOST_CALLS} calls of the script's modules."
                self._facts.problem = reason
            self.finish()
            self.attachment.stop()

    def _see_inputs(self, inputs: Any) -> None:
        """Note the column of the inputs that loses most of its spread in each format, if one loses much."""
        for dtype in (torch.bfloat16, torch.float16):
            column = most_rounded_column(inputs, dtype)
            if column is not None:
                self._facts.rounded_columns[format_name(dtype)] = column

    def _first_call(self, module: torch.nn.Module) -> None:
        """Save the weights of a module at its first call, or load the reference's; keep its buffers.

        Tensors that it shares with an earlier module are left out: they were saved or loaded then, and may be
        in use.
        """
        file = self._reference_folder / f"weights-{len(self._modules)}.pt"
        self._modules.append(module)
        buffers = dict(module.named_buffers())
        parameters = dict(module.named_parameters())
        if any(map(is_functorch_wrapped, parameters.values())):
            self._facts.problem = (
                "The script calls its model inside torch.func, where weights cannot be read, so that runs "
                "cannot be compared at the same weights."
            )
            return
        state: dict[str, torch.Tensor] = {}
        for name, tensor in {**parameters, **buffers}.items():
            # Not lazy tensors, which have no values yet, nor expanded ones, which cannot be written.
            is_plain = not is_lazy(tensor) and each_once(tensor) is tensor
            if is_plain and id(tensor) not in self._tensors:
                state[name] = tensor
        for name, tensor in state.items():
            self._tensors[id(tensor)] = (name, tensor)
        if self._role == Purpose.REFERENCE:
            torch.save({name: tensor.detach().cpu() for name, tensor in state.items()}, file)
        else:
            self._load(state, file)
        for name, buffer in buffers.items():
            if name in state:
                self._buffers.append((buffer, buffer.detach().clone()))

    def _load(self, tensors: dict[str, torch.Tensor], file: Path) -> None:
        try:
            kept = torch.load(file, weights_only=True, mmap=True)
        except (OSError, RuntimeError):
            kept = {}
        if _shapes(tensors) != _shapes(kept):
            reason = "The FP32 and the mixed run did not call the same modules in the same order."
            self._facts.problem = reason
            return
        for name, tensor in tensors.items():
            put_back(tensor, kept[name].to(tensor.device))

    def holds_back(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._is_holding and self._weights_before is None

    def held_back(self, optimizer: torch.optim.Optimizer) -> None:
        self._calls = 0
        if not self._held_steps:
            if not self._begins_iteration(optimizer):
                return
            self._facts.scale = self.attachment.scale_of_gradients
            self._optimizers_at_first = max(1, len([*self.attachment.optimizers]))
        batch = self._held_steps.get(optimizer, 0)
        if batch == 0:
            self._facts.random.append([])
        self._held_steps[optimizer] = batch + 1
        self._all_held += 1
        self._last_held[optimizer] = self._all_held
        if batch < self._batches_kept:
            place = list(self._held_steps).index(optimizer)
            self._facts.random[place].append(random_fingerprint())
            self._keep_gradients(optimizer, place, batch)
            self._count_minibatches(optimizer)
        if self._role == Purpose.MIXED:
            self._see_overflow(optimizer)
        # Each batch starts from the same statistics of norms. Exact sums stop once all gradients are kept.
        for buffer, before in self._buffers:
            put_back(buffer, before)
        self._exact.paused = not self._waiting_for(self._batches_kept)
        self.finish()

    def _begins_iteration(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this step is the first of an iteration whose updates are all held back.

        Another optimizer than the first to step ends an iteration that began before. That first one may have
        ended, as after a warm-up, or be gone, where each epoch makes an optimizer of its own.
        """
        first = self._first_to_step() if self._first_to_step is not None else None
        if first is None or first is optimizer:
            return True
        self._steps_of_others += 1
        if self._steps_of_others <= STEPS_AFTER_THE_END:
            return False
        self._first_to_step = weakref.ref(optimizer)
        return True

    @property
    def _batches_kept(self) -> int:
        return 1 if self._role == Purpose.EXACT else FEWEST_BATCHES

    @property
    def _batches_held(self) -> int:
        """For how many batches updates are held back; as many in all runs, if they train on after these."""
        if self._later_at_steps:
            return FEWEST_BATCHES
        return self._batches_kept

    def returned(self, module: torch.nn.Module, output: Any) -> None:
        if self._is_holding:
            self._minibatches.returned(module, output)

    def backward_begins(self, roots: Sequence[Any]) -> None:
        if not self._is_holding:
            return
        if self._drops_gradients:
            self._drops_gradients = False
            for optimizer in self.attachment.optimizers:
                for parameter in parameters_of(optimizer):
                    parameter.grad = None
        self._minibatches.backward_begins(roots, call_site())

    def backward_ended(self) -> None:
        if self._is_holding:
            self._minibatches.backward_ended()

    def _count_minibatches(self, optimizer: torch.optim.Optimizer) -> None:
        """Note how many minibatches this step averages, and how many samples each has."""
        facts = self._facts
        facts.backwards, facts.samples = self._minibatches.stepped(optimizer)
        facts.ranks = 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            facts.ranks = torch.distributed.get_world_size()
        facts.launched = 1
        launched = os.environ.get("WORLD_SIZE", "")
        if launched.isdecimal():
            facts.launched = max(1, int(launched))

    def _see_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the first scale at which every optimizer's gradients are finite again after an overflow."""
        gradients: list[torch.Tensor] = []
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        if any(nonfinite_flags(gradients).read()):
            if self._held_steps[optimizer] <= FEWEST_BATCHES:
                self._overflowed.add(optimizer)
        elif optimizer in self._overflowed:
            self._overflowed.remove(optimizer)
            if not self._overflowed:
                self._facts.good_scale = self.attachment.scale_of_gradients

    def _keep_gradients(self, optimizer: torch.optim.Optimizer, place: int, batch: int) -> None:
        """Save name, shape and gradient of each parameter."""
        names = self.attachment.parameter_names()
        rows = []
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if not parameter.requires_grad:
                    continue
                unnamed = f"optimizer {place}, group {number}, parameter {position}"
                name = names.get(id(parameter), unnamed)
                gradient = None if parameter.grad is None else parameter.grad.detach().cpu()
                rows.append((name, tuple(parameter.shape), gradient))
        torch.save(rows, self._kept_folder / f"gradients-{place}-{batch}.pt")

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._first_to_step is None:
            self._first_to_step = weakref.ref(optimizer)
        if not self._is_holding:
            self._steps += 1
            self._facts.steps_before = self._steps
            if self._steps >= self._at_step:
                self._begin_to_hold()
        elif self._weights_before is not None:
            self._calls = 0
            self._moves_by = self._moves_by or optimizer
            if optimizer is self._moves_by:
                self._moves += 1
            else:
                self._moves_of_others += 1
            if self._moves == MOVES:
                self._keep_moves(self._weights_before)
                self.attachment.stop()
            elif self._moves_of_others > STEPS_AFTER_THE_END * self._optimizers_at_first:
                # It has ended, as where each round makes optimizers of its own.
                self.attachment.stop()
        elif self._is_complete():
            # After an overflow more batches were held back than in the reference, so later steps cannot be
            # compared.
            if self._overflowed or self._facts.good_scale is not None:
                self._later_at_steps.clear()
            if self._later_at_steps:
                self._train_on()
                return
            # Any rounding sends a line search another way, so its moves cannot be compared.
            searches = any(isinstance(held, torch.optim.LBFGS) for held in self._held_steps)
            if self._role == Purpose.EXACT or searches:
                self.attachment.stop()
                return
            # From here on ``holds_back`` lets updates through.
            self._weights_before = self._weights()
            self._calls = 0
            self._skipped_before = self.attachment.recorder.skipped_steps

    def _weights(self) -> dict[str, torch.Tensor]:
        """Copy floating parameters and buffers, by the names that the script's model gives them."""
        names = self.attachment.parameter_names()
        weights = {}
        for own_name, tensor in self._tensors.values():
            if tensor.is_floating_point():
                name = names.get(id(tensor), own_name)
                weights[name] = tensor.detach().to("cpu", torch.float32, copy=True)
        return weights

    def _keep_moves(self, before: dict[str, torch.Tensor]) -> None:
        # A step may have been skipped in this run only, so the runs may be at different weights.
        if self.attachment.recorder.skipped_steps != self._skipped_before:
            return
        moves = {}
        for name, weight in self._weights().items():
            if name not in before:
                continue
            move = weight - before[name]
            # What moves by a few roundoffs in FP32 itself tells nothing.
            if self._role != Purpose.REFERENCE or move.norm() > _MOVES_CLEARLY * before[name].norm():
                moves[name] = move
        self._facts.passes = self.attachment.recorder.backwards - self._backwards_before
        torch.save(moves, self._kept_folder / MOVES_FILE)
        self.finish()

    def _is_complete(self) -> bool:
        """Return whether no more steps must be held back here."""
        if not self._held_steps:
            return False
        most = max(self._held_steps.values())
        # A dynamic scale that has moved since the first batch may still fall to one that does not overflow.
        scale_has_moved = self.attachment.loss_scale not in (None, self._facts.scale)
        if self._overflowed and scale_has_moved and most < _MOST_OVERFLOWS:
            return False
        # Where optimizers come and go, none of them may take so many.
        too_many = most >= _MOST_STEPS or self._all_held >= _MOST_STEPS * self._optimizers_at_first
        return too_many or not self._waiting_for(self._batches_held)

    def _waiting_for(self, batches: int) -> int:
        """Return for how many optimizers fewer than ``batches`` steps were held back."""
        # One without parameters may never step. If none is known, those that stepped are all.
        expected = [optimizer for optimizer in self.attachment.optimizers if parameters_of(optimizer)]
        held_parameters: set[int] = set()
        for optimizer in self._held_steps:
            held_parameters.update(map(id, parameters_of(optimizer)))

        waiting = 0
        for optimizer in expected or self._held_steps:
            if self._held_steps.get(optimizer, 0) >= batches:
                continue
            if optimizer in self._last_held:
                # It has ended if only others have stepped for long.
                has_ended = self._all_held - self._last_held[optimizer] > STEPS_AFTER_THE_END
            else:
                # It may be within another optimizer, or around it, which does the stepping.
                has_ended = held_parameters.issuperset(map(id, parameters_of(optimizer)))
            if not has_ended:
                waiting += 1
        return waiting

    def finish(self) -> None:
        """Write what is known so far: the script may end at any moment."""
        # A process that the script forked must not overwrite it.
        if os.getpid() != self._process:
            return
        facts = self._facts
        facts.never_stepped = 0
        if self._is_holding:
            facts.never_stepped = self._waiting_for(1)
        facts.problem = facts.problem or self._draws.undecidable
        facts.in_attention = self._draws.in_attention
        write_result(self.folder, {"steps": msgspec.to_builtins(self._all_facts)})


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


class OutputProbe(Probe):
    """Keep the floating outputs of the first outermost calls of each module, with what shows its inputs."""

    def attached(self, attachment: Attachment) -> None:
        super().attached(attachment)
        self._calls: list[OutputFacts] = []
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        # Numbers are not given again if a module is gone.
        self._next_number = 0
        # How many calls of each module were kept, and how many there were since the latest new module.
        self._kept = Counter[int]()
        self._calls_since_new = self._all_calls = 0
        self._inputs: Any = None  # of the call that goes on
        (self.folder / TENSORS).mkdir(exist_ok=True)
        torch.compiler.set_stance("force_eager")
        self._draws = Fp32Draws()
        _until_the_end.enter_context(self._draws)

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The call may write to its inputs.
        self._inputs = (
            fingerprint([args, kwargs]),
            fingerprint([args, kwargs], floating=False),
            some_values([args, kwargs]),
        )

    def returned(self, module: torch.nn.Module, output: Any) -> None:
        if module not in self._modules:
            self._modules[module] = self._next_number
            self._next_number += 1
            self._calls_since_new = 0
        number = self._modules[module]
        self._calls_since_new += 1
        self._all_calls += 1
        if number < MOST_MODULES and self._kept[number] < _OUTPUTS:
            self._kept[number] += 1
            self._keep(number, module, output)
        expected = min(self.settings.modules, MOST_MODULES)
        is_complete = self._next_number >= expected and self._calls_since_new >= _OUTPUTS
        # Each call may be of a new module, or a module may come no more.
        if is_complete or self._all_calls >= _MOST_STEPS * expected:
            self.attachment.stop()

    def _keep(self, number: int, module: torch.nn.Module, output: Any) -> None:
        floating = [tensor.detach().cpu() for tensor in tensors_inside(output) if tensor.is_floating_point()]
        torch.save(floating, self.folder / TENSORS / f"outputs-{len(self._calls)}.pt")
        exact, others, values = self._inputs
        facts = OutputFacts(
            module=number, kind=type(module).__name__, inputs=exact, batch=others, batch_values=values
        )
        self._calls.append(facts)
        write_result(
            self.folder, {"calls": msgspec.to_builtins(self._calls), "problem": self._draws.undecidable}
        )
