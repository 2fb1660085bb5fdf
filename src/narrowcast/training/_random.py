"""Where the random numbers are: kept to draw the same ones again, in this process or in a later one."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class RandomState:
    """Where the random numbers are, to draw the same ones again."""

    def __init__(self, device_types: Iterable[str]) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if "cuda" in device_types else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def random_states() -> dict[str, Any]:
    """The states of torch (CPU and every device), of Python's ``random``, and of NumPy where it is imported.

    A device that this process has not used yet has none, and is not woken for it.
    """
    return {
        "torch": torch.get_rng_state(),
        "devices": {
            f"{kind}:{index}": torch.get_device_module(kind).get_rng_state(*_which(kind, index))
            for kind in _kinds_in_use()
            for index in range(torch.get_device_module(kind).device_count())
        },
        "python": random.getstate(),
        "numpy": _numpy_state(),
    }


def check_random_states(states: dict[str, Any]) -> None:
    """Raises an exception of torch, Python or NumPy for a state that ``set_random_states`` could not set."""
    if states["torch"] is not None:
        torch.Generator().set_state(states["torch"])
    for name, state in states["devices"].items():
        if _is_here(name):
            torch.Generator(name).set_state(state)
    if states["python"] is not None:
        random.Random().setstate(states["python"])
    if states["numpy"] is not None and importlib.util.find_spec("numpy") is not None:
        from numpy.random import RandomState as Throwaway

        if states["numpy"]["bit_generator"] == "MT19937":
            Throwaway().set_state(states["numpy"])


def set_random_states(states: dict[str, Any]) -> list[str]:
    """Go on from ``states``; what could not be set, in sentences."""
    notes = []
    if states["torch"] is None:
        notes.append("the checkpoint holds no random state of torch on the CPU: it is as it was")
    else:
        torch.set_rng_state(states["torch"])
    for name, state in states["devices"].items():
        if _is_here(name):
            kind, _, index = name.partition(":")
            torch.get_device_module(kind).set_rng_state(state, *_which(kind, int(index)))
        else:
            notes.append(f"the random state of {name} was not set: this process has no such device")
    new = [f"{k}:{i}" for k in _kinds_in_use() for i in range(torch.get_device_module(k).device_count())]
    for name in (one for one in new if one not in states["devices"]):
        notes.append(f"the checkpoint holds no random state of {name}: it is as it was")
    if states["python"] is None:
        notes.append("the checkpoint holds no random state of Python's random: it is as it was")
    else:
        random.setstate(states["python"])
    return notes + _set_numpy_state(states["numpy"])


def _kinds_in_use() -> list[str]:
    """The types of devices with random numbers of their own that this process has begun to use."""
    kinds = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available() and module.is_initialized():
            kinds.append(kind)
    return [*kinds, *(["mps"] if torch.backends.mps.is_available() else [])]


def _which(kind: str, index: int) -> tuple[int, ...]:
    return () if kind == "mps" else (index,)  # torch.mps has one device, and takes no number


def _is_here(name: str) -> bool:
    kind, _, index = name.partition(":")
    module = getattr(torch, kind, None)
    return module is not None and module.is_available() and int(index) < module.device_count()


def _numpy_state() -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    state: dict[str, Any] = _plain(numpy.random.get_state(legacy=False))
    return state


def _plain(value: Any) -> Any:
    """Arrays as lists; NumPy takes them back."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _set_numpy_state(state: dict[str, Any] | None) -> list[str]:
    if state is None:
        if "numpy" in sys.modules:
            return ["the checkpoint holds no random state of NumPy: it is as it was"]
        return []
    if importlib.util.find_spec("numpy") is None:
        return ["the random state of NumPy was not set: it is not installed here"]
    import numpy

    current = numpy.random.get_state(legacy=False)["bit_generator"]
    if current != state["bit_generator"]:
        return [
            f"the random state of NumPy was not set: it is that of {state['bit_generator']}, and here "
            f"{current} draws"
        ]
    numpy.random.set_state(state)
    return []
