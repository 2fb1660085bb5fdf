"""What became of each step: told to whoever asked, and counted until patience is spent.

Where the host knows at once whether a step was skipped, this happens before ``step`` returns. Where only the
device knows, the flag is copied to the host without waiting, and looked at when the next step begins.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from narrowcast.errors import ScaleCollapseError, ScaleError, UnsupportedError
from narrowcast.gradients._held import listed
from narrowcast.gradients._result import StepResult
from narrowcast.gradients._torch_internals import is_capturing

Listener = Callable[[StepResult], None]

_COLLAPSED = (
    "{patience} steps of {optimizer} in a row were skipped, since step {since} of this scaler: the gradients "
    "of {names} are not finite{scale}. The values overflow in the forward "
    "pass, or the loss itself is not finite: look at the loss, try bf16, and fp32 to see whether it has it "
    "too. nc.GradScaler(patience=None) goes on for ever"
)
_DID_NOT_HELP = ", and a loss scale of {} did not help"
APART = (
    "the ranks of process_group hold different gradients (their norms differ by more than rounding), and "
    "each would clip by another norm: reduce them first as DistributedDataParallel does, or say "
    "GradScaler(process_group=..., sharded=True) if each rank holds parts of one model"
)


Reference = Callable[[], torch.optim.Optimizer | None]


def reference_to(optimizer: torch.optim.Optimizer) -> Reference:
    """A weak reference; a class with slots may have none, and is held while it is waited for."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


@dataclass(slots=True)
class Outcome:
    """One step that the host does not know yet; ``learn`` is told the scale that its losses had."""

    optimizer: Reference
    result: StepResult
    number: int
    readback: Readback
    learn: Callable[[float], None] | None


class Readback:
    """Numbers on their way to the host: the overflow, whether ranks disagree, and the scale."""

    __slots__ = ("_event", "_host")

    def __init__(self, values: torch.Tensor) -> None:
        """``values``: 1-dim, on any device. Only CUDA copies without waiting."""
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self._host = values.cpu()

    def read(self) -> list[float]:
        """The values; waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values


class Outcomes:
    """Every step of one scaler, in order."""

    def __init__(self, patience: int | None) -> None:
        if patience is not None and (
            not isinstance(patience, int) or isinstance(patience, bool) or patience < 1
        ):
            raise ScaleError(f"patience must be a whole number of at least 1, or None, got {patience!r}")
        self.patience = patience
        self.steps = 0
        self.on_step: OrderedDict[int, Listener] = OrderedDict()
        self.on_skip: OrderedDict[int, Listener] = OrderedDict()
        self._waiting: deque[Outcome] = deque()
        self._skips_in_a_row: dict[int, tuple[Reference, int, int]] = {}

    def listen(self, listeners: OrderedDict[int, Listener], listener: Listener) -> RemovableHandle:
        if not callable(listener):
            raise TypeError(f"expected a function of a StepResult, got {type(listener).__name__}")
        handle = RemovableHandle(listeners)
        listeners[handle.id] = listener
        return handle

    def next_number(self) -> int:
        self.steps += 1
        return self.steps

    def later(self, outcome: Outcome) -> None:
        """The host does not know yet."""
        self._waiting.append(outcome)

    def settle(self) -> None:
        """Act on the steps before this one. Their flags have long come: a whole forward lies between."""
        while self._waiting and not is_capturing():
            outcome = self._waiting.popleft()
            found, apart, *scale = outcome.readback.read()
            outcome.result.learn(skipped=found > 0)
            if outcome.learn is not None:
                outcome.learn(*scale)
            self.now(outcome.optimizer(), outcome.result, outcome.number, apart=apart > 0)

    def now(
        self, optimizer: torch.optim.Optimizer | None, result: StepResult, number: int, *, apart: bool = False
    ) -> None:
        """Tell the listeners, count the skips.

        Raises:
            UnsupportedError: ``apart``: ranks with copies of a model hold different gradients.
            ScaleCollapseError: one skip in a row too many.
        """
        if apart:
            raise UnsupportedError(APART)
        skipped = result.skipped
        for listener in list((self.on_skip if skipped else self.on_step).values()):
            listener(result)
        if optimizer is None:
            return
        if not skipped:
            self._skips_in_a_row.pop(id(optimizer), None)
            return
        known, count, since = self._skips_in_a_row.get(id(optimizer), (None, 0, number))
        if known is None or known() is not optimizer:
            known, count, since = reference_to(optimizer), 0, number
        self._skips_in_a_row[id(optimizer)] = (known, count + 1, since)
        if self.patience is not None and count + 1 >= self.patience:
            # The next step may try again: somebody may have caught this and lowered a learning rate.
            del self._skips_in_a_row[id(optimizer)]
            raise ScaleCollapseError(
                _COLLAPSED.format(
                    patience=self.patience,
                    optimizer=type(optimizer).__name__,
                    since=since,
                    names=listed(result.nonfinite) or "another rank",
                    scale="" if result.scale == 1.0 else _DID_NOT_HELP.format(_shown(result.scale)),
                )
            )


def _shown(scale: float | dict[str, float]) -> str:
    if isinstance(scale, dict):
        return ", ".join(f"{value:g} ({name})" for name, value in scale.items())
    return f"{scale:g}"
