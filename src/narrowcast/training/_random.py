"""Random states of torch, Python and NumPy: saved, checked and set."""

from __future__ import annotations

import importlib.util
import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Return the states of torch (CPU and devices in use), of ``random``, and of NumPy if it is imported.

    A device that this process has not used yet has no state, and is not initialized for it.
    """
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "devices": {name: _module(name).get_rng_state(*_index(name)) for name in _devices_in_use()},
        "python": random.getstate(),
        "numpy": None if numpy is None else _plain(numpy.random.get_state(legacy=False)),
    }


def set_random_states(states: dict[str, Any]) -> list[str]:
    """Set ``states``; return notes on those that could not be set."""
    notes = []
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    for name, state in states["devices"].items():
        if name in _devices():
            _module(name).set_rng_state(state, *_index(name))
        else:
            notes.append(f"the random state of {name} was not set: this process has no such device")
    for name in _devices_in_use():
        if name not in states["devices"]:
            notes.append(f"the checkpoint holds no random state of {name}: it is unchanged")
    if states["numpy"] is None:
        if "numpy" in sys.modules:
            notes.append("the checkpoint holds no random state of NumPy: it is unchanged")
    elif importlib.util.find_spec("numpy") is None:
        notes.append("the random state of NumPy was not set: it is not installed here")
    else:
        import numpy

        numpy.random.set_state(states["numpy"])
    return notes


def _devices() -> list[str]:
    """The accelerators of this machine, by name."""
    kind = torch.accelerator.current_accelerator()
    return [] if kind is None else [f"{kind.type}:{i}" for i in range(torch.accelerator.device_count())]


def _devices_in_use() -> list[str]:
    """The accelerators that this process has initialized; torch.mps has no such state."""
    return [name for name in _devices() if getattr(_module(name), "is_initialized", lambda: True)()]


def _module(name: str) -> Any:
    return torch.get_device_module(name.partition(":")[0])


def _index(name: str) -> tuple[int, ...]:
    kind, _, index = name.partition(":")
    return () if kind == "mps" else (int(index),)  # torch.mps has one device, and takes no index


def _plain(value: Any) -> Any:
    """NumPy's arrays as lists, which NumPy accepts."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
