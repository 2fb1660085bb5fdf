"""Every private name of torch that this room needs, in one place; tests/attach checks each one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

NO_GRAPH_TASK = -1

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that this thread is working for; NO_GRAPH_TASK outside of one.

Each pass of the autograd engine has its own number, nested ones too, in whatever thread it works.
"""


untraced: Callable[[Callable[..., Any]], Callable[..., Any]] = vars(torch)["_disable_dynamo"]
"""Decorator: torch.compile calls the function and does not look inside.

It loads the compiler at the first call, as torch's own optimizers do.
"""

is_jit_tracing: Callable[[], bool] = vars(torch.jit)["is_tracing"]


NATIVE_FILES: tuple[tuple[type, str, bool], ...] = tuple(
    (vars(torch._C)[name], name, writes)
    for name, writes in (("PyTorchFileWriter", True), ("PyTorchFileReader", False))
)
"""What opens the zip files of ``torch.save``, ``torch.export`` and ``torch.package``: class, name, writes."""


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether ``torch.func`` is differentiating ``tensor``; such a tensor has no data to look at."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def register_hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
    """``tensor.register_hook`` for a leaf, run before the hooks that the leaf already has.

    The engine calls a leaf's hooks in the order of this dictionary, which it reads at each call; the
    handles of the hooks that move keep working, since they go by key.
    """
    handle: RemovableHandle = torch.Tensor.register_hook(tensor, hook)  # type: ignore[no-untyped-call]
    hooks = tensor._backward_hooks
    assert hooks is not None
    earlier = [(key, hooks[key]) for key in hooks if key != handle.id]
    for key, _ in earlier:
        del hooks[key]
    hooks.update(earlier)
    return handle
