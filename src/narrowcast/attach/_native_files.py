"""Files that code in C++ or Rust opens, where Python's audit hooks see nothing."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from narrowcast.attach._patches import Patches
from narrowcast.attach._torch_internals import NATIVE_FILES

_Path = str | bytes | os.PathLike[str]
_Tell = Callable[[_Path], None]

_WRITES, _READS, _BY_MODE, _IF_SHARED = "writes", "reads", "by mode", "if shared"
# Owner, function of it, its argument that is the path, and what it does with the file.
_OF_TORCH: tuple[tuple[Any, str, str, str], ...] = (
    (torch.jit, "load", "f", _READS),
    (vars(torch.jit)["RecursiveScriptModule"], "save", "f", _WRITES),
    (torch, "from_file", "filename", _IF_SHARED),
    (torch.UntypedStorage, "from_file", "filename", _IF_SHARED),
)
# Of packages that a script may import later: the same, by name.
_OF_PACKAGES: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "safetensors": (
        ("", "safe_open", "filename", _READS),
        ("", "serialize_file", "filename", _WRITES),
    ),
    "h5py": (("File", "__init__", "name", _BY_MODE),),
}
# Parameters in order, where the function itself cannot tell them.
_SIGNATURES = {"from_file": ("filename", "shared"), "save": ("self", "f")}


class NativeFiles:
    """Tells of the files that native code opens: torch's from now on, a package's once it is imported.

    Args:
        wrote: called with a path before it is written.
        reads: called with a path before it is read.
    """

    def __init__(self, wrote: _Tell, reads: _Tell) -> None:
        self._wrote = wrote
        self._reads = reads
        self._waiting = dict(_OF_PACKAGES)

    def install(self, patches: Patches) -> None:
        self._patches = patches
        for kind, name, writes in NATIVE_FILES:
            patches.replace(torch._C, name, _opening(kind, self._wrote if writes else self._reads))
        for owner, name, argument, does in _OF_TORCH:
            self._tell_of(owner, name, argument, does)
        for package in list(self._waiting):
            if package in sys.modules:
                self.importing(package)

    def importing(self, name: str) -> None:
        """A module is about to be imported: one of the packages is taken hold of before the script has it."""
        functions = self._waiting.pop(name, None)
        if functions is None:
            return
        with suppress(Exception):  # the script meets it when it imports the package itself
            package = importlib.import_module(name)
            for owner, function, argument, does in functions:
                whose = getattr(package, owner) if owner else package
                self._tell_of(whose, function, argument, does)

    def _tell_of(self, owner: Any, name: str, argument: str, does: str) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return  # as of torch.jit where PYTORCH_JIT=0 turns it off
        parameters = _SIGNATURES.get(name) or tuple(inspect.signature(original).parameters)
        place = parameters.index(argument)

        @functools.wraps(original)
        def native(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(parameters, args, strict=False)) | kwargs
            path = args[place] if len(args) > place else kwargs.get(argument)
            if isinstance(path, str | bytes | os.PathLike):
                self._tell(path, does, given)
            return original(*args, **kwargs)

        static = isinstance(owner, type) and parameters[0] != "self"
        self._patches.replace(owner, name, staticmethod(native) if static else native)

    def _tell(self, path: _Path, does: str, given: dict[str, Any]) -> None:
        mode = given.get("mode") or "r"
        reads = (
            does == _READS
            or (does == _BY_MODE and mode in ("r", "r+", "a"))
            or (does == _IF_SHARED and not given.get("shared"))
        )
        writes = does == _WRITES or (does == _BY_MODE and mode != "r") or (does == _IF_SHARED and not reads)
        if reads:
            self._reads(path)
        if writes:
            self._wrote(path)


def _opening(kind: type, tell: _Tell) -> type:
    """``kind``, telling which file it opens, if it is one."""

    def __init__(self: Any, file: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if isinstance(file, str | bytes | os.PathLike):
            tell(file)
        kind.__init__(self, file, *args, **kwargs)  # type: ignore[misc]

    return type(kind)(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})
