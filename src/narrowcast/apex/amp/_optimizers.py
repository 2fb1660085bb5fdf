"""Optimizers as ``amp.initialize`` prepares them: fp32 masters, skipped steps, and gradients of blocks.

Gradients from before a ``scale_loss`` block are not scaled, so they are kept apart during the block. At its
end the block's gradients are divided by the scale, and the earlier ones are added.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.apex._torch_internals import is_view
from narrowcast.apex.amp._levels import LOW_DTYPES, Properties
from narrowcast.apex.amp._models import Masters
from narrowcast.apex.amp._process_state import maybe_print
from narrowcast.errors import AmpError
from narrowcast.gradients import closure_of, lost_eps, mark_as_stepped, parameters_of, unscale_by
from narrowcast.weights import hold, version_of

# apex uses an attribute of this name too.
_STASH = "_amp_stash"
# Methods that scripts of apex call before they load masters from a checkpoint.
_MAKE_MASTERS = ("_amp_lazy_init", "_lazy_init_maybe_master_weights")


# ---- the optimizer


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
    ) -> None:
        self.optimizer = optimizer
        self.properties = properties
        self.loss_scalers = loss_scalers
        self.gradients = BlockGradients(optimizer)
        self.skip: str | None = None
        self.in_block = False
        setattr(optimizer, _STASH, self)
        for name in _MAKE_MASTERS:
            setattr(optimizer, name, self.refresh)
        self._wrap("step", self._step)
        # This comes before refresh makes masters, since their holder wraps the zero_grad that it finds.
        self._wrap("zero_grad", self._zero_grad)
        self.refresh(originals)

        eps = lost_eps(optimizer)
        if eps is not None:
            maybe_print(
                f"amp: {self._name} keeps its state in float16 with the weights, where its eps of {eps:g} is "
                "0 and weights become NaN: give it eps=1e-4, or choose opt_level='O2'"
            )
        if properties.cast_model_type is not None and optimizer.state:
            # The state was made before the cast of the model: load_state_dict casts it to the new formats.
            optimizer.load_state_dict(optimizer.state_dict())

    @property
    def scales(self) -> bool:
        """Whether losses are scaled and gradients checked: False only in plain float32 training."""
        half = self.properties.patch_torch_functions or self.properties.cast_model_type in LOW_DTYPES
        return bool(self.properties.master_weights or half or self.properties.loss_scale != 1.0)

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__

    def refresh(self, originals: Mapping[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Make masters for half parameters that have none, where the level has masters."""
        gradients = self.gradients
        if not self.properties.master_weights:
            return
        # An optimizer may start with float32 parameters only, and get half ones later.
        if gradients.masters is None and any(p.dtype in LOW_DTYPES for p in gradients.leaves):
            gradients.masters = Masters(hold(self.optimizer, originals=originals))
        if gradients.masters is not None:
            gradients.masters.refresh()

    # ---- replacements of the optimizer's own methods

    def _wrap(self, name: str, call: Callable[..., Any]) -> None:
        inner = getattr(self.optimizer, name)

        @functools.wraps(inner)
        def wrapper(_: Any, *args: Any, **kwargs: Any) -> Any:
            return call(inner, args, kwargs)

        # A bound method, because learning-rate schedulers use its __func__.
        setattr(self.optimizer, name, types.MethodType(wrapper, self.optimizer))

    def _zero_grad(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.gradients.forget()
        return inner(*args, **kwargs)

    def _step(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # apex steps on wrong gradients in these two cases, without an error.
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

        # The last block found gradients that are not finite.
        if self.skip is not None:
            maybe_print(self.skip)
            self.skip = None
            # Many scripts only call model.zero_grad(), which does not clear the gradients of masters.
            self.gradients.drop_masters_gradients()
            mark_as_stepped(self.optimizer)
            return None

        # A step needs unscaled gradients.
        if self.gradients.delayed_scale is not None:
            raise AmpError(
                f"{self._name}.step() came while gradients are scaled by {self.gradients.delayed_scale:g}, "
                "left so by scale_loss(..., delay_unscale=True): leave delay_unscale out for the last "
                "backward pass before a step, or call zero_grad() to drop them"
            )
        with self.gradients.low_gradients_hidden():
            return inner(*args, **kwargs)


def optimizer_of(optimizer: Any) -> torch.optim.Optimizer:
    """Return ``optimizer``, or the optimizer inside a wrapper such as apex's LARC; else raise ``AmpError``.

    The ``step`` of such a wrapper changes the gradients in ``param_groups`` and then calls ``optim.step``. If
    ``optim`` is prepared, these gradients are unscaled, and under O2 they are the gradients of the masters.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    inside = getattr(optimizer, "optim", None)
    if isinstance(inside, torch.optim.Optimizer) and callable(getattr(optimizer, "step", None)):
        return inside
    raise AmpError(
        f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}: give the optimizer itself"
    )


def prepared(optimizer: torch.optim.Optimizer) -> PreparedOptimizer | None:
    """Return the ``PreparedOptimizer`` of an optimizer; None if ``amp.initialize`` was not given it."""
    stash = vars(optimizer).get(_STASH)
    return stash if isinstance(stash, PreparedOptimizer) else None


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Refuse objects that are no optimizers, and optimizers that were initialized before."""
    seen: set[int] = set()
    for optimizer_or_wrapper in optimizers:
        optimizer = optimizer_of(optimizer_or_wrapper)
        if prepared(optimizer) is not None or id(optimizer) in seen:
            raise AmpError(
                f"this {type(optimizer).__name__} was given to amp.initialize before: give each optimizer "
                "once, and call amp.initialize once for it"
            )
        seen.add(id(optimizer))


# ---- gradients of scale_loss blocks

_Gradients = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class _TakenGradient:
    """The scaled gradient of a half weight, after its value was added to the gradient of the master.

    Attributes:
        low, master: the half weight, and its float32 master.
        gradient: what ``low.grad`` was at the end of the block.
        version: of ``gradient``, to see whether a script changes it later.
    """

    low: torch.Tensor
    master: torch.nn.Parameter
    gradient: torch.Tensor
    version: int


class BlockGradients:
    """The gradients of one optimizer from block to block.

    Under O2 masters have the unscaled gradients. Half weights keep the scaled ones in ``.grad`` until the
    next block, as in apex. If the script sets those to None, as ``model.zero_grad()`` does, the masters' are
    cleared too.

    Attributes:
        masters: the masters of the half parameters; None if the optimizer has no half parameters.
        delayed_scale: the scale of gradients that ``delay_unscale`` left scaled; None if there are none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.masters: Masters | None = None
        self.delayed_scale: float | None = None
        self._apart: _Gradients = []
        self._taken: list[_TakenGradient] = []
        self._warned_of_changes = False

    @property
    def _pairs(self) -> Sequence[tuple[torch.Tensor, torch.nn.Parameter]]:
        return () if self.masters is None else self.masters.pairs

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The parameters that get gradients in a backward pass: the half weights, not their masters."""
        parameters = parameters_of(self._optimizer)
        if self.masters is None:
            return parameters
        low_of: dict[torch.Tensor, torch.Tensor] = {master: low for low, master in self._pairs}
        return [low_of.get(parameter, parameter) for parameter in parameters]

    # ---- one block

    def begin(self, scale: float) -> None:
        """Prepare for the backward pass of a block; refuse gradients that another scale has scaled."""
        if all(parameter.grad is None for parameter in self.leaves):
            self.delayed_scale = None  # the script has cleared what delayed blocks left
        if self.delayed_scale not in (None, scale):
            raise AmpError(
                f"the gradients are scaled by {self.delayed_scale:g}, left so by scale_loss(..., "
                f"delay_unscale=True), and this block scales by {scale:g}: their sum cannot be unscaled. "
                "Give blocks that accumulate with delay_unscale=True one loss_id, or leave delay_unscale out"
            )

        # After a delayed block the unscaled gradients are kept apart already. The scaled ones stay in place,
        # and the backward pass of this block adds to them.
        if self.delayed_scale is None:
            self._drop_taken_gradients()
            if self.masters is not None:
                # Backward passes outside of blocks leave gradients on half weights. The masters take them, so
                # that they are kept apart too.
                self.masters.held.take_gradients()
            self._apart = _take_apart(parameters_of(self._optimizer))

    def delay_unscale(self, scale: float) -> None:
        """Leave the gradients of a block scaled: the backward passes of further blocks add to them."""
        self.delayed_scale = scale

    def unscale(self, scale: float) -> torch.Tensor:
        """Unscale the gradients of this block and of delayed ones before it; then add those kept apart.

        Returns:
            Float32 of shape (2,), on the device of the gradients: the first is above 0 if a gradient of the
            block is NaN or infinite, the second if a sum is.
        """
        if self.masters is not None:
            self._give_to_masters(self.masters)
        overflow = unscale_by(self._optimizer, scale)
        overflow_of_sum = torch.zeros_like(overflow)
        if self._apart:
            _add(self._apart)
            self._apart = []
            overflow_of_sum = unscale_by(self._optimizer, 1.0).to(overflow.device)
        self.delayed_scale = None
        return torch.stack((overflow, overflow_of_sum))

    def _give_to_masters(self, masters: Masters) -> None:
        self._taken = []
        for low, master in self._pairs:
            if low.grad is not None:
                self._taken.append(_TakenGradient(low, master, low.grad, version_of(low.grad)))
        masters.held.take_gradients()
        # take_gradients has cleared them. As in apex, scripts find them on the half weights after a block.
        for taken in self._taken:
            taken.low.grad = taken.gradient

    def abandon(self) -> None:
        """Restore the gradients from before a block that raised, and drop those of the block.

        After a delayed block nothing can be restored, since its gradients are scaled and contain a part of
        this block's: only ``zero_grad`` helps.
        """
        if self.delayed_scale is not None:
            return
        for parameter in (*parameters_of(self._optimizer), *self.leaves):
            parameter.grad = None
        for parameter, gradient in self._apart:
            parameter.grad = gradient
        self._apart = []

    # ---- checks at the end of a block

    def has_gradients(self) -> bool:
        """Return whether a parameter has a gradient that is not 0; waits for the device."""
        for parameter in self.leaves:
            if parameter.grad is not None and bool(parameter.grad.detach().any()):
                return True
        return False

    def check_graph(self) -> None:
        """Refuse gradients with a graph (``create_graph=True``): unscaling does not reach into it."""
        if any(p.grad is not None and p.grad.requires_grad for p in self.leaves):
            raise AmpError(
                "backward(create_graph=True) in a scale_loss block is not supported: take the inner gradient "
                "with torch.autograd.grad(loss, parameters, create_graph=True) outside of the block, and add "
                "what depends on it to the loss"
            )

    # ---- between blocks

    def forget(self) -> None:
        """Drop the gradients that are kept here, because the script clears its gradients."""
        self._drop_taken_gradients()
        self._apart = []
        self.delayed_scale = None

    def drop_masters_gradients(self) -> None:
        """Set the gradients of masters to None, as a step does."""
        for _, master in self._pairs:
            master.grad = None

    @contextmanager
    def low_gradients_hidden(self) -> Iterator[None]:
        """Hide the gradients of half weights from a step, which would add them to those of masters again."""
        self._follow_cleared_gradients()
        hidden = [(taken.low, taken.low.grad) for taken in self._taken]
        for low, _ in hidden:
            low.grad = None
        try:
            yield
        finally:
            for low, gradient in hidden:
                if low.grad is None:
                    low.grad = gradient

    def _drop_taken_gradients(self) -> None:
        self._follow_cleared_gradients()
        for taken in self._taken:
            taken.low.grad = None
        self._taken = []

    def _follow_cleared_gradients(self) -> None:
        """Clear masters' gradients where the script cleared those of their weights; report other changes."""
        kept = []
        for taken in self._taken:
            if taken.low.grad is None:
                taken.master.grad = None
                continue
            kept.append(taken)
            was_changed = taken.low.grad is taken.gradient and version_of(taken.gradient) != taken.version
            if was_changed and taken.master.grad is not None and not self._warned_of_changes:
                self._warned_of_changes = True
                maybe_print(
                    f"amp: gradients of this {type(self._optimizer).__name__}'s half weights were changed "
                    "after the scale_loss block, which has no effect: clip and change those of "
                    "amp.master_params(optimizer), which it steps on"
                )
        self._taken = kept


def _take_apart(parameters: Iterable[torch.Tensor]) -> _Gradients:
    apart = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            if is_view(gradient):
                gradient = gradient.clone()  # DDP writes the next gradient into the same memory
            apart.append((parameter, gradient))
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
            # torch adds a sparse tensor to a dense one, but not a dense one to a sparse one.
            elif new.is_sparse:
                parameter.grad = gradient + new
            else:
                parameter.grad = new + gradient
