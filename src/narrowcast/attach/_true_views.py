"""Hooks that see gradients in the middle of a graph: shown true ones, though the pass is scaled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as module_hooks

from narrowcast.attach._patches import Patches

FactorNow = Callable[[], float | None]


class TrueView:
    """A hook shown true gradients in fp32; what it returns is scaled like the argument it replaces.

    ``factor_now`` tells the scale of the pass that the hook works for; None: it is not scaled. A copy or a
    pickle of it is the script's own hook.
    """

    def __init__(self, hook: Callable[..., Any], replaces: int, factor_now: FactorNow) -> None:
        functools.update_wrapper(self, hook)
        self.hook = hook
        self.replaces = replaces
        self.factor_now = factor_now

    def __call__(self, *args: Any) -> Any:
        factor = self.factor_now()
        if factor is None:
            return self.hook(*args)
        result = self.hook(*(_map(argument, lambda g: _true(g, factor)) for argument in args))
        return None if result is None else _scaled_like(result, args[self.replaces], factor)

    def __reduce__(self) -> Any:
        return _itself, (self.hook,)


def install(patches: Patches, of_tensors: FactorNow, of_leaves: FactorNow) -> None:
    """Wrap whatever registers hooks on tensors and modules.

    Args:
        patches: what puts it back.
        of_tensors: the scale of the pass in which a hook in the middle of a graph is called.
        of_leaves: the same for a leaf, whose gradient is true already where the leaf accumulates it.
    """
    register_hook: Callable[..., Any] = torch.Tensor.register_hook

    @functools.wraps(register_hook)
    def tensor_register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return register_hook(tensor, TrueView(hook, 0, of_leaves if tensor.grad_fn is None else of_tensors))

    patches.replace(torch.Tensor, "register_hook", tensor_register_hook)
    for name in ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"):
        patches.replace(torch.nn.Module, name, _registrar(getattr(torch.nn.Module, name), of_tensors))
    for name in ("register_module_full_backward_hook", "register_module_full_backward_pre_hook"):
        patches.replace(module_hooks, name, _global_registrar(getattr(module_hooks, name), of_tensors))


def _registrar(register: Callable[..., Any], factor_now: FactorNow) -> Callable[..., Any]:
    @functools.wraps(register)
    def registrar(module: torch.nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return register(module, TrueView(hook, 1, factor_now), *args, **kwargs)

    return registrar


def _global_registrar(register: Callable[..., Any], factor_now: FactorNow) -> Callable[..., Any]:
    @functools.wraps(register)
    def registrar(hook: Callable[..., Any]) -> Any:
        return register(TrueView(hook, 1, factor_now))

    return registrar


def _itself(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


def _true(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    return (gradient.float() if gradient.is_floating_point() else gradient) / factor


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_map(item, change) for item in value)
    return value


def _scaled_like(result: Any, like: Any, factor: float) -> Any:
    if isinstance(result, tuple) and isinstance(like, tuple):
        return tuple(_scaled_like(r, g, factor) for r, g in zip(result, like, strict=False))
    if isinstance(like, tuple) and len(like) == 1:
        return _scaled_like(result, like[0], factor)
    if isinstance(result, torch.Tensor) and isinstance(like, torch.Tensor):
        return (result * factor).to(like.dtype)
    return result
