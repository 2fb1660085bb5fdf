"""Run a script as Python itself would: its own ``__main__``, arguments, path, traceback and exit code.

Also its seeds, which a repeat of a run shifts.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import pkgutil
import random
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

import narrowcast
from narrowcast.attach._run import Nesting, Patches
from narrowcast.errors import NarrowcastError, ScriptError

_TOO_LARGE_FOR_NUMPY = 2**32
_FOR_APEX = (
    "narrowcast: python -m narrowcast.apex SCRIPT runs scripts that import apex.amp, apex.optimizers or "
    "apex.parallel, without apex"
)
_OUR_FOLDER = str(Path(narrowcast.__file__).parent) + os.sep


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script that was found and compiled.

    Attributes:
        name: used in messages and names of folders.
        code: its compiled code.
        argv: its ``sys.argv``.
        file: the file that the code came from.
        first_path: its ``sys.path[0]``; None: nothing is added (``python -P``).
        spec: its ``__spec__``; None for a script given by its path.
    """

    name: str
    code: types.CodeType
    argv: tuple[str, ...]
    file: str
    first_path: str | None
    spec: ModuleSpec | None

    @classmethod
    def from_path(cls, path: str, arguments: Sequence[str]) -> Script:
        """Find the script at ``path`` as ``python path arguments...`` does: a file, or a folder or a zip file
        with a ``__main__.py`` in it.

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
        folder = None if sys.flags.safe_path else str(Path(file).resolve().parent)
        return cls(
            name=Path(os.path.normpath(file)).stem,
            code=_code_of(path, file, spec),
            argv=(path, *arguments),
            file=spec.origin or file if spec else file,
            first_path=file if spec else folder,
            spec=spec,
        )

    @classmethod
    def from_module(cls, module: str, arguments: Sequence[str]) -> Script:
        """Find the module or package ``module`` as ``python -m module arguments...`` does.

        Parent packages are imported when it runs, not here.

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
            wanted = "no module of that name was found, nor a package with a __main__"
            raise ScriptError(f"cannot run module {module}: {wanted}{hint}")
        return cls(
            name=module,
            code=_code_of(f"module {module}", spec.origin, spec),
            argv=(spec.origin, *arguments),
            file=spec.origin,
            first_path=here,
            spec=spec,
        )


def _main_inside(file: str, path: str) -> ModuleSpec | None:
    """Find ``__main__.py`` in a folder or a zip file; None for a file that is neither."""
    finder: Any = pkgutil.get_importer(file)
    if finder is None:
        return None
    spec: ModuleSpec | None = finder.find_spec("__main__")
    if spec is None:
        raise ScriptError(f"cannot run {path}: there is no __main__.py in it")
    return spec


def _spec_of(module: str) -> ModuleSpec | None:
    """Find what ``-m module`` runs without importing its parent packages.

    They are the script's own code: their output and errors belong to the run.
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


def _code_of(what: str, file: str, spec: ModuleSpec | None) -> types.CodeType:
    """Return the code of a module, or of a plain file; ``what`` is named in the error."""
    try:
        if spec is None:
            return compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
        code = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    except (SyntaxError, ValueError) as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ScriptError(f"cannot run {what}: not valid Python{where}: {error.args[0]}") from error
    except (ImportError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScriptError(f"cannot run {what}: {reason}") from error
    if not isinstance(code, types.CodeType):
        raise ScriptError(f"cannot run {what}: it has no Python code")
    return code


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's (if it is installed) and torch's random numbers, from 0 to 2**32 - 1."""
    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy.random").seed(seed)


def shift_seeds(patches: Patches, by: int, note: Callable[[str], None]) -> None:
    """Add ``by`` to every integer that seeds Python's, NumPy's or torch's global generators from now on.

    Generators that the script creates, and seeds that it passes to libraries (``random_state=0``), stay as
    they are: they often determine how data is split, which must be the same in every run. ``note`` is called
    with a note for the user, each time a seed was shifted.
    """
    # torch.seed, which takes a seed from the clock, is among them because it calls the others.
    owners: list[tuple[Any, str]] = [(random, "seed")]
    owners += [(owner, name) for owner in (torch, torch.random) for name in ("manual_seed", "seed")]
    for device in (torch.cuda, torch.mps, torch.xpu):
        owners += [(device, name) for name in ("manual_seed", "manual_seed_all") if hasattr(device, name)]
    if importlib.util.find_spec("numpy") is not None:
        owners.append((importlib.import_module("numpy.random"), "seed"))
    nesting = Nesting()  # torch's seed function calls CUDA's with the seed that it was given

    def shifted_seed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = next(iter(kwargs), None)
        given = kwargs[name] if name else args[0] if args else None
        if isinstance(given, Integral) and not nesting.depth:
            note("a repeat adds its number to the seeds that the script sets, so that it draws other numbers")
            seed = (int(given) + by) % _TOO_LARGE_FOR_NUMPY
            args, kwargs = (args, {name: seed}) if name else ((seed, *args[1:]), kwargs)
        with nesting:
            return original(*args, **kwargs)

    for owner, name in owners:
        patches.wrap(owner, name, shifted_seed)


def run_script(script: Script) -> None:
    """Run ``script`` as ``__main__``; its errors propagate, ``SystemExit`` too.

    ``sys.modules["__main__"]`` stays the script's module, as at the end of a plain run, so that objects of
    its classes can still be pickled at exit. The traceback of an uncaught error begins at the script's first
    line.
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
        # pickles objects of the script's classes under it.
        sys.modules["__mp_main__"] = main
    _set_first_path(script.first_path)
    try:
        if script.spec and script.spec.parent:
            __import__(script.spec.parent)
        exec(script.code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "apex":
            error.add_note(_FOR_APEX)
        # Set only now, so that the script sees Python's own hook and may set another.
        sys.excepthook = _without_our_frames(sys.excepthook)
        raise


def _set_first_path(first: str | None) -> None:
    """Replace the entry that Python made for the narrowcast command (it makes none with ``-P``)."""
    sys.path[: 0 if sys.flags.safe_path else 1] = [] if first is None else [first]


def _without_our_frames(show: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``excepthook`` that shows tracebacks from the script's first line on, by ``show``."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> Any:
        chain, one = list[BaseException](), error
        while one is not None and one not in chain:
            _trim(one)
            chain.append(one)
            one = one.__cause__ or one.__context__  # type: ignore[assignment]
        return show(kind, error, error.__traceback__)

    return excepthook


def _trim(error: BaseException) -> None:
    """Remove narrowcast's frames from a traceback, unless narrowcast raised the error by mistake."""
    frames, trace = list[types.TracebackType](), error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    begun = next((n for n, t in enumerate(frames) if t.tb_frame.f_code is run_script.__code__), -1)
    frames = frames[begun + 1 :]
    ours = [t.tb_frame.f_code.co_filename.startswith(_OUR_FOLDER) for t in frames]
    if not (frames and ours[-1]) or isinstance(error, NarrowcastError | TypeError):
        frames = [t for t, is_ours in zip(frames, ours, strict=True) if not is_ours]
    for this, following in pairwise([*frames, None]):
        this.tb_next = following  # type: ignore[union-attr]
    error.__traceback__ = frames[0] if frames else None
