"""apex's mixed precision on top of the rooms above: ``from narrowcast.apex import amp`` in place of apex's.

``amp``, ``fp16_utils``, ``multi_tensor_apply``, ``optimizers``, ``parallel`` and ``transformer.amp`` have
apex's names. Each is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowcast.apex import amp, fp16_utils, multi_tensor_apply, optimizers, parallel, transformer

__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "optimizers", "parallel", "transformer"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return import_module(f"narrowcast.apex.{name}")
    raise AttributeError(f"module 'narrowcast.apex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
