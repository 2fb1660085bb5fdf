"""The states of all random generators of this process: torch's, Python's and NumPy's."""

from __future__ import annotations

import importlib.util
import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Return the states of torch (CPU and accelerators), of ``random``, and of NumPy if it is imported.

    If this process has initialized its accelerators, the states of all accelerators of the machine are among
    them; if not, none are, and this function does not initialize them.
    """
    device_states = {}
    for device in _devices_in_use():
        device_states[device] = _device_module(device).get_rng_state(*_index_arguments(device))

    numpy_state = None
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # torch.load(weights_only=True) reads no arrays. NumPy accepts lists in their place.
        numpy_state = _without_arrays(numpy.random.get_state(legacy=False))

    return {
        "torch": torch.get_rng_state(),
        "devices": device_states,
        "python": random.getstate(),
        "numpy": numpy_state,
    }


def set_random_states(states: dict[str, Any]) -> list[str]:
    """Set states that ``random_states`` returned.

    Returns:
        A note on each generator that could not be set, or that is in use here and has no state in ``states``.
    """
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    return _set_device_states(states["devices"]) + _set_numpy_state(states["numpy"])


def _set_device_states(device_states: dict[str, torch.Tensor]) -> list[str]:
    notes = []
    devices_here = _devices()
    for device, state in device_states.items():
        if device in devices_here:
            _device_module(device).set_rng_state(state, *_index_arguments(device))
        else:
            notes.append(f"the random state of {device} was not set: this process has no such device")
    for device in _devices_in_use():
        if device not in device_states:
            notes.append(f"the checkpoint holds no random state of {device}: it is unchanged")
    return notes


def _set_numpy_state(state: Any) -> list[str]:
    if state is None:
        if "numpy" in sys.modules:
            return ["the checkpoint holds no random state of NumPy: it is unchanged"]
        return []
    if importlib.util.find_spec("numpy") is None:
        return ["the random state of NumPy was not set: it is not installed here"]
    import numpy

    numpy.random.set_state(state)
    return []


def _devices() -> list[str]:
    """Return the accelerators of this machine, as "cuda:0"."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    return [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]


def _devices_in_use() -> list[str]:
    """Return all accelerators of this machine if this process has initialized them, else none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    # torch.mps lacks the function: its one device is always in use.
    is_initialized = getattr(_device_module(accelerator.type), "is_initialized", None)
    if is_initialized is not None and not is_initialized():
        return []
    return _devices()


def _device_module(device: str) -> Any:
    """Return the module of torch for an accelerator, as ``torch.cuda`` for "cuda:0"."""
    return torch.get_device_module(device.partition(":")[0])


def _index_arguments(device: str) -> tuple[int, ...]:
    kind, _, index = device.partition(":")
    if kind == "mps":
        return ()  # the functions of torch.mps take no index, as there is only one device
    return (int(index),)


def _without_arrays(value: Any) -> Any:
    """Return a state of NumPy with lists in place of its arrays."""
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return value
