"""Run a script as Python itself would: its own ``__main__``, arguments, path, traceback and exit code."""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

import narrowcast
from narrowcast.errors import NarrowcastError, ScriptError, nearest_name

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
        """Find the script at ``path`` as ``python path arguments...`` does.

        Raises:
            ScriptError: there is no such file, it is a folder or a notebook, or it does not compile.
        """
        if Path(path).suffix == ".ipynb":
            raise ScriptError(
                f"{path} is a notebook, and only scripts can be run unmodified. In a notebook use the "
                "library: import narrowcast as nc, then `with nc.autocast(...)` around the forward pass "
                "(or export it first: jupyter nbconvert --to script)"
            )
        file = os.path.join(os.getcwd(), path)  # as Python does: absolute, and otherwise as it was typed
        if Path(file).is_dir():
            raise ScriptError(f"cannot run {path}: it is a folder; name a script in it, or a package with -m")
        return cls(
            name=Path(file).stem,
            code=_compiled(path, file),
            argv=(path, *arguments),
            file=file,
            first_path=None if sys.flags.safe_path else str(Path(file).resolve().parent),
            spec=None,
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
            code=_code_of_module(module, spec),
            argv=(spec.origin, *arguments),
            file=spec.origin,
            first_path=here,
            spec=spec,
        )


def _spec_of(module: str) -> ModuleSpec | None:
    """Find what ``-m module`` runs without importing its parent packages.

    Parent packages are the script's own code: what they print and raise belongs to the run, and torch has to
    be patched before they import from it.
    """
    spec = None
    path: Any = None
    parts = module.split(".")
    # To find a folder without __init__.py inside a package, Python reads the parent's path from sys.modules.
    # So modules without code stand in for the parents.
    stand_ins: list[str] = []
    try:
        for count in range(1, len(parts) + 1):
            if count > 1 and path is None:
                return None  # the name before it is no package
            name = ".".join(parts[:count])
            spec = _found_by_finders(name, path)
            if spec is None:
                return None
            path = spec.submodule_search_locations
            if path is not None and name not in sys.modules:
                package = types.ModuleType(name)
                package.__path__ = path
                sys.modules[name] = package
                stand_ins.append(name)
        if path is not None and parts[-1] != "__main__":
            return _spec_of(f"{module}.__main__")
        return spec
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)


def _found_by_finders(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module as ``import`` does, also by the finders of editable installs."""
    if not name or name.endswith("."):
        return None
    for finder in sys.meta_path:
        if hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, path, None)
            if spec is not None:
                return spec
    return None


def _compiled(what: str, file: str) -> types.CodeType:
    """Compile a file; ``what`` is named in the error."""
    try:
        return compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise _not_python(what, error) from error
    except FileNotFoundError as error:
        raise ScriptError(f"cannot run {what}: {error.strerror}{_meant(file)}") from error
    except OSError as error:
        raise ScriptError(f"cannot run {what}: {error.strerror or error}") from error


def _meant(file: str) -> str:
    """Return a hint at a script with nearly the name of the missing ``file``; empty if there is none."""
    folder = Path(file).parent
    if not folder.is_dir():
        return ""
    # Compare names without their suffix, which would make any two of them alike.
    nearest = nearest_name(Path(file).stem, [script.stem for script in folder.glob("*.py")])
    if nearest is None:
        return ""
    return f' (did you mean "{nearest}.py"?)'


def _code_of_module(module: str, spec: ModuleSpec) -> types.CodeType:
    what = f"module {module}"
    loader: Any = spec.loader
    if not hasattr(loader, "get_code"):
        raise ScriptError(f"cannot run {what}: it has no Python code")
    try:
        code = loader.get_code(spec.name)
    except (SyntaxError, ValueError) as error:
        raise _not_python(what, error) from error
    except (ImportError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScriptError(f"cannot run {what}: {reason}") from error
    if not isinstance(code, types.CodeType):  # an extension module
        raise ScriptError(f"cannot run {what}: it has no Python code")
    return code


def _not_python(what: str, error: SyntaxError | ValueError) -> ScriptError:
    where = "not valid Python"
    line = getattr(error, "lineno", None)
    if line:
        where += f" (line {line})"
    return ScriptError(f"cannot run {what}: {where}: {error.args[0]}")


def run_script(script: Script) -> None:
    """Run ``script`` as ``__main__``; its errors propagate, ``SystemExit`` too.

    ``sys.modules["__main__"]`` stays the script's module, as at the end of a plain run, so that objects of
    its classes can still be pickled at exit. The traceback of an uncaught error begins at the script's first
    line.
    """
    # What Python puts into a main module.
    main = types.ModuleType("__main__")
    spec = script.spec
    main.__dict__.update(
        __annotations__={},
        __builtins__=builtins,
        __cached__=None,
        __file__=script.file,
        __loader__=SourceFileLoader("__main__", script.file),
        __package__=None,
        __spec__=spec,
    )
    if spec is not None:
        main.__dict__.update(__cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent)
    sys.argv = list(script.argv)
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        # multiprocessing, imported with torch, keeps the main module under this name too: a spawned child
        # pickles objects of the script's classes under it.
        sys.modules["__mp_main__"] = main
    _set_first_path(script.first_path)

    try:
        if spec and spec.parent:
            __import__(spec.parent)
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
    if not sys.flags.safe_path:
        del sys.path[:1]
    if first is not None:
        sys.path.insert(0, first)


def _without_our_frames(show: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``excepthook`` that shows tracebacks from the script's first line on, by ``show``."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> Any:
        # The error, and the errors before it, which Python shows first.
        trimmed: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in trimmed:
            _trim(cause)
            trimmed.append(cause)
            cause = cause.__cause__ or cause.__context__
        return show(kind, error, error.__traceback__)

    return excepthook


def _trim(error: BaseException) -> None:
    """Remove narrowcast's frames from a traceback, unless narrowcast raised the error by mistake."""
    frames: list[types.TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        if trace.tb_frame.f_code is run_script.__code__:
            frames.clear()  # what comes after is the script
        trace = trace.tb_next

    # An internal error of narrowcast is shown whole. A NarrowcastError is a refusal, and a TypeError mostly a
    # call with wrong arguments: these are not internal errors.
    by_mistake = bool(frames) and _is_ours(frames[-1])
    if not by_mistake or isinstance(error, NarrowcastError | TypeError):
        frames = [frame for frame in frames if not _is_ours(frame)]

    error.__traceback__ = None
    for frame in reversed(frames):
        frame.tb_next = error.__traceback__
        error.__traceback__ = frame


def _is_ours(trace: types.TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OUR_FOLDER)
