"""The gradients of one optimizer in ``scale_loss`` blocks: kept apart, unscaled and added up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from narrowcast.apex._torch_internals import add_all, is_view, version_of
from narrowcast.apex.amp._amp_state import maybe_print
from narrowcast.apex.amp._masters import Masters
from narrowcast.errors import AmpError
from narrowcast.gradients import unscale_by

_Gradients = list[tuple[torch.Tensor, torch.Tensor]]
# By parameter: its gradient, which no later one can be mistaken for while it is kept, and its version.
Versions = dict[torch.Tensor, tuple[torch.Tensor, int]]


class _LowGradient(NamedTuple):
    """The scaled gradient of a half weight, after it was added to the gradient of its master."""

    low: torch.Tensor
    master: torch.nn.Parameter
    gradient: torch.Tensor
    version: int

    def was_replaced(self) -> torch.Tensor:
        """Return whether the weight has another gradient now, with other bits; 0-dim, bool."""
        found = self.low.grad
        assert found is not None
        # Compared as integers, because NaN is not equal to itself.
        return (found.detach().view(torch.int16) != self.gradient.detach().view(torch.int16)).any()


class Accumulation:
    """The gradients of one optimizer from block to block.

    Gradients from before a block are unscaled and are kept apart during it. Those of the block are scaled;
    at its end they are unscaled and added to the others. Under O2 the unscaled ones belong to the masters.
    The scaled ones of the half weights stay in ``.grad`` until the next block, as in apex; if the script
    sets them to None, as ``model.zero_grad()`` does, those of the masters are cleared too.

    ``masters`` is None if the optimizer has no half parameters. ``scaled_by`` is the scale of gradients that
    ``delay_unscale`` left scaled, and None if they are unscaled. ``scaled_by_others`` is the scale of a block
    that did not name the optimizer and brought gradients to its parameters.
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
                self.masters.held.take_gradients(reuse=True)
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
        return [
            gradient
            for parameter, (gradient, version) in self.versions().items()
            if parameter not in before
            or before[parameter][0] is not gradient
            or before[parameter][1] != version
        ]

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

    def end(self, scale: float, *, delayed: bool) -> torch.Tensor | None:
        """Unscale the gradients of a block and add those from before it.

        Returns:
            None if ``delayed``. Otherwise float32 of shape (2,), on the device of the gradients: the first is
            above 0 if a gradient of the block is NaN or infinite, the second if a sum is.
        """
        if any(p.grad is not None and p.grad.requires_grad for p in self.leaves):
            raise AmpError(
                "backward(create_graph=True) in a scale_loss block is not supported: take the inner gradient "
                "with torch.autograd.grad(loss, parameters, create_graph=True) outside of the block, and add "
                "what depends on it to the loss"
            )
        if delayed:
            return None
        if self.masters is not None:
            self._low = [
                _LowGradient(low, master, low.grad, version_of(low.grad))
                for low, master in self._pairs
                if low.grad is not None
            ]
            self.masters.held.take_gradients(reuse=True)
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
        same, others = [], []
        for one in self._low:
            found = one.low.grad
            if found is one.gradient:
                same.append(one)
                if version_of(found) != one.version and one.master.grad is not None:
                    self._say_that_changes_have_no_effect()
            elif found is None or (found.shape, found.dtype) != (one.gradient.shape, one.gradient.dtype):
                one.master.grad = None
            else:
                others.append(one)
        # DDP replaces gradients by equal ones when it rebuilds its buckets. To compare waits for the device.
        flags = torch.stack([one.was_replaced() for one in others]).tolist() if others else ()
        for one, was_replaced in zip(others, flags, strict=True):
            found = one.low.grad
            if was_replaced or found is None:
                one.master.grad = None
            else:
                same.append(one._replace(gradient=found, version=version_of(found)))
        self._low = same

    def _say_that_changes_have_no_effect(self) -> None:
        if not self._said:
            self._said = True
            maybe_print(
                f"amp: gradients of this {type(self._optimizer).__name__}'s half weights were changed after "
                "the scale_loss block, which has no effect: clip and change those of "
                "amp.master_params(optimizer), which it steps on"
            )

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
    sums, terms = [], []
    for parameter, gradient in apart:
        new = parameter.grad
        if new is None:
            parameter.grad = gradient
        elif new.layout == gradient.layout == torch.strided:
            sums.append(new)
            terms.append(gradient)
        else:
            # A sparse tensor can be added to a dense one, but not the other way round.
            parameter.grad = gradient + new if new.is_sparse else new + gradient
    with torch.no_grad():
        add_all(sums, terms)
