"""Which modules a model is made of: their paths, without what wrappers add, and whether that changed."""

from __future__ import annotations

import torch

# What DDP, DataParallel, torch.compile, FSDP and checkpoint wrappers call the module inside them.
_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPERS = (
    "DistributedDataParallel", "DataParallel", "OptimizedModule", "FullyShardedDataParallel",
    "CheckpointWrapper", "ActivationWrapper", "OffloadWrapper",
)  # fmt: skip

_MOST_PATHS = 64  # of one module; shared parts inside shared parts have a path for each way to them


def modules_by_path(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return every module inside ``model`` with its first path, itself under ``""``.

    Wrappers have the path of what they wrap, and come before it.
    """
    return [(paths[0], module) for paths, module in all_paths(model)]


def all_paths(model: torch.nn.Module) -> list[tuple[tuple[str, ...], torch.nn.Module]]:
    """Return every module inside ``model`` with every path by which it is reached."""
    found: dict[int, tuple[list[str], torch.nn.Module]] = {}
    _find_paths("", model, found, ())
    return [(tuple(paths), module) for paths, module in found.values()]


# Not inside the other: a function that calls itself there would hold the model until Python looks for cycles.
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
    for name, child in module._modules.items():  # named_children() gives a shared one once
        if child is not None:
            inner = path if wraps and name in _WRAPPED else f"{path}.{name}" if path else name
            _find_paths(inner, child, found, (*above, id(module)))


def is_wrapper(module: torch.nn.Module) -> bool:
    """Return whether ``module`` only hands calls on to one inside it."""
    return any(cls.__name__ in _WRAPPERS for cls in type(module).__mro__)


def clean_path(path: str) -> str:
    """Return a dotted path as tracers give it, without the names that ``torch.compile`` and DDP put in."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPED[1:])


class Structure:
    """The modules inside ``model`` as they are now.

    It costs some 50 nanoseconds a module to ask whether they still are, and holds them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._children = [part._modules for part in model.modules()]
        self._as_they_were = [dict(children) for children in self._children]

    def holds(self) -> bool:
        """Return whether no module was added, replaced or taken away."""
        return self._children == self._as_they_were
