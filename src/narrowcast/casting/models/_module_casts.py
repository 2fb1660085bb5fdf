"""Cast a module's arguments and outputs by a rule, and write changes of the casts back to the originals."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from narrowcast.casting._torch_internals import traced_only_inline
from narrowcast.casting.kernels._operators import CASTABLE
from narrowcast.casting.models._tree import cast_where
from narrowcast.casting.regions._scopes import thread
from narrowcast.policy import Rule


class RuleCast(NamedTuple):
    """The cast that a rule makes of a module's inputs or outputs, on one device type."""

    rule: Rule
    device: str
    dtype: torch.dtype


def cast_arguments(rule_cast: RuleCast, args: Any, kwargs: Any) -> tuple[Any, Any, Copies]:
    """Cast a module's inputs, and return the copies that were made."""
    # Most modules take one tensor, in every step: it is cast without walking the tree of arguments.
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        tensor = args[0]
        cast = _cast_by_rule(rule_cast, tensor)
        copies = () if cast is tensor else (_TensorCopy(tensor, cast),)
        return (cast,), kwargs, copies
    cast_args, cast_kwargs = _cast_by_rule(rule_cast, (args, kwargs))
    return cast_args, cast_kwargs, _copies_in((cast_args, cast_kwargs), (args, kwargs))


# ``ModuleCall.call``, which Dynamo does not compile by itself, calls the functions with this mark. Without it
# Dynamo would compile each of them alone, where Python calls them after a graph break.
@traced_only_inline
def cast_outputs(rule_casts: tuple[RuleCast, ...], output: Any) -> Any:
    """Cast what a module returns, on each device type."""
    for rule_cast in rule_casts:
        output = _cast_by_rule(rule_cast, output)
    return output


def _cast_by_rule(rule_cast: RuleCast, values: Any) -> Any:
    """Cast a module's inputs or outputs."""
    if isinstance(values, torch.Tensor) and values.dtype is rule_cast.dtype:
        return values
    # Traces of operators read the rule by ``rule_that_casts()``, to say why a tensor was cast.
    thread.casting_rule = rule_cast.rule
    try:
        return cast_where(values, rule_cast.dtype, wants(rule_cast.device, rule_cast.dtype))
    finally:
        thread.casting_rule = None


class _TensorCopy(NamedTuple):
    """A cast of an argument, which the module may write to."""

    original: torch.Tensor
    cast: torch.Tensor

    @traced_only_inline
    def write_back(self) -> None:
        # A cast is at version 0 until the module writes to it; inference tensors count no versions.
        if not self.cast.is_inference() and self.cast._version:
            self.original.copy_(self.cast)


class _ContainerCopy(NamedTuple):
    """A copy of the caller's list or dict that holds casts; the module may change the copy.

    Attributes:
        original: the caller's list or dict.
        cast: the copy that the module gets.
        parts_before: the items of the copy before the call.
        original_of: id of each of these items -> the caller's item in the same place.
    """

    original: Any
    cast: Any
    parts_before: list[Any]
    original_of: dict[int, Any]

    @traced_only_inline
    def write_back(self) -> None:
        # The module changed nothing if each part is still the same object, under the same key. The copy began
        # with the keys of the original.
        parts = _parts_of(self.cast)
        is_as_long = len(parts) == len(self.parts_before)
        has_same_parts = is_as_long and all(map(operator.is_, parts, self.parts_before))
        has_same_keys = not isinstance(self.cast, dict) or list(self.cast) == list(self.original)
        if has_same_parts and has_same_keys:
            return
        # For an item that the module left as it was, or moved, put back the caller's item instead of the cast
        # of it. ``parts_before`` keeps the casts alive, so that no other object has the id of one.
        written = [self.original_of.get(id(part), part) for part in parts]
        if isinstance(self.cast, dict):
            by_key = dict(zip(self.cast, written, strict=True))
            self.original.clear()
            self.original.update(by_key)
        else:
            self.original[:] = written


Copies = tuple[_TensorCopy | _ContainerCopy, ...]


def _copies_in(cast: Any, original: Any) -> Copies:
    """Return a record for each tensor, list and dict in ``cast`` that is a copy of the caller's.

    ``original`` holds the caller's, in the same places. A record has it as its first field, before the cast.

    Only tuples, lists and dicts are searched: what a module writes to casts inside other containers, such as
    dataclasses, is lost.
    """
    if cast is original:
        return ()
    if isinstance(cast, torch.Tensor):
        return (_TensorCopy(original, cast),)
    if type(cast) not in (tuple, list, dict):
        return ()

    # A tuple is a copy too, but nobody can write to it.
    parts = _parts_of(cast)
    original_parts = _parts_of(original)
    copies: Copies = ()
    if type(cast) is not tuple:
        original_of = dict(zip(map(id, parts), original_parts, strict=True))
        copies = (_ContainerCopy(original, cast, parts, original_of),)
    for part, original_part in zip(parts, original_parts, strict=True):
        copies += _copies_in(part, original_part)
    return copies


def _parts_of(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def wants(device: str, dtype: torch.dtype) -> Callable[[torch.Tensor], bool]:
    """Return a function that says whether a cast to ``dtype`` on a device type would change a tensor."""
    return lambda tensor: tensor.dtype in CASTABLE and tensor.dtype != dtype and tensor.device.type == device
