"""Running a script as Python itself would: its own ``__main__``, arguments, path, traceback and exit code."""

from __future__ import annotations

import builtins
import importlib.util
import os
import pkgutil
import random
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from narrowcast.attach._tracebacks import trim_threads_errors, without_our_frames
from narrowcast.errors import ScriptError


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script that was found and compiles, ready to run.

    Attributes:
        name: how it is called in messages and folders.
        code: what runs.
        argv: ``sys.argv`` for it.
        file: the file that the code came from.
        first_path: what Python puts at ``sys.path[0]`` for it; None: nothing (``python -P``).
        spec: what ``__spec__`` is; None for a script given by its path.
    """

    name: str
    code: types.CodeType
    argv: tuple[str, ...]
    file: str
    first_path: str | None
    spec: ModuleSpec | None

    @classmethod
    def from_path(cls, path: str, arguments: Sequence[str]) -> Script:
        """The script at ``path``, as ``python path arguments...`` takes it: a file, or a folder or a zip
        file with a ``__main__.py`` in it.

        Raises:
            ScriptError: there is no such file, it is a notebook, or it does not compile.
        """
        if Path(path).suffix == ".ipynb":
            raise ScriptError(
                f"{path} is a notebook, and only scripts can be run unmodified. In a notebook use the "
                "library: import narrowcast as nc, then `with nc.autocast(...)` around the forward pass "
                "(or export it first: jupyter nbconvert --to script)"
            )
        # As Python does: absolute, and otherwise as it was typed.
        file = os.getcwd() if path == "." else os.path.join(os.getcwd(), path)
        spec = _main_inside(file, path) if path else None
        code = _code_of(spec, path) if spec else _compiled(file, path)
        folder = None if sys.flags.safe_path else str(Path(file).resolve().parent)
        return cls(
            name=Path(os.path.normpath(file)).stem,
            code=code,
            argv=(path, *arguments),
            file=spec.origin or file if spec else file,
            first_path=file if spec else folder,
            spec=spec,
        )

    @classmethod
    def from_module(cls, module: str, arguments: Sequence[str]) -> Script:
        """The module or package ``module``, as ``python -m module arguments...`` takes it.

        Packages around it are imported when it runs, not here.

        Raises:
            ScriptError: there is no such module, or it has no source that could run.
        """
        here = None if sys.flags.safe_path else str(Path.cwd())
        _set_first_path(here)
        try:
            spec = _spec_of(module)
        except (ImportError, ValueError) as error:
            raise ScriptError(f"cannot run module {module}: {error}") from error
        if spec is None or spec.origin is None:
            hint = f" (for a file: narrowcast run {module})" if Path(module).is_file() else ""
            raise ScriptError(f"cannot run module {module}: no module of that name was found{hint}")
        return cls(
            name=module,
            code=_code_of(spec, f"module {module}"),
            argv=(spec.origin, *arguments),
            file=spec.origin,
            first_path=here,
            spec=spec,
        )


def _main_inside(file: str, path: str) -> ModuleSpec | None:
    """What runs in a folder or a zip file; None for a file that is neither."""
    finder: Any = pkgutil.get_importer(file)
    if finder is None:
        return None
    spec: ModuleSpec | None = finder.find_spec("__main__")
    if spec is None:
        raise ScriptError(f"cannot run {path}: there is no __main__.py in it")
    return spec


def _spec_of(module: str) -> ModuleSpec | None:
    """What ``-m module`` runs, found without importing the packages around it.

    They are the script's own code: what they print or raise belongs to the run.
    """
    spec, path = None, None
    parts = module.split(".")
    if not all(parts):
        return None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        finders = [find for finder in sys.meta_path if (find := getattr(finder, "find_spec", None))]
        spec = next((found for find in finders if (found := find(name, path, None))), None)
        if spec is None and count > 1:
            spec = importlib.util.find_spec(module)  # a package may change its own __path__
            break
        path = spec.submodule_search_locations if spec else None
        if spec is None or (path is None and count < len(parts)):
            return None
    package = spec is not None and spec.submodule_search_locations is not None
    return _spec_of(f"{module}.__main__") if package and parts[-1] != "__main__" else spec


def _code_of(spec: ModuleSpec, what: str) -> types.CodeType:
    read = getattr(spec.loader, "get_code", None)
    try:
        code = read(spec.name) if read else None
    except (SyntaxError, ValueError) as error:
        raise _no_python(what, error) from error
    except (ImportError, OSError) as error:
        raise ScriptError(f"cannot run {what}: {error}") from error
    if not isinstance(code, types.CodeType):
        raise ScriptError(f"cannot run {what}: it has no Python code")
    return code


def _compiled(file: str, path: str) -> types.CodeType:
    try:
        return compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    except OSError as error:
        raise ScriptError(f"cannot run {path}: {error.strerror or error}") from error
    except (SyntaxError, ValueError) as error:
        raise _no_python(path, error) from error


def _no_python(what: str, error: SyntaxError | ValueError) -> ScriptError:
    where = f" at line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
    return ScriptError(f"cannot run {what}: it is no Python{where}: {error.args[0]}")


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's (where it is installed) and torch's random numbers, before a script starts.

    Args:
        seed: from 0 to 2**32 - 1, which is what all three take.
    """
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(seed)


def run_script(script: Script) -> None:
    """Run ``script`` as ``__main__``; whatever it raises comes out, ``SystemExit`` too.

    ``sys.modules["__main__"]`` stays the script's, as at the end of a plain run, so that objects of its
    classes can still be pickled at exit. The traceback of an error that nobody catches is shown from the
    script's own first line on.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __annotations__={},
        __builtins__=builtins,
        __cached__=script.spec.cached if script.spec else None,
        __file__=script.file,
        __loader__=script.spec.loader if script.spec else SourceFileLoader("__main__", script.file),
        __package__=script.spec.parent if script.spec else None,
        __spec__=script.spec,
    )
    sys.argv = list(script.argv)
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        # multiprocessing, imported with torch, keeps the main module under this name too: a spawned child
        # sends objects of the script's classes under it.
        sys.modules["__mp_main__"] = main
    _set_first_path(script.first_path)
    trim_threads_errors()
    try:
        if script.spec and script.spec.parent:
            __import__(script.spec.parent)
        exec(script.code, main.__dict__)
    except SystemExit:
        raise
    except BaseException:
        # Only now, so that a script finds the hook that Python has, and one of its own is used.
        sys.excepthook = without_our_frames(sys.excepthook, run_script.__code__)
        raise


def _set_first_path(first: str | None) -> None:
    """Put ``first`` where Python put the folder of the command that was typed (nowhere with ``-P``)."""
    sys.path[: 0 if sys.flags.safe_path else 1] = [] if first is None else [first]
