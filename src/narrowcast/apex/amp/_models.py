"""Models under O0, O2 and O3: cast weights, inputs and outputs, fp32 masters, exported states.

In apex a model's ``state_dict()`` has the half weights, cast to float32, so that a resumed O2 run loses the
low bits of its masters. Here it has the masters, so that the documented calls of apex save the whole state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.apex.amp._levels import LOW_DTYPES, Properties
from narrowcast.apex.amp._process_state import process_state
from narrowcast.casting import cast_floating
from narrowcast.errors import AmpError
from narrowcast.weights import HeldWeights, is_batch_or_instance_norm, lower

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


# ---- what is refused


def check_models(models: list[torch.nn.Module], properties: Properties) -> None:
    """Refuse models that are half or wrapped for several devices already, or that cannot be cast."""
    for model in models:
        if isinstance(model, _PARALLEL):
            raise AmpError(
                f"expected a model that is not wrapped yet, got a {type(model).__name__}: wrap what "
                "amp.initialize returns"
            )
        if not process_state.allow_incoming_model_not_fp32:
            _refuse_half("parameter", model.named_parameters())
            _refuse_half("buffer", model.named_buffers())
        if properties.cast_model_type is not None:
            _refuse_torchscript(model)


def _refuse_half(kind: str, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in named_tensors:
        if tensor.dtype in LOW_DTYPES:
            raise AmpError(
                f"expected a model in float32, got {kind} {name!r} in "
                f"{str(tensor.dtype).removeprefix('torch.')}: leave out .half() and .bfloat16(), "
                "amp.initialize casts what the level needs; to start from half nevertheless set "
                "amp._amp_state.allow_incoming_model_not_fp32 = True before"
            )


def _refuse_torchscript(model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise AmpError(
                f"expected no TorchScript where weights are cast, got {path or 'the model'}, whose "
                "state_dict cannot be followed: use O1, or the module before torch.jit"
            )


# ---- casts of weights, inputs and outputs


def cast_model(model: torch.nn.Module, properties: Properties) -> dict[torch.Tensor, torch.Tensor]:
    """Cast the weights of a model, and from now on its inputs and outputs, as the level asks.

    Returns:
        Each weight that was cast down -> its float32 value from before, for the masters.
    """
    originals: dict[torch.Tensor, torch.Tensor] = {}
    model_type, output_type = properties.cast_model_type, properties.cast_model_outputs
    if model_type is not None:
        output_type = output_type or torch.float32
        if model_type in LOW_DTYPES:
            if properties.keep_batchnorm_fp32:
                originals = lower(model, model_type, keep_fp32=is_batch_or_instance_norm)
            else:
                originals = lower(model, model_type, keep_fp32=None)
        else:
            model.to(model_type)
        # The hooks are on every module, since scripts also save and load parts of a model.
        modules: Any = model.modules()  # the methods that register them have no types
        for module in modules:
            module.register_state_dict_post_hook(_export)
            module.register_load_state_dict_pre_hook(_load_masters)
    if output_type is not None:
        vars(model)["forward"] = _CastForward(model, model_type, output_type, vars(model).get("forward"))
    return originals


@dataclass(eq=False, repr=False)
class _CastForward:
    """Replace the ``forward`` of one model.

    Copies and pickles of the model contain this object. Its class and attributes therefore keep their names.
    """

    _model: torch.nn.Module
    inputs: torch.dtype | None
    outputs: torch.dtype
    before: Callable[..., Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inputs is not None:
            inputs = self.inputs
            args = tuple(_cast_object(value, inputs) for value in args)
            kwargs = {name: _cast_object(value, inputs) for name, value in kwargs.items()}
            args, kwargs = cast_floating((args, kwargs), inputs, only=_FLOATING)
        if self.before is None:
            output = type(self._model).forward(self._model, *args, **kwargs)
        else:
            output = self.before(*args, **kwargs)
        return cast_floating(output, self.outputs, only=_FLOATING)


def _cast_object(value: Any, dtype: torch.dtype) -> Any:
    """Cast an object that has a method ``to``, such as a batch of another library, as apex does."""
    if isinstance(value, torch.Tensor | tuple | list | dict | torch.nn.Module | type):
        return value
    return value.to(dtype) if callable(getattr(value, "to", None)) else value


# ---- masters

# Keyed by the id of the half weight, which stays alive as long as its Masters.
_masters_by_weight: weakref.WeakValueDictionary[int, Masters] = weakref.WeakValueDictionary()


class Masters:
    """The float32 masters of one held optimizer: ``pairs`` of a half weight and its master."""

    def __init__(self, held: HeldWeights) -> None:
        self.held = held
        self.pairs: list[tuple[torch.Tensor, torch.nn.Parameter]] = []
        self._positions: dict[int, int] = {}

    def refresh(self) -> None:
        """Add the half weights that the optimizer got since the last call."""
        self.pairs = self.held.parameters
        for position in range(len(self._positions), len(self.pairs)):
            low, _ = self.pairs[position]
            self._positions[id(low)] = position
            _masters_by_weight[id(low)] = self

    def full_value(self, low: torch.Tensor) -> torch.Tensor:
        """Return the master, but the weight in float32 where it was changed without its master."""
        master = self.pairs[self._positions[id(low)]][1].detach()
        weight = low.detach()
        return torch.where(master.to(weight.dtype) == weight, master, weight.to(torch.float32))

    def set(self, low: torch.Tensor, value: torch.Tensor) -> None:
        """Write a value to a master, and the rounded value to its weight."""
        self.held.set_values({self._positions[id(low)]: value})


def _export(module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Hook of each module: replace half tensors in its ``state_dict()`` by masters or float32 copies."""
    for name, live in (*module._parameters.items(), *module._buffers.items()):
        value = state.get(prefix + name)
        # state_dict(keep_vars=True) returns the live tensor, and keeps it.
        if live is None or live.dtype not in LOW_DTYPES or value is None or value is live:
            continue
        masters = _masters_by_weight.get(id(live))
        if masters is None:
            state[prefix + name] = value.to(torch.float32)
        else:
            state[prefix + name] = masters.full_value(live)


def _load_masters(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Hook of each module: load the masters in full precision, and their weights rounded to nearest."""
    # After this hook torch loads the weights again, and rounds them to the same numbers.
    for name, weight in module.named_parameters(recurse=False):
        masters = _masters_by_weight.get(id(weight))
        value = state.get(prefix + name)
        if masters is not None and isinstance(value, torch.Tensor) and value.shape == weight.shape:
            masters.set(weight, value)
