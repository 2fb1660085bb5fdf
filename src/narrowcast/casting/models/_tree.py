"""Walk nested values, to cast the tensors in them, and the modules of a model, with their paths."""

from __future__ import annotations

import copy
import dataclasses
import types
import warnings
import weakref
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from narrowcast.casting._torch_internals import one_level
from narrowcast.casting.regions._warnings import stacklevel_outside
from narrowcast.policy import Policy, Rule, Scope, class_names, rules_for

# The attributes in which wrappers hold a module (those of DDP, DataParallel, torch.compile, FSDP, checkpoints
# and Fabric), and the classes of these wrappers. Fabric's holds two modules: the one that it was given, and
# what its strategy made of that.
_WRAPPED = (
    "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module",
    "_original_module",
)  # fmt: skip
_WRAPPERS = (
    "DistributedDataParallel", "DataParallel", "OptimizedModule", "FullyShardedDataParallel",
    "CheckpointWrapper", "ActivationWrapper", "OffloadWrapper", "_FabricModule",
)  # fmt: skip

_MOST_PATHS = 64
"""How many paths of one module are found. Shared modules inside shared modules multiply the paths."""
_HALVES = frozenset({torch.float16, torch.bfloat16})
_ATOMS = (type(None), bool, int, float, str)
_ValueT = TypeVar("_ValueT")
_warned_of: weakref.WeakSet[type] = weakref.WeakSet()
"""The unknown classes that a warning has named."""


def cast_floating(
    value: _ValueT,
    dtype: torch.dtype,
    *,
    only: Iterable[torch.dtype] | None = None,
    tell: Callable[[str], object] | None = None,
) -> _ValueT:
    """Return the same structure with its floating tensors in ``dtype``.

    Args:
        value: a tensor of any shape and device, or any nesting of lists, sets, tuples (named ones and
            ``PackedSequence`` too), dicts, deques and other containers that are registered with
            ``torch.utils._pytree`` (Hugging Face's ``ModelOutput`` is), dataclasses and
            ``torch.distributions.Distribution`` objects. Anything else is returned as it is; a warning names
            a class once if its objects hold tensors that would have been cast.
        dtype: format of the cast tensors.
        only: formats that are cast; by default ``torch.float16`` and ``torch.bfloat16``. Integer, bool and
            complex tensors are never cast.
        tell: called in place of that warning, at each such object.

    Returns:
        ``value`` itself where nothing was cast, else a copy of the containers on the way to what was cast;
        parts in which nothing was cast are shared with ``value``. A tensor that occurs twice is cast once.
        Casts are differentiable and stay on the tensor's device. Widening is exact, NaN, infinities and the
        sign of zero included; narrowing rounds to nearest even and overflows to infinity, as ``Tensor.to``.

    >>> cast_floating((torch.ones(2, dtype=torch.bfloat16), torch.arange(2)), torch.float32)
    (tensor([1., 1.]), tensor([0, 1]))
    """
    formats = _HALVES if only is None else frozenset(only)

    def wants(tensor: torch.Tensor) -> bool:
        before = tensor.dtype
        return before in formats and before != dtype and before.is_floating_point

    return cast_where(value, dtype, wants, tell)


def cast_where(
    value: _ValueT,
    dtype: torch.dtype,
    wants: Callable[[torch.Tensor], bool],
    tell: Callable[[str], object] | None = None,
) -> _ValueT:
    """As ``cast_floating``, for the tensors of which ``wants`` is true."""
    # Most modules take and return one tensor.
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if wants(value) else value  # type: ignore[return-value]

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if wants(tensor) else tensor

    return map_tensors(value, cast, tell)


def map_tensors(
    value: _ValueT,
    function: Callable[[torch.Tensor], torch.Tensor],
    tell: Callable[[str], object] | None = None,
) -> _ValueT:
    """Return the same structure with ``function(tensor)``, which may be the tensor itself, for each tensor.

    ``tell`` gets a sentence about each object of an unknown class that holds tensors; without it there is a
    warning.
    """
    # Pairs of a tensor and its replacement, searched by ``is``, which Dynamo can trace.
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def replacement(tensor: torch.Tensor) -> torch.Tensor:
        for original, made in replaced:
            if original is tensor:
                return made
        made = function(tensor)
        if made is not tensor:
            replaced.append((tensor, made))
        return made

    result: _ValueT = _map(value, replacement, tell)[0]
    return result


def tensors_inside(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested value.

    In an object of an unknown class, only its own attributes and items are searched; while Dynamo traces,
    they are not.
    """
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    # ``_name_unknown`` passes the tensors of unknown objects to ``collect``.
    _map(value, collect, say_nothing)
    return tensors


def say_nothing(text: str) -> None:
    """Ignore what ``tell`` is called with, where a warning would be wrong or a repetition."""


def _map(
    value: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    tell: Callable[[str], object] | None = None,
) -> tuple[Any, bool]:
    """Return ``value`` with ``function`` of each of its tensors, and whether anything changed.

    If nothing changed, it is ``value`` itself. Dynamo cannot compare the two by ``is``, hence the flag.
    """
    if isinstance(value, torch.Tensor):
        made = function(value)
        return made, made is not value
    if isinstance(value, _ATOMS):
        return value, False
    opened = _open(value)
    if opened is None:
        if not torch.compiler.is_compiling():
            _name_unknown(value, function, tell)
        return value, False

    parts, rebuild = opened
    mapped_parts: list[Any] = []
    is_changed = False
    for part in parts:
        mapped, part_is_changed = _map(part, function, tell)
        mapped_parts.append(mapped)
        is_changed = is_changed or part_is_changed
    if not is_changed:
        return value, False
    return rebuild(mapped_parts), True


def _open(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the parts of a container and a function that rebuilds it; None for anything else."""
    cls: Any = type(value)
    if cls is tuple or cls is list or cls is set or cls is frozenset:
        return list(value), cls
    if cls is dict:
        return list(value.values()), lambda parts: dict(zip(value, parts, strict=True))
    # A named tuple, or a subclass of one, as PackedSequence.
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return list(value), cls._make
    opened = one_level(value)
    if opened is not None:
        return opened
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A field may have no value yet, if it is not set by __init__.
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    elif isinstance(value, torch.distributions.Distribution):
        names = list(vars(value))
    else:
        return None
    return [getattr(value, name) for name in names], lambda parts: _with_attributes(value, names, parts)


def _with_attributes(value: Any, names: list[str], parts: list[Any]) -> Any:
    """Return a copy of ``value`` in which the attributes of these names are ``parts``."""
    made = copy.copy(value)
    for name, part in zip(names, parts, strict=True):
        # The __setattr__ of a frozen dataclass would raise.
        object.__setattr__(made, name, part)
    return made


def _name_unknown(
    value: Any, function: Callable[[torch.Tensor], torch.Tensor], tell: Callable[[str], object] | None
) -> None:
    """Warn about an object whose tensors are not cast, once for its class, or ``tell`` it."""
    cls = type(value)
    if (tell is None and cls in _warned_of) or isinstance(value, torch.nn.Module):
        return
    if cls is types.GeneratorType:
        text = (
            f"what the generator {value.__qualname__} yields is not cast, since it computes when it is "
            "iterated, outside of the region: return a list"
        )
    elif _holds_any_to_cast(value, function):
        text = (
            f"the tensors in a {cls.__module__}.{cls.__qualname__} were not cast, since narrowcast cannot "
            "look into it: make it a dataclass, or call torch.utils._pytree.register_pytree_node"
        )
    else:
        return
    if tell is not None:
        tell(text)
        return
    _warned_of.add(cls)
    warnings.warn(text, UserWarning, stacklevel=stacklevel_outside(("narrowcast.", "torch.")))


def _holds_any_to_cast(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether an attribute or an item of an object is a tensor that ``function`` would replace."""
    inside = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, UserDict):
        value = value.data
    if isinstance(value, dict):
        inside += dict.values(value)  # a subclass may override the method
    elif isinstance(value, list | tuple | set):
        inside += value
    tensors = [part for part in inside if isinstance(part, torch.Tensor)]
    return any(function(tensor) is not tensor for tensor in tensors)


# ---- modules


@contextmanager
def undo_on_error(models: Iterable[Any], optimizers: Iterable[Any] | None = None) -> Iterator[ExitStack]:
    """If the block raises, close the yielded stack, and put the attributes of the models' modules back.

    With ``optimizers``, also their attributes, and the data and gradients of the models' weights.
    """
    modules = [part for model in models for part in model.modules()]
    classes = [(module, type(module)) for module in modules]

    # The attributes of the objects, and three levels of containers in them: an optimizer has its parameters
    # in the lists in the dicts in the list ``param_groups``.
    containers: list[Any] = [vars(owner) for owner in (*modules, *(optimizers or ()))]
    outer = containers
    for _ in range(3):
        inner: list[Any] = []
        for container in outer:
            items = container.values() if isinstance(container, dict) else container
            inner += [item for item in items if type(item) in (list, dict, OrderedDict, defaultdict)]
        containers = [*containers, *inner]
        outer = inner
    contents = [(container, container.copy()) for container in containers]

    # Each weight with its data and its gradient.
    weights: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    modules_to_cast = modules if optimizers else []
    for module in modules_to_cast:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if not torch.nn.parameter.is_lazy(tensor):
                weights.append((tensor, tensor.data, tensor.grad))

    def restore() -> None:
        for module, cls in classes:
            # TorchScript modules override __setattr__, which would set it on another object.
            object.__setattr__(module, "__class__", cls)
        for container, before in contents:
            container.clear()
            if isinstance(container, list):
                container.extend(before)
            else:
                container.update(before)
        for tensor, data, gradient in weights:
            tensor.grad = None  # first, since the block may have given it another format than ``data``
            tensor.data = data
            tensor.grad = gradient

    with ExitStack() as undo:
        undo.callback(restore)
        yield undo
        # Nothing raised: leave out what the stack would do.
        undo.pop_all()


def modules_by_path(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return every module inside ``model`` with its first path, itself under ``""``.

    Wrappers have the path of what they wrap, and come before it.
    """
    return [(paths[0], module) for paths, module in all_paths(model)]


def all_paths(model: torch.nn.Module) -> list[tuple[tuple[str, ...], torch.nn.Module]]:
    """Return every module inside ``model`` with every path by which it is reached."""
    paths_of: dict[int, tuple[list[str], torch.nn.Module]] = {}
    _find_paths("", model, paths_of, ())
    return [(tuple(paths), module) for paths, module in paths_of.values()]


# A nested function that calls itself would hold the model until Python's collector looks for cycles.
def _find_paths(
    path: str,
    module: torch.nn.Module,
    paths_of: dict[int, tuple[list[str], torch.nn.Module]],
    above: tuple[int, ...],
) -> None:
    """Add ``path`` to the paths of ``module``, and go on with its children.

    ``above``: the ids of the modules around it, so that a module inside itself ends the search.
    """
    paths, _ = paths_of.setdefault(id(module), ([], module))
    if path in paths or id(module) in above or len(paths) == _MOST_PATHS:
        return
    paths.append(path)
    if isinstance(module, torch.jit.ScriptModule):
        return  # it calls its parts without their hooks

    wraps = is_wrapper(module)
    for name, child in module._modules.items():  # named_children() gives a shared one once
        if child is None:
            continue
        child_path = f"{path}.{name}" if path else name
        if wraps and name in _WRAPPED:
            child_path = path
        _find_paths(child_path, child, paths_of, (*above, id(module)))


def is_wrapper(module: torch.nn.Module) -> bool:
    """Return whether ``module`` only wraps another one."""
    return any(cls.__name__ in _WRAPPERS for cls in type(module).__mro__)


def with_what_it_wraps(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return ``module`` and, where it only wraps another one, that one and so on."""
    modules = [module]
    while is_wrapper(modules[-1]):
        wrapped = _wrapped_by(modules[-1])
        if wrapped is None:
            break
        modules.append(wrapped)
    return modules


def _wrapped_by(wrapper: torch.nn.Module) -> torch.nn.Module | None:
    for name in _WRAPPED:
        wrapped = wrapper._modules.get(name)
        if wrapped is not None:
            return wrapped
    return None


def scopes_by_path(model: torch.nn.Module, policy: Policy, root: Scope) -> dict[str, Scope]:
    """Return the scope inside each module of ``model``, by every path to it."""
    modules: dict[str, torch.nn.Module] = {}
    for paths, module in all_paths(model):
        # What a wrapper holds comes after it, and replaces it at the path that they share.
        modules.update(dict.fromkeys(paths, module))

    # From the model inwards: a parent is a prefix of its children, so it is sorted before them.
    scopes: dict[str, Scope] = {}
    for path in sorted(modules):
        around = scopes[path.rpartition(".")[0]] if path else root
        scopes[path] = around.inside(rules_of(policy, (path,), modules[path]))
    return scopes


def rules_of(policy: Policy, paths: tuple[str, ...], module: torch.nn.Module) -> tuple[Rule, ...]:
    """Return the rules for a module at ``paths``, in the order of the policy; none for a wrapper."""
    if is_wrapper(module):
        return ()
    selected: set[Rule] = set()
    for path in paths:
        selected.update(rules_for(policy, path, class_names(type(module))))
    return tuple(rule for rule in policy.rules if rule in selected)
