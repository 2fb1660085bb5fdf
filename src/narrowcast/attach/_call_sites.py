"""Which line of the script called: a loss is told from another one by that."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch

import narrowcast

_PASSED_OVER = tuple(str(Path(path).parent) + os.sep for path in (narrowcast.__file__, torch.__file__))
_STANDARD = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_STARTED_IN = os.getcwd()  # a script that changes its folder keeps the names of its files


def call_site() -> str:
    """File and line of the nearest caller that belongs to the script, as ``"train.py:42"``.

    A library's frames are passed over (a training framework calls ``backward`` for the script); where there
    is no other, its nearest frame outside of torch is taken.
    """
    nearest = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        whose = _whose(path)
        if whose == "script":
            return f"{_named(path)}:{frame.f_lineno}"
        if whose == "library" and not nearest:
            nearest = f"{_named(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return nearest or "unknown"


# By path, whose hash a str keeps: that of a code object is worked out anew from all that it holds.
@lru_cache(maxsize=4096)
def _whose(path: str) -> str:
    """``"script"``, ``"library"``, or ``"passed over"`` for ours, torch's and Python's own."""
    if path.startswith((*_PASSED_OVER, "<")):
        return "passed over"
    if any(folder in path for folder in _INSTALLED):
        return "library"
    return "passed over" if path.startswith(_STANDARD) else "script"


@lru_cache(maxsize=4096)
def _named(path: str) -> str:
    file = Path(path)
    return (file.relative_to(_STARTED_IN) if file.is_relative_to(_STARTED_IN) else Path(file.name)).as_posix()
