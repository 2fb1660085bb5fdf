"""Running a script as Python itself would: its own ``__main__``, arguments, path, traceback and exit code."""

from __future__ import annotations

import importlib.util
import random
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

import narrowcast
from narrowcast.errors import ScriptError

_OUR_FOLDER = str(Path(narrowcast.__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script that was found and compiles, ready to run.

    Attributes:
        name: how it is called in messages and folders.
        code: what runs.
        argv: ``sys.argv`` for it.
        file: the file that the code came from.
        first_path: what Python puts at ``sys.path[0]`` for it.
        spec: what ``__spec__`` is; None for a script given by its path.
    """

    name: str
    code: types.CodeType
    argv: tuple[str, ...]
    file: str
    first_path: str
    spec: ModuleSpec | None

    @classmethod
    def from_path(cls, path: str, arguments: Sequence[str]) -> Script:
        """The script at ``path``, as ``python path arguments...`` takes it.

        Raises:
            ScriptError: there is no such file, it is a notebook, or it does not compile.
        """
        file = Path(path)
        if file.suffix == ".ipynb":
            raise ScriptError(
                f"{path} is a notebook, and only scripts can be run unmodified. In a notebook use the library: "
                "import narrowcast as nc, then `with nc.autocast(...)` around the forward pass "
                "(or export it first: jupyter nbconvert --to script)"
            )
        if file.is_dir():
            file = file / "__main__.py"
        try:
            source = file.read_bytes()
        except OSError as error:
            raise ScriptError(f"cannot run {path}: {error.strerror or error}") from error
        folder = str(file.parent.resolve()) if not Path(path).is_dir() else str(Path(path))
        return cls(
            name=Path(path).stem,
            code=_compiled(source, str(file), path),
            argv=(path, *arguments),
            file=str(file),
            first_path=folder,
            spec=None,
        )

    @classmethod
    def from_module(cls, module: str, arguments: Sequence[str]) -> Script:
        """The module or package ``module``, as ``python -m module arguments...`` takes it.

        Raises:
            ScriptError: there is no such module, or it has no source that could run.
        """
        here = str(Path.cwd())
        if not sys.path or sys.path[0] != here:
            sys.path.insert(0, here)
        try:
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{module}.__main__")
        except (ImportError, ValueError) as error:
            raise ScriptError(f"cannot run module {module}: {error}") from error
        loader = spec.loader if spec is not None else None
        code = loader.get_code(spec.name) if spec and isinstance(loader, SourceFileLoader) else None
        if spec is None or code is None or spec.origin is None:
            raise ScriptError(f"cannot run module {module}: no module of that name with a source was found")
        return cls(
            name=module,
            code=code,
            argv=(spec.origin, *arguments),
            file=spec.origin,
            first_path=here,
            spec=spec,
        )


def _compiled(source: bytes, file: str, path: str) -> types.CodeType:
    try:
        return compile(source, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f" at line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ScriptError(f"cannot run {path}: it is no Python{line}: {error.args[0]}") from error


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's (where it is installed) and torch's random numbers, before a script starts."""
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
        __file__=script.file,
        __cached__=None,
        __spec__=script.spec,
        __package__=script.spec.parent if script.spec else None,
        __loader__=script.spec.loader if script.spec else SourceFileLoader("__main__", script.file),
        __builtins__=__builtins__,
    )
    sys.argv = list(script.argv)
    sys.modules["__main__"] = main
    if script.spec is None:
        # Where Python put the folder of the command that was typed, the script's own belongs.
        sys.path[:1] = [script.first_path]
    sys.excepthook = without_our_frames(sys.excepthook)
    exec(script.code, main.__dict__)


def without_our_frames(show: Callable[..., Any]) -> Callable[..., Any]:
    """An ``excepthook`` that leaves narrowcast's frames out of a traceback, except for its own errors."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> Any:
        kept = _trimmed(trace)
        return show(kind, error.with_traceback(kept), kept)

    return excepthook


def _trimmed(trace: types.TracebackType | None) -> types.TracebackType | None:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept = [t for t in frames if not _is_ours(t) and not _starts_us(t)]
    for this, following in zip(kept, [*kept[1:], None], strict=True):
        this.tb_next = following
    return kept[0] if kept else None


def _is_ours(trace: types.TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OUR_FOLDER)


def _starts_us(trace: types.TracebackType) -> bool:
    """The frames between the interpreter and this package: ``python -m`` and the installed command."""
    file = trace.tb_frame.f_code.co_filename
    return file == "<frozen runpy>" or (trace.tb_frame.f_back is None and Path(file).name == "narrowcast")
