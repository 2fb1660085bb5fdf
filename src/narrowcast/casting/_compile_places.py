"""The modules that a function which is compiled can come to, with the paths by which its code calls them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from narrowcast.casting._paths import all_paths

_DEPTH = 3  # of containers and objects between a variable and a module
_MOST_ENTRIES = 1000  # of a container that is looked into, at each call


def variables_of(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The values that the code of ``function`` can name: arguments, globals, and variables around it."""
    found: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    if inspect.ismethod(function):
        args, function = (function.__self__, *args), function.__func__
    elif not inspect.isfunction(function):
        args, function = (function, *args), type(function).__call__
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return dict(kwargs)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not yet filled
    names = function.__code__.co_names
    found |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    given = dict(zip(function.__code__.co_varnames[: function.__code__.co_argcount], args, strict=False))
    return {**found, **(function.__kwdefaults__ or {}), **given, **kwargs}


def models_in(variables: dict[str, Any]) -> list[tuple[str, str, torch.nn.Module]]:
    """The modules that are found in some variables: the variable, the path to them in it, and they."""
    return [
        (variable, path, model)
        for variable, value in variables.items()
        for path, model in _models("", value, _DEPTH)
    ]


def modules_of(
    models: list[tuple[str, str, torch.nn.Module]],
) -> list[tuple[tuple[str, ...], torch.nn.Module]]:
    """Every module inside ``models``, by its paths with and without the name of the variable."""
    paths_of: dict[int, tuple[dict[str, None], torch.nn.Module]] = {}
    for variable, name, model in models:
        for paths, module in all_paths(model):
            known, _ = paths_of.setdefault(id(module), ({}, module))
            for path in paths:
                inside = ".".join(part for part in (name, path) if part)
                known[inside] = known[f"{variable}.{inside}".rstrip(".")] = None
    return [(tuple(paths), module) for paths, module in paths_of.values()]


def _models(path: str, value: Any, depth: int) -> Iterator[tuple[str, torch.nn.Module]]:
    if isinstance(value, torch.nn.Module):
        yield path, value
    elif depth and isinstance(value, list | tuple) and len(value) <= _MOST_ENTRIES:
        for index, part in enumerate(value):
            yield from _models(f"{path}.{index}".strip("."), part, depth - 1)
    elif depth and isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
        for key, part in value.items():
            yield from _models(f"{path}.{key}".strip("."), part, depth - 1)
    elif depth and _is_own(value):
        yield from _models(path, vars(value), depth - 1)


def _is_own(value: Any) -> bool:
    """Whether ``value`` is an object of a class that somebody wrote, and no class, module or function."""
    return hasattr(value, "__dict__") and not (
        isinstance(value, type | torch.Tensor) or inspect.ismodule(value) or inspect.isroutine(value)
    )
