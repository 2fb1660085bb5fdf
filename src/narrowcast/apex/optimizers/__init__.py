"""The fused optimizers of apex: torch's own where they compute the same, and refused where they do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from narrowcast.errors import SettingError, UnsupportedError

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]

_LOW = (torch.float16, torch.bfloat16)
_NO_BIAS_CORRECTION = (
    "FusedAdam(bias_correction=False) leaves out the division of the moments by 1 - beta**step, which "
    "torch's Adam always makes: leave bias_correction at True, or write the update without it as an "
    "optimizer of your own"
)


class _ApexOptimizer(torch.optim.Optimizer):
    """Base class of the fused optimizers; the optimizer of torch comes after it among the bases."""

    def __init__(self, params: Any, *, set_grad_none: bool, **settings: Any) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, **{**settings, "fused": True})
        self.register_step_pre_hook(_refuse_low)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set gradients to None or to zero, by default as ``set_grad_none`` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this optimizer, of torch's, or of apex's of the same name."""
        super().load_state_dict(_to_torch(self, state_dict))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy has no hooks. torch's load_state_dict also calls this method, without this key.
        if "set_grad_none" in state:
            self.register_step_pre_hook(_refuse_low)


class FusedAdam(_ApexOptimizer, torch.optim.Adam):
    """``apex.optimizers.FusedAdam``: torch's fused Adam, with decoupled weight decay by default.

    Formulas and state are those of ``torch.optim.AdamW(fused=True)``, or with ``adam_w_mode=False`` of
    ``torch.optim.Adam(fused=True)``; single operations are rounded as in torch. States that apex saved load,
    with their count of steps. ``set_grad_none`` is what ``zero_grad()`` does without an argument.

    Raises ``UnsupportedError`` for ``bias_correction=False``, also in a group, ``amsgrad`` and
    ``master_weights``, and at a step for parameters in float16 or bfloat16, for which apex kept moments in
    float32 and torch would keep them in the parameter's format. Source: apex ``csrc/multi_tensor_adam.cu``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if not bias_correction:
            raise UnsupportedError(_NO_BIAS_CORRECTION)
        if amsgrad or master_weights:
            raise UnsupportedError(
                "FusedAdam has no amsgrad and no master_weights here: use torch.optim.AdamW(..., "
                "amsgrad=True, fused=True), and narrowcast.weights.hold(optimizer) for float32 masters"
            )
        super().__init__(
            params,
            set_grad_none=set_grad_none,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            capturable=capturable,
            decoupled_weight_decay=adam_w_mode,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; its ``bias_correction``, if it has one, must be True."""
        if not param_group.pop("bias_correction", True):
            raise UnsupportedError(_NO_BIAS_CORRECTION)
        super().add_param_group(param_group)


class FusedSGD(_ApexOptimizer, torch.optim.SGD):
    """``apex.optimizers.FusedSGD``: torch's fused SGD, which has the same formulas and state.

    ``materialize_master_grads`` has no effect: masters always have gradients here. Raises
    ``UnsupportedError`` for ``wd_after_momentum=True``, and at a step for parameters in float16 or bfloat16,
    which torch rounds differently than apex did. Source: apex ``csrc/multi_tensor_sgd_kernel.cu``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise UnsupportedError(
                "FusedSGD(wd_after_momentum=True) adds the weight decay to the update, and torch's SGD to "
                "the gradient: leave weight_decay at 0 and multiply the parameters by 1 - lr * weight_decay "
                "before each step, which is the same"
            )
        # In apex lr has no default, and in torch it has one.
        params = list(params)
        if lr is None and not all(isinstance(group, dict) and "lr" in group for group in params):
            raise SettingError("FusedSGD needs an lr, or one in each group of parameters")
        super().__init__(
            params,
            set_grad_none=set_grad_none,
            lr=1e-3 if lr is None else lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )
        # Without this, a group that is added later without an lr would train with the default of torch.
        if lr is None:
            del self.defaults["lr"]


class _Unsupported(torch.optim.Optimizer):
    """An optimizer of apex that scripts can import, but not make."""

    instead: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            f"{type(self).__name__} is not mapped on an optimizer of torch: {self.instead}"
        )


class FusedAdagrad(_Unsupported):
    """Refused: use ``torch.optim.Adagrad``."""

    instead = "torch.optim.Adagrad(params, lr=1e-2, eps=1e-10) has its formulas"


class FusedLAMB(_Unsupported):
    """Refused: LAMB scales each layer's update by a trust ratio, which no optimizer of torch does."""

    instead = (
        "LAMB scales each parameter's Adam update by |parameter| / |update|. timm.optim.Lamb has apex's "
        "options (always_adapt for use_nvlamb) and works with amp.initialize; for small batches, "
        "torch.optim.AdamW(fused=True) with clip_grad_norm_ is the nearest of torch's own"
    )


class FusedMixedPrecisionLamb(FusedLAMB):
    """Refused, as ``FusedLAMB`` is."""


class FusedNovoGrad(_Unsupported):
    """Refused: NovoGrad keeps one second moment a layer, which no optimizer of torch does."""

    instead = (
        "NovoGrad divides each gradient by a running norm of the whole layer's. timm.optim.NvNovoGrad is "
        "this algorithm and works with amp.initialize; AdamW(fused=True) is the nearest of torch's own"
    )


def _refuse_low(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    # At each step, because weights.hold replaces the parameters after the optimizer was made.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype in _LOW and parameter.grad is not None:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise UnsupportedError(
                    f"{type(optimizer).__name__} has a parameter in {dtype}, whose state or updates torch "
                    "rounds otherwise than apex did: hold the optimizer with "
                    'narrowcast.weights.hold, or use amp.initialize(..., opt_level="O2"), either of which '
                    "gives it float32 masters"
                )


def _to_torch(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state of apex's optimizer to the format of torch's; a state of torch's stays as it is.

    apex counts the steps of FusedAdam once for each group, and torch for each parameter. Settings that apex's
    groups lack get the values of ``optimizer``.
    """
    groups = []
    state = dict(state_dict["state"])
    for group in state_dict["param_groups"]:
        settings = dict(group)
        if not settings.pop("bias_correction", True):
            raise UnsupportedError(_NO_BIAS_CORRECTION)
        steps = torch.as_tensor(settings.pop("step", 0), dtype=torch.float32)
        if isinstance(optimizer, torch.optim.Adam):
            for index in group["params"]:
                if index in state:
                    state[index] = {"step": steps.clone(), **state[index]}
        groups.append({**optimizer.defaults, **settings})
    return {**state_dict, "state": state, "param_groups": groups}
