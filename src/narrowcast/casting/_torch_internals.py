"""The names of torch without a promise of stability that this room uses, in one place.

``Module.load_state_dict`` has no hook that sees every module. Replacing the method for the length of each
region would empty Python's method caches of every module class each time (measured: 7 microseconds a region
with 2,000 classes), so what is replaced is the record that it makes after writing each module: a dict entry.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_module_file: Any = sys.modules["torch.nn.modules.module"]
LoadedKeys: Any = _module_file._IncompatibleKeys


def replace_loaded_keys(replacement: Any) -> None:
    """What ``Module.load_state_dict`` makes once it has written a module's weights."""
    _module_file._IncompatibleKeys = replacement


def current_loaded_keys() -> Any:
    return _module_file._IncompatibleKeys


def privateuse1_name() -> str:
    """What a device that an extension registered is called; ``privateuseone`` where none did."""
    name: str = torch._C._get_privateuse1_backend_name()
    return name


def cuda_is_missing() -> bool:
    """torch's own answer: no CUDA, and no torch_xla either, which takes regions for ``"cuda"``."""
    missing: bool = torch.cuda.amp.common.amp_definitely_not_available()  # type: ignore[no-untyped-call]
    return missing
