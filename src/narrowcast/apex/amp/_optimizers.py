"""An optimizer as ``amp.initialize`` prepares it: with float32 masters, and steps that may be skipped."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from narrowcast.apex.amp._accumulation import Accumulation
from narrowcast.apex.amp._amp_state import maybe_print
from narrowcast.apex.amp._levels import LOW_DTYPES, Properties
from narrowcast.apex.amp._masters import Masters
from narrowcast.errors import AmpError
from narrowcast.gradients import closure_of, mark_as_stepped
from narrowcast.weights import hold, lost_eps

_STASH = "_amp_stash"
active: weakref.WeakSet[PreparedOptimizer] = weakref.WeakSet()
# Methods that scripts of apex call before they load masters from a checkpoint.
_MAKE_MASTERS = ("_amp_lazy_init", "_lazy_init_maybe_master_weights")


class PreparedOptimizer:
    """One optimizer of one ``amp.initialize``; its ``step`` and ``zero_grad`` go through here.

    Attributes:
        optimizer: the optimizer itself.
        properties, loss_scalers: the settings and the scalers of its ``initialize``.
        gradients: the bookkeeping of its gradients in ``scale_loss`` blocks.
        skip: why the next step is skipped, in one line; None if it is not.
        in_block: whether a ``scale_loss`` block is open.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        properties: Properties,
        loss_scalers: list[Any],
        originals: Mapping[torch.Tensor, torch.Tensor],
        models: Sequence[torch.nn.Module],
    ) -> None:
        self.optimizer = optimizer
        self.properties = properties
        self.loss_scalers = loss_scalers
        self.gradients = Accumulation(optimizer)
        self.skip: str | None = None
        self.in_block = False
        self._said = False
        self._active = True
        self._replaced: dict[str, tuple[Any, Any]] = {}  # attribute: ours, and the instance's own
        self._models = [weakref.ref(model) for model in models]
        self._ids_at_start = {id(p) for model in models for p in model.parameters()}
        setattr(optimizer, _STASH, self)
        try:
            self._begin(originals)
        except BaseException:
            self.undo()
            raise
        active.add(self)

    def _begin(self, originals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        # First, so that the zero_grad that hold puts in front is removed before ours is.
        self._wrap("step", self._step)
        self._wrap("zero_grad", self._zero_grad)
        for name in _MAKE_MASTERS:
            self._replaced[name] = (self.refresh, None)
            setattr(self.optimizer, name, self.refresh)
        self.refresh(originals)
        eps = lost_eps(self.optimizer)
        if eps is not None:
            maybe_print(
                f"amp: {self._name} keeps its state in float16 with the weights, where its eps of {eps:g} is "
                "0 and weights become NaN: give it eps=1e-4, or choose opt_level='O2'"
            )
        if self.properties.cast_model_type is not None and self.optimizer.state:
            # State from before the cast of the model: torch casts what it loads to the parameters' formats.
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    @property
    def scales(self) -> bool:
        """Whether losses are scaled or gradients checked: always, except in plain float32 training."""
        half = self.properties.patch_torch_functions or self.properties.cast_model_type in LOW_DTYPES
        return bool(self.properties.master_weights or half or self.properties.loss_scale != 1.0)

    def refresh(self, originals: Mapping[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Make masters for half parameters that have none, where the level has masters."""
        if not self.properties.master_weights:
            return
        if self.gradients.masters is None:
            if not any(
                p.dtype in LOW_DTYPES for group in self.optimizer.param_groups for p in group["params"]
            ):
                return
            self.gradients.masters = Masters(hold(self.optimizer, originals=originals))
        self.gradients.masters.refresh()

    def check_that_models_have_its_parameters(self) -> None:
        """Refuse parameters that were replaced in the models since ``initialize``; check once."""
        models = [model for one in self._models if (model := one()) is not None]
        self._models = []
        now = {id(p) for model in models for p in model.parameters()}
        lost = {id(p) for p in self.gradients.leaves} & self._ids_at_start - now
        if models and lost and now - self._ids_at_start:
            raise AmpError(
                f"{len(lost)} parameters of this {self._name} were replaced in the models after "
                "amp.initialize, as fully_shard and FullyShardedDataParallel do, so that it would train "
                "nothing there: use DistributedDataParallel, or narrowcast.Stepper with fully_shard"
            )

    def say_that_gradients_are_scaled(self) -> None:
        """Report once that gradients are read inside a block."""
        if self.in_block and not self._said:
            self._said = True
            maybe_print(
                "amp: master_params was read inside a scale_loss block, where gradients are scaled, and "
                "those of masters are not there yet: clip after the block"
            )

    def undo(self) -> dict[torch.Tensor, torch.Tensor]:
        """Restore the optimizer, with its present state; return the values of weights that had masters."""
        if not self._active:
            return {}
        self._active = False
        active.discard(self)
        values = self._without_masters()
        for name, (ours, instance) in self._replaced.items():
            if vars(self.optimizer).get(name) == ours:
                delattr(self.optimizer, name)
                if instance is not None:
                    setattr(self.optimizer, name, instance)
        delattr(self.optimizer, _STASH)
        return values

    def _without_masters(self) -> dict[torch.Tensor, torch.Tensor]:
        masters = self.gradients.masters
        if masters is None:
            return {}
        self.gradients.forget_low_gradients()
        self.refresh()
        values = {low: masters.full_value(low) for low, _ in masters.pairs}
        for low, value in values.items():
            low.grad = None
            # In float32 before the state goes back to it, which would be rounded to half otherwise.
            low.data = value
        masters.held.remove()
        masters.forget()
        return values

    # ---- replacements of the optimizer's own methods

    def _wrap(self, name: str, call: Callable[..., Any]) -> None:
        instance, inner = vars(self.optimizer).get(name), getattr(self.optimizer, name)

        @functools.wraps(inner)
        def wrapper(_: Any, *args: Any, **kwargs: Any) -> Any:
            return call(inner, args, kwargs) if self._active else inner(*args, **kwargs)

        # A bound method, because learning-rate schedulers use its __func__.
        method = types.MethodType(wrapper, self.optimizer)
        self._replaced[name] = (method, instance)
        setattr(self.optimizer, name, method)

    def _zero_grad(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.gradients.forget_low_gradients()
        self.gradients.scaled_by = self.gradients.scaled_by_others = None
        return inner(*args, **kwargs)

    def _step(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.in_block:
            raise AmpError(
                f"{self._name}.step() came inside a scale_loss block, where gradients are scaled: call it "
                "after the block"
            )
        if self.scales and closure_of(args, kwargs) is not None:
            raise AmpError(
                f"{self._name}.step(closure) is not supported with a scaled loss: call the closure before "
                "step(), or use narrowcast.GradScaler, whose step takes closures"
            )
        if self.skip is not None:
            return self._skip()
        if self.gradients.scaled_by is not None:
            raise AmpError(
                f"{self._name}.step() came while gradients are scaled by {self.gradients.scaled_by:g}, left "
                "so by scale_loss(..., delay_unscale=True): leave delay_unscale out for the last backward "
                "pass before a step, or call zero_grad() to drop them"
            )
        self.gradients.check_own()
        masters = self.gradients.masters
        with self.gradients.low_gradients_hidden():
            if masters is None:
                return inner(*args, **kwargs)
            masters.before_step(self._name)
            returned = inner(*args, **kwargs)
            masters.after_step()
        return returned

    def _skip(self) -> None:
        assert self.skip is not None
        maybe_print(self.skip)
        self.skip = None
        # model.zero_grad(), which many scripts call, does not clear them.
        self.gradients.drop_masters_gradients()
        mark_as_stepped(self.optimizer)

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__


def optimizer_of(given: Any) -> torch.optim.Optimizer:
    """Return ``given``, or raise ``AmpError`` if it is no optimizer."""
    if isinstance(given, torch.optim.Optimizer):
        return given
    raise AmpError(f"expected a torch.optim.Optimizer, got {type(given).__name__}: give the optimizer itself")


def prepared(optimizer: torch.optim.Optimizer) -> PreparedOptimizer | None:
    """Return what ``amp.initialize`` made of this optimizer; None if it was not given one."""
    found = vars(optimizer).get(_STASH)
    return found if isinstance(found, PreparedOptimizer) else None


def prepare_optimizers(
    optimizers: Sequence[Any],
    properties: Properties,
    loss_scalers: list[Any],
    originals: Mapping[torch.Tensor, torch.Tensor],
    models: Sequence[torch.nn.Module],
) -> Callable[[], dict[torch.Tensor, torch.Tensor]]:
    """Prepare optimizers for ``scale_loss``; under O2 masters replace their half parameters.

    Masters start from ``originals``, float32 values by half weight, where these round to the weight. Returns
    a function that restores every optimizer and returns the values of weights that had masters. It keeps no
    optimizer alive.
    """
    found = [optimizer_of(one) for one in optimizers]
    for position, optimizer in enumerate(found):
        if prepared(optimizer) is not None or any(optimizer is other for other in found[:position]):
            raise AmpError(
                f"this {type(optimizer).__name__} was given to amp.initialize before: give each optimizer "
                "once, and call amp.initialize once for it"
            )
    made: list[weakref.ref[PreparedOptimizer]] = []

    def undo() -> dict[torch.Tensor, torch.Tensor]:
        values: dict[torch.Tensor, torch.Tensor] = {}
        while made:
            one = made.pop()()
            values.update({} if one is None else one.undo())
        return values

    try:
        for optimizer in found:
            new = PreparedOptimizer(optimizer, properties, loss_scalers, originals, models)
            made.append(weakref.ref(new))
    except BaseException:
        undo()
        raise
    return undo
