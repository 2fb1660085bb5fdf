"""Optimizers that step together, and what a Stepper keeps over the micro-batches of their step."""

from __future__ import annotations

import functools
import math
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from narrowcast.casting import drop_casts
from narrowcast.errors import OrderError, ScaleCollapseError, SettingError, UnsupportedError
from narrowcast.gradients import (
    GradScaler,
    StepResult,
    needs_closure,
    nodes_below,
    parameters_of,
    steps_twice,
)
from narrowcast.training._torch_internals import run_casts_of_leaves_soon
from narrowcast.weights import HeldWeights, held_by

_GRAD, _VERSION = operator.attrgetter("grad"), operator.attrgetter("_version")


@dataclass(frozen=True)
class Settings:
    """The settings of a Stepper that hold for each group; SettingError if one is outside its range."""

    accumulate: int
    max_norm: float | None
    max_value: float | None

    def __post_init__(self) -> None:
        accumulate = self.accumulate
        if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
            raise SettingError(f"accumulate must be a whole number of at least 1, got {accumulate!r}")
        for name, value in (("max_norm", self.max_norm), ("max_value", self.max_value)):
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise SettingError(f"{name} must be a number above 0, or None, got {value!r}")
        if self.max_norm is not None and self.max_value is not None:
            raise SettingError("expected max_norm or max_value, got both: clip by one of them")


@dataclass(eq=False, repr=False)
class OptimizerGroup:
    """One or several optimizers that step together, all or none, on the same accumulated gradients.

    Attributes:
        filled: how many micro-batches the gradients are the sum of.
        stepping: whether the Stepper is stepping them now; a step by hand is refused.
    """

    optimizers: list[torch.optim.Optimizer]
    scaler: GradScaler
    schedulers: list[Any]
    settings: Settings
    filled: int = 0
    stepping: bool = False

    def __post_init__(self) -> None:
        self._written: list[tuple[int, int]] = []
        self._last_epochs: dict[int, Any] = {}
        self._results = 0
        self._saw_graph = False
        self.accumulate = self.settings.accumulate
        self.held: list[HeldWeights] = [h for o in self.optimizers if (h := held_by(o)) is not None]
        self.needs_closure = any(map(needs_closure, self.optimizers))
        if self.needs_closure and self.held:
            raise UnsupportedError(
                f"{type(self.optimizers[0]).__name__} evaluates the loss several times a step, which masters "
                "do not support: use policy 'bf16' or 'fp16'"
            )
        for scheduler in self.schedulers:
            _check_scheduler(scheduler, self.optimizers)

    def move_schedulers(self, _: StepResult) -> None:
        self._results += 1
        if self._results % len(self.optimizers):
            return  # the scaler reports each of several optimizers that step together
        for index, scheduler in enumerate(self.schedulers):
            # Schedulers without last_epoch, such as ChainedScheduler, cannot be checked.
            epoch = getattr(scheduler, "last_epoch", None)
            if self._last_epochs.get(index, epoch) != epoch:
                warnings.warn(
                    f"{type(scheduler).__name__}.step was called by hand, and the Stepper moves it too: "
                    "leave the call out, or do not give the scheduler to the Stepper",
                    UserWarning,
                    stacklevel=2,
                )
            scheduler.step()
            self._last_epochs[index] = getattr(scheduler, "last_epoch", None)

    @property
    def reduces(self) -> bool:
        """Whether DDP reduces the gradients of the next micro-batch: the last one, or with masters each.

        Masters take over the gradients of every micro-batch, to add them in fp32.
        """
        return self.filled + 1 >= self.accumulate or bool(self.held)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The model's own parameters, in which gradients accumulate."""
        low_of: dict[torch.Tensor, torch.Tensor]
        low_of = {working: low for held in self.held for low, working in held.parameters}
        return [low_of.get(parameter, parameter) for parameter in parameters_of(*self.optimizers)]

    def _gradients(self) -> list[torch.Tensor]:
        """Return those that the optimizers use: of masters, or of the model's own parameters."""
        gradients = map(_GRAD, parameters_of(*self.optimizers))
        return [gradient for gradient in gradients if gradient is not None]

    # ---- backward

    def backward(
        self,
        loss: torch.Tensor,
        *,
        inputs: Sequence[torch.Tensor] | None,
        one_rank: bool = True,
    ) -> None:
        """Add the gradients of one micro-batch, scaled, and divided by the number of micro-batches.

        Only ``inputs`` get gradients, if given. With ``one_rank`` no other rank computes gradients of them.
        """
        parameters = parameters_of(*self.optimizers)
        self._check_gradients(parameters)
        if inputs is not None and not self._saw_graph and loss.grad_fn is not None:
            # Of the first backward alone: it is a walk over the whole graph.
            if any(node.name() == "CheckpointFunctionBackward" for node in nodes_below([loss.grad_fn])):
                raise UnsupportedError(
                    "an activation checkpoint with use_reentrant=True hides its parameters from named "
                    "optimizers, each of which asks for its own gradients alone: pass use_reentrant=False"
                )
            self._saw_graph = True
        scaled = self.scaler.scale(loss)
        if self.accumulate > 1:
            scaled = scaled / self.accumulate
        torch.autograd.backward(scaled, inputs=inputs)
        for held in self.held:
            held.take_gradients()
        # After a backward pass it mostly reads one gradient.
        got_gradients = any(parameter.grad is not None for parameter in parameters)
        if one_rank and self.scaler.process_group is None and not got_gradients:
            raise OrderError(
                f"no parameter of this {type(self.optimizers[0]).__name__} got a gradient from this loss: "
                "compute it from the model that the Stepper was given, with parameters that require gradients"
            )
        self.filled += 1
        if self.filled < self.accumulate:
            self._written = _versions(self._gradients())

    def _check_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse to add to gradients of another origin: these are scaled, others are not."""
        if not self.filled and not self.held and set(map(_GRAD, parameters)) == {None}:
            return  # as at every step, so in the fastest way
        present = self._gradients()
        by_hand = [low.grad for held in self.held for low, _ in held.parameters if low.grad is not None]
        if by_hand or not self.filled:
            # zero_grad(set_to_none=False) leaves zeros; values are read only in this case.
            if any(bool(gradient.detach().any()) for gradient in by_hand or present):
                raise OrderError(
                    "there are gradients before the first backward pass of the step: loss.backward() was "
                    "called by hand, which stepper.step(loss) does, or they are left over: call "
                    "optimizer.zero_grad()"
                )
        elif _versions(present) != self._written:
            what = "changed" if present else "gone"
            raise OrderError(
                f"the gradients of the first {self.filled} micro-batches are {what}: zero_grad was called, "
                f"or something wrote to them, during an accumulation of {self.accumulate}. Leave it "
                "out: Stepper zeroes them, and clips them if max_norm or max_value is given"
            )

    # ---- step

    def step(self, filled: float | None = None) -> StepResult:
        """Clip, check and step on the gradients of ``filled`` micro-batches (the mean over the ranks)."""
        if filled is not None and filled < self.accumulate:
            with torch.no_grad():
                for gradient in self._gradients():
                    gradient.mul_(self.accumulate / filled)
        return self._guarded(self._clip_and_step)

    def step_with_closure(self, evaluate: Callable[[], torch.Tensor]) -> StepResult:
        """Step an optimizer that evaluates the loss several times, such as LBFGS and SAM."""
        (optimizer,) = self.optimizers

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = evaluate()
            if not isinstance(loss, torch.Tensor):
                raise SettingError("an optimizer with a closure takes one loss, got several by name")
            self.scaler.scale(loss).backward()
            self._clip(optimizer)
            return loss

        def step() -> StepResult:
            if steps_twice(optimizer):
                closure()  # its first step takes gradients that are there before
            return self.scaler.step(optimizer, closure)

        return self._guarded(step)

    def _guarded(self, step: Callable[[], StepResult]) -> StepResult:
        self.stepping = True
        try:
            result = step()
        except ScaleCollapseError:
            self.scaler.update()
            raise
        except BaseException:
            self.scaler.abandon()
            raise
        finally:
            self.stepping = False
        self.scaler.update()
        return result

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        if self.settings.max_value is not None:
            self.scaler.clip_grad_value_(optimizer, self.settings.max_value)
        elif self.settings.max_norm is not None:
            self.scaler.clip_grad_norm_(optimizer, self.settings.max_norm)

    def _clip_and_step(self) -> StepResult:
        scaler, max_norm, max_value = self.scaler, self.settings.max_norm, self.settings.max_value
        if len(self.optimizers) == 1:
            self._clip(self.optimizers[0])
            return scaler.step(self.optimizers[0])
        norm = None
        for optimizer in self.optimizers:
            scaler.unscale_(optimizer)
            if max_value is not None:
                scaler.clip_grad_value_(optimizer, max_value)
        if max_norm is not None:
            parameters = parameters_of(*self.optimizers)
            if scaler.process_group is None:
                norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            else:
                # The norm of each optimizer over all ranks; at infinity nothing is clipped.
                norms = [scaler.clip_grad_norm_(optimizer, math.inf) for optimizer in self.optimizers]
                norm = torch.linalg.vector_norm(torch.stack(norms))
                torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return StepResult.joined(scaler.step_together(self.optimizers), grad_norm=norm)

    def zero(self) -> None:
        """Discard the accumulated gradients."""
        self.filled = 0
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def restart(self) -> None:
        """Discard gradients, and accept the schedulers where they are now."""
        self._last_epochs = {}
        self.zero()


def _versions(gradients: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Identify tensors and count the writes to them."""
    return list(zip(map(id, gradients), map(_VERSION, gradients), strict=True))


def _check_scheduler(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UnsupportedError(
            "ReduceLROnPlateau needs a metric, which Stepper does not have: leave it out and call "
            "scheduler.step(metric) after each evaluation"
        )
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise SettingError(f"expected a learning-rate scheduler with a step method, got {scheduler!r}")
    if getattr(scheduler, "optimizer", optimizers[0]) not in optimizers:
        raise SettingError(
            f"this {type(scheduler).__name__} is of another optimizer: make it from the one that it moves"
        )


def check_loss(loss: Any, group: OptimizerGroup | None = None) -> None:
    """Refuse what no backward pass can start from."""
    if group is not None and group.needs_closure:
        raise OrderError(
            f"{type(group.optimizers[0]).__name__} evaluates the loss several times a step: give step a "
            "function, as stepper.step(lambda: criterion(model(x), y))"
        )
    if not isinstance(loss, torch.Tensor):
        add = ": add several losses" if isinstance(loss, Mapping | list | tuple) else ""
        raise SettingError(f"expected a loss, got {type(loss).__name__}{add}")
    if loss.numel() != 1:
        raise SettingError(f"expected a loss of one element, got shape {tuple(loss.shape)}: take its mean")
    if not loss.requires_grad:
        raise OrderError(
            "expected a loss with a graph, got one that needs no gradient: compute it outside "
            "torch.no_grad(), from parameters with requires_grad=True, and do not detach it"
        )


def is_fp32(loss: torch.Tensor, model: torch.nn.Module) -> bool:
    """Return whether ``loss`` was certainly computed from fp32 weights without a cast."""
    hides_casts = torch.autograd.function.BackwardCFunction  # written in Python, or compiled
    return all(p.dtype == torch.float32 for p in model.parameters()) and not any(
        node.name() == "ToCopyBackward0" or isinstance(node, hides_casts)
        for node in nodes_below([loss.grad_fn])
    )


# ---- one Stepper for each scaler, and no steps by hand

_GROUPS: weakref.WeakSet[OptimizerGroup] = weakref.WeakSet()
"""Those of every Stepper that exists."""


def claim(group: OptimizerGroup) -> list[RemovableHandle]:
    """Reserve the scaler of a group, watch its optimizers, and let its schedulers move; return the handles.

    Raises:
        SettingError: the scaler belongs to another group, of this Stepper or another.
    """
    if any(other.scaler is group.scaler for other in _GROUPS):
        raise SettingError(
            "this GradScaler is another Stepper's, or another named optimizer's: make one for each, or "
            "delete the other Stepper first (del stepper)"
        )
    _GROUPS.add(group)
    handles: list[RemovableHandle] = []
    for optimizer in group.optimizers:
        handles.append(optimizer.register_step_pre_hook(functools.partial(_refuse_by_hand, group)))
    if group.schedulers:
        handles.append(group.scaler.on_step(group.move_schedulers))
    return handles


def release(groups: list[OptimizerGroup], handles: list[RemovableHandle]) -> None:
    """A Stepper was deleted: discard its unfinished gradients, which are scaled."""
    for handle in handles:
        handle.remove()
    for group in groups:
        _GROUPS.discard(group)
        if group.filled:
            group.zero()


def _refuse_by_hand(group: OptimizerGroup, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if group.stepping:
        return
    owners = [group for group in _GROUPS if optimizer in group.optimizers]
    if any(group.stepping for group in owners):
        return
    # torch.distributed.checkpoint steps at a rate of 0 to create the state that it is about to load:
    # torch/distributed/checkpoint/state_dict.py, _init_optim_state
    filled = any(group.filled for group in owners)
    if filled or any(group.get("lr") != 0 for group in optimizer.param_groups):
        raise OrderError(
            f"{type(optimizer).__name__}.step was called by hand: its gradients belong to a Stepper and may "
            "be scaled or incomplete. Call result = stepper.step(loss), which steps; to step by hand, delete "
            "the Stepper first (del stepper), which discards an unfinished accumulation"
        )


# ---- what a Stepper keeps over the micro-batches of a step


class WeightCasts:
    """Keeps the weight casts of one thread over the micro-batches of a step.

    torch drops weight casts when the outermost region of a thread ends, so each micro-batch would cast every
    weight again. One level of autocast nesting, held from the first region to the step, keeps them.

    Autograd runs old nodes last, and a kept cast is older than the next micro-batch's graph. All low
    gradients of weights would stay in memory until the end of the backward pass, and DDP would reduce only
    then. So these nodes are given a priority to run early.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        # A cast would keep the whole weight, which fully_shard gathers and frees layer by layer.
        self._sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
        self._thread: int | None = None  # that keeps casts now
        self._versions = 0
        self._new = False

    def keep(self) -> None:
        """Keep casts beyond the regions of this thread from now on; drop those of changed weights.

        A write through ``.data`` changes no version and is not seen. Casts of sharded weights are not kept.
        """
        if self._sharded:
            return
        versions = sum(map(_VERSION, self._parameters))
        if self._thread is None:
            self._thread = threading.get_ident()
            torch.autocast_increment_nesting()
            self._leave = weakref.finalize(self, _leave, self._thread)
            self._new = True
        elif versions != self._versions:
            self.forget()
        self._check_thread()
        self._versions = versions

    def before_backward(self, loss: torch.Tensor) -> None:
        """Let the backward of casts that this loss has made, and that later ones share, run early."""
        if self._thread is not None and self._new and loss.grad_fn is not None:
            run_casts_of_leaves_soon(nodes_below([loss.grad_fn]))
            self._new = False

    def drop(self) -> None:
        """Drop every cast, and keep no new ones."""
        if self._thread is not None:
            self._check_thread()
            self._leave()
            drop_casts()
            self._thread = None

    def forget(self) -> None:
        """Drop every cast, and keep new ones."""
        drop_casts()
        self._new = True

    def _check_thread(self) -> None:
        if self._thread != threading.get_ident():
            raise OrderError(
                "expected every micro-batch of a step in one thread, got a second one: the weight casts are "
                "kept in the first; finish the step there, or use accumulate=1"
            )


def _leave(thread: int) -> None:
    # The count of another thread is out of reach. At 1 and more another Stepper may be using casts.
    if threading.get_ident() != thread or torch.autocast_decrement_nesting() == 0:
        drop_casts()


class Synchronization:
    """Has DDP reduce gradients once a step, with the last micro-batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._no_sync = ExitStack()
        self._open = False
        # DDP learns a static graph in its first backward pass, which fails without a reduction. An extra
        # reduction changes nothing: the mean of means over the same ranks is the mean.
        self._learns = any(module.static_graph for module in self.ddp)

    def begin(self, *, reduces: bool) -> None:
        """Start a micro-batch; DDP decides in the forward pass what its backward pass will do."""
        if not self.ddp:
            return
        if reduces or self._learns:
            self.end()
        elif not self._open:
            self._open = True
            for module in self.ddp:
                self._no_sync.enter_context(module.no_sync())

    def after_backward(self) -> None:
        self._learns = False
        self.end()

    def end(self) -> None:
        """Let DDP reduce from now on."""
        if self._open:
            self._open = False
            self._no_sync.close()

    @torch.no_grad()
    def reduce_now(self, count: float) -> float:
        """Average over the ranks a count, and, unless it is 0, gradients that no backward pass reduced."""
        group = self.ddp[0].process_group
        total = torch.tensor(count, device=next(self.ddp[0].parameters()).device)
        dist.all_reduce(total, group=group)
        for module in self.ddp if total else ():
            ignored = module.parameters_to_ignore
            parameters = [
                parameter
                for name, parameter in module.module.named_parameters()
                if parameter.requires_grad and name not in ignored
            ]
            if parameters:
                _average(parameters, module.process_group)
        return float(total) / dist.get_world_size(group)


def _average(parameters: Sequence[torch.nn.Parameter], group: Any) -> None:
    """Average gradients over the ranks, which may have reached different parameters.

    Raises:
        UnsupportedError: a gradient is sparse.
    """
    kinds = [0 if one.grad is None else 1 + one.grad.is_sparse for one in parameters]
    kind = torch.tensor(kinds, device=parameters[0].device)
    dist.all_reduce(kind, dist.ReduceOp.MAX, group=group)
    if int(kind.max()) > 1:
        raise UnsupportedError(
            "sparse gradients of an unfinished accumulation cannot be reduced under "
            "DistributedDataParallel: use dense gradients (sparse=False), or finish every accumulation"
        )
    works = []
    for parameter, reached in zip(parameters, kind.tolist(), strict=True):
        if reached:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(dist.get_world_size(group))
            works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
    for work in works:
        work.wait()
