"""``nc.bake``: for inference, weights stored in the format that their layers compute in."""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from narrowcast.casting.kernels._operators import LOW, compute_dtype
from narrowcast.casting.kernels._promotion import why_no_lstm
from narrowcast.casting.models._apply import Applied
from narrowcast.casting.models._module_calls import ModuleCall
from narrowcast.casting.models._tree import all_paths, scopes_by_path, undo_on_error
from narrowcast.casting.regions._warnings import stacklevel_outside
from narrowcast.casting.regions._weight_casts import drop_casts
from narrowcast.errors import PolicyError, SettingError, UnsupportedError
from narrowcast.policy import (
    Policy,
    Scope,
    dtype_of,
    format_name,
    overloads_of,
    resolve,
    resolved,
    with_fp32_weights,
)

_HANDLE = "_narrowcast_baked"


def bake(
    model: torch.nn.Module, policy: Policy | str, *, keep_fp32: bool = True, frozen_only: bool = False
) -> Baked:
    """Store weights of ``model`` in the format that their layers compute in, so that no call casts them.

    Call the model as before, without a region. It follows ``policy``, rules for modules included, and its
    outputs have the same bits as under ``nc.apply(model, policy)``. Stored are the weights and biases of
    linear layers, convolutions, recurrent layers, ``MultiheadAttention`` and transformers' ``Conv1D`` that
    the policy casts to one low format. Every other parameter stays in fp32 and is listed in ``handle.left``:
    embeddings, norms, weights that are tied or share memory, parameters that a module of another type uses,
    tensor subclasses. Call the model itself: a part that is called directly finds low weights and no region,
    and code that reads a stored weight itself gets the low values.

    Writes to parameters change the stored values. ``load_state_dict`` loads fp32 values and rounds them.
    Parameters stay the same objects. A copy of the model, by ``deepcopy`` or pickle, is baked on its own.
    Training is refused: ``optimizer.step()`` raises if a stored weight has a gradient.

    Args:
        model: any module on any device.
        policy: the name of a preset, a ``Policy``, or the path of one.
        keep_fp32: keep the fp32 values of stored weights for ``state_dict()`` and ``restore()``, which takes
            half as much memory again as the model in fp32. If a stored weight changed, its new value counts.
            Without it about half of the memory is freed: ``state_dict()`` has the low values, and
            ``restore()`` widens them, with a warning. Values are rounded to nearest even; NaN stays NaN, and
            values beyond the largest number of fp16 become infinite, as in every cast of a region.
        frozen_only: store only parameters that do not require gradients, such as the base weights under
            LoRA; the others train in fp32.

    Returns:
        The handle, with ``formats``, ``left`` and ``restore()``.

    Raises:
        PolicyError: not a module; an unknown policy, or one that holds low weights itself; a model that
            already has a policy or is baked.
        SettingError: ``keep_fp32`` or ``frozen_only`` is not a bool.
        UnsupportedError: a DistributedDataParallel whose parameters would be stored.

    Example::

        with nc.bake(model, "bf16") as handle, torch.inference_mode():
            logits = model(tokens)
    """
    for name, value in (("keep_fp32", keep_fp32), ("frozen_only", frozen_only)):
        if not isinstance(value, bool):
            raise SettingError(f"expected {name} to be True or False, got {value!r}")
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(f"expected a torch.nn.Module to bake, got {type(model).__name__}")
    policy = with_fp32_weights(policy)
    for path, module in model.named_modules():
        if baked(module) is not None:
            what = f"the part {path!r}" if path else f"this {type(model).__name__}"
            raise PolicyError(f"{what} is baked already: call restore() on its handle first")
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and not frozen_only:
            raise UnsupportedError(
                "DistributedDataParallel does not reduce gradients of weights that changed their format "
                "once, not even after restore(): bake a copy of the wrapped model, "
                "nc.bake(copy.deepcopy(model.module), policy), or pass frozen_only=True"
            )
    return Baked(model, policy, keep_fp32=keep_fp32, frozen_only=frozen_only)


def baked(model: torch.nn.Module) -> Baked | None:
    """Return the handle of a model that ``bake`` was called with, or of a copy; None for any other."""
    handle: Baked | None = vars(model).get(_HANDLE)
    if handle is None or handle._ended:
        return None
    return handle


class Baked:
    """The handle of a baked model. As a context manager it restores the model at its end.

    Attributes:
        policy: the policy that the model follows.
        formats: the path of each stored weight, and its format.
        left: the paths of the parameters that stay as they were.
    """

    def __init__(self, model: torch.nn.Module, policy: Policy, *, keep_fp32: bool, frozen_only: bool) -> None:
        self.policy = policy
        self._ended = False
        self._hook_handles: list[Any] = []
        self._calls: list[ModuleCall] = []
        self._stored: dict[torch.nn.Parameter, _StoredWeight] = {}
        self._watch_optimizers()
        with undo_on_error([model]) as undo:
            self._applied: Applied | None = Applied(
                model, policy, how_to_end="call restore() on the handle of its nc.bake first"
            )
            undo.callback(self.restore)
            self._calls = self._applied.calls
            chosen = _choose(model, policy)
            left = []
            for name, parameter in model.named_parameters():
                if parameter not in chosen or (frozen_only and parameter.requires_grad):
                    left.append(name)
                else:
                    self._stored[parameter] = _StoredWeight(name, parameter, chosen[parameter], keep_fp32)
            self.left = tuple(left)
            drop_casts()
            for module in model.modules():
                self._prepare_module(module, keep_fp32=keep_fp32)
            vars(model)[_HANDLE] = self

    def _prepare_module(self, module: torch.nn.Module, *, keep_fp32: bool) -> None:
        """Register what the stored weights of ``module`` need, and flatten those of a recurrent layer."""
        own: dict[str, _StoredWeight] = {}
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in self._stored:
                own[name] = self._stored[parameter]
        if not own:
            return
        if isinstance(module, torch.nn.RNNBase):
            with _apart_from_autograd():
                module.flatten_parameters()  # cuDNN needs the weights in one piece of memory
        if keep_fp32:
            self._follow_state_dicts(module, own)

    @property
    def formats(self) -> dict[str, torch.dtype]:
        """The path of each stored weight, and its format."""
        return {stored.name: stored.dtype for stored in self._stored.values()}

    def restore(self) -> None:
        """Restore the fp32 weights, with the values written since, and remove the policy.

        Call it while no call of the model is running.
        """
        if self._ended:
            return
        widened = [stored.dtype for stored in self._stored.values() if stored.kept is None]
        for stored in self._stored.values():
            stored.widen()
        drop_casts()
        for handle in self._hook_handles:
            handle.remove()
        for call in self._calls:
            call.detach()
        if self._applied is not None:
            self._applied.remove(copies=False)
        self._stop_watching()
        self._ended = True
        self._stored.clear()
        if widened:
            formats = " and ".join(sorted({format_name(dtype) for dtype in widened}))
            warnings.warn(
                f"restore() widened {len(widened)} weights from {formats}: with keep_fp32=False their fp32 "
                "values were not kept",
                UserWarning,
                stacklevel=stacklevel_outside("narrowcast."),
            )

    def __enter__(self) -> Baked:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        if self._ended:
            return "Baked(restored)"
        return f"Baked({len(self._stored)} weights in a low format, {len(self.left)} left)"

    def _follow_state_dicts(self, module: torch.nn.Module, own: dict[str, _StoredWeight]) -> None:
        """Have ``state_dict`` return, and ``load_state_dict`` take, fp32 values of the stored weights."""
        hooked: Any = module  # these methods have no types
        self._hook_handles += [
            hooked.register_state_dict_post_hook(functools.partial(_give_fp32, own)),
            hooked.register_load_state_dict_pre_hook(functools.partial(_before_load, own)),
            hooked.register_load_state_dict_post_hook(functools.partial(_after_load, own)),
        ]

    def __getstate__(self) -> dict[str, Any]:
        # A copy has the calls and the hooks of its own modules.
        return {**vars(self), "_applied": None, "_stop_watching": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._watch_optimizers()

    def _watch_optimizers(self) -> None:
        hook = register_optimizer_step_pre_hook(functools.partial(_refuse_step, weakref.ref(self)))
        self._stop_watching = weakref.finalize(self, hook.remove)


# ---- which weights are stored


@dataclass(frozen=True)
class _Layer:
    """How a class of layers uses its parameters.

    Attributes:
        names: the parameters that only ``ops`` read; None: those of the layer's ``all_weights``.
        ops: the operators that decide the format; those that a device does not have are skipped.
    """

    names: tuple[str, ...] | None
    ops: tuple[str, ...]


_LAYERS: dict[Any, _Layer] = {
    torch.nn.Linear.forward: _Layer(("weight", "bias"), ("linear",)),
    torch.nn.Conv1d.forward: _Layer(("weight", "bias"), ("conv1d",)),
    torch.nn.Conv2d.forward: _Layer(("weight", "bias"), ("conv2d",)),
    torch.nn.Conv3d.forward: _Layer(("weight", "bias"), ("conv3d",)),
    torch.nn.ConvTranspose1d.forward: _Layer(("weight", "bias"), ("conv_transpose1d",)),
    torch.nn.ConvTranspose2d.forward: _Layer(("weight", "bias"), ("conv_transpose2d",)),
    torch.nn.ConvTranspose3d.forward: _Layer(("weight", "bias"), ("conv_transpose3d",)),
    torch.nn.LSTM.forward: _Layer(None, ("lstm", "linear", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell")),
    torch.nn.GRU.forward: _Layer(None, ("gru", "linear", "_thnn_fused_gru_cell")),
    torch.nn.RNN.forward: _Layer(None, ("rnn_tanh", "rnn_relu", "linear")),
    torch.nn.MultiheadAttention.forward: _Layer(
        ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
        ("linear", "_native_multi_head_attention"),
    ),
}
"""By the ``forward`` of the class, so that a class that overrides it is unknown."""

# In evaluation PyTorch computes these with fused operators, which tables="cuda" leaves uncast on a CPU.
_FUSED_LAYERS = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
_FUSED = ("_native_multi_head_attention", "_addmm_activation")
_TRANSFORMERS_CONV1D = _Layer(("weight", "bias"), ("addmm",))


def _layer(module: torch.nn.Module, device_type: str) -> _Layer | None:
    """Return how ``module`` uses its parameters; None if its class is unknown or overrides ``forward``."""
    kind = type(module)
    if f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D":
        return _TRANSFORMERS_CONV1D
    if isinstance(module, torch.nn.MultiheadAttention) and module.batch_first and device_type == "cpu":
        # The fused kernel takes only inputs in the format of the weight, so with a stored weight PyTorch may
        # choose another kernel: torch/nn/modules/activation.py, MultiheadAttention.forward
        return None
    return _LAYERS.get(getattr(kind, "forward", None))  # the class of TorchScript modules has none


def _is_read_by_ops_alone(layer: _Layer, module: Any, name: str) -> bool:
    """Return whether only the operators of ``layer`` read the parameter ``name`` of ``module``."""
    if layer.names is not None:
        return name in layer.names
    # After torch.nn.utils.weight_norm or pruning a recurrent layer also has parameters that its operators do
    # not read: a hook computes the weights from them.
    parameter = module._parameters[name]
    return any(parameter is weight for weight in itertools.chain.from_iterable(module.all_weights))


def _choose(model: torch.nn.Module, policy: Policy) -> dict[torch.nn.Parameter, torch.dtype]:
    """Return the parameters that may be stored, with the low format of each."""
    owners = _owners_of_storages(model)
    fused: set[int] = set()
    for module in model.modules():
        if isinstance(module, _FUSED_LAYERS):
            fused.update(id(part) for part in module.modules())

    chosen: dict[torch.nn.Parameter, torch.dtype] = {}
    scopes: dict[str, dict[str, Scope]] = {}  # by device type and path
    for paths, module in all_paths(model):
        for name, parameter in module._parameters.items():
            if parameter is None or not _may_store(parameter):
                continue
            is_shared = len(owners[_storage(parameter)]) > 1
            device_type = parameter.device.type
            layer = _layer(module, device_type)
            if is_shared or layer is None or not _is_read_by_ops_alone(layer, module, name):
                continue

            if device_type not in scopes:
                root = resolved(policy, device_type, format_name(resolve(policy, device_type))).root
                scopes[device_type] = scopes_by_path(model, policy, root)
            ops = layer.ops + _FUSED if id(module) in fused else layer.ops
            # A module that is used at several paths may follow a different rule at each.
            formats = {_format(scopes[device_type][path], ops) for path in paths}
            if len(formats) > 1:
                continue
            dtype = formats.pop()
            if dtype is not None and not _computes_otherwise(module, device_type, dtype):
                chosen[parameter] = dtype
    return chosen


def _owners_of_storages(model: torch.nn.Module) -> dict[int, set[int]]:
    """Return, by the number of each storage, the ids of the modules with a parameter or buffer in it."""
    owners: defaultdict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not torch.nn.parameter.is_lazy(tensor):
                owners[_storage(tensor)].add(id(module))
    return owners


def _computes_otherwise(module: torch.nn.Module, device_type: str, dtype: torch.dtype) -> bool:
    """Return whether a recurrent layer computes in another format than the low one of its region."""
    # cuDNN computes recurrent layers in fp16 in every region: aten/src/ATen/cudnn/AutocastRNN.cpp
    if device_type == "cuda":
        return isinstance(module, torch.nn.RNNBase) and dtype is torch.bfloat16
    # On a CPU whose oneDNN has no kernel, an LSTM is promoted to fp32.
    if device_type == "cpu" and isinstance(module, torch.nn.LSTM):
        return why_no_lstm(dtype) is not None
    return False


def _may_store(parameter: torch.nn.Parameter) -> bool:
    return (
        type(parameter) is torch.nn.Parameter  # not lazy, and no subclass such as DTensor
        and parameter.dtype is torch.float32
        and parameter.layout is torch.strided
        and not parameter.is_meta
        and not parameter.is_inference()
    )


def _storage(tensor: torch.Tensor) -> int:
    """Return a number that tensors in the same memory share; one of its own for a tensor without memory."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    return -id(tensor)


def _format(scope: Scope, ops: Iterable[str]) -> torch.dtype | None:
    """Return the one low format in which ``ops`` compute in ``scope``; None if there is none."""
    lower = dtype_of(scope.resolved.lower)
    dtypes: set[torch.dtype | None] = set()
    for op in itertools.chain.from_iterable(map(overloads_of, ops)):
        decision = scope.decide(op)
        compute = scope.resolved.native.get(op) if decision is None else decision.compute
        if compute is not None:  # an operator on no table is made of others, which are cast
            dtypes.add(compute_dtype(compute, lower, (), scope.resolved.device_type))
    if len(dtypes) != 1:
        return None
    dtype = dtypes.pop()
    return dtype if dtype in LOW else None


# ---- one stored weight


class _StoredWeight:
    """A parameter that is stored in ``dtype``.

    The ``Parameter`` stays the same object, for optimizers and hooks. ``kept`` has the fp32 values, or is
    None. Where it no longer rounds to the stored values, bit for bit, these were written since, and count.
    """

    def __init__(self, name: str, parameter: torch.nn.Parameter, dtype: torch.dtype, keep: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.dtype = dtype
        self.kept = parameter.data if keep else None
        with _apart_from_autograd():
            parameter.data = parameter.data.to(dtype)

    def full(self) -> torch.Tensor:
        """Return the fp32 values: those kept, or the low ones widened if they changed."""
        with _apart_from_autograd():
            stored = self.parameter.data
            if self.kept is not None:
                self.kept = self.kept.to(stored.device)
                if _same_bits(stored.to(self.dtype), self.kept.to(self.dtype)):
                    return self.kept
            return stored.to(torch.float32)

    def widen(self) -> None:
        """Store the fp32 values in the parameter."""
        full = self.full()
        with _apart_from_autograd():
            self.parameter.data = full

    def narrow(self) -> None:
        """Store low values in the parameter again, after ``widen``."""
        with _apart_from_autograd():
            self.kept = self.parameter.data
            self.parameter.data = self.kept.to(self.dtype)


@contextmanager
def _apart_from_autograd() -> Iterator[None]:
    """Change weights without recording it, and without making inference tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors in a low format have equal bits; any NaN equals any NaN."""
    if a.shape != b.shape:
        return False
    same = a.contiguous().view(torch.int16) == b.contiguous().view(torch.int16)
    return bool((same | (a.isnan() & b.isnan())).all())


# ---- hooks of modules


def _give_fp32(
    own: dict[str, _StoredWeight], module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any
) -> None:
    """Put the fp32 values of a module's stored weights into its ``state_dict``."""
    for name, stored in own.items():
        is_replaced = module._parameters.get(name) is not stored.parameter
        # With keep_vars=True the parameters themselves are wanted.
        is_itself = state.get(prefix + name) is stored.parameter
        if not is_replaced and not is_itself:
            state[prefix + name] = stored.full()


def _before_load(own: dict[str, _StoredWeight], *_: Any) -> None:
    for stored in own.values():
        stored.widen()


def _after_load(own: dict[str, _StoredWeight], *_: Any) -> None:
    for stored in own.values():
        stored.narrow()
    drop_casts()


# ---- no training


def _refuse_step(reference: weakref.ref[Baked], optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise before the step of an optimizer that would update a stored weight."""
    handle = reference()
    if handle is None:
        return
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for parameter in parameters:
        stored = handle._stored.get(parameter)
        if stored is not None and parameter.grad is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() would update {stored.name!r}, which nc.bake stores in "
                f"{format_name(stored.dtype)} for inference, where small updates are lost: call restore() on "
                "its handle before training; with frozen_only=True only weights that do not require "
                "gradients are stored, and the others train"
            )
