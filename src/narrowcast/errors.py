"""All errors that narrowcast raises on purpose.

    NarrowcastError
    ├── PolicyError (ValueError)               unknown policy or rule, or one that cannot hold on this device
    ├── SettingError (ValueError)              an argument out of range, or two that exclude each other
    ├── DeviceError (ValueError, RuntimeError) unknown device, or one that this machine does not have
    ├── ScaleError (ValueError, AssertionError)    loss scale, or gradients, that a scaler cannot use
    ├── OrderError (RuntimeError, AssertionError)  parts of a training step called out of order
    ├── UnsupportedError (RuntimeError)        what narrowcast does not support, or would compute incorrectly
    ├── ScaleCollapseError (RuntimeError)      too many skipped steps in a row
    ├── AmpError (NotImplementedError)         wrong use of apex.amp; raised by narrowcast.apex alone
    ├── MissingModuleError (ModuleNotFoundError)   optional package missing, or module of apex not offered
    ├── ScriptError (ValueError)               a script that cannot be started or compared, or that failed
    ├── FileError (OSError, ValueError)        a file or folder that cannot be read or written
    └── CheckpointError (ValueError)           a checkpoint that is damaged or does not fit

    >>> import narrowcast as nc
    >>> try:
    ...     nc.GradScaler("cpu", init_scale=-1.0)
    ... except nc.NarrowcastError as error:
    ...     print(type(error).__name__)
    ScaleError

Each message says what was expected, what came, and how to fix it. The built-in bases are those that torch or
apex raise in the same place, so that existing ``except`` clauses keep working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

__all__ = [
    "AmpError",
    "CheckpointError",
    "DeviceError",
    "FileError",
    "MissingModuleError",
    "NarrowcastError",
    "OrderError",
    "PolicyError",
    "ScaleCollapseError",
    "ScaleError",
    "ScriptError",
    "SettingError",
    "UnsupportedError",
]


class NarrowcastError(Exception):
    """Base class of all errors below; catch it to catch everything that narrowcast raises on purpose."""


class PolicyError(NarrowcastError, ValueError):
    """Unknown policy or rule, or one that cannot hold on this device."""


class SettingError(NarrowcastError, ValueError):
    """An argument outside its range, an unknown format, or two arguments that exclude each other."""


class DeviceError(NarrowcastError, ValueError, RuntimeError):
    """A device that torch does not know, or that this machine does not have."""


class ScaleError(NarrowcastError, ValueError, AssertionError):
    """A loss scale, a scaler's state or fp16 gradients that a gradient scaler cannot use."""


class OrderError(NarrowcastError, RuntimeError, AssertionError):
    """Parts of a training step called out of order, or autocast regions left out of order."""


class UnsupportedError(NarrowcastError, RuntimeError):
    """A use that narrowcast does not support, such as training that it would compute incorrectly."""


class ScaleCollapseError(NarrowcastError, RuntimeError):
    """So many steps skipped in a row that a lower loss scale cannot help."""


class AmpError(NarrowcastError, NotImplementedError):
    """Wrong use of ``apex.amp``, which itself raises ``RuntimeError`` or ``NotImplementedError`` for it."""


class MissingModuleError(NarrowcastError, ModuleNotFoundError):
    """An optional package that is not installed, or a module of apex that narrowcast does not offer."""


class ScriptError(NarrowcastError, ValueError):
    """A script that cannot be started, that failed, or whose runs cannot be compared."""


class FileError(NarrowcastError, OSError, ValueError):
    """A file or folder that cannot be read or written, or whose content is not what was expected."""


class CheckpointError(NarrowcastError, ValueError):
    """A checkpoint that is damaged, cannot be written, or does not fit what it is loaded into."""


def not_copied(what: str, instead: str) -> Any:
    """Return a ``__reduce_ex__`` that refuses to copy: hooks know the original object, not a copy."""

    def refuse(_object: object, _protocol: object) -> NoReturn:
        raise UnsupportedError(f"{what} cannot be copied or pickled: {instead}")

    return refuse


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to ``name``, ignoring case; None if none is similar."""
    by_lower_case = {known_name.lower(): known_name for known_name in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return by_lower_case[near[0]] if near else None


# How many known names a message lists: a large model has hundreds of modules.
_MOST_KNOWN = 40


def did_you_mean(name: str, known: Iterable[str], *, guess: str | None = None) -> str:
    """Return the end of a message about an unknown ``name``: a suggestion, if any, and the known names.

    The suggestion is ``guess``, or else the known name that is most similar.

    >>> did_you_mean("bf61", ["bf16", "fp16", "fp32"])
    'Did you mean "bf16"? Known: bf16, fp16, fp32.'
    """
    names = list(known)
    listed = f"Known: {few(names, _MOST_KNOWN)}."
    if guess is None:
        guess = nearest_name(name, names)
    if guess is None:
        return listed
    return f'Did you mean "{guess}"? {listed}'


def few(names: Sequence[str], most: int = 3) -> str:
    """List the first ``most`` names for a message, and how many more there are.

    >>> few(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    listed = ", ".join(names[:most])
    if len(names) > most:
        return f"{listed} and {len(names) - most} more"
    return listed
