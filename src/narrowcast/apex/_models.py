"""Models under O0, O2 and O3: weights cast in place, inputs and outputs at each call, float32 exported."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowcast.apex._levels import LOW_DTYPES, Properties
from narrowcast.apex._masters import keep_masters
from narrowcast.apex._state import amp_state, say
from narrowcast.apex._torch_internals import REPLICATE, replica_of, version_of
from narrowcast.casting import cast_floating
from narrowcast.errors import AmpError
from narrowcast.weights import is_batch_or_instance_norm, lower

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def check_models(models: list[torch.nn.Module]) -> None:
    """Refuse what amp cannot start from.

    Raises:
        AmpError: a model that is wrapped for several devices already, or that holds half tensors.
    """
    for model in models:
        if isinstance(model, _PARALLEL):
            raise AmpError(
                f"expected a model that is not wrapped yet, got a {type(model).__name__}: wrap what "
                "amp.initialize returns"
            )
        if not amp_state.allow_incoming_model_not_fp32:
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
    """A model that was cast; ``undo`` brings its functions and its weights' formats back.

    Attributes:
        originals: the float32 values of the weights that were cast down, by weight, until they are dropped.
    """

    def __init__(self, model: torch.nn.Module, properties: Properties) -> None:
        self._model = weakref.ref(model)
        self.originals: dict[torch.Tensor, torch.Tensor] = {}
        self._before: dict[str, tuple[torch.dtype, torch.dtype]] = {}  # by name: what it was, and is
        self._handles: list[Any] = []
        inputs, outputs = properties.cast_model_type, properties.cast_model_outputs
        if inputs is not None:
            self._cast_weights(model, inputs, bool(properties.keep_batchnorm_fp32))
            outputs = outputs or torch.float32
            self._handles += keep_masters(model)
            export = _Export()
            modules: Any = model.modules()
            self._handles += [module.register_state_dict_post_hook(export) for module in modules]
            root: Any = model
            self._handles.append(root.register_load_state_dict_pre_hook(export.forget))
        self._forward: weakref.ref[_CastForward] | None = None
        if outputs is not None:
            forward = _CastForward(model, inputs, outputs, vars(model).get("forward"))
            self._forward, vars(model)["forward"] = weakref.ref(forward), forward
            vars(model)[REPLICATE] = _Replicate(model)

    def _cast_weights(self, model: torch.nn.Module, dtype: torch.dtype, keep_batchnorm: bool) -> None:
        before = {name: tensor.dtype for name, tensor in _tensors_of(model).items()}
        if dtype in LOW_DTYPES:
            keep = is_batch_or_instance_norm if keep_batchnorm else None
            self.originals = lower(model, dtype, keep_fp32=keep)
        else:
            model.to(dtype)
        self._before = {
            name: (before[name], tensor.dtype)
            for name, tensor in _tensors_of(model).items()
            if tensor.dtype != before[name]
        }

    def undo(self, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """As before ``initialize``, but for the weights' values, which are those of now, or in ``values``."""
        for handle in self._handles:
            handle.remove()
        model = self._model()
        if model is None:
            return
        its, ours = vars(model), None if self._forward is None else self._forward()
        is_there = its.get("forward") is ours
        if ours is not None and is_there:
            del its["forward"]
            its.pop(REPLICATE, None)
            if ours.before is not None:
                its["forward"] = ours.before
        with torch.no_grad():
            for name, tensor in _tensors_of(model).items():
                was, became = self._before.get(name, (None, None))
                if was is None or tensor.dtype != became:
                    continue  # of another module by now, or cast by somebody else
                gradient, tensor.grad = tensor.grad, None
                tensor.data = values.get(tensor, tensor).detach().to(was, copy=True)
                if gradient is not None:
                    tensor.grad = gradient.to(was)


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each once, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class _CastForward:
    """Stands for the ``forward`` of one model; copied and saved along with it."""

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: torch.dtype | None,
        outputs: torch.dtype,
        before: Callable[..., Any] | None = None,
    ) -> None:
        self._model = model
        self.inputs = inputs
        self.outputs = outputs
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inputs is not None:
            args, kwargs = _cast(args, self.inputs), _cast(kwargs, self.inputs)
        if self.before is None:
            output = type(self._model).forward(self._model, *args, **kwargs)
        else:
            output = self.before(*args, **kwargs)
        return cast_floating(output, self.outputs, only=_FLOATING)


class _Replicate:
    """Makes the copies of one model for ``DataParallel``, whose ``forward`` is to be of the copy."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __call__(self) -> torch.nn.Module:
        replica: torch.nn.Module = replica_of(self._model)
        its = vars(replica)
        del its[REPLICATE]
        ours = its["forward"]
        if isinstance(ours, _CastForward):
            its["forward"] = _CastForward(replica, ours.inputs, ours.outputs, ours.before)
        return replica


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    """Floating tensors wherever they are; a batch of an unknown class by its own ``to``, as in apex."""
    cast = cast_floating(arguments, dtype, only=_FLOATING)
    if isinstance(cast, dict):
        return {name: _by_its_own(value, dtype) for name, value in cast.items()}
    return tuple(_by_its_own(value, dtype) for value in cast)


def _by_its_own(value: Any, dtype: torch.dtype) -> Any:
    known = isinstance(value, torch.Tensor | tuple | list | dict | torch.nn.Module | type)
    return value if known or not callable(getattr(value, "to", None)) else value.to(dtype)


class _Export:
    """A hook of ``state_dict``: half tensors are handed out in float32; live ones, as they are."""

    def __init__(self) -> None:
        self._handed_out: dict[str, _Copy] = {}
        self._said = False

    def __call__(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, live in (*module._parameters.items(), *module._buffers.items()):
            value = state.get(prefix + name)
            if live is None or live.dtype not in LOW_DTYPES or value is None or value.requires_grad:
                continue
            state[prefix + name] = value = value.to(torch.float32)
            before = self._handed_out.get(prefix + name)
            if before is not None and before.was_written_in_vain():
                self._say_in_vain()
            self._handed_out[prefix + name] = _Copy(value)

    def forget(self, *_: Any) -> None:
        """What was handed out comes back by ``load_state_dict``."""
        self._handed_out.clear()

    def _say_in_vain(self) -> None:
        if not self._said:
            self._said = True
            say(
                "amp: what state_dict() handed out was written to, as an average of weights is kept, and "
                "then dropped: of half weights these are copies, so that nothing reaches the model; write to "
                "its parameters() under torch.no_grad(), or load_state_dict what was written"
            )

    def __reduce__(self) -> tuple[type[_Export], tuple[()]]:
        return _Export, ()  # a copy of the model has handed nothing out


class _Copy:
    """What remains of a tensor that was handed out: whether anybody has it, and how often it was written."""

    def __init__(self, value: torch.Tensor) -> None:
        self._reference = weakref.ref(value)
        self._counter = value.detach()  # counts with the value, and keeps none of its memory
        self._counter.data = torch.empty(0)
        self._version = version_of(value)

    def was_written_in_vain(self) -> bool:
        return self._reference() is None and version_of(self._counter) != self._version
