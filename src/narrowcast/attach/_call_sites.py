"""Which line of the script called: a loss is told from another one by that."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

import narrowcast

_PASSED_OVER = tuple(str(Path(path).parent) + os.sep for path in (narrowcast.__file__, torch.__file__))
_STANDARD = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")


def call_site() -> str:
    """File and line of the nearest caller that belongs to the script, as ``"train.py:42"``.

    A library's frames are passed over (a training framework calls ``backward`` for the script); where there
    is no other, its nearest frame outside of torch is taken.
    """
    nearest = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        whose = _whose(frame.f_code)
        if whose == "script":
            return _named(frame.f_code, frame.f_lineno)
        if whose == "library" and not nearest:
            nearest = _named(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return nearest or "unknown"


@lru_cache(maxsize=4096)
def _whose(code: CodeType) -> str:
    """``"script"``, ``"library"``, or ``"passed over"`` for ours, torch's and Python's own."""
    path = code.co_filename
    if path.startswith((*_PASSED_OVER, "<")):
        return "passed over"
    if any(folder in path for folder in _INSTALLED):
        return "library"
    return "passed over" if path.startswith(_STANDARD) else "script"


@lru_cache(maxsize=4096)
def _named(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    try:
        shown = path.relative_to(Path.cwd())
    except (ValueError, OSError):
        shown = Path(path.name)
    return f"{shown.as_posix()}:{line}"
