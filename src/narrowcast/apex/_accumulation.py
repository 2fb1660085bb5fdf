"""What becomes of one optimizer's gradients in ``scale_loss`` blocks: set aside, unscaled, added."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from narrowcast.apex._masters import Masters
from narrowcast.apex._sharding import is_sharded
from narrowcast.apex._state import say
from narrowcast.apex._torch_internals import add_all, is_view, version_of
from narrowcast.errors import AmpError
from narrowcast.gradients import unscale_by

_Gradients = list[tuple[torch.Tensor, torch.Tensor]]


class _Left(NamedTuple):
    """The scaled gradient of a half weight, of which its master has had its part."""

    low: torch.Tensor
    master: torch.nn.Parameter
    gradient: torch.Tensor
    version: int

    def flag(self) -> torch.Tensor:
        """Of a gradient in its place, whether it has other bits; of itself, whether it is not zero."""
        found = self.low.grad
        assert found is not None
        if found is self.gradient:
            return found.detach().any()
        # NaNs are equal by their bits.
        return (found.detach().view(torch.int16) != self.gradient.detach().view(torch.int16)).any()


class Writes:
    """Which gradients there are at one moment, and how often each was written.

    They are held: a later one in the memory of one that was freed would else pass for it.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._found = {p: (p.grad, version_of(p.grad)) for p in parameters if p.grad is not None}

    def since(self, before: Writes) -> list[torch.Tensor]:
        """Those that came or were written to; none for one that is gone."""
        came = []
        for parameter, (gradient, version) in self._found.items():
            then, its = before._found.get(parameter, (None, 0))
            if then is not gradient or its != version:
                came.append(gradient)
        return came


class Accumulation:
    """The gradients of one optimizer from block to block.

    Gradients that are there when a block begins are unscaled, and wait aside; those that come in the block
    are scaled, and are unscaled and added to the others when it ends. Under O2 the scaled ones are those of
    the half weights, which stay where they are until the next block, and the others those of the masters.
    Where a script clears the former, as ``model.zero_grad()`` does, the latter go with them.

    Attributes:
        masters: those of the optimizer's half parameters; None where it has none.
        scaled_by: what the gradients are still scaled by after a block with ``delay_unscale``; else None.
        strange: what gradients are scaled by that came in a block of other optimizers; None: none did.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.masters: Masters | None = None
        self.scaled_by: float | None = None
        self.strange: float | None = None
        self._said: set[str] = set()
        self._aside: _Gradients = []
        self._left: list[_Left] = []

    def begin(self, scale: float, *, delayed: bool) -> None:
        """Before the backward pass of a block.

        Raises:
            AmpError: gradients are still scaled, by another scale or for another optimizer.
        """
        self.check_own()
        if self.scaled_by not in (None, scale):
            self._check_dropped(scale)
        if self.scaled_by is not None:
            # Masters' gradients are unscaled also while those of the weights are not.
            self._aside = [] if delayed else _set_aside(master for _, master in self._pairs)
            return
        self.forget_what_is_left()
        if self.masters is not None:
            self.masters.held.take_gradients(reuse=True)
        if not delayed:
            self._aside = _set_aside(self._parameters)
            return
        # What is there already joins the scaled ones; masters' gradients are no part of them.
        of_masters = _set_aside(master for _, master in self._pairs)
        self._unscale(1.0 / scale)
        for master, gradient in of_masters:
            master.grad = gradient
        self.scaled_by = scale

    def end(self, scale: float, *, delayed: bool) -> torch.Tensor | None:
        """After the backward pass of a block; what was found, where the gradients were looked at.

        Returns:
            Float32 of shape (2,), on the device of the gradients, or None where ``delayed``: above 0 in the
            first place where a new gradient was NaN or infinite, in the second where a sum is.
        """
        if delayed:
            return None
        if self.masters is not None:
            self._left = [
                _Left(low, master, low.grad, version_of(low.grad))
                for low, master in self._pairs
                if low.grad is not None
            ]
            self.masters.held.take_gradients(reuse=True)
            for left in self._left:
                left.low.grad = left.gradient
            if any(left.gradient.requires_grad for left in self._left):
                self._say_once(
                    "half weights were computed with create_graph=True, and the float32 gradients of "
                    "amp.master_params(optimizer) have no graph: gradients of gradients cannot be taken of "
                    "them, and those of model.parameters() stay scaled: choose opt_level='O1'"
                )
        found = self._unscale(scale)
        total = torch.zeros_like(found)
        if self._aside:
            _add(self._aside)
            self._aside = []
            total = unscale_by(self._optimizer, 1.0).to(found.device)
        self.scaled_by = None
        return torch.stack((found, total))

    def _unscale(self, scale: float) -> torch.Tensor:
        """As ``unscale_by``; gradients of ``create_graph=True`` are divided with their graphs."""
        graphs = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.requires_grad:
                graphs.append((parameter, gradient / scale))
                parameter.grad = gradient.detach().clone()
        found = unscale_by(self._optimizer, scale)
        for parameter, unscaled in graphs:
            parameter.grad = unscaled
        return found

    def abandon(self, *, delayed: bool) -> None:
        """After an exception in a block: what was there before is there again, what came in it is dropped.

        Gradients that were scaled before, and were added to, stay scaled: only ``zero_grad`` helps.
        """
        if not delayed and self.scaled_by is None:
            for parameter in self._parameters:
                parameter.grad = None
            for low, _ in self._pairs:
                low.grad = None
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []

    def forget_what_is_left(self) -> None:
        """Drop the gradients of half weights whose masters have had their part, and what waits aside."""
        self._follow_the_script()
        for left in self._left:
            left.low.grad = None
        self._left, self._aside = [], []

    @contextmanager
    def what_is_left_hidden(self) -> Iterator[None]:
        """For a step, which would else add them to the masters' again."""
        self._follow_the_script()
        hidden = [(left.low, left.low.grad) for left in self._left]
        for low, _ in hidden:
            low.grad = None
        try:
            yield
        finally:
            for low, gradient in hidden:
                if low.grad is None:
                    low.grad = gradient

    def _follow_the_script(self) -> None:
        """Clear masters' gradients where those of their weights were cleared since the block.

        The device is waited for where some were written or replaced since, once for all of them.
        """
        there, asked = [], []
        for left in self._left:
            found = left.low.grad
            if found is left.gradient and version_of(found) == left.version:
                there.append(left)
            elif found is None or (found.shape, found.dtype) != (left.gradient.shape, left.gradient.dtype):
                left.master.grad = None
            else:
                asked.append((left, left._replace(gradient=found, version=version_of(found))))
        for (left, now), flag in zip(asked, _read([left.flag() for left, _ in asked]), strict=True):
            # DDP replaces gradients by equal ones when it orders its buckets anew.
            if now.gradient is not left.gradient and flag:
                left.master.grad = None
                continue
            there.append(now)
            if now.gradient is left.gradient and left.master.grad is not None:
                if flag:
                    self._say_once(
                        "half weights were changed after the scale_loss block, which has no effect: clip and "
                        "change those of amp.master_params(optimizer), which it steps on"
                    )
                else:
                    left.master.grad.zero_()
        self._left = there

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            say(f"amp: gradients of this {type(self._optimizer).__name__}'s {what}")

    def writes(self) -> Writes:
        """Which gradients backward passes have written, and how often."""
        return Writes(self.leaves)

    def check_own(self) -> None:
        """Refuse gradients that a block of other optimizers brought, unless they were cleared.

        Raises:
            AmpError: there are some.
        """
        if self.strange is None:
            return
        self._follow_the_script()
        left = {left.low for left in self._left}
        if any_not_zero(p.grad for p in self.leaves if p not in left):
            raise AmpError(
                f"gradients of this {type(self._optimizer).__name__} came in a scale_loss block that did not "
                f"name it, and are scaled by {self.strange:g}: name it in that block, scale_loss(loss, "
                "[optimizer, other]), or clear them with zero_grad() after the block"
            )
        self.strange = None

    def drop_masters_gradients(self) -> None:
        """As a step does."""
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
        """The parameters that backward passes give gradients to."""
        low_of: dict[torch.Tensor, torch.Tensor] = {master: low for low, master in self._pairs}
        return [low_of.get(parameter, parameter) for parameter in self._parameters]

    def _check_dropped(self, scale: float) -> None:
        if any_not_zero(p.grad for p in self.leaves):
            raise AmpError(
                f"the gradients are scaled by {self.scaled_by:g}, left so by scale_loss(..., "
                f"delay_unscale=True), and this block scales by {scale:g}: their sum cannot be unscaled. "
                "Give blocks that accumulate with delay_unscale=True one loss_id, or leave delay_unscale out"
            )
        self.scaled_by = None


def any_not_zero(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Whether one of them has a number that is not zero; waits for the device once."""
    return any(_read([one.detach().any() for one in gradients if one is not None]))


def _read(flags: Sequence[torch.Tensor]) -> list[bool]:
    """0-dim flags, in one wait for the device; those of DTensors are the same on every rank."""
    if not flags:
        return []
    given: Sequence[Any] = flags
    # What a DTensor tells a rank by itself is of its own part.
    whole = [flag.full_tensor() if is_sharded(flag) else flag for flag in given]
    read: list[bool] = torch.stack([flag.to(whole[0].device) for flag in whole]).tolist()
    return read


def _set_aside(parameters: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> _Gradients:
    aside = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            # DDP writes the next gradient into the same part of its bucket.
            aside.append((parameter, gradient.clone() if is_view(gradient) else gradient))
            parameter.grad = None
    return aside


def _add(aside: _Gradients) -> None:
    """Give gradients back that waited aside, added to those that have come."""
    sums, terms = [], []
    for parameter, gradient in aside:
        new = parameter.grad
        if new is None:
            parameter.grad = gradient
            continue
        has_graph = new.requires_grad or gradient.requires_grad
        if not has_graph and new.layout == gradient.layout == torch.strided:
            sums.append(new)
            terms.append(gradient)
            continue
        # A dense tensor takes a sparse one, not the other way round.
        parameter.grad = gradient + new if new.is_sparse else new + gradient
    with torch.no_grad():
        add_all(sums, terms)
