"""The names of torch without a promise of stability that this room uses, in one place.

``Module.load_state_dict`` has no hook that sees every module. Replacing the method for the length of each region
would empty Python's method caches of every module class each time (measured: 7 microseconds a region with 2,000
classes), so the record that it builds after loading each module is replaced instead, which costs a dict entry.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

# By sys.modules: the name torch.nn.modules.module is also reachable as an attribute, which mypy cannot tell apart.
_module_file: Any = sys.modules["torch.nn.modules.module"]
LoadedKeys: Any = _module_file._IncompatibleKeys

is_function_mode_enabled: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
"""Whether something such as pre-dispatch tracing for ``torch.export`` watches calls of torch functions."""


def replace_loaded_keys(replacement: Any) -> None:
    """What ``Module.load_state_dict`` calls once it has loaded a module."""
    _module_file._IncompatibleKeys = replacement


def current_loaded_keys() -> Any:
    return _module_file._IncompatibleKeys


def privateuse1_name() -> str:
    """What a device that an extension registered is called; ``privateuseone`` where none did."""
    name: str = torch._C._get_privateuse1_backend_name()
    return name
