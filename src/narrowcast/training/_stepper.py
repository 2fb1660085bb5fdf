"""``nc.Stepper``: a whole training step in two lines."""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from narrowcast.casting import ModelRegion, undo_on_error
from narrowcast.errors import CheckpointError, OrderError, SettingError, did_you_mean, not_copied
from narrowcast.gradients import GradScaler, StepResult, multiplied
from narrowcast.policy import Policy, as_policy, dtype_of, format_name, policy_name
from narrowcast.replay import (
    SkipExplainer,
    Surroundings,
    called_modules,
    random_states,
    set_random_states,
)
from narrowcast.training._accumulation import Synchronization, WeightCasts
from narrowcast.training._board import StepBoard, check_writer
from narrowcast.training._make import (
    cast_inputs,
    formats_of,
    make_groups,
    optimizers_by_name,
    warn_of_other_format,
)
from narrowcast.training._optimizer_group import (
    OptimizerGroup,
    Settings,
    check_loss,
    claim,
    is_fp32,
    release,
)
from narrowcast.training._state import Fit, Objects
from narrowcast.training._statistics import Statistics

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


class Stepper:
    """Do a whole mixed-precision training step in two lines::

        stepper = nc.Stepper(model, optimizer, accumulate=4, max_norm=1.0, scheduler=scheduler)
        for images, labels in loader:
            with stepper.autocast():
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            result = stepper.step(loss)
        stepper.flush()

    ``step`` runs the backward pass of the scaled loss. After ``accumulate`` micro-batches it unscales, clips
    and checks the gradients, steps the optimizer and the scheduler, and zeroes the gradients. If a gradient
    is not finite, the whole step is skipped: parameters, optimizer state, scheduler and the statistics of
    normalization layers are as before the first micro-batch. Named optimizers share these statistics: a skip
    of one restores the values from before the first micro-batch that any of them has accumulated.

    Args:
        model: the module to train; it may be wrapped in DDP, or sharded by ``fully_shard``.
        optimizer: one; several that step together, all or none; or a dict of optimizers that step in turn (a
            GAN's), where ``step(loss, name=...)`` selects one. Each entry accumulates, scales and schedules
            on its own.
        policy: ``"auto"``, ``"bf16"``, ``"fp16"``, ``"fp32"``, a ``Policy``, or ``"O2"``: the weights of the
            model are cast to the low format in place, and the optimizer updates fp32 masters. (``"O3"``: the
            same without masters.)
        accumulate: micro-batches per step; at least 1. Each loss is divided by it.
        max_norm: clip the norm of all gradients together.
        max_value: clamp each element of the gradients; exclusive with ``max_norm``.
        scheduler: a learning-rate scheduler, several, or a dict as for ``optimizer``; it steps after each
            step that was not skipped.
        scaler: a ``GradScaler`` or a loss scale of ``narrowcast.scaling``. Default: a dynamic scale in fp16,
            and in other formats only the check for NaN and infinities.
        restore: the buffers that a skipped step restores: ``"norms"`` (of batch and instance norms),
            ``"all"``, or ``"none"``. Modules that are added after the first step are left out.
        process_group: ranks that skip together; see ``GradScaler``. DDP and ``fully_shard`` do not need it.
        explain_skips: run a skipped step again, and say where its first infinity or NaN arose:
            ``skip_stories`` (docs/stepper.md).
        writer: gets the loss scale, skipped steps, the norm of the gradients, swallowed updates and stories
            (docs/stepper.md): a ``torch.utils.tensorboard.SummaryWriter``, or another object with
            ``add_scalar(tag, value, step)`` and ``add_text(tag, text, step)``.

    Weight casts are kept over the micro-batches of a step (not with ``fully_shard``). A weight that changes
    in between is cast again, except after a write through ``.data``, and except for weights of other models
    that change without an optimizer: call ``drop_casts`` after those.

    Attributes:
        model: the module that was given.
        steps: how many steps ended, taken or skipped, of all optimizers.

    Raises:
        SettingError: a setting outside its range, or optimizers and schedulers that do not fit.
        PolicyError: an unknown policy, or one that cannot hold for this model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizers,
        policy: Policy | str = "auto",
        *,
        accumulate: int = 1,
        max_norm: float | None = None,
        max_value: float | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        restore: str = "norms",
        process_group: Any | None = None,
        explain_skips: bool = False,
        writer: Any = None,
    ) -> None:
        if writer is not None:
            check_writer(writer)
        self._statistics = Statistics(model, restore)
        self._policy = as_policy(policy)
        self._formats = formats_of(model, self._policy)
        settings = Settings(accumulate, max_norm, max_value)
        self.model = model
        self.steps = 0
        self._synchronization = Synchronization(model)
        self._regions_open = 0
        self._checks_first_loss = torch.float32 not in self._formats.values()
        by_name = optimizers_by_name(optimizer)
        if self._synchronization.ddp and len(by_name) > 1 and accumulate > 1:
            raise SettingError(
                "accumulate with named optimizers under DistributedDataParallel would mix their gradients: "
                "use accumulate=1, or one Stepper for each"
            )
        with undo_on_error([model], list(itertools.chain.from_iterable(by_name.values()))) as undo:
            self._groups = make_groups(
                model, by_name, self._policy, self._formats, settings, scheduler, scaler, process_group
            )
            self._casts = WeightCasts([p for p in model.parameters() if p.dtype == torch.float32])
            groups = list(self._groups.values())

            # ``release`` is registered twice: for when the Stepper is deleted (not at exit, where nothing is
            # left to undo), and for an error in this block. Both share this list, which is filled below.
            handles: list[Any] = []
            weakref.finalize(self, release, groups, handles).atexit = False
            undo.callback(release, groups, handles)
            for group in groups:
                handles += claim(group)
            self._region = self._make_region()
            handles.append(self._region)
            if self._policy.holds_low_weights:
                handles.append(cast_inputs(model, self._formats))

            # Record the calls of modules, so that a skipped step can be run again and explained.
            self._explains_skips = explain_skips
            self._explainer = SkipExplainer(self._policy, model=model)
            self._recording = self._explainer.recording
            if explain_skips:
                for module in called_modules(model):
                    handles += self._recording.watch(module)

            self._board = None
            if writer is not None:
                self._board = StepBoard(writer, self._groups, self._explainer)
                handles += self._board.meters

    def _make_region(self) -> ModelRegion:
        return ModelRegion(self._policy, self._formats, warnings.warn, model=self.model, warns=True)

    # ---- training

    @contextmanager
    def autocast(self, name: str | None = None) -> Iterator[None]:
        """The region for forward pass and loss, in the policy's format; may be entered several times a step.

        Args:
            name: that of the optimizer that steps next, if they have names; an unknown name is an error.
        """
        groups = self._groups_called(name)
        # Without gradients, as in ``evaluate``, no micro-batch begins.
        if torch.is_grad_enabled():
            self._statistics.remember()
            self._synchronization.begin(reduces=any(group.reduces for group in groups))
            if any(group.accumulate > 1 for group in groups):
                self._casts.keep()
        with self._region:
            self._regions_open += 1
            self._recording.records = True
            self._checks_first_loss = False
            try:
                yield
            except BaseException:
                self._recording.clear()
                self._casts.drop()
                self._forget_statistics()
                raise
            finally:
                self._regions_open -= 1
                self._recording.records = self._regions_open > 0

    def step(self, loss: torch.Tensor | Callable[[], torch.Tensor], name: str | None = None) -> StepResult:
        """Run the backward pass of ``loss``, and step after the last micro-batch.

        Args:
            loss: a tensor of one element, or a function without arguments that computes it (in the region).
                If its gradients overflow and a lower scale may help, the function is called again with the
                same random numbers. Optimizers that need a closure, such as LBFGS, need a function.
            name: of the optimizer that steps, if they have names.

        Returns:
            The result; ``complete`` is False before the last micro-batch.

        Raises:
            OrderError: called inside the region; gradients were zeroed or written during an accumulation; or
                ``loss`` needs no gradient.
            ScaleCollapseError: too many skipped steps in a row.
        """
        group = self._group(name)
        self._check_outside("step", "stepper.step(loss)")
        if callable(loss) and not isinstance(loss, torch.Tensor):
            result = self._step_by_function(group, name, loss)
        else:
            check_loss(loss, group)
            if self._checks_first_loss and is_fp32(loss, self.model):
                warnings.warn(
                    "the loss was computed from fp32 weights without a cast: call the model and the loss "
                    'inside "with stepper.autocast():", or make the Stepper with policy="fp32"',
                    stacklevel=2,
                )
            self._checks_first_loss = False
            result = self._backward(group, loss)

        # Write here and not in _finish: a function may be tried again, and all its tries are one step.
        if self._board is not None and result.complete:
            self._board.step_ended(group, self.steps, result)
        return result

    def flush(self, name: str | None = None) -> StepResult:
        """Step on an unfinished accumulation, as at the end of an epoch: on the mean of its micro-batches.

        Nothing happens, and ``complete`` is False, if there is none. Without ``name`` every optimizer is
        flushed, and the last result is returned. Under DDP every rank calls it, with or without micro-batches
        of its own: the mean is that of all ranks. Steps that a ``writer`` has not got yet are written.
        """
        self._check_outside("flush", "stepper.flush()")
        groups = self._groups_called(name)
        result = _incomplete(groups[0])
        for group in groups:
            # Under DDP it becomes the mean count over ranks, which may be a fraction.
            micro_batches = float(group.filled)
            # With masters, DDP has reduced the gradients of every micro-batch already.
            if self._synchronization.ddp and group.accumulate > 1 and not group.held:
                micro_batches = self._synchronization.reduce_now(micro_batches)
            if micro_batches:
                result = self._finish(group, functools.partial(group.step, micro_batches))
                if self._board is not None:
                    self._board.step_ended(group, self.steps, result)
        if self._board is not None:
            self._board.write_all()
        return result

    def grad(
        self, outputs: Any, inputs: Any, *, name: str | None = None, create_graph: bool = True, **options: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """``torch.autograd.grad`` of scaled ``outputs``, unscaled, for a gradient penalty.

        The graph of the gradients is kept, so that a penalty on them can be added to the loss. Call it
        outside the region; compute the penalty inside or outside. In fp16 small gradients do not underflow.
        A gradient that overflows is infinite here, and the step that uses it is skipped. ``options`` are
        those of ``torch.autograd.grad``.
        """
        factor_on = self._group(name).scaler.factor_on
        scaled = multiplied(outputs, factor_on)
        gradients = torch.autograd.grad(scaled, inputs, create_graph=create_graph, **options)
        inverse_on = functools.cache(lambda device: factor_on(device).reciprocal())

        unscaled: list[torch.Tensor | None] = []
        for gradient in gradients:
            if gradient is None:  # with allow_unused
                unscaled.append(None)
            else:
                unscaled.append(multiplied(gradient, inverse_on))
        return tuple(unscaled)

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Evaluate the model without gradients, in the policy's format; its mode is restored afterwards."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), self.autocast():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def zero_grad(self) -> None:
        """Discard every unfinished accumulation: gradients and statistics."""
        self._discard(self._groups.values())

    def drop_casts(self) -> None:
        """Cast every weight again; needed only after a write through ``.data`` during an accumulation."""
        self._casts.forget()

    # ---- saving

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the model: optimizers, masters, schedulers, scalers, and the step count.

        Together with ``model.state_dict()`` it continues bit for bit; ``torch.load(weights_only=True)``
        reads it.

        Raises:
            OrderError: during an accumulation, whose gradients would be lost.
        """
        self._refuse_unfinished()
        if self._board is not None:
            self._board.write_all()
        states = Objects(self.model, self._groups).state()
        # torch.distributed.checkpoint takes only text for keys, so the three parts of each are joined.
        objects = {"\n".join(key): entry for key, entry in states.items()}
        return {"steps": self.steps, "formats": self._format_names(), "objects": objects}

    def _format_names(self) -> dict[str, str]:
        return {device: format_name(dtype) for device, dtype in self._formats.items()}

    def _refuse_unfinished(self) -> None:
        for name, group in self._groups.items():
            if group.filled:
                of_optimizer = ""
                if name:
                    of_optimizer = f" ({name})"
                raise OrderError(
                    f"{group.filled} of {group.accumulate} micro-batches are accumulated{of_optimizer}, and "
                    "gradients are not saved: call flush() or finish the step"
                )
            group.scaler.report_pending()  # the schedulers may still have to move for the last step

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, and discard accumulated gradients; load the model's state too.

        With policy ``"auto"`` the saved format is kept, with a warning if ``auto`` would now choose another;
        not so for fp16, for rules that name modules, and for weights in a low format.

        Raises:
            CheckpointError: the state is of a Stepper with other optimizers, masters, schedulers or
                parameters. Nothing was loaded.
        """
        states = None
        if isinstance(state, Mapping) and "steps" in state:
            states = state.get("objects")
        # ``state_dict`` has joined the group, kind and name of each object by line breaks.
        if not isinstance(states, Mapping) or any(str(key).count("\n") != 2 for key in states):
            raise CheckpointError(f"expected what stepper.state_dict() returned, got {state!r:.80}")
        saved = {tuple(key.split("\n")): entry for key, entry in states.items()}

        objects = Objects(self.model, self._groups)
        objects.check(Fit("the state of the Stepper"), saved)
        objects.load(saved)
        self._restart(state["steps"], state.get("formats", {}))

    def _may_keep_format(self, saved: str, current: str) -> bool:
        """Return whether a resumed run may keep the saved format.

        It may if "auto" chose the format and only the regions depend on it.
        """
        if self._policy.compute != "auto":
            return False
        # Weights and rules of modules were made for a format, and fp16 takes a loss scale.
        is_bound = self._policy.holds_low_weights or self._policy.names_modules
        return not is_bound and "fp16" not in (saved, current)

    def _restart(self, steps: int, formats: Mapping[str, str]) -> None:
        """Continue after ``steps``, with states that were just loaded.

        The statistics are forgotten, not restored, since the model's saved buffers are loaded too.
        """
        for device, current in self._format_names().items():
            saved = formats.get(device, current)
            if saved != current and self._may_keep_format(saved, current):
                warn_of_other_format(device, saved)
                self._formats[device] = dtype_of(saved)
                # The old region needs no remove(), since such a policy has no rules for modules.
                self._region = self._make_region()
        for group in self._groups.values():
            group.restart()
        self.steps = steps
        self._end_accumulation()

    __reduce_ex__ = not_copied(
        "a Stepper",
        "copy model and optimizer and make another Stepper, or save it with nc.training.save_checkpoint",
    )

    # ---- properties

    @property
    def scaler(self) -> GradScaler:
        """The scaler; for named optimizers use ``scalers[name]``."""
        if None not in self._groups:
            raise SettingError(f"optimizers have names: stepper.scalers[{next(iter(self._groups))!r}]")
        return self._groups[None].scaler

    @property
    def scalers(self) -> dict[str | None, GradScaler]:
        """Every scaler, by the name of its optimizer; None for one without a name."""
        return {name: group.scaler for name, group in self._groups.items()}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Every optimizer, in the order given."""
        optimizers: list[torch.optim.Optimizer] = []
        for group in self._groups.values():
            optimizers += group.optimizers
        return optimizers

    @property
    def skip_stories(self) -> list[str]:
        """Where the first infinity or NaN of skipped steps arose: one story for each kind, as logged."""
        return self._explainer.told

    @property
    def formats(self) -> dict[str, torch.dtype]:
        """The format of computation, by device type."""
        return dict(self._formats)

    def __repr__(self) -> str:
        groups = []
        for name, group in self._groups.items():
            kinds = ", ".join(type(optimizer).__name__ for optimizer in group.optimizers)
            if name is None:
                groups.append(kinds)
            else:
                groups.append(f"{name}: {kinds}")

        formats = self._format_names()
        computes = ", ".join(f"{format_} on {device}" for device, format_ in formats.items())
        policy = policy_name(self._policy)
        if policy not in formats.values():
            computes += f" by {policy}"
        return f"Stepper({type(self.model).__name__}, {'; '.join(groups)}, {computes}, steps={self.steps})"

    # ---- one step

    def _check_outside(self, method: str, call: str) -> None:
        if self._regions_open:
            raise OrderError(
                f"{method} was called inside stepper.autocast() or stepper.evaluate(): end the region after "
                f"the loss, then call {call}"
            )

    def _group(self, name: str | None) -> OptimizerGroup:
        if name in self._groups:
            return self._groups[name]
        names = [known for known in self._groups if known is not None]
        if not names:
            raise SettingError(f"expected no name, since the optimizer has none, got {name!r}")
        if name is None:
            raise SettingError(f"expected name=... of the optimizer that steps: {', '.join(names)}")
        raise SettingError(f"no optimizer is called {name!r}. {did_you_mean(name, names)}")

    def _groups_called(self, name: str | None) -> list[OptimizerGroup]:
        """Return the group of an optimizer, or without a name every group."""
        if name is None:
            return list(self._groups.values())
        return [self._group(name)]

    def _backward(self, group: OptimizerGroup, loss: torch.Tensor) -> StepResult:
        uses_ddp = bool(self._synchronization.ddp)
        try:
            # Only parameters of the optimizer that steps get gradients: a generator's loss reaches the
            # discriminator too. DDP waits for all parameters, so there the others are zeroed afterwards.
            inputs = None
            if len(self._groups) > 1 and not uses_ddp:
                inputs = [parameter for parameter in group.parameters if parameter.requires_grad]
            self._casts.before_backward(loss)
            group.backward(loss, inputs=inputs, one_rank=not uses_ddp)
            if uses_ddp:
                for other in self._groups.values():
                    if other is not group:
                        other.zero()
        except BaseException:
            # The gradients hold part of a backward pass: start a new accumulation.
            self._discard([group])
            raise
        finally:
            self._synchronization.after_backward()
        if group.filled < group.accumulate:
            return _incomplete(group)
        return self._finish(group, group.step)

    def _finish(self, group: OptimizerGroup, step: Callable[[], StepResult]) -> StepResult:
        """End the accumulation with ``step``, whether it is taken, skipped or raises."""
        try:
            result = step()
            self._statistics.restore(result.skipped_on_device())
        except BaseException:
            self._recording.clear()
            self._statistics.restore()
            raise
        finally:
            group.zero()
            self._end_accumulation()
        self.steps += 1
        if self._explains_skips and not result.is_known:
            self._explainer.tell_of_late_flags()
        elif self._explains_skips and result.skipped and not group.needs_closure:
            self._explainer.explain(
                Surroundings(self._call_in_region, nullcontext, self._formats),
                number=self.steps,
                scale=result.scale,
                lower_scale=group.scaler.get_scale(),
                names=result.nonfinite,
            )
        # Keep the recorded calls if another named optimizer may step on them too.
        self._explainer.step_ended(may_step_again=len(self._groups) > 1)
        return result

    def _call_in_region(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._region:
            return module(*args, **kwargs)

    def _discard(self, groups: Iterable[OptimizerGroup]) -> None:
        for group in groups:
            group.zero()
        self._recording.clear()
        self._statistics.restore()
        self._end_accumulation()

    def _end_accumulation(self) -> None:
        self._synchronization.end()
        self._casts.drop()
        self._forget_statistics()

    def _forget_statistics(self) -> None:
        # Micro-batches of any optimizer may still be skipped, and need the statistics of their start.
        if not any(group.filled for group in self._groups.values()):
            self._statistics.forget()

    def _step_by_function(
        self, group: OptimizerGroup, name: str | None, function: Callable[[], torch.Tensor]
    ) -> StepResult:
        def evaluate() -> torch.Tensor:
            with torch.enable_grad(), self.autocast(name):
                return function()

        if group.needs_closure:
            if group.accumulate > 1 or len(group.optimizers) > 1:
                raise SettingError("an optimizer with a closure needs accumulate=1 and no other beside it")
            return self._finish(group, lambda: group.step_with_closure(evaluate))

        random = random_states()
        while True:
            loss = evaluate()
            check_loss(loss, group)
            loss_is_finite = bool(loss.detach().isfinite())
            result = self._backward(group, loss)

            # Earlier micro-batches cannot be computed again, and only a lower scale may help.
            may_retry = group.accumulate == 1 and result.skipped
            if not may_retry or group.scaler.get_scale() >= result.scale:
                return result
            # No scale mends a loss that is not finite. If one rank has such a loss, none tries again: the
            # others would wait for it in the next collective.
            process_group = group.scaler.process_group
            if not self._synchronization.on_all_ranks(loss_is_finite, group.parameters, process_group):
                return result
            # This try and the next one are one step.
            self.steps -= 1
            set_random_states(random)


def _incomplete(group: OptimizerGroup) -> StepResult:
    return StepResult(found_inf=False, scale=group.scaler.factor(), complete=False)
