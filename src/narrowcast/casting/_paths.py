"""Paths of modules as a person writes them: without what wrappers put in between."""

from __future__ import annotations

import torch

# What DDP, DataParallel, torch.compile, FSDP and checkpoint wrappers call the module inside them.
_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPERS = (
    "DistributedDataParallel", "DataParallel", "OptimizedModule", "FullyShardedDataParallel",
    "CheckpointWrapper", "ActivationWrapper", "OffloadWrapper",
)  # fmt: skip

_MOST_PATHS = 64  # of one module; shared parts inside shared parts have a path for each way to them


def named_places(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Every module inside ``model`` with its path, itself under ``""``; a shared one under its first path.

    Wrappers have the path of what they wrap, and come before it.
    """
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    _find_places("", model, found)
    return list(found.values())


# Not inside the other: a function that calls itself there would hold the model until Python looks for cycles.
def _find_places(path: str, module: torch.nn.Module, found: dict[int, tuple[str, torch.nn.Module]]) -> None:
    if id(module) in found:
        return
    found[id(module)] = (path, module)
    wraps = is_wrapper(module)
    for name, child in module.named_children():
        inner = path if wraps and name in _WRAPPED else f"{path}.{name}" if path else name
        _find_places(inner, child, found)


def all_paths(model: torch.nn.Module) -> list[tuple[tuple[str, ...], torch.nn.Module]]:
    """As ``named_places``, with every path of a module that stands at several places of the model."""
    found: dict[int, tuple[list[str], torch.nn.Module]] = {}
    _find_paths("", model, found, ())
    return [(tuple(paths), module) for paths, module in found.values()]


def _find_paths(
    path: str,
    module: torch.nn.Module,
    found: dict[int, tuple[list[str], torch.nn.Module]],
    above: tuple[int, ...],
) -> None:
    paths, _ = found.setdefault(id(module), ([], module))
    if path in paths or id(module) in above or len(paths) == _MOST_PATHS:
        return
    paths.append(path)
    wraps = is_wrapper(module)
    for name, child in _children(module):
        inner = path if wraps and name in _WRAPPED else f"{path}.{name}" if path else name
        _find_paths(inner, child, found, (*above, id(module)))


def _children(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Every child under each of its names, which ``named_children`` gives once."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def is_wrapper(module: torch.nn.Module) -> bool:
    """Whether ``module`` only hands calls on to one inside it."""
    return any(cls.__name__ in _WRAPPERS for cls in type(module).__mro__)


def clean_path(path: str) -> str:
    """A dotted path as tracers give it, without the names that ``torch.compile`` and DDP put in."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPED[1:])
