"""An optimizer as ``amp.initialize`` leaves it: with float32 masters, and steps that are left out."""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from narrowcast.apex._accumulation import Accumulation
from narrowcast.apex._findings import Finding, settle
from narrowcast.apex._levels import LOW_DTYPES, Properties
from narrowcast.apex._loss_scaler import LossScaler
from narrowcast.apex._masters import Masters
from narrowcast.apex._sharding import Places, Replaced, is_sharded, shared_out
from narrowcast.apex._state import say
from narrowcast.errors import AmpError
from narrowcast.gradients import SkipStep, closure_of, mark_as_stepped, step_or_restore
from narrowcast.weights import hold, lost_eps, refuse_scalers

_STASH = "_amp_stash"
# What scripts of apex call before they load masters from a checkpoint.
_MAKE_MASTERS = ("_amp_lazy_init", "_lazy_init_maybe_master_weights")
_numbers = itertools.count()
_active: weakref.WeakSet[PreparedOptimizer] = weakref.WeakSet()


class PreparedOptimizer:
    """One optimizer of one ``amp.initialize``, and what stands between its gradients and its next step.

    Attributes:
        optimizer: it; its ``step`` and ``zero_grad`` go through here.
        properties, loss_scalers: those of its ``initialize``.
        gradients: what becomes of its gradients in ``scale_loss`` blocks.
        findings: of blocks whose gradients were looked at, and nobody has read the answer yet.
        skip: why the next step is left out, in one line; None: it is not.
        in_block: whether a ``scale_loss`` block is open.
        losses: how many losses of the old handle's there were since the last step.
        number: larger for those that were prepared later.
        lazy_init_called: without effect; scripts of apex set it where they load a checkpoint.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        properties: Properties,
        loss_scalers: list[LossScaler],
        originals: Mapping[torch.Tensor, torch.Tensor],
        models: Sequence[torch.nn.Module] = (),
    ) -> None:
        self.optimizer = optimizer
        self.properties = properties
        self.loss_scalers = loss_scalers
        self.gradients = Accumulation(optimizer)
        self.findings: list[Finding] = []
        self.skip: str | None = None
        self.in_block = False
        self.losses = 0
        self.number = next(_numbers)
        self.lazy_init_called = False
        self._said = False
        self._active = True
        self._before: dict[str, tuple[Any, Any]] = {}
        self._places: Places | None = None
        setattr(optimizer, _STASH, self)
        if properties.enabled:
            self._places = Places(models, optimizer)
            try:
                self._begin(originals)
            except BaseException:
                self.undo()
                raise

    def _begin(self, originals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        # Before there are masters, whose own zero_grad then stands in front and goes when they go.
        self._wrap("step", self._step)
        self._wrap("zero_grad", self._zero_grad)
        for name in _MAKE_MASTERS:
            self.offer(name, self.refresh)
        self.refresh(originals)
        self._say_that_eps_is_lost()
        _recast_state(self.optimizer)
        _active.add(self)

    @property
    def scales(self) -> bool:
        """Whether losses are scaled, or gradients looked at: everywhere but in plain float32 training."""
        half = self.properties.patch_torch_functions or self.properties.cast_model_type in LOW_DTYPES
        dynamic = self.properties.loss_scale == "dynamic"
        return bool(self.properties.master_weights or half or dynamic or self.properties.loss_scale != 1.0)

    def refresh(self, originals: Mapping[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Give masters to half parameters that have none, where this level has masters."""
        if not self.properties.master_weights:
            return
        if self.gradients.masters is None:
            if not any(
                p.dtype in LOW_DTYPES for group in self.optimizer.param_groups for p in group["params"]
            ):
                return
            self.gradients.masters = Masters(hold(self.optimizer, originals=originals))
            refuse_scalers(self.optimizer, functools.partial(_no_scaler, self._name))
        self.gradients.masters.refresh()

    def after_first_block(self, scale: float) -> None:
        """Go on with the parameters that ``fully_shard`` has made since ``initialize``; later without effect.

        Parameters of the models that no optimizer has keep gradients that are scaled, which is said.

        Raises:
            AmpError: the optimizer has stepped before they were made.
        """
        places = self._places
        if places is None:
            return
        new = places.replaced()
        if lost := places.lost(new):
            say(
                f"amp: {lost} parameters of this {self._name} are in no model any more, so that what it does "
                "trains nothing there: FullyShardedDataParallel needs an optimizer that was made after it, "
                "fully_shard does not"
            )
        if new:
            self._go_on_with(new)
        self._places = None
        if scale != 1.0:
            self._say_what_stays_scaled(places, scale)

    def _go_on_with(self, new: Replaced) -> None:
        masters = self.gradients.masters
        pairs = [] if masters is None else [pair for pair in masters.pairs if pair[0] in new]
        if any(parameter in self.optimizer.state for parameter in (*new, *(master for _, master in pairs))):
            raise AmpError(
                f"fully_shard came after this {self._name} had stepped, and its state is not sharded: call "
                "fully_shard right after amp.initialize"
            )
        values: dict[torch.Tensor, torch.Tensor] = {}
        if masters is not None:
            values = {new[low]: shared_out(masters.full_value(low), new[low]) for low, _ in pairs}
            masters.held.remove()
            masters.forget()
            self.gradients.masters = None
        for group in self.optimizer.param_groups:
            group["params"][:] = [new.get(parameter, parameter) for parameter in group["params"]]
        self.refresh(values)

    def _say_what_stays_scaled(self, places: Places, scale: float) -> None:
        stepped = {id(leaf) for one in _active for leaf in one.gradients.leaves}
        left = [
            p
            for p in places.parameters()
            if p.grad is not None and id(p) not in stepped and not is_sharded(p)  # whose turn comes
        ]
        if left:
            say(
                f"amp: {len(left)} parameters of the models are in no optimizer that amp.initialize was "
                f"given, and their gradients stay scaled by {scale:g}: set requires_grad=False on them, or "
                "give amp.initialize their optimizer, and leave them out of clipping"
            )

    def say_that_gradients_are_scaled(self) -> None:
        """Once, where they are read within a block."""
        if self.in_block and not self._said:
            self._said = True
            say(
                "amp: master_params was read inside a scale_loss block, where gradients are scaled, and "
                "those of masters are not there yet: clip after the block"
            )

    def _say_that_eps_is_lost(self) -> None:
        eps = lost_eps(self.optimizer)
        if eps is not None:
            say(
                f"amp: {self._name} keeps its state in float16 with the weights, where its eps of {eps:g} is "
                "0 and weights become NaN: give it eps=1e-4, or choose opt_level='O2'"
            )

    def undo(self) -> dict[torch.Tensor, torch.Tensor]:
        """The optimizer as it was, with its state of now; the float32 values of weights that had masters.

        Without effect the second time.
        """
        if not self._active:
            return {}
        self._active = False
        _active.discard(self)
        values = self._without_masters()
        for name, (wrapper, instance) in self._before.items():
            if vars(self.optimizer).get(name) == wrapper:
                delattr(self.optimizer, name)
                if instance is not None:
                    setattr(self.optimizer, name, instance)
        delattr(self.optimizer, _STASH)
        return values

    def _without_masters(self) -> dict[torch.Tensor, torch.Tensor]:
        masters = self.gradients.masters
        if masters is None:
            return {}
        self.gradients.forget_what_is_left()
        self.refresh()
        values = {low: masters.full_value(low) for low, _ in masters.pairs}
        for low, value in values.items():
            low.grad = None
            if not is_sharded(low):  # which cannot change its format
                # In float32 before the state goes back to it, which would else be rounded to half.
                low.data = value
        masters.held.remove()
        masters.forget()
        return values

    # ---- what stands for the optimizer's own methods

    def _wrap(self, name: str, call: Callable[..., Any]) -> None:
        instance, inner = vars(self.optimizer).get(name), getattr(self.optimizer, name)

        @functools.wraps(inner)
        def wrapper(_: Any, *args: Any, **kwargs: Any) -> Any:
            return call(inner, args, kwargs) if self._active else inner(*args, **kwargs)

        # A method, since learning-rate schedulers take its function.
        method = types.MethodType(wrapper, self.optimizer)
        self._before[name] = (method, instance)
        setattr(self.optimizer, name, method)

    def _zero_grad(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.gradients.forget_what_is_left()
        self.gradients.scaled_by = self.gradients.strange = None
        return inner(*args, **kwargs)

    def _step(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.losses = 0
        if self.in_block:
            raise AmpError(
                f"{self._name}.step() came inside a scale_loss block, where gradients are scaled: call it "
                "after the block"
            )
        settle(self.findings)
        closure = closure_of(args, kwargs)
        if closure is not None:
            self._check_closure()
        if self.skip is not None:
            return self._skip()
        if self.gradients.scaled_by is not None:
            raise AmpError(
                f"{self._name}.step() came while gradients are scaled by {self.gradients.scaled_by:g}, left "
                "so by scale_loss(..., delay_unscale=True): leave delay_unscale out for the last backward "
                "pass before a step, or call zero_grad() to drop them"
            )
        self.gradients.check_own()
        if closure is not None and self.scales:
            return self._step_with_closure(inner, args, kwargs, closure)
        masters = self.gradients.masters
        with (
            self.gradients.what_is_left_hidden(),
            nullcontext() if masters is None else masters.step(self._name),
        ):
            return inner(*args, **kwargs)

    def _check_closure(self) -> None:
        if self.properties.master_weights:
            raise AmpError(
                f"{self._name}.step(closure) cannot work on float32 masters, which closures do not see: "
                "step without a closure, or choose opt_level='O1'"
            )
        if self.skip is not None:
            raise AmpError(
                f"{self._name}.step(closure) came after a backward pass that overflowed outside of the "
                "closure, for which a step is left out: call zero_grad() and step() once, and make every "
                "gradient of this optimizer inside the closure"
            )

    def _skip(self) -> None:
        assert self.skip is not None
        say(self.skip)
        self.skip = None
        # model.zero_grad(), which many scripts call, does not reach them.
        self.gradients.drop_masters_gradients()
        mark_as_stepped(self.optimizer)

    def _step_with_closure(
        self, inner: Callable[..., Any], args: Any, kwargs: Any, closure: Callable[[], Any]
    ) -> Any:
        def evaluate() -> Any:
            loss = closure()
            settle(self.findings)
            if self.skip is not None:
                raise SkipStep(loss)
            return loss

        returned, skip = step_or_restore(self.optimizer, inner, args, kwargs, evaluate)
        if skip is not None:
            self._skip()
        return returned

    def offer(self, name: str, value: Any) -> None:
        """An attribute or a method more for the optimizer, until ``undo``."""
        self._before.setdefault(name, (value, vars(self.optimizer).get(name)))
        setattr(self.optimizer, name, self._before[name][0])

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__

    # ---- what scripts of apex look at

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """The half weights that have masters."""
        self.refresh()
        masters = self.gradients.masters
        return [] if masters is None else [low for low, _ in masters.pairs]

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """Their masters."""
        self.refresh()
        masters = self.gradients.masters
        return [] if masters is None else [master for _, master in masters.pairs]


def optimizer_of(given: Any) -> torch.optim.Optimizer:
    """The optimizer itself, or the one inside a wrapper that has it as ``optim``, as apex's LARC.

    Raises:
        AmpError: there is none.
    """
    for one in (given, getattr(given, "optim", None)):
        if isinstance(one, torch.optim.Optimizer):
            return one
    raise AmpError(f"expected a torch.optim.Optimizer, got {type(given).__name__}: give the optimizer itself")


def prepared(optimizer: torch.optim.Optimizer) -> PreparedOptimizer | None:
    """What ``amp.initialize`` made of this optimizer; None where it was not given one."""
    found = vars(optimizer).get(_STASH)
    return found if isinstance(found, PreparedOptimizer) else None


@contextmanager
def others_watched(named: Sequence[PreparedOptimizer], scale: float) -> Iterator[None]:
    """Remember of optimizers that are not named which of them got gradients inside."""
    before = [(one, one.gradients.writes()) for one in _active if one not in named]
    try:
        yield
    finally:
        for one, writes in before:
            if scale != 1.0 and not one.in_block and one.gradients.writes().since(writes):
                one.gradients.strange = scale


def _no_scaler(name: str) -> AmpError:
    return AmpError(
        f"a GradScaler cannot step this {name}, which amp.initialize gave float32 masters: it would look at "
        "their gradients, and the scaled ones are those of the half weights; use amp.scale_loss and "
        "optimizer.step(), or opt_level='O1'"
    )


def _recast_state(optimizer: torch.optim.Optimizer) -> None:
    """State that was there before the model was cast follows its parameters, as torch loads a state."""
    for parameter, state in optimizer.state.items():
        values = state.values() if isinstance(state, dict) else ()
        if isinstance(parameter, torch.Tensor) and any(
            isinstance(value, torch.Tensor)
            and value.shape == parameter.shape
            and value.is_floating_point()
            and value.dtype != parameter.dtype
            for value in values
        ):
            optimizer.load_state_dict(optimizer.state_dict())
            return
