"""``nc.bake``: for inference, each weight stored in the format that its ops use."""

from __future__ import annotations

import torch

from narrowcast.casting._bake_handle import Baked, baked
from narrowcast.errors import PolicyError, SettingError, UnsupportedError
from narrowcast.policy import Policy, with_fp32_weights


def bake(
    model: torch.nn.Module, policy: Policy | str, *, frozen_only: bool = False, keep_fp32: bool = True
) -> Baked:
    """Store each weight of ``model`` in the format that its ops use, so that no call casts it again.

    The model is then called as before, without a region: its own calls open that of ``policy``, rules for
    modules included, and give the same bits as under ``nc.apply(model, policy)``. The first call shows which
    fp32 parameters are only ever read rounded to one low format; these are stored in it as the call ends (in
    several threads: as soon as no call is under way). One that something reads as it is (an embedding, a
    norm, a weight norm), in two formats, whose ``dtype`` Python code looks at, or which is returned, stays in
    fp32, and so do buffers, tensor subclasses as DTensor, inference tensors and parameters that share memory.
    A weight whose module is called for the first time later is found in one of its first calls. Later calls
    are expected to use a weight as the calls did in which it was found; where one does otherwise,
    ``restore()`` and bake again. That code casts to the format of a weight by ``x.to(weight)`` is not
    seen. Call the model itself: what calls a module inside it directly finds low weights and no region.

    Writes land in what is stored: ``copy_``, in-place operations, exchanges and writes through ``.data``.
    ``load_state_dict`` replaces the fp32 values and rounds them anew, and so do writes to the tensors of a
    state dict, from the model's next call on. Parameters stay the objects that they are.

    Training a stored weight is refused: an UnsupportedError where a gradient reaches it, before it is
    accumulated, and where an optimizer would step on it, a frozen one that was unfrozen meanwhile included.
    Gradients for the inputs and for weights that stay in fp32 are those under ``nc.apply``; but in the first
    call, while other threads run, a weight is cast at each use, and the gradients of its uses add up in fp32.
    A copy of the model, by ``deepcopy`` or pickle, is baked on its own; ``nc.casting.baked(model)`` is its
    handle.

    Args:
        model: any module on any device.
        policy: the name of a preset, a ``Policy``, or the path of one.
        frozen_only: store only parameters that do not require gradients, as the base weights under LoRA; the
            others train on in fp32.
        keep_fp32: keep the fp32 values of stored weights, for ``state_dict()`` and ``restore()``: half as
            much memory again as in fp32. Where a stored weight was written to, its values win, widened.
            Without it they are gone (about half the memory is free): ``state_dict()`` has the low values,
            and ``restore()`` widens them, with a warning. Values are rounded to nearest even; NaN stays NaN,
            and what is past the largest number of fp16 becomes an infinity, as in each cast of a region.

    Returns:
        The handle, with ``restore()``.

    Raises:
        PolicyError: no module; a policy that does not exist or holds low weights itself; a model that has a
            policy, or is baked, already.
        SettingError: ``frozen_only`` or ``keep_fp32`` is no bool.
        UnsupportedError: a DistributedDataParallel whose parameters would be stored.
    """
    for name, value in (("frozen_only", frozen_only), ("keep_fp32", keep_fp32)):
        if not isinstance(value, bool):
            raise SettingError(f"expected {name} to be True or False, got {value!r}")
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(f"expected a torch.nn.Module to bake, got {type(model).__name__}")
    wanted = with_fp32_weights(policy)
    _check_is_free(model)
    _check_gradients_are_not_shared(model, frozen_only)
    return Baked(model, wanted, frozen_only=frozen_only, keep_fp32=keep_fp32)


def _check_is_free(model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        if baked(module) is not None:
            what = f"its part {path!r}" if path else f"this {type(model).__name__}"
            raise PolicyError(
                f"{what} is baked already: call restore() on its handle, nc.casting.baked(module), first"
            )


def _check_gradients_are_not_shared(model: torch.nn.Module, frozen_only: bool) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and not frozen_only:
            raise UnsupportedError(
                "DistributedDataParallel would not reduce the gradients of weights that changed their format "
                "once, after restore() either: bake a copy of what it wraps, "
                "nc.bake(copy.deepcopy(model.module), policy), or pass frozen_only=True"
            )
