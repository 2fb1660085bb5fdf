"""``nc.Stepper``: one training step in its one right order."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from narrowcast.casting import region_in
from narrowcast.errors import OrderError, SettingError, near_names
from narrowcast.gradients import GradScaler, StepResult
from narrowcast.policy import Policy, as_policy, format_name, policy_name
from narrowcast.training._casts import KeptCasts
from narrowcast.training._guards import check_loss, check_state, claim, device_of, let_go, own, times
from narrowcast.training._lane import Lane, Loss
from narrowcast.training._make import cast_inputs, formats_of, make_lanes, place_rules
from narrowcast.training._random import RandomState
from narrowcast.training._statistics import Statistics
from narrowcast.training._synchronisation import Synchronisation

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


class Stepper:
    """One training step in its one right order, in two lines::

        stepper = nc.Stepper(model, optimizer, accumulate=4, max_norm=1.0, scheduler=scheduler)
        for images, labels in loader:
            with stepper.autocast():
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            result = stepper.step(loss)
        stepper.flush()

    ``step`` goes backward from the scaled loss and, when the window of ``accumulate`` micro-batches is full,
    unscales, clips, checks and steps, moves the scheduler, and zeroes the gradients. A step whose gradients
    are not finite is skipped whole: parameters, optimizer state, scheduler and the statistics of
    normalization layers are as before the window.

    Args:
        model: the module that is trained; perhaps wrapped in DDP, or sharded by ``fully_shard``.
        optimizer: one; several that step together, all or none; or a dict, where ``step(loss, name=...)``
            says whose turn it is (a GAN's), each with a window, a scale and a scheduler of its own.
        policy: ``"auto"``, ``"bf16"``, ``"fp16"``, ``"fp32"``, a ``Policy``, or ``"O2"``: the model's weights
            are cast to the low format in place and the optimizer works on fp32 masters of them.
        accumulate: micro-batches a step; at least 1. Each loss counts as its share of their mean.
        max_norm: clip the norm of all gradients together.
        max_value: clamp each gradient element; one of the two.
        scheduler: a learning-rate scheduler, several, or a dict as ``optimizer`` is; moved after each step
            that was taken.
        scaler: a ``GradScaler`` or a loss scale of ``narrowcast.scaling``. By default dynamic in fp16, and in
            other formats only the check for NaN and infinities.
        restore: which buffers a skipped step puts back to the start of its window: ``"norms"`` (of batch and
            instance norms), ``"all"``, or ``"none"``.
        process_group: ranks that skip together; see ``GradScaler``. DDP and ``fully_shard`` need none.

    Casts of weights are kept over the window (not of those that ``fully_shard`` gathers). A weight that is
    written inside it is cast anew, but for writes through ``.data``, and for weights of other models that are
    written without an optimizer: call ``drop_casts`` after those.

    Raises:
        SettingError: a setting outside its range, or optimizers and schedulers that do not fit.
        PolicyError: no such policy, or one that cannot hold for this model.
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
    ) -> None:
        self._statistics = Statistics(model, restore)
        self._policy = as_policy(policy)
        self._formats = formats_of(model, self._policy)
        self._lanes = make_lanes(
            model,
            optimizer,
            self._policy,
            self._formats,
            accumulate=accumulate,
            max_norm=max_norm,
            max_value=max_value,
            scheduler=scheduler,
            scaler=scaler,
            process_group=process_group,
        )
        self.model = model
        self.steps = 0
        self._synchronisation = Synchronisation(model)
        self._casts = KeptCasts([p for p in model.parameters() if p.dtype == torch.float32])
        self._regions_open = 0
        if self._synchronisation.ddp and len(self._lanes) > 1 and accumulate > 1:
            raise SettingError(
                "accumulate with named optimizers under DistributedDataParallel would mix their gradients: "
                "use accumulate=1, or one Stepper for each"
            )
        for lane in self._lanes.values():
            claim(lane.scaler, self)
            for one in lane.optimizers:
                own(one, self, lane)
        weakref.finalize(self, let_go, list(self._lanes.values())).atexit = False
        rules = place_rules(model, self._policy)
        if rules is not None:
            weakref.finalize(self, rules.remove).atexit = False
        if self._policy.holds_low_weights:
            inputs = cast_inputs(model, self._formats)
            weakref.finalize(self, inputs.remove).atexit = False

    # ---- what a training loop calls

    @contextmanager
    def autocast(self, name: str | None = None) -> Iterator[None]:
        """The region for forward and loss, in the policy's format; may be opened several times a step.

        Args:
            name: whose turn it is, where optimizers have names and DDP or ``accumulate`` are used.
        """
        lanes = (
            [self._lane(name)] if name is not None or len(self._lanes) == 1 else list(self._lanes.values())
        )
        with ExitStack() as regions:
            if torch.is_grad_enabled():
                self._statistics.remember()
                self._synchronisation.begin(reduces=any(lane.reduces for lane in lanes))
                if any(lane.accumulate > 1 for lane in lanes):
                    self._casts.keep()
            for device_type, dtype in self._formats.items():
                regions.enter_context(region_in(self._policy, device_type, dtype, audible=True))
            self._regions_open += 1
            try:
                yield
            except BaseException:
                self._casts.drop()
                raise
            finally:
                self._regions_open -= 1

    def step(self, loss: Loss | Callable[[], Loss], name: str | None = None) -> StepResult:
        """Go backward from ``loss`` and, when its window is full, step.

        Args:
            loss: a 0-dim tensor; a dict of losses by name, each with a scale of its own, whose gradients add
                up; or a function without arguments that computes one of these (in the region), which is
                called again, with the same random numbers, where its gradients overflow and a lower scale may
                help. Optimizers that ask for a closure, as LBFGS, need a function.
            name: whose turn it is, where optimizers have names.

        Returns:
            What became of it. ``complete`` is False while the window is being filled.

        Raises:
            OrderError: inside the region; after ``zero_grad`` in the middle of a window; a ``loss`` that
                needs no gradient.
            ScaleCollapseError: too many skipped steps in a row.
        """
        lane = self._lane(name)
        self._check_outside("step", "stepper.step(loss)")
        if callable(loss) and not isinstance(loss, torch.Tensor):
            return self._step_by_function(lane, name, loss)
        check_loss(loss, lane)
        return self._ended(lane, self._backward(lane, loss))

    def flush(self, name: str | None = None) -> StepResult:
        """Step on a window that is not full, as at the end of an epoch: on the mean of what there is.

        Nothing happens, and ``complete`` is False, where the window is empty. Without ``name`` every window
        is flushed, and the last result is returned. Under DDP every rank calls it, whatever is in its window:
        the mean is that over the micro-batches of all ranks.
        """
        self._check_outside("flush", "stepper.flush()")
        lanes = [self._lane(name)] if name is not None else list(self._lanes.values())
        result = _waiting(lanes[0].scaler)
        for lane in lanes:
            filled = float(lane.filled)
            if self._synchronisation.ddp and lane.defers:
                filled = self._synchronisation.mean_of_ranks(filled)
                if filled:
                    self._synchronisation.reduce_now()
            if filled:
                complete = functools.partial(lane.complete, filled=filled)
                result = self._ended(lane, self._settled(lane, complete))
        return result

    def grad(
        self, outputs: Any, inputs: Any, *, name: str | None = None, create_graph: bool = True, **options: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """``torch.autograd.grad`` of scaled ``outputs``, unscaled: gradients for a gradient penalty.

        The graph of the gradients is kept, so that a penalty on them can be added to the loss. Call it
        outside the region and compute the penalty inside or outside; in fp16 small gradients survive.
        ``options`` are those of ``torch.autograd.grad``. A gradient that overflows is infinite here, and the
        step that uses it is skipped.
        """
        factor = self._lane(name).scaler.factor_on(device_of(outputs))
        scaled = times(outputs, factor)
        gradients = torch.autograd.grad(scaled, inputs, create_graph=create_graph, **options)
        inverse = factor.reciprocal()
        return tuple(None if g is None else times(g, inverse) for g in gradients)

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """The model in evaluation mode, without gradients, in the policy's format; as it was afterwards."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), self.autocast():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def zero_grad(self) -> None:
        """Throw away every window that is not full, its gradients and its statistics."""
        for lane in self._lanes.values():
            lane.zero()
        self._statistics.rewind()
        self._end_window()

    def drop_casts(self) -> None:
        """Cast every weight anew; needed only after a write through ``.data`` inside a window."""
        self._casts.forget()

    # ---- saving

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model: optimizers, masters, schedulers, scalers, and how many steps there were.

        Saved beside ``model.state_dict()`` it resumes bit for bit; ``torch.load(weights_only=True)`` reads
        it.

        Raises:
            OrderError: in the middle of a window, whose gradients would be lost.
        """
        for name, lane in self._lanes.items():
            if lane.filled:
                raise OrderError(
                    f"a window is open with {lane.filled} of {lane.accumulate} micro-batches"
                    f"{f' ({name})' if name else ''}, and gradients are not saved: call flush() or finish it"
                )
        lanes = {"" if name is None else name: lane.state_dict() for name, lane in self._lanes.items()}
        return {"steps": self.steps, "lanes": lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, and throw away what is in a window; load the model's state too.

        Raises:
            SettingError: the state is of a Stepper with other optimizers, masters or schedulers.
        """
        theirs = check_state(state, self._lanes)
        for key, lane in self._lanes.items():
            lane.load_state_dict(theirs[key or ""])
            lane.zero()
        self.steps = int(state["steps"])
        self._end_window()  # without going back to its statistics: the model's own were loaded

    # ---- what there is to look at

    @property
    def scaler(self) -> GradScaler:
        """The scaler; of named optimizers ``scalers[name]``."""
        if None not in self._lanes:
            raise SettingError(f"optimizers have names: stepper.scalers[{next(iter(self._lanes))!r}]")
        return self._lane(None).scaler

    @property
    def scalers(self) -> dict[str | None, GradScaler]:
        """Every scaler, by the name of its optimizer; None where it has none."""
        return {name: lane.scaler for name, lane in self._lanes.items()}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Every optimizer, in the order given."""
        return [optimizer for lane in self._lanes.values() for optimizer in lane.optimizers]

    @property
    def formats(self) -> dict[str, torch.dtype]:
        """What is computed in, by device type."""
        return dict(self._formats)

    def __repr__(self) -> str:
        lanes = [
            f"{'' if name is None else f'{name}: '}{', '.join(type(o).__name__ for o in lane.optimizers)}"
            for name, lane in self._lanes.items()
        ]
        formats = ", ".join(f"{format_name(dtype)} on {device}" for device, dtype in self._formats.items())
        name = policy_name(self._policy)
        by = "" if name in map(format_name, self._formats.values()) else f" by {name}"
        return f"Stepper({type(self.model).__name__}, {'; '.join(lanes)}, {formats}{by}, steps={self.steps})"

    # ---- one step

    def _check_outside(self, method: str, call: str) -> None:
        if self._regions_open:
            raise OrderError(
                f"{method} was called inside stepper.autocast() or stepper.evaluate(): end the region after "
                f"the loss, then call {call}"
            )

    def _lane(self, name: str | None) -> Lane:
        if name in self._lanes:
            return self._lanes[name]
        names = [known for known in self._lanes if known is not None]
        if not names:
            raise SettingError(f"expected no name, since the optimizer has none, got {name!r}")
        if name is None:
            raise SettingError(f"expected name=... to say whose turn it is: {', '.join(names)}")
        raise SettingError(f"no optimizer is called {name!r}. {near_names(name, names)}")

    def _backward(self, lane: Lane, loss: Loss) -> StepResult | None:
        """Backward, and the step where the window is full; None where it is not."""
        alone = len(self._lanes) == 1
        wrapped = bool(self._synchronisation.ddp)
        try:
            # Of several optimizers only the one whose turn it is gets gradients: a generator's loss reaches
            # the discriminator too.
            inputs = None if alone or wrapped else [p for p in lane.parameters if p.requires_grad]
            self._casts.before_backward(loss.values() if isinstance(loss, Mapping) else [loss])
            lane.backward(loss, inputs=inputs, reduce=self._synchronisation.reduce_now if wrapped else None)
            if not alone and wrapped:
                for other in self._lanes.values():
                    if other is not lane:
                        other.zero()
        except BaseException:
            # Half of a backward pass is in the gradients: what follows begins a new window.
            lane.zero()
            self._statistics.rewind()
            self._end_window()
            raise
        finally:
            self._synchronisation.went_backward()
        return self._completed(lane) if lane.filled >= lane.accumulate else None

    def _completed(self, lane: Lane) -> StepResult:
        return self._settled(lane, lane.complete)

    def _settled(self, lane: Lane, complete: Callable[[], StepResult]) -> StepResult:
        """The window ends with ``complete``, whatever becomes of it."""
        try:
            result = complete()
            self._statistics.end(result)
        except BaseException:
            self._statistics.rewind()
            raise
        finally:
            lane.zero()
            self._end_window()
        return result

    def _ended(self, lane: Lane, result: StepResult | None) -> StepResult:
        if result is None:
            return _waiting(lane.scaler)
        self.steps += 1
        return result

    def _end_window(self) -> None:
        self._synchronisation.end()
        self._casts.drop()
        self._statistics.forget()

    def _step_by_function(self, lane: Lane, name: str | None, function: Callable[[], Loss]) -> StepResult:
        def evaluate() -> Loss:
            with torch.enable_grad(), self.autocast(name):
                return function()

        if lane.needs_closure:
            if lane.accumulate > 1 or len(lane.optimizers) > 1:
                raise SettingError("an optimizer that asks for a closure needs accumulate=1 and to be alone")
            return self._ended(lane, self._settled(lane, lambda: lane.step_with_closure(evaluate)))
        random = RandomState(self._formats)
        while True:
            loss = evaluate()
            check_loss(loss, lane)
            losses = loss.values() if isinstance(loss, Mapping) else [loss]
            finite = all(bool(one.detach().isfinite()) for one in losses)  # else no loss scale is to blame
            stepped = self._backward(lane, loss)
            if stepped is None or not (finite and self._may_help(lane, stepped)):
                return self._ended(lane, stepped)
            random.restore()

    def _may_help(self, lane: Lane, result: StepResult) -> bool:
        """Whether the same step at the scale that the scaler has gone down to may be finite."""
        if lane.accumulate > 1 or not result.skipped or isinstance(result.scale, dict):
            return False
        return lane.scaler.get_scale() < result.scale


def _waiting(scaler: GradScaler) -> StepResult:
    return StepResult(found_inf=False, scale=scaler.factors(), complete=False)
