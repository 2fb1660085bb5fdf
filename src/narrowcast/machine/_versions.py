"""Versions that a result depends on."""

from __future__ import annotations

import platform
import sys

import torch

from narrowcast.errors import UnsupportedError

_OLDEST_TORCH = (2, 11)


def require_torch() -> None:
    """Refuse a torch older than 2.11 in one line instead of failing somewhere inside.

    Raises:
        UnsupportedError: with the version found and the command that upgrades it.
    """
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise UnsupportedError(
            f"narrowcast needs torch {oldest} or newer and found {torch.__version__}: "
            f"pip install --upgrade 'torch>={oldest}'"
        )


def versions() -> dict[str, str | int | None]:
    """Python, torch, operating system, processor or GPU, and thread count, as JSON-ready values."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),  # a subclass of str, which compares by parts
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "processor": _processor(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    read = getattr(torch.cpu, "get_capabilities", None)
    name = read().get("cpu_name") if read is not None else None
    return str(name or platform.processor() or platform.machine())
