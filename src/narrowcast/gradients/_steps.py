"""Results of steps, their listeners, counts of skipped steps, and steps that end inside a closure.

If the host knows at once whether a step was skipped, listeners are called before ``step`` returns. If only
the device knows, the flag is copied to the host without a sync and read when the next step begins.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from narrowcast.errors import ScaleCollapseError, ScaleError, UnsupportedError, few
from narrowcast.gradients._optimizer_gradients import parameters_of
from narrowcast.gradients._torch_internals import copied, is_capturing

RANKS_DIFFER = (
    "the ranks of process_group hold different gradients (their norms differ by more than rounding), and "
    "each would clip by another norm: reduce them first as DistributedDataParallel does, or pass "
    "GradScaler(process_group=..., sharded=True) if each rank holds parts of one model"
)


class StepResult:
    """The result of one step of one optimizer, read from the device only on access.

    >>> import torch
    >>> import narrowcast as nc
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> scaler = nc.GradScaler("cpu", init_scale=8.0)
    >>> scaler.scale((weight * float("inf")).sum()).backward()
    >>> scaler.step(optimizer)
    StepResult(skipped=True, scale=8.0, nonfinite=('group 0, parameter 0, shape (2,)',))

    Attributes:
        returned: the return value of the optimizer's ``step``; None if it was skipped, or the loss if a
            closure was not finite.
        complete: False while gradients accumulate and no step is due (``Stepper(accumulate=...)``).
    """

    __slots__ = ("_found_inf", "_grad_norm", "_nonfinite", "_scale", "complete", "returned")

    def __init__(
        self,
        *,
        found_inf: torch.Tensor | bool,
        scale: torch.Tensor | float,
        grad_norm: torch.Tensor | float | None = None,
        nonfinite: Callable[[], tuple[str, ...]] | tuple[str, ...] = (),
        returned: Any = None,
        complete: bool = True,
    ) -> None:
        self._found_inf = found_inf
        self._scale = scale
        self._grad_norm = grad_norm
        self._nonfinite = nonfinite
        self.returned = returned
        self.complete = complete

    @classmethod
    def joined(cls, results: Sequence[StepResult], *, grad_norm: torch.Tensor | None = None) -> StepResult:
        """Join the results of optimizers that stepped together; all were skipped or none."""

        def nonfinite() -> tuple[str, ...]:
            names: list[str] = []
            for result in results:
                names += result.nonfinite
            return tuple(names)

        first = results[0]
        return cls(
            found_inf=first._found_inf,
            scale=first._scale,
            grad_norm=grad_norm,
            nonfinite=nonfinite,
            returned=tuple(result.returned for result in results),
        )

    def skipped_on_device(self) -> torch.Tensor | bool:
        """Return ``skipped`` without a host sync: a 0-dim bool tensor if only the device knows."""
        if isinstance(self._found_inf, torch.Tensor):
            return self._found_inf > 0
        return self._found_inf

    def values_on_device(self) -> dict[str, torch.Tensor | float | None]:
        """Return ``skipped``, ``scale`` and ``grad_norm`` without a host sync, each a number or a tensor."""
        return {"skipped": self.skipped_on_device(), "scale": self._scale, "grad_norm": self._grad_norm}

    def settle(self, *, skipped: bool) -> None:
        """Learn whether the step was skipped, and release gradients that were held to name parameters."""
        self._found_inf = skipped
        _ = self.nonfinite  # the first access reads the gradients and drops them

    @property
    def is_known(self) -> bool:
        """Whether ``skipped`` can be read without waiting for a device."""
        return not isinstance(self._found_inf, torch.Tensor) or self._found_inf.device.type == "cpu"

    @property
    def skipped(self) -> bool:
        """Whether a gradient was NaN or infinite, so that no parameter and no state moved."""
        if isinstance(self._found_inf, torch.Tensor):
            self._found_inf = bool(self._found_inf.item())
        return self._found_inf

    @property
    def scale(self) -> float:
        """The loss scale of these gradients."""
        if isinstance(self._scale, torch.Tensor):
            self._scale = float(self._scale)
        return self._scale

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients together, unscaled and before clipping; None without clipping.

        Infinite or NaN if a gradient is.
        """
        if isinstance(self._grad_norm, torch.Tensor):
            self._grad_norm = float(self._grad_norm)
        return self._grad_norm

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient held a NaN or an infinity.

        A Stepper has the model's names. A GradScaler has those that the optimizer was given
        (``SGD(model.named_parameters())``), or says ``"group 0, parameter 3, shape (4, 5)"``.

        On a GPU it may be too late to tell which gradients these were. If torch's ``clip_grad_norm_`` divided
        by a NaN norm before the step, or the gradients' memory was written again before this was read, these
        are the names of all parameters.
        """
        if callable(self._nonfinite):
            self._nonfinite = self._nonfinite() if self.skipped else ()
        return self._nonfinite

    def __getstate__(self) -> object:
        # Read everything from the device now: the functions that read it later cannot be pickled.
        _ = self.skipped, self.scale, self.grad_norm, self.nonfinite
        return super().__getstate__()

    def __repr__(self) -> str:
        parts = [f"skipped={self.skipped}", f"scale={self.scale}"]
        if self.grad_norm is not None:
            parts.append(f"grad_norm={self.grad_norm:.6g}")
        if self.skipped:
            parts.append(f"nonfinite={self.nonfinite}")
        if not self.complete:
            parts.append("complete=False")
        return f"StepResult({', '.join(parts)})"


Listener = Callable[[StepResult], None]


class HostCopy:
    """Values that are being copied to the host; call it once, which waits for them and returns them."""

    __slots__ = ("_event", "_read")

    def __init__(self, read: Callable[[], list[float]], event: torch.cuda.Event | None = None) -> None:
        self._read = read
        self._event = event

    def __call__(self) -> list[float]:
        return self._read()

    def has_arrived(self) -> bool:
        """Return whether a call would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]


class HostCopies:
    """Copies small tensors to the host, without a sync where that is possible.

    Pinned memory and events take long to make, so they are used again once their values were read.
    """

    def __init__(self) -> None:
        # Pinned memory and its event, by the device of the values and their number.
        self._free: dict[tuple[torch.device, int], list[tuple[torch.Tensor, torch.cuda.Event]]] = {}

    def start(self, values: torch.Tensor) -> HostCopy:
        """Start to copy 1-dim values, whose dtype is the same in all calls."""
        if values.device.type != "cuda":  # only CUDA copies without a sync
            return HostCopy(values.cpu().tolist)

        free = self._free.setdefault((values.device, len(values)), [])
        if free:
            host, event = free.pop()
        else:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        host.copy_(values, non_blocking=True)
        event.record(torch.cuda.current_stream(values.device))

        def read() -> list[float]:
            event.synchronize()
            numbers: list[float] = host.tolist()
            free.append((host, event))
            return numbers

        return HostCopy(read, event)


@dataclass(slots=True)
class PendingStep:
    """A step whose flags are on their way to the host.

    Attributes:
        number: the number of the step among all steps of the scaler, from 1.
        read: returns the overflow flag, the scale and, if ranks are compared, whether they differ.
        learn_scale: tells the ``DeviceScale`` of the scaler what the scale was.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    result: StepResult
    number: int
    read: Callable[[], list[float]]
    learn_scale: Callable[[float], None]


class SkipsInARow:
    """Counts how many steps of each optimizer were skipped in a row."""

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        # For each optimizer, how many steps in a row were skipped, and the number of the first of them.
        self._skips: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]]
        self._skips = weakref.WeakKeyDictionary()

    def took(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a step was taken, which ends the row."""
        if self._skips:
            self._skips.pop(optimizer, None)

    def skipped(self, optimizer: torch.optim.Optimizer, number: int) -> int | None:
        """Count the skip of step ``number``.

        Returns:
            None, or the number of the first step in the row once ``patience`` steps were skipped. Counting
            then starts again, because the caller of a step may catch the error and lower a learning rate.
        """
        count, since = self._skips.get(optimizer, (0, number))
        self._skips[optimizer] = (count + 1, since)
        if self.patience is None or count + 1 < self.patience:
            return None
        del self._skips[optimizer]
        return since


def collapse_message(
    optimizer: torch.optim.Optimizer,
    patience: int,
    since: int,
    names: Sequence[str],
    scale: float,
    advice: str,
) -> str:
    """Return the message of a ``ScaleCollapseError``, in which a scale of 1 is left out.

    Args:
        since: the number of the first step in the row.
        names: parameters whose gradients are not finite; none if they are another rank's.
    """
    reason = f"the gradients of {few(names, 5) or 'another rank'} are not finite"
    if scale != 1.0:
        reason += f", and a loss scale of {scale:g} did not help"
    skips = f"{patience} steps of {type(optimizer).__name__} in a row were skipped, since step {since}"
    return f"{skips}: {reason}. {advice}"


class Outcomes:
    """Reports the results of a scaler's steps in order: to listeners, and by an error after many skips.

    Attributes:
        patience: skipped steps in a row of one optimizer until the error; None: never.
        advice_on_collapse: the end of the error's message.
        steps: the number of the latest step; the first one is 1.
        on_step: functions that are called after a step was taken.
        on_skip: functions that are called after a step was skipped.
        pending: steps to report once the host can know their flag.
    """

    def __init__(self, patience: int | None) -> None:
        is_number = isinstance(patience, int) and not isinstance(patience, bool)
        if patience is not None and (not is_number or patience < 1):
            raise ScaleError(f"patience must be a whole number of at least 1, or None, got {patience!r}")
        self.patience = patience
        self.advice_on_collapse = (
            "Look at the loss, and at the same steps in fp32. nc.GradScaler(patience=None) never raises this"
        )
        self.steps = 0
        # By the id of a handle, as torch's RemovableHandle removes them.
        self.on_step: OrderedDict[int, Listener] = OrderedDict()
        self.on_skip: OrderedDict[int, Listener] = OrderedDict()
        self.pending: deque[PendingStep] = deque()
        self._skips = SkipsInARow(patience)
        self._host_copies = HostCopies()

    def listen(self, listeners: OrderedDict[int, Listener], listener: Listener) -> RemovableHandle:
        """Add a listener to ``on_step`` or ``on_skip``; the handle removes it."""
        if not callable(listener):
            raise TypeError(f"expected a function of a StepResult, got {type(listener).__name__}")
        handle = RemovableHandle(listeners)
        listeners[handle.id] = listener
        return handle

    def next_number(self) -> int:
        self.steps += 1
        return self.steps

    def wait_for(
        self,
        optimizer: torch.optim.Optimizer,
        result: StepResult,
        number: int,
        values: torch.Tensor,
        learn_scale: Callable[[float], None],
    ) -> None:
        """Report a step once the host can know its flag.

        Args:
            values: the flag, the scale and, if ranks are compared, whether they differ.
        """
        read = self._host_copies.start(values)
        self.pending.append(PendingStep(weakref.ref(optimizer), result, number, read, learn_scale))

    def report_pending(self) -> None:
        """Report the pending steps; waits for their flags, most of which have arrived by now."""
        while self.pending and not is_capturing():
            step = self.pending.popleft()
            found_inf, scale, *ranks_differ = step.read()
            step.result.settle(skipped=found_inf > 0)
            step.learn_scale(scale)
            self.report(step.optimizer(), step.result, step.number, ranks_differ=any(ranks_differ))

    def report(
        self,
        optimizer: torch.optim.Optimizer | None,
        result: StepResult,
        number: int,
        *,
        ranks_differ: bool = False,
    ) -> None:
        """Call the listeners and count skips.

        Raises:
            UnsupportedError: ranks with copies of a model hold different gradients.
            ScaleCollapseError: ``patience`` steps in a row were skipped.
        """
        if ranks_differ:
            raise UnsupportedError(RANKS_DIFFER)
        listeners = self.on_skip if result.skipped else self.on_step
        # A copy, since a listener may remove itself.
        for listener in list(listeners.values()):
            listener(result)

        # A freed optimizer, whose flag arrived later, needs no count.
        if optimizer is None:
            return
        if not result.skipped:
            self._skips.took(optimizer)
            return
        since = self._skips.skipped(optimizer, number)
        if since is not None:
            assert self.patience is not None
            raise ScaleCollapseError(
                collapse_message(
                    optimizer,
                    self.patience,
                    since,
                    result.nonfinite,
                    result.scale,
                    self.advice_on_collapse,
                )
            )


# ---- closures


class SkipStep(BaseException):  # not an Exception, which the optimizer might catch
    """Raise it inside a closure to leave the optimizer's step.

    Args:
        loss: what the step then returns.
        nonfinite: the parameters whose gradients are not finite (``StepResult.nonfinite`` has their names);
            None if the code that catches this finds them by itself.
    """

    def __init__(self, loss: Any, nonfinite: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.nonfinite = nonfinite or []


def closure_of(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Return the closure among the arguments of a ``step``, positional or keyword; None without one."""
    closure = kwargs.get("closure")
    if "closure" not in kwargs and args:
        closure = args[0]
    return closure if callable(closure) else None


def step_or_restore(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    args: Any,
    kwargs: Any,
    evaluate: Callable[[], Any],
    *,
    moves_first: bool = True,
) -> tuple[Any, SkipStep | None]:
    """Call ``step`` with ``evaluate`` in place of its closure; undo it if ``evaluate`` raises ``SkipStep``.

    To undo the step, this holds a copy of parameters and state meanwhile. An optimizer that moves parameters
    only after the last evaluation of its closure needs no copy: ``moves_first=False``.

    Returns:
        What ``step`` returned, or the loss of a skipped step; and the ``SkipStep``, None if none was raised.
    """
    restore = _snapshot(optimizer) if moves_first else None

    # Pass ``evaluate`` as the caller passed the closure: by keyword, or as the first argument.
    if callable(kwargs.get("closure")):
        kwargs = {**kwargs, "closure": evaluate}
    else:
        args = (evaluate, *args[1:])
    try:
        return step(*args, **kwargs), None
    except SkipStep as skipped:
        if restore is not None:
            restore()
        return skipped.loss, skipped


def _snapshot(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Copy an optimizer's parameters, state and settings; return a function that restores them."""
    values = [(parameter, parameter.detach().clone()) for parameter in parameters_of(optimizer)]
    state = {parameter: copied(its_state) for parameter, its_state in optimizer.state.items()}
    settings_of_groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        settings_of_groups.append((group, copied(settings)))

    def restore() -> None:
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)
        # Change the dicts in place, because schedulers and wrappers hold them too.
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, settings in settings_of_groups:
            group.update(settings)

    return restore
