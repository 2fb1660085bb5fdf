"""Optimizers as ``amp.initialize`` prepares them: fp32 masters, skipped steps, and gradients of blocks.

``scale_loss`` blocks keep earlier gradients apart, unscale those of the block, and add both.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from narrowcast.apex._torch_internals import is_view
from narrowcast.apex.amp._amp_state import maybe_print
from narrowcast.apex.amp._levels import LOW_DTYPES, Properties
from narrowcast.apex.amp._models import Masters
from narrowcast.errors import AmpError
from narrowcast.gradients import closure_of, lost_eps, mark_as_stepped, unscale_by
from narrowcast.weights import hold, version_of

_STASH = "_amp_stash"
_NO_EFFECT = (
    "amp: gradients of this {name}'s half weights were changed after the scale_loss block, which has no "
    "effect: clip and change those of amp.master_params(optimizer), which it steps on"
)
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
        gradients = self.gradients
        if not self.properties.master_weights:
            return
        if gradients.masters is None and any(p.dtype in LOW_DTYPES for p in gradients.leaves):
            gradients.masters = Masters(hold(self.optimizer, originals=originals))
        if gradients.masters is not None:
            gradients.masters.refresh()

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

    def undo(self) -> dict[torch.Tensor, torch.Tensor]:
        """Restore the optimizer, with its present state; return the values of weights that had masters."""
        if not self._active:
            return {}
        self._active = False
        active.discard(self)
        values = self._take_masters_away()
        for name, (ours, instance) in self._replaced.items():
            if vars(self.optimizer).get(name) == ours:
                delattr(self.optimizer, name)
                if instance is not None:
                    setattr(self.optimizer, name, instance)
        delattr(self.optimizer, _STASH)
        return values

    def _take_masters_away(self) -> dict[torch.Tensor, torch.Tensor]:
        masters = self.gradients.masters
        if masters is None:
            return {}
        self.gradients.forget_low_gradients()
        self.refresh()
        values = {low: masters.full_value(low) for low, _ in masters.pairs}
        for low, value in values.items():
            low.grad = None
            # Before the state returns to it: torch casts state to the format of its weight.
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
            maybe_print(self.skip)
            self.skip = None
            # model.zero_grad(), which many scripts call, does not clear them.
            self.gradients.drop_masters_gradients()
            mark_as_stepped(self.optimizer)
            return None
        if self.gradients.scaled_by is not None:
            raise AmpError(
                f"{self._name}.step() came while gradients are scaled by {self.gradients.scaled_by:g}, left "
                "so by scale_loss(..., delay_unscale=True): leave delay_unscale out for the last backward "
                "pass before a step, or call zero_grad() to drop them"
            )
        self.gradients.check_own()
        with self.gradients.low_gradients_hidden():
            return inner(*args, **kwargs)

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__


def optimizer_of(given: Any) -> torch.optim.Optimizer:
    """Return ``given``, or the optimizer inside a wrapper as apex's LARC is; else raise ``AmpError``.

    Such a wrapper changes the gradients of ``param_groups`` in its ``step``, then calls that of ``optim``:
    the gradients that it finds there are unscaled, and under O2 those of the masters, if ``optim`` is
    prepared.
    """
    if isinstance(given, torch.optim.Optimizer):
        return given
    inside = getattr(given, "optim", None)
    if isinstance(inside, torch.optim.Optimizer) and callable(getattr(given, "step", None)):
        return inside
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
    made: weakref.WeakSet[PreparedOptimizer] = weakref.WeakSet()

    def undo() -> dict[torch.Tensor, torch.Tensor]:
        return {low: value for one in list(made) for low, value in one.undo().items()}

    try:
        for optimizer in found:
            made.add(PreparedOptimizer(optimizer, properties, loss_scalers, originals, models))
    except BaseException:
        undo()
        raise
    return undo


# ---- gradients of scale_loss blocks

_Gradients = list[tuple[torch.Tensor, torch.Tensor]]
# By parameter: its gradient, which no later one can be mistaken for while it is kept, and its version.
Versions = dict[torch.Tensor, tuple[torch.Tensor, int]]


class _LowGradient(NamedTuple):
    """The scaled gradient of a half weight, after it was added to the gradient of its master."""

    low: torch.Tensor
    master: torch.nn.Parameter
    gradient: torch.Tensor
    version: int


class Accumulation:
    """The gradients of one optimizer from block to block.

    Gradients from before a block are unscaled, and are kept apart during it. Those of the block are scaled;
    at its end they are unscaled and added to the others. Under O2 the unscaled ones belong to the masters.
    The scaled ones of the half weights stay in ``.grad`` until the next block, as in apex; if the script
    sets them to None, as ``model.zero_grad()`` does, those of the masters are cleared too.

    Attributes:
        masters: None if the optimizer has no half parameters.
        scaled_by: the scale of gradients that ``delay_unscale`` left scaled; None if they are unscaled.
        scaled_by_others: the scale of a block that did not name the optimizer, but wrote its gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.masters: Masters | None = None
        self.scaled_by: float | None = None
        self.scaled_by_others: float | None = None
        self._said = False
        self._apart: _Gradients = []
        self._low: list[_LowGradient] = []

    def begin(self, scale: float, *, delayed: bool) -> None:
        """Prepare for the backward pass of a block; refuse gradients that another scale has scaled."""
        self.check_own()
        if self.scaled_by not in (None, scale):
            if any(parameter.grad is not None for parameter in self.leaves):
                raise AmpError(
                    f"the gradients are scaled by {self.scaled_by:g}, left so by scale_loss(..., "
                    f"delay_unscale=True), and this block scales by {scale:g}: their sum cannot be unscaled. "
                    "Give blocks that accumulate with delay_unscale=True one loss_id, or leave delay_unscale "
                    "out"
                )
            self.scaled_by = None
        if self.scaled_by is not None:
            # The gradients of masters are unscaled even while those of their weights are not.
            self._apart = [] if delayed else _take_apart(master for _, master in self._pairs)
        else:
            self.forget_low_gradients()
            if self.masters is not None:
                self.masters.held.take_gradients()
            if not delayed:
                self._apart = _take_apart(self._parameters)
            else:
                # Existing gradients are scaled too, to be added to. Those of masters stay unscaled.
                of_masters = _take_apart(master for _, master in self._pairs)
                unscale_by(self._optimizer, 1.0 / scale)
                for master, gradient in of_masters:
                    master.grad = gradient
                self.scaled_by = scale

    def versions(self) -> Versions:
        """Return the present gradients, for ``written_since``."""
        return {p: (p.grad, version_of(p.grad)) for p in self.leaves if p.grad is not None}

    def written_since(self, before: Versions) -> list[torch.Tensor]:
        """Return the gradients that are new, or were written to, since ``before``."""
        found = []
        for parameter, (gradient, version) in self.versions().items():
            kept, kept_version = before.get(parameter, (None, 0))
            if kept is not gradient or kept_version != version:
                found.append(gradient)
        return found

    def check_own(self) -> None:
        """Refuse gradients from a block that did not name the optimizer, unless they were cleared since."""
        if self.scaled_by_others is None:
            return
        self._follow_the_script()
        taken_over = {one.low for one in self._low}
        left = [p.grad for p in self.leaves if p.grad is not None and p not in taken_over]
        if any_not_zero(left):
            raise AmpError(
                f"gradients of this {type(self._optimizer).__name__} came in a scale_loss block that did not "
                f"name it, and are scaled by {self.scaled_by_others:g}: name it in that block, "
                "scale_loss(loss, [optimizer, other]), or clear them with zero_grad() after the block"
            )
        self.scaled_by_others = None

    def check_graph(self) -> None:
        """Refuse gradients that have a graph of their own: their graph would hold the scale."""
        if any(p.grad is not None and p.grad.requires_grad for p in self.leaves):
            raise AmpError(
                "backward(create_graph=True) in a scale_loss block is not supported: take the inner gradient "
                "with torch.autograd.grad(loss, parameters, create_graph=True) outside of the block, and add "
                "what depends on it to the loss"
            )

    def unscale(self, scale: float) -> torch.Tensor:
        """Unscale the gradients of a block and add those from before it.

        Returns:
            Float32 of shape (2,), on the device of the gradients: the first is above 0 if a gradient of the
            block is NaN or infinite, the second if a sum is.
        """
        if self.masters is not None:
            self._low = [
                _LowGradient(low, master, low.grad, version_of(low.grad))
                for low, master in self._pairs
                if low.grad is not None
            ]
            self.masters.held.take_gradients()
            for one in self._low:
                one.low.grad = one.gradient
        found = unscale_by(self._optimizer, scale)
        total = torch.zeros_like(found)
        if self._apart:
            _add(self._apart)
            self._apart = []
            total = unscale_by(self._optimizer, 1.0).to(found.device)
        self.scaled_by = None
        return torch.stack((found, total))

    def abandon(self, *, delayed: bool) -> None:
        """Restore the gradients from before a block that raised, and drop those of the block.

        Gradients that were scaled before, and were added to, stay scaled: only ``zero_grad`` helps.
        """
        if not delayed and self.scaled_by is None:
            for parameter in (*self._parameters, *self.leaves):
                parameter.grad = None
        for parameter, gradient in self._apart:
            parameter.grad = gradient
        self._apart = []

    def forget_low_gradients(self) -> None:
        """Drop the gradients that the masters have taken over, and what a block keeps apart."""
        self._follow_the_script()
        for one in self._low:
            one.low.grad = None
        self._low, self._apart = [], []

    @contextmanager
    def low_gradients_hidden(self) -> Iterator[None]:
        """Hide the gradients that the masters have taken over from a step, which would add them again."""
        self._follow_the_script()
        hidden = [(one.low, one.low.grad) for one in self._low]
        for low, _ in hidden:
            low.grad = None
        try:
            yield
        finally:
            for low, gradient in hidden:
                if low.grad is None:
                    low.grad = gradient

    def _follow_the_script(self) -> None:
        """Clear the gradients of masters if those of their weights were cleared or replaced since."""
        same, others, differ = [], [], []
        for one in self._low:
            found = one.low.grad
            if found is one.gradient:
                same.append(one)
                if version_of(found) != one.version and one.master.grad is not None and not self._said:
                    self._said = True
                    maybe_print(_NO_EFFECT.format(name=type(self._optimizer).__name__))
            elif found is None or (found.shape, found.dtype) != (one.gradient.shape, one.gradient.dtype):
                one.master.grad = None
            else:
                # DDP replaces gradients by equal ones when it rebuilds its buckets. Compared as integers,
                # because NaN is not equal to itself.
                differ.append((_bits(found) != _bits(one.gradient)).any())
                others.append(one._replace(gradient=found, version=version_of(found)))
        # Waits for the device.
        for one, was_replaced in zip(others, torch.stack(differ).tolist() if differ else (), strict=True):
            if was_replaced:
                one.master.grad = None
            else:
                same.append(one)
        self._low = same

    def drop_masters_gradients(self) -> None:
        """Set the gradients of masters to None, as a step does."""
        for _, master in self._pairs:
            master.grad = None

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def _pairs(self) -> Sequence[tuple[torch.Tensor, torch.nn.Parameter]]:
        return () if self.masters is None else self.masters.pairs

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The parameters that backward passes give gradients to: half weights in place of their masters."""
        low_of: dict[torch.Tensor, torch.Tensor] = {master: low for low, master in self._pairs}
        return [low_of.get(parameter, parameter) for parameter in self._parameters]


def _bits(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().view(torch.int16)


def any_not_zero(gradients: Iterable[torch.Tensor]) -> bool:
    """Return whether a gradient has an element that is not 0; waits for the device."""
    return any(bool(gradient.detach().any()) for gradient in gradients)


def _take_apart(parameters: Iterable[torch.Tensor]) -> _Gradients:
    apart = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            # DDP writes the next gradient into the same part of its bucket.
            apart.append((parameter, gradient.clone() if is_view(gradient) else gradient))
            parameter.grad = None
    return apart


def _add(apart: _Gradients) -> None:
    """Add the gradients that were kept apart to those of the block."""
    with torch.no_grad():
        for parameter, gradient in apart:
            new = parameter.grad
            if new is None:
                parameter.grad = gradient
            elif new.layout == gradient.layout == torch.strided:
                new.add_(gradient)
            else:
                # A sparse tensor can be added to a dense one, but not the other way round.
                parameter.grad = gradient + new if new.is_sparse else new + gradient
