"""``hold``: lets a dense optimizer work in float32 on parameters that are in bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowcast.errors import SettingError, UnsupportedError, did_you_mean, not_copied
from narrowcast.gradients import ASKED_BY_SCALERS, untraced
from narrowcast.weights._gradients import (
    ScalerGuard,
    clear,
    move_back,
    require_dense,
    restore_low,
    take,
)
from narrowcast.weights._lower import LOW_DTYPES
from narrowcast.weights._torch_internals import is_dtensor, is_outermost_step, local, version_of
from narrowcast.weights._update_methods import (
    KahanMethod,
    MastersMethod,
    Pair,
    StochasticMethod,
    UpdateMethod,
    check_state,
    load_state,
    narrow_state,
    release,
    saved_state,
    widen_state,
)

# A held optimizer has its handle in this attribute. ``GradScaler`` looks whether an optimizer has it.
_HANDLE = "holds_low_weights"


def hold(
    optimizer: torch.optim.Optimizer,
    updates: str = "masters",
    *,
    originals: Mapping[torch.Tensor, torch.Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> HeldWeights:
    """Make ``optimizer`` work in float32 on its bfloat16 and float16 parameters.

    >>> import torch
    >>> from narrowcast.weights import hold
    >>> model = torch.nn.Linear(8, 8).bfloat16()
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    >>> handle = hold(optimizer, "kahan")
    >>> model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    >>> optimizer.step()
    >>> handle.remove()

    Each low parameter is replaced in ``optimizer.param_groups`` by a float32 working parameter, to which its
    optimizer state is moved. A step converts the low gradients to float32, updates the working parameters,
    and writes the result into the low parameters, in place. What is kept of the float32 values between two
    steps:

    - ``"masters"``: the float32 parameters; the low ones are their nearest numbers. 4 bytes an element.
    - ``"kahan"``: a residual in the low format; low plus residual is the float32 value to 16 significant
      bits in bfloat16 and 22 in float16. 2 bytes an element.
    - ``"stochastic"``: nothing. The result is rounded up or down at random, exact in the mean.

    With ``"kahan"`` and ``"stochastic"`` the working parameters have memory only during a step and read as
    NaN between steps. Parameters of other dtypes are left alone.

    Args:
        optimizer: any that takes dense gradients and reads its parameters from ``param_groups``.
        updates: ``"masters"``, ``"kahan"`` or ``"stochastic"``.
        originals: float32 values by low parameter, as ``lower`` returns them, to start from. An element that
            does not round to the low value is not used. Copied. Not for ``"stochastic"``.
        generator: for ``"stochastic"``, of the device of the parameters. By default each device has its own,
            with a fixed seed, so that replicas on several ranks round alike.

    Returns:
        The handle, with the methods for gradients, checkpoints and removal.

    Raises:
        SettingError: unknown ``updates``; an optimizer that is held already, or has no parameter in a low
            format; a parameter that comes twice; originals or a generator that do not fit.
        UnsupportedError: an optimizer for sparse gradients or a differentiable one; a tensor subclass other
            than DTensor.

    If something else writes to a low parameter between steps in place (``load_state_dict``, a clamp), the
    written elements replace what was kept. Writes through ``.data`` are noticed only before the first step. A
    skipped step leaves every bit of the low parameters; after a step that raised, the next one continues.
    NaN and infinities reach the low parameter. A finite value above the largest number becomes infinite
    there, which a master survives and a residual does not. Closures are evaluated with up-to-date low
    parameters. DTensors are held part by part. Parameters added with ``add_param_group`` are held from the
    next step on. CUDA graphs cannot capture the step. ``GradScaler.step`` raises ``OrderError`` while low
    parameters have gradients: call ``take_gradients`` first.

    Source: masters: Micikevicius et al. 2018, arXiv 1710.03740, section 3.1. Kahan summation and stochastic
    rounding of weights: Zamirai et al. 2020, arXiv 2010.06192, algorithms 2 and 3.
    """
    method = _update_method(updates, generator)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(f"expected an optimizer to hold, got {type(optimizer).__name__}")
    if held_by(optimizer) is not None:
        raise SettingError(
            f"this {type(optimizer).__name__} is held already: call remove() on its handle first"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError("SparseAdam takes sparse gradients, held weights dense ones: use Adam")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError("held weights cannot be differentiated through: set differentiable=False")
    if originals is not None and isinstance(method, StochasticMethod):
        raise SettingError(
            'updates="stochastic" keeps nothing of the originals: leave them out, or use "masters" or "kahan"'
        )
    return HeldWeights(optimizer, method, originals or {})


def held_by(optimizer: torch.optim.Optimizer) -> HeldWeights | None:
    """Return the handle of a held optimizer, or None."""
    handle: HeldWeights | None = getattr(optimizer, _HANDLE, None)
    return handle


def _refuse_copy() -> Any:
    raise SettingError(
        "a held optimizer can be neither copied nor pickled: save its state_dict() and that of its handle, "
        "copy the model, make an optimizer for the copy, hold it, and load both"
    )


def _update_method(updates: str, generator: torch.Generator | None) -> UpdateMethod:
    if updates == "stochastic":
        return StochasticMethod(generator)
    methods: dict[str, type[UpdateMethod]] = {"masters": MastersMethod, "kahan": KahanMethod}
    if updates not in methods:
        known = [*methods, "stochastic"]
        raise SettingError(f'unknown updates="{updates}". {did_you_mean(str(updates), known)}')
    if generator is not None:
        raise SettingError(f'updates="{updates}" draws no random numbers: leave out the generator')
    return methods[updates]()


class HeldWeights:
    """The handle of a held optimizer: ``hold`` returns it, ``remove`` ends it.

    Gradients belong to the low parameters, and ``optimizer.zero_grad()`` clears them there. A step leaves
    them there, unless ``take_gradients`` was called.

    >>> import torch
    >>> from narrowcast.weights import hold
    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> handle = hold(torch.optim.SGD([weight], lr=2.0**-12), "masters")
    >>> weight.sum().backward()
    >>> handle.optimizer.step()
    >>> handle.full_values()[weight]
    tensor([0.9998, 0.9998])
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: UpdateMethod,
        originals: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        self.optimizer = optimizer
        self._method = method
        self._pairs: list[Pair] = []

        # Each is called after the optimizer's step, before the low parameters are written. It returns a
        # function that is called after they are written.
        self.watchers: list[Callable[[], Callable[[], None]]] = []
        self._hold_new(originals)
        if not self._pairs:
            raise SettingError(
                f"no parameter of this {type(optimizer).__name__} is in bfloat16 or float16: lower the "
                "model first, with narrowcast.weights.lower"
            )

        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._own_zero_grad = optimizer.zero_grad
        self._replaced: dict[str, Any] = {
            "zero_grad": self._zero_grad,
            _HANDLE: self,
            # copy, deepcopy and pickle ask for it. A copy has no hooks: it would update the working
            # parameters and never write them to the low ones.
            "__getstate__": _refuse_copy,
            ASKED_BY_SCALERS: ScalerGuard(optimizer, self._pairs),
        }
        attributes = vars(optimizer)
        self._own = {name: value for name, value in attributes.items() if name in self._replaced}
        attributes.update(self._replaced)

    __reduce_ex__ = not_copied("the handle of held weights", "save its state_dict()")

    @property
    def updates(self) -> str:
        """``"masters"``, ``"kahan"`` or ``"stochastic"``."""
        return self._method.name

    @property
    def parameters(self) -> list[tuple[torch.Tensor, torch.nn.Parameter]]:
        """Each low parameter with its float32 working parameter, in the optimizer's order."""
        self._hold_new({})
        return [(pair.low, pair.working) for pair in self._pairs]

    def take_gradients(self) -> None:
        """Add the low gradients to the working parameters' float32 ``.grad`` and set the low ones to None.

        Call it once before the gradients are unscaled, clipped or checked, or after each backward to
        accumulate micro-batches in float32. Values are converted, exact, and not unscaled. The next step uses
        them up; ``optimizer.zero_grad()`` clears them, ``model.zero_grad()`` does not. Where masters are on
        the CPU, the memory of these float32 gradients is kept for the next step (4 bytes an element), unless
        something else holds it.

        Raises:
            UnsupportedError: a gradient is sparse. Nothing was taken.
        """
        self._hold_new({})
        self._take(restores=False)

    def _take(self, *, restores: bool) -> None:
        take(self._pairs, restores=restores, reuses_memory=not self._method.frees_working)

    def full_values(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the float32 value of each low parameter: the master, low plus residual, or low."""
        self._hold_new({})
        values = {}
        with torch.no_grad():
            for pair in self._pairs:
                # Of a DTensor, which keeps its mesh and its placements, the local part is filled.
                values[pair.low] = torch.empty_like(pair.low, dtype=torch.float32).detach()
                local(values[pair.low]).copy_(self._value(pair))
        return values

    def set_values(self, values: Mapping[int, torch.Tensor]) -> None:
        """Replace the values of some held parameters, the low ones and what is kept.

        Args:
            values: by position in ``parameters``; any floating dtype, of the parameter's shape, on any
                device; a DTensor if the parameter is one. Rounded to float32, then to the low format, both to
                nearest; NaN and infinities are kept.
        """
        with torch.no_grad():
            for position, value in values.items():
                pair = self._pairs[position]
                full = local(value.detach()).to(local(pair.low).device, torch.float32)
                local(pair.low).copy_(full)
                self._method.start(pair, full)
                self._close_pair(pair)
                pair.seen_version = version_of(pair.low)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept between steps beside the low parameters and the optimizer's state.

        A dict of strings, lists and tensors that ``torch.load(weights_only=True)`` reads. The tensors are not
        copied, as in ``Optimizer.state_dict``. Gradients that were taken and not used are not included.
        """
        self._hold_new({})
        with torch.no_grad():
            self._finish_interrupted()
            if isinstance(self._method, MastersMethod):
                # Masters take over what others wrote to low parameters. These are not written, since a graph
                # may have saved them for its backward pass.
                self._open()
                for pair in self._pairs:
                    pair.opened = False
            return saved_state(self._method, self._pairs)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, so that training continues bit for bit; before or after model and optimizer load.

        Masters are written into the low parameters too. A residual is used where the low parameter, at the
        next step, is the nearest number to their sum.

        Raises:
            SettingError: the state does not fit, as ``check_state_dict`` says. Nothing was changed.
        """
        self._hold_new({})
        with torch.no_grad():
            load_state(self._method, self._pairs, state)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check that ``load_state_dict`` would succeed, without changing anything.

        Raises:
            SettingError: other updates, another number of parameters, other shapes or formats; or random
                generators of devices that no held parameter is on.
        """
        self._hold_new({})
        check_state(self._method, self._pairs, state)

    def remove(self) -> None:
        """Put the low parameters back into the optimizer, with its state rounded to their format.

        Gradients that were taken go back to the low parameters, rounded to nearest. What was kept is lost.
        """
        if held_by(self.optimizer) is not self:
            return
        with torch.no_grad():
            self._finish_interrupted()
            move_back(self._pairs)

        # The lists are changed in place, as when the parameters were held.
        low_of = {pair.working: pair.low for pair in self._pairs}
        for group in self.optimizer.param_groups:
            group["params"][:] = [low_of.get(parameter, parameter) for parameter in group["params"]]
        for pair in self._pairs:
            narrow_state(self.optimizer, pair.working, pair.low)
        for hook in self._hooks:
            hook.remove()
        attributes = vars(self.optimizer)
        for name, value in self._replaced.items():
            if attributes.get(name) is not value:
                continue  # something else has replaced it since
            del attributes[name]
            if name in self._own:
                attributes[name] = self._own[name]

    # ---- parameters

    def _hold_new(self, originals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Hold every low parameter of the optimizer that is not held yet."""
        places = []
        for group in self.optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                if parameter.dtype in LOW_DTYPES:
                    places.append((group["params"], position, parameter))
        if not places:
            return

        # All are checked before anything changes.
        known = {pair.low for pair in self._pairs}
        for _, _, low in places:
            _check_parameter(low, known, originals.get(low))
            known.add(low)
        with torch.no_grad():
            pairs = [self._new_pair(low, originals.get(low)) for _, _, low in places]

        for (parameters, position, low), pair in zip(places, pairs, strict=True):
            # The list is changed in place, because an optimizer may refer to it (LBFGS does).
            parameters[position] = pair.working
            widen_state(self.optimizer, low, pair.working)
        self._pairs += pairs

    def _new_pair(self, low: torch.Tensor, original: torch.Tensor | None) -> Pair:
        working = torch.nn.Parameter(low.detach().to(torch.float32), requires_grad=low.requires_grad)
        for name, value in vars(low).items():
            # Attributes that users put on parameters for their optimizers.
            vars(working).setdefault(name, value)

        # Until the first step no version is known, so that writes through .data count too.
        pair = Pair(low, working, seen_version=None)
        full = local(working).detach()
        if original is not None:
            full = _full_where_it_agrees(local(original).detach(), local(low))
        self._method.start(pair, full)
        if self._method.frees_working:
            release(pair)
        return pair

    def _value(self, pair: Pair) -> torch.Tensor:
        """Return the float32 value of a pair, with the elements that others have written to ``low``."""
        value = local(pair.working)
        if not pair.opened:
            value = self._method.value(pair)
        if pair.written_by_others:
            return _full_where_it_agrees(value, local(pair.low))
        return value

    # ---- one step

    def _open(self) -> None:
        """Bring the values into the working parameters that do not hold them yet."""
        for pair in self._pairs:
            if self._method.frees_working:
                if pair.written_by_others or not pair.opened:
                    local(pair.working).data = self._value(pair)
            elif pair.written_by_others:
                local(pair.working).copy_(self._value(pair))
            pair.opened = True
            pair.seen_version = version_of(pair.low)

    def _write(self) -> list[Pair]:
        """Write the values to the low parameters; return the pairs that were open."""
        opened = [pair for pair in self._pairs if pair.opened]
        self._method.write(opened)
        for pair in opened:
            pair.seen_version = version_of(pair.low)
        return opened

    def _close(self) -> None:
        for pair in self._write():
            self._close_pair(pair)

    def _close_pair(self, pair: Pair) -> None:
        if pair.opened and self._method.frees_working:
            release(pair)
        pair.opened = False

    def _finish_interrupted(self) -> None:
        """Finish a step that raised."""
        if any(pair.opened for pair in self._pairs):
            self._open()
            self._close()

    @untraced
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not is_outermost_step(optimizer):
            return None
        self._hold_new({})
        require_dense(self._pairs)
        with torch.no_grad():
            self._open()
            self._take(restores=True)

        # torch hands the optimizer itself as the first argument.
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._with_current_weights(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._with_current_weights(args[1]), *args[2:]), kwargs
        return None

    def _with_current_weights(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure: it sees the low parameters as the step has moved them so far."""

        def evaluate() -> Any:
            with torch.no_grad():
                self._write()
                restore_low(self._pairs)
            loss = closure()
            with torch.no_grad():
                self._open()
                self._take(restores=True)
            return loss

        return evaluate

    @untraced
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not is_outermost_step(optimizer):
            return
        for pair in self._pairs:
            if pair.opened and pair.written_by_others:
                raise UnsupportedError(
                    f"the step of {type(optimizer).__name__} wrote to a held parameter of shape "
                    f"{tuple(pair.low.shape)} directly, not through param_groups, so its update would be "
                    "lost: make the optimizer read its parameters from param_groups, or do not hold it"
                )
        with torch.no_grad():
            after_writing = [watcher() for watcher in self.watchers]
            self._close()
            restore_low(self._pairs)
            for pair in self._pairs:
                pair.working.grad = None
            for callback in after_writing:
                callback()

    @untraced
    def _zero_grad(self, set_to_none: bool = True) -> None:
        self._own_zero_grad(set_to_none)
        clear(self._pairs, set_to_none=set_to_none)


def _full_where_it_agrees(full: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return ``full`` where it rounds to ``low``, and ``low`` elsewhere."""
    return torch.where(full.to(low.dtype) == low, full, low.to(torch.float32))


def _check_parameter(low: torch.Tensor, known: set[torch.Tensor], original: torch.Tensor | None) -> None:
    """Refuse a parameter of ``known`` or a tensor subclass, and an original that does not fit."""
    shape = tuple(low.shape)
    if low in known:
        raise SettingError(
            f"a parameter of shape {shape} comes twice in this optimizer: leave it in one group only"
        )
    if type(low.data) is not torch.Tensor and not is_dtensor(low):
        raise UnsupportedError(
            f"a parameter of shape {shape} is a {type(low.data).__name__}: plain tensors and DTensors can be "
            "held, so leave it out of this optimizer"
        )
    if original is None:
        return
    if (original.dtype, original.shape, original.device) != (torch.float32, low.shape, low.device):
        raise SettingError(
            f"the original of a parameter of shape {shape} on {low.device} must be a float32 tensor of that "
            f"shape there, not {str(original.dtype).removeprefix('torch.')} of shape "
            f"{tuple(original.shape)} on {original.device}"
        )
