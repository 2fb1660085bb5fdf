"""Models under O0, O2 and O3: cast weights, inputs and outputs, fp32 masters, exported states.

apex exports the half weights, widened, so that a resumed O2 run loses the low bits of its masters. Here the
exported weights are the masters, so that the documented calls of apex save the whole state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.apex.amp._amp_state import _amp_state
from narrowcast.apex.amp._levels import LOW_DTYPES, Properties
from narrowcast.casting import cast_floating
from narrowcast.errors import AmpError
from narrowcast.weights import HeldWeights, is_batch_or_instance_norm, lower

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def check_models(models: list[torch.nn.Module]) -> None:
    """Refuse models that are wrapped for several devices already, or that hold half tensors."""
    for model in models:
        if isinstance(model, _PARALLEL):
            raise AmpError(
                f"expected a model that is not wrapped yet, got a {type(model).__name__}: wrap what "
                "amp.initialize returns"
            )
        if not _amp_state.allow_incoming_model_not_fp32:
            _refuse_half(model)


def _refuse_half(model: torch.nn.Module) -> None:
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.dtype in LOW_DTYPES:
                raise AmpError(
                    f"expected a model in float32, got {kind} {name!r} in "
                    f"{str(tensor.dtype).removeprefix('torch.')}: leave out .half() and .bfloat16(), "
                    "amp.initialize casts what the level needs; to start from half nevertheless set "
                    "amp._amp_state.allow_incoming_model_not_fp32 = True before"
                )


class CastModel:
    """A model whose weights, inputs and outputs are cast; ``undo`` restores its methods and formats.

    Attributes:
        originals: the float32 values of the weights that were cast down, by weight, until they are dropped.
    """

    def __init__(self, model: torch.nn.Module, properties: Properties) -> None:
        self._model = weakref.ref(model)
        self.originals: dict[torch.Tensor, torch.Tensor] = {}
        self._formats: dict[str, tuple[torch.dtype, torch.dtype]] = {}  # by name: before and after the cast
        self._handles: list[Any] = []
        inputs, outputs = properties.cast_model_type, properties.cast_model_outputs
        if inputs is not None:
            self._cast_weights(model, inputs, bool(properties.keep_batchnorm_fp32))
            outputs = outputs or torch.float32
            modules: Any = model.modules()
            for module in modules:
                self._handles.append(module.register_state_dict_post_hook(_export))
                self._handles.append(module.register_load_state_dict_pre_hook(_load_masters))
        self._forward: weakref.ref[_CastForward] | None = None
        if outputs is not None:
            forward = _CastForward(model, inputs, outputs, vars(model).get("forward"))
            self._forward, vars(model)["forward"] = weakref.ref(forward), forward

    def _cast_weights(self, model: torch.nn.Module, dtype: torch.dtype, keep_batchnorm: bool) -> None:
        for path, part in model.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise AmpError(
                    f"expected no TorchScript where weights are cast, got {path or 'the model'}, whose "
                    "state_dict cannot be followed: use O1, or the module before torch.jit"
                )
        before = {name: tensor.dtype for name, tensor in _named_tensors(model).items()}
        if dtype in LOW_DTYPES:
            keep = is_batch_or_instance_norm if keep_batchnorm else None
            self.originals = lower(model, dtype, keep_fp32=keep)
        else:
            model.to(dtype)
        self._formats = {
            name: (before[name], tensor.dtype)
            for name, tensor in _named_tensors(model).items()
            if tensor.dtype != before[name]
        }

    def undo(self, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Restore the model as before ``initialize``, with its present weights or those in ``values``."""
        for handle in self._handles:
            handle.remove()
        model = self._model()
        if model is None:
            return
        ours = None if self._forward is None else self._forward()
        is_in_place = vars(model).get("forward") is ours
        if ours is not None and is_in_place:
            del vars(model)["forward"]
            if ours.before is not None:
                vars(model)["forward"] = ours.before
        with torch.no_grad():
            for name, tensor in _named_tensors(model).items():
                was, became = self._formats.get(name, (None, None))
                if was is None or tensor.dtype != became:
                    continue  # replaced or cast by other code since
                gradient, tensor.grad = tensor.grad, None
                tensor.data = values.get(tensor, tensor).detach().to(was, copy=True)
                if gradient is not None:
                    tensor.grad = gradient.to(was)


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, each once, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@dataclass(eq=False, repr=False)
class _CastForward:
    """Replaces the ``forward`` of one model; copied and saved along with it."""

    _model: torch.nn.Module
    inputs: torch.dtype | None
    outputs: torch.dtype
    before: Callable[..., Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inputs is not None:
            args, kwargs = _cast(args, self.inputs), _cast(kwargs, self.inputs)
        if self.before is None:
            output = type(self._model).forward(self._model, *args, **kwargs)
        else:
            output = self.before(*args, **kwargs)
        return cast_floating(output, self.outputs, only=_FLOATING)


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    """Cast floating tensors in any nesting, and objects of other classes by their own ``to``, as in apex."""
    if isinstance(arguments, dict):
        arguments = {name: _cast_object(value, dtype) for name, value in arguments.items()}
    else:
        arguments = tuple(_cast_object(value, dtype) for value in arguments)
    return cast_floating(arguments, dtype, only=_FLOATING)


def _cast_object(value: Any, dtype: torch.dtype) -> Any:
    known = isinstance(value, torch.Tensor | tuple | list | dict | torch.nn.Module | type)
    return value if known or not callable(getattr(value, "to", None)) else value.to(dtype)


# ---- masters

# By the id of the half weight, which the holder keeps alive.
_masters_by_weight: weakref.WeakValueDictionary[int, Masters] = weakref.WeakValueDictionary()


class Masters:
    """The float32 masters of one held optimizer: ``pairs`` of a half weight and its master."""

    def __init__(self, held: HeldWeights) -> None:
        self.held = held
        self.pairs: list[tuple[torch.Tensor, torch.nn.Parameter]] = []
        self._places: dict[int, int] = {}

    def refresh(self) -> None:
        """Take in the parameters that were added to the optimizer."""
        self.pairs = self.held.parameters
        for place in range(len(self._places), len(self.pairs)):
            low, _ = self.pairs[place]
            self._places[id(low)] = place
            _masters_by_weight[id(low)] = self

    def full_value(self, low: torch.Tensor) -> torch.Tensor:
        """Return the master, and where the weight is not the rounded master, the weight, widened."""
        master = self.pairs[self._places[id(low)]][1].detach()
        weight = low.detach()
        return torch.where(master.to(weight.dtype) == weight, master, weight.to(torch.float32))

    def set(self, low: torch.Tensor, value: torch.Tensor) -> None:
        """Write a value to a master, and rounded to its weight."""
        self.held.set_values({self._places[id(low)]: value})

    def forget(self) -> None:
        """Leave the weights without masters."""
        for number in self._places:
            _masters_by_weight.pop(number, None)


def _export(module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Hook of each module: return float32 from ``state_dict()``."""
    for name, live in (*module._parameters.items(), *module._buffers.items()):
        value = state.get(prefix + name)
        # keep_vars=True asks for the live weight.
        if live is None or live.dtype not in LOW_DTYPES or value is None or value.requires_grad:
            continue
        masters = _masters_by_weight.get(id(live))
        state[prefix + name] = value.to(torch.float32) if masters is None else masters.full_value(live)


def _load_masters(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Hook of each module: set masters to loaded values in full, which weights get rounded to nearest."""
    # torch loads the weights after this hook. Their values round to the same numbers, so the masters stay.
    for name, weight in module.named_parameters(recurse=False):
        masters, value = _masters_by_weight.get(id(weight)), state.get(prefix + name)
        if masters is not None and isinstance(value, torch.Tensor) and value.shape == weight.shape:
            masters.set(weight, value)
