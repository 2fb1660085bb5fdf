"""The mixed precision of NVIDIA apex: ``from narrowcast.apex import amp``, for ``from apex import amp``.

``amp``, ``optimizers`` and ``parallel`` have the names of apex. Each is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from narrowcast.errors import MissingModuleError

if TYPE_CHECKING:
    from narrowcast.apex import amp, optimizers, parallel

__all__ = ["amp", "optimizers", "parallel"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return import_module(f"narrowcast.apex.{name}")
    if name in ("fp16_utils", "multi_tensor_apply", "transformer"):
        from narrowcast.apex._stand_in import refusal

        raise MissingModuleError(refusal(f"apex.{name}"))
    raise AttributeError(f"module 'narrowcast.apex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
