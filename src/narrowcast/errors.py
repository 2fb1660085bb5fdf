"""Every error that narrowcast raises on purpose, in one tree.

    NarrowcastError
    ├── FormatError (ValueError)          a number format or a rounding mode that does not exist
    ├── PolicyError (ValueError)          a policy that does not exist or cannot hold here
    ├── DeviceError (ValueError)          a device that torch does not know or this machine lacks
    ├── ScaleError (ValueError, AssertionError)    a loss scale that cannot scale a loss
    ├── SettingError (ValueError)         a setting outside its range
    ├── OrderError (RuntimeError, AssertionError)  a training step out of order
    ├── WeightsError (ValueError)         held weights that do not fit what was given
    ├── Fp16GradientError (ValueError)    gradients in fp16, where small updates are lost
    ├── RegionError (RuntimeError)        a region that was left out of order
    ├── UnsupportedError (RuntimeError)   training that this policy cannot make right
    ├── AmpError (RuntimeError)           what apex's amp refused, or was called in the wrong state
    │   └── HalfRefusedError (NotImplementedError)  a function that half tensors must not reach
    ├── MissingExtraError (ImportError)   a package that only some features need, and that is not installed
    ├── ApexModuleError (ModuleNotFoundError)   a module of apex that narrowcast does not answer for
    ├── ScaleCollapseError (RuntimeError) so many skipped steps in a row that the scale is not to blame
    ├── ScriptError (ValueError)          a script that cannot be started
    ├── ResumedRunError (RuntimeError)    a run of a comparison that reads what an earlier one wrote
    ├── RunFolderError (OSError)          a folder that cannot be written
    ├── LockError (ValueError)            a lock file that cannot be read or written
    ├── MigrationError (ValueError)       a file that cannot be migrated or written
    ├── CheckpointError (ValueError)      a checkpoint that cannot be written, read, or does not fit
    └── CaptureError (ValueError)         a capture file that cannot be read

A message says what was expected, what came, and how to fix it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NarrowcastError(Exception):
    """Root of the tree; catch this to catch everything that narrowcast raises on purpose."""


class FormatError(NarrowcastError, ValueError):
    """A number format or a rounding mode that does not exist."""


class PolicyError(NarrowcastError, ValueError):
    """A policy that does not exist, or that cannot hold on this device."""


class DeviceError(NarrowcastError, ValueError):
    """A device that torch does not know, or that this machine lacks."""


class ScaleError(NarrowcastError, ValueError, AssertionError):
    """A loss scale, or a setting of one, that cannot scale a loss; ``torch.amp.GradScaler`` asserts some."""


class SettingError(NarrowcastError, ValueError):
    """A setting outside its range, or two that exclude each other."""


class OrderError(NarrowcastError, RuntimeError, AssertionError):
    """A part of a training step out of order; where ``torch.amp.GradScaler`` raises one of the two."""


class WeightsError(NarrowcastError, ValueError):
    """Weights held in a low format that do not fit what was given for them."""


class Fp16GradientError(NarrowcastError, ValueError):
    """Gradients in fp16, where updates smaller than 2**-11 of a weight are lost."""


class RegionError(NarrowcastError, RuntimeError):
    """A region that was left in another order than it was entered."""


class UnsupportedError(NarrowcastError, RuntimeError):
    """Training that this policy would get wrong, refused before it does."""


class AmpError(NarrowcastError, RuntimeError):
    """What apex's amp refused too, or a call in the wrong state of it; apex raised RuntimeErrors."""


class HalfRefusedError(AmpError, NotImplementedError):
    """A function that apex kept from half tensors; apex raised NotImplementedErrors."""


class MissingExtraError(NarrowcastError, ImportError):
    """A package that only some features need, and that is not installed."""


class ApexModuleError(NarrowcastError, ModuleNotFoundError):
    """A module of apex that narrowcast does not answer for."""


class ScaleCollapseError(NarrowcastError, RuntimeError):
    """So many steps skipped in a row that lowering the scale further cannot help."""


class ScriptError(NarrowcastError, ValueError):
    """A script that cannot be started."""


class ResumedRunError(NarrowcastError, RuntimeError):
    """A run of a comparison that read what an earlier one wrote, so that the two do other work."""


class RunFolderError(NarrowcastError, OSError):
    """A folder that a run wants to write to and cannot."""


class LockError(NarrowcastError, ValueError):
    """A lock file of decisions that cannot be read or written."""


class MigrationError(NarrowcastError, ValueError):
    """A file that cannot be migrated, or whose new text cannot be written."""


class CheckpointError(NarrowcastError, ValueError):
    """A checkpoint that cannot be written or read, or that does not fit what it is loaded into."""


class CaptureError(NarrowcastError, ValueError):
    """A capture file that is missing, empty, or of a schema that this version does not read."""


def near_names(name: str, known: Iterable[str]) -> str:
    """End of a message about an unknown ``name``: what it may have meant, then all there is.

    >>> near_names("bf61", ["bf16", "fp16", "fp32"])
    'Did you mean "bf16"? Known: bf16, fp16, fp32.'
    """
    names = list(known)
    near = difflib.get_close_matches(name.lower(), [known_name.lower() for known_name in names], n=1)
    meant = [known_name for known_name in names if near and known_name.lower() == near[0]]
    guess = f'Did you mean "{meant[0]}"? ' if meant else ""
    return f"{guess}Known: {', '.join(names)}."
