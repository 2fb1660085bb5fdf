"""Any dense optimizer at work in float32 on parameters that are held in bfloat16 or float16."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowcast.errors import SettingError, UnsupportedError, near_names
from narrowcast.weights import _checkpoint
from narrowcast.weights._gradients import clear, give_back, require_dense, spend, take, untake
from narrowcast.weights._holdable import check_parameter
from narrowcast.weights._keepers import Kahan, Keeper, Masters, Pair, Stochastic, release
from narrowcast.weights._rounding import LOW_DTYPES
from narrowcast.weights._scalers import begin_answering, end_answering
from narrowcast.weights._state import narrow_state, widen_state
from narrowcast.weights._torch_internals import is_outermost_step, local, untraced, version_of

Watcher = Callable[[], Callable[[], None]]

# Weak on both sides: the optimizer's own hooks keep its handle alive.
_HELD: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[HeldWeights]] = (
    weakref.WeakKeyDictionary()
)


def hold(
    optimizer: torch.optim.Optimizer,
    updates: str = "masters",
    *,
    originals: Mapping[torch.Tensor, torch.Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> HeldWeights:
    """Let ``optimizer`` work in float32 on its bfloat16 and float16 parameters, from now on.

    Each of them is replaced in ``optimizer.param_groups`` by a float32 working parameter, to which its
    optimizer state is moved, widened. A step takes the low gradients, widened, updates the working
    parameters in float32, and writes the result into the low parameters, in place. What is kept of the
    float32 values between two steps is the difference:

    - ``"masters"``: the float32 parameters. The low ones are their nearest numbers. 4 bytes an element.
    - ``"kahan"``: a residual in the low format, so that low plus residual is the float32 value to 16
      significant bits in bfloat16 and 22 in float16 (where it is kept times 2**11). 2 bytes an element.
    - ``"stochastic"``: nothing. The result is rounded up or down at random, right in the mean.

    With ``"kahan"`` and ``"stochastic"`` the working parameters have memory only during a step; what is read
    from them between steps is NaN. Parameters of other dtypes are left alone.

    A low parameter that something else wrote to between steps in place (``load_state_dict``, a clamp) wins
    over what was kept, element by element; a residual that fits its new number stays. Writes through
    ``.data`` are noticed until the first step. A step that does not happen, or that a fused optimizer leaves
    out, leaves every bit of the low parameters. After one that raised, the next goes on from where it
    stopped. NaN and infinities in a working parameter reach the low one; a finite value past the largest
    number becomes an infinity there, which a master outlives and a residual does not. Closures are evaluated
    with the low parameters, brought up to date before each evaluation. DTensors are held part by part.
    Parameters added later with ``add_param_group`` are held from the next step on. CUDA graphs cannot capture
    the step. ``GradScaler.step`` raises ``OrderError`` while low parameters have gradients, which it would
    neither unscale nor check: ``take_gradients`` comes before.

    Args:
        optimizer: any that takes dense gradients and works on ``param_groups``.
        updates: ``"masters"``, ``"kahan"`` or ``"stochastic"``.
        originals: float32 values, by low parameter, of the shape and device of the parameter, to start from
            where they round to it; copied. ``lower`` returns them. Not for ``"stochastic"``.
        generator: for ``"stochastic"``, of the device of the parameters. By default each device has one of
            its own that starts from a fixed seed, so that replicas on several ranks round alike.

    Raises:
        SettingError: unknown ``updates``; an optimizer that is held already, or has no parameter in a low
            format; a parameter that comes twice; originals or a generator that do not fit.
        UnsupportedError: an optimizer for sparse gradients or a differentiable one; a tensor subclass other
            than DTensor.

    Source: masters: Micikevicius et al. 2018, arXiv 1710.03740, section 3.1. Kahan summation and stochastic
    rounding of weights: Zamirai et al. 2020, arXiv 2010.06192, algorithms 2 and 3.
    """
    keeper = _keeper(updates, generator)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(f"expected an optimizer to hold, got {type(optimizer).__name__}")
    if held_by(optimizer) is not None:
        raise SettingError(
            f"this {type(optimizer).__name__} is held already: call remove() on its handle before holding it "
            "another way"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError("SparseAdam takes sparse gradients, held weights dense ones: use Adam")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError("held weights cannot be differentiated through: set differentiable=False")
    if originals is not None and isinstance(keeper, Stochastic):
        raise SettingError(
            'updates="stochastic" keeps nothing of the originals: leave them out, or use "masters" or "kahan"'
        )
    return HeldWeights(optimizer, keeper, originals or {})


def held_by(optimizer: torch.optim.Optimizer) -> HeldWeights | None:
    """The handle of a held optimizer, or None."""
    reference = _HELD.get(optimizer)
    return reference() if reference is not None else None


def _refuse_copy(_: Any) -> Any:
    raise SettingError(
        "a held optimizer can be neither copied nor pickled: save its state_dict() and that of its handle, "
        "copy the model, make an optimizer for the copy, hold it, and load both"
    )


def _keeper(updates: str, generator: torch.Generator | None) -> Keeper:
    keepers: list[Keeper] = [Masters(), Kahan(), Stochastic(generator)]
    for keeper in keepers:
        if keeper.name == updates:
            if generator is not None and not isinstance(keeper, Stochastic):
                raise SettingError(f'updates="{updates}" draws no random numbers: leave out the generator')
            return keeper
    known = [keeper.name for keeper in keepers]
    raise SettingError(f'updates="{updates}" is no way to keep updates. {near_names(str(updates), known)}')


class HeldWeights:
    """The handle of a held optimizer: made by ``hold``, undone by ``remove``.

    Gradients belong to the low parameters, and ``optimizer.zero_grad()`` clears them there. A step finds
    them there and leaves them there, unless ``take_gradients`` was called.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        keeper: Keeper,
        originals: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        self.optimizer = optimizer
        self._keeper = keeper
        self._pairs: list[Pair] = []
        # Called when a step is made and not yet written; what they return is called when it is.
        self.watchers: list[Watcher] = []
        self._adopt(originals)
        if not self._pairs:
            raise SettingError(
                f"no parameter of this {type(optimizer).__name__} is in bfloat16 or float16, so there is "
                "nothing to hold: lower the model first, with narrowcast.weights.lower"
            )
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._zero_grad_of_instance = vars(optimizer).get("zero_grad")
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        optimizer.holds_low_weights = True  # type: ignore[attr-defined]
        # A copy would have the working parameters and nobody to write them back: it would train nothing.
        optimizer.__deepcopy__ = optimizer.__reduce_ex__ = _refuse_copy  # type: ignore[attr-defined,method-assign]
        begin_answering(optimizer, self._pairs)
        _HELD[optimizer] = weakref.ref(self)

    @property
    def updates(self) -> str:
        """``"masters"``, ``"kahan"`` or ``"stochastic"``."""
        return self._keeper.name

    @property
    def parameters(self) -> list[tuple[torch.Tensor, torch.nn.Parameter]]:
        """Each low parameter with the float32 one that the optimizer has in its place, in its order."""
        self._adopt({})
        return [(pair.low, pair.working) for pair in self._pairs]

    def take_gradients(self, *, reuse: bool = False) -> None:
        """Add the low gradients to the working parameters' float32 ``.grad`` and set the low ones to None.

        For accumulation over micro-batches in float32, call it after each backward; before unscaling,
        clipping or checking the gradients that the step will use, call it once. Values are widened, exact,
        and otherwise left as they are: not unscaled, NaN and infinities kept. What was taken is used up by
        the next step that is made, and cleared by ``optimizer.zero_grad()``, not by the model's.

        Args:
            reuse: keep the memory of float32 gradients on the CPU from step to step, 4 bytes an element: to
                get it anew from the system takes ten times as long as to fill it. What somebody else still
                holds, as a gradient that was put aside, is not written to.

        Raises:
            UnsupportedError: a gradient is sparse. Nothing was taken then.
        """
        self._adopt({})
        take(self._pairs, lend=False, reuse=reuse)

    def full_values(self) -> dict[torch.Tensor, torch.Tensor]:
        """The float32 value of each low parameter, as new tensors: the master, low plus residual, or low."""
        self._adopt({})
        values = {}
        with torch.no_grad():
            for pair in self._pairs:
                values[pair.low] = torch.empty_like(pair.low, dtype=torch.float32).detach()
                local(values[pair.low]).copy_(self._value(pair))
        return values

    def state_dict(self) -> dict[str, Any]:
        """What is kept between steps beside the low parameters and the optimizer's state.

        A dict of strings, lists and tensors that ``torch.load(weights_only=True)`` reads. The tensors are
        the live ones, as in ``Optimizer.state_dict``. Gradients that were taken and not used are not in it.
        """
        self._adopt({})
        with torch.no_grad():
            self._settle()
            if isinstance(self._keeper, Masters):
                # Without a write to the low parameters, which a graph may have saved for its backward.
                self._open()
                for pair in self._pairs:
                    pair.opened = False
            return _checkpoint.saved(self._keeper, self._pairs)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state in, so that training goes on bit for bit, before or after model and optimizer load.

        Masters are written into the low parameters too. A residual counts where the low parameter, as it is
        at the next step, is the nearest number to their sum.

        Raises:
            SettingError: other updates, another number of parameters, other shapes or formats; or random
                generators of devices that no held parameter is on. Nothing was changed then.
        """
        self._adopt({})
        with torch.no_grad():
            _checkpoint.load(self._keeper, self._pairs, state)

    def remove(self) -> None:
        """Give the optimizer its low parameters back, with its state rounded to their format.

        Gradients that were taken go back to the low parameters, rounded to nearest. What was kept is lost.
        """
        if held_by(self.optimizer) is not self:
            return
        with torch.no_grad():
            self._settle()
            untake(self._pairs)
        low_of = {pair.working: pair.low for pair in self._pairs}
        for group in self.optimizer.param_groups:
            group["params"][:] = [low_of.get(parameter, parameter) for parameter in group["params"]]
        for pair in self._pairs:
            narrow_state(self.optimizer, pair.working, pair.low)
        for hook in self._hooks:
            hook.remove()
        if vars(self.optimizer).get("zero_grad") == self._zero_grad:
            del self.optimizer.zero_grad
            if self._zero_grad_of_instance is not None:
                self.optimizer.zero_grad = self._zero_grad_of_instance  # type: ignore[method-assign]
        del self.optimizer.holds_low_weights  # type: ignore[attr-defined]
        end_answering(self.optimizer)
        del self.optimizer.__deepcopy__  # type: ignore[attr-defined]
        del self.optimizer.__reduce_ex__
        del _HELD[self.optimizer]

    # ---- parameters

    def _adopt(self, originals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Hold every parameter in a low format that the optimizer has and that is not held yet."""
        found = [
            (group["params"], position, parameter)
            for group in self.optimizer.param_groups
            for position, parameter in enumerate(group["params"])
            if parameter.dtype in LOW_DTYPES
        ]
        seen = {pair.low for pair in self._pairs} if found else set()
        for _, _, low in found:
            check_parameter(low, seen, originals.get(low))
            seen.add(low)
        with torch.no_grad():
            pairs = [self._paired(low, originals.get(low)) for _, _, low in found]
        for (parameters, position, low), pair in zip(found, pairs, strict=True):
            # In place, since an optimizer may hold the list itself (LBFGS does).
            parameters[position] = pair.working
            widen_state(self.optimizer, low, pair.working)
        self._pairs += pairs

    def _paired(self, low: torch.Tensor, original: torch.Tensor | None) -> Pair:
        working = torch.nn.Parameter(low.detach().to(torch.float32), requires_grad=low.requires_grad)
        for name, value in vars(low).items():
            # Marks that users put on parameters for their optimizers to read.
            vars(working).setdefault(name, value)
        pair = Pair(low, working, seen=None)  # .data too may be written to until the first step
        full = local(working).detach()
        if original is not None:
            full = _agreed(local(original).detach(), local(low))
        self._keeper.start(pair, full)
        if self._keeper.releases:
            release(pair)
        return pair

    def _value(self, pair: Pair) -> torch.Tensor:
        value = local(pair.working) if pair.opened else self._keeper.value(pair)
        return _agreed(value, local(pair.low)) if pair.written_by_others else value

    # ---- one step

    def _open(self) -> None:
        """Bring the values into the working parameters; where they are there already, leave them."""
        for pair in self._pairs:
            if pair.written_by_others or (self._keeper.releases and not pair.opened):
                value = self._value(pair)
                if self._keeper.releases:
                    local(pair.working).data = value
                else:
                    local(pair.working).copy_(value)
            pair.opened = True
            pair.seen = version_of(pair.low)

    def _write(self) -> list[Pair]:
        opened = [pair for pair in self._pairs if pair.opened]
        self._keeper.write(opened)
        for pair in opened:
            pair.seen = version_of(pair.low)
        return opened

    def _close(self) -> None:
        for pair in self._write():
            if self._keeper.releases:
                release(pair)
            pair.opened = False

    def _settle(self) -> None:
        """Bring a step that raised to its end."""
        if any(pair.opened for pair in self._pairs):
            self._open()
            self._close()

    @untraced
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not is_outermost_step(optimizer):
            return None
        self._adopt({})
        require_dense(self._pairs)
        with torch.no_grad():
            self._open()
            take(self._pairs, lend=True)
        # torch hands the optimizer itself as the first argument.
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._evaluated(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._evaluated(args[1]), *args[2:]), kwargs
        return None

    def _evaluated(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            with torch.no_grad():
                self._write()
                give_back(self._pairs)
            loss = closure()
            with torch.no_grad():
                self._open()
                take(self._pairs, lend=True)
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
                    f"{tuple(pair.low.shape)} itself, not through param_groups, so that its update would be "
                    "lost: make the optimizer read its parameters from param_groups, or do not hold it"
                )
        with torch.no_grad():
            finish = [watcher() for watcher in self.watchers]
            self._close()
            spend(self._pairs)
            for finished in finish:
                finished()

    @untraced
    def _zero_grad(self, set_to_none: bool = True) -> None:
        if self._zero_grad_of_instance is not None:
            self._zero_grad_of_instance(set_to_none)
        else:
            type(self.optimizer).zero_grad(self.optimizer, set_to_none)
        clear(self._pairs, set_to_none=set_to_none)


def _agreed(full: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """``full`` where it rounds to ``low``, and ``low`` elsewhere."""
    return torch.where(full.to(low.dtype) == low, full, low.to(torch.float32))
