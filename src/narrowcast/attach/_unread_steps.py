"""Steps on a GPU whose flag (``found_inf``: a gradient is not finite) is still on its way to the host."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from narrowcast.gradients import (
    GradientCheck,
    HostCopies,
    is_capturing,
    is_torchs_own,
    starts_momentum,
    takes_grad_scale,
)


@dataclass(slots=True)
class UnreadStep:
    """A step whose flag has not been read.

    Attributes:
        number: of the step, in the order of all steps.
        counts: whether it is counted as a step; one inside of another is not.
        skips: whether the optimizer itself skipped the step if its flag is set.
        parameters: those that had a gradient.
        read_flag: waits for the flag and returns it, in a list.
        read_nonfinite: tells for each of ``parameters`` whether its gradient is not finite.
    """

    optimizer: weakref.ref[Optimizer]
    number: int
    counts: bool
    skips: bool
    parameters: list[torch.Tensor]
    read_flag: Callable[[], list[float]]
    read_nonfinite: Callable[[], list[bool]]

    def bad(self) -> list[torch.Tensor]:
        """Return the parameters whose gradient was not finite."""
        flags = self.read_nonfinite()
        return [parameter for parameter, flag in zip(self.parameters, flags, strict=True) if flag]


class UnreadSteps:
    """Hand flags to optimizers that skip by them, and read all of them when any next step begins.

    With one optimizer the flag has a whole iteration to arrive, so nothing waits. Where several step in one
    iteration, each step waits for the flag of the step before it.
    """

    def __init__(self) -> None:
        self._steps: deque[UnreadStep] = deque()
        self._copies = HostCopies()
        self._checks: dict[int, GradientCheck] = {}

    def begin(self, optimizer: Optimizer, check: GradientCheck) -> None:
        """Keep the check of a step; torch's fused optimizers skip by the flag."""
        self._checks[id(optimizer)] = check
        if _skips(optimizer):
            # As torch.amp.GradScaler hands it over.
            target: Any = optimizer
            target.grad_scale, target.found_inf = None, check.found_inf

    def end(self, optimizer: Optimizer, number: int, *, counts: bool) -> bool:
        """Start the copy of the flag to the host; return whether the step had one."""
        check = self._checks.pop(id(optimizer), None)
        if check is None:
            return False
        skips = _skips(optimizer)
        if skips:
            target: Any = optimizer
            del target.grad_scale, target.found_inf

        # Which gradients are not finite is computed once the flag is read and set, if they can be kept until
        # then. Otherwise the device computes it now, before the script writes to them.
        read_nonfinite = check.look_later() if check.can_look_later() else check.nonfinite().read
        step = UnreadStep(
            optimizer=weakref.ref(optimizer),
            number=number,
            counts=counts,
            skips=skips,
            parameters=check.gradients.parameters,
            read_flag=self._copies.start(check.found_inf.reshape(1)),
            read_nonfinite=read_nonfinite,
        )
        self._steps.append(step)
        return True

    def read(self) -> Iterator[tuple[UnreadStep, bool]]:
        """Read the flags of earlier steps; yield each with whether a gradient was not finite."""
        while self._steps and not is_capturing():
            step = self._steps.popleft()
            yield step, step.read_flag()[0] > 0


def must_wait(optimizer: Optimizer) -> bool:
    """Return whether a step cannot begin before its flag is known, though the optimizer skips by itself."""
    return _skips(optimizer) and starts_momentum(optimizer)


def _skips(optimizer: Optimizer) -> bool:
    return takes_grad_scale(optimizer) and is_torchs_own(optimizer)
