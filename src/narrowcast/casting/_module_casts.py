"""Casts of a module's arguments and outputs by a rule, and of what the module writes to its arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from narrowcast.casting._operators import CASTABLE
from narrowcast.casting._scopes import thread
from narrowcast.casting._torch_internals import traced_only_inline
from narrowcast.casting._tree import cast_where
from narrowcast.policy import Rule


class Casts(NamedTuple):
    """A cast by a rule for a module, on one device type."""

    rule: Rule
    device: str
    dtype: torch.dtype


def cast_arguments(casts: Casts, args: Any, kwargs: Any) -> tuple[Any, Any, Copies]:
    """Cast a module's inputs, and return the copies that were made; for one tensor the way is short."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        given = args[0]
        cast = _cast_by_rule(casts, given)
        return (cast,), kwargs, () if cast is given else (_TensorCopy(given, cast),)
    all_cast = _cast_by_rule(casts, (args, kwargs))
    return *all_cast, _copies_in(all_cast, (args, kwargs))


@traced_only_inline
def cast_outputs(every: tuple[Casts, ...], output: Any) -> Any:
    for casts in every:
        output = _cast_by_rule(casts, output)
    return output


def _cast_by_rule(casts: Casts, values: Any) -> Any:
    """Cast a module's inputs or outputs; meanwhile ``rule_that_casts`` returns the rule."""
    if isinstance(values, torch.Tensor) and values.dtype is casts.dtype:
        return values
    thread.casting_rule = casts.rule
    try:
        return cast_where(values, casts.dtype, wants(casts.device, casts.dtype))
    finally:
        thread.casting_rule = None


class _TensorCopy(NamedTuple):
    """A cast of an argument, which the module may write to."""

    given: torch.Tensor
    cast: torch.Tensor

    @traced_only_inline
    def write_back(self) -> None:
        if not self.cast.is_inference() and self.cast._version:
            self.given.copy_(self.cast)


class _ListCopy(NamedTuple):
    """A list or dict with the casts of what the given one holds, which the module may change.

    Attributes:
        given, cast: the two.
        originals: what ``given`` held, by the id of its cast.
        before: what ``cast`` held.
    """

    given: Any
    cast: Any
    originals: dict[int, Any]
    before: list[Any]

    @traced_only_inline
    def write_back(self) -> None:
        now = _parts_of(self.cast)
        if len(now) == len(self.before) and all(map(operator.is_, now, self.before)):
            return
        kept = [self.originals.get(id(part), part) for part in now]
        if isinstance(self.cast, dict):
            changed = dict(zip(self.cast, kept, strict=True))
            self.given.clear()
            self.given.update(changed)
        else:
            self.given[:] = kept


Copies = tuple[_TensorCopy | _ListCopy, ...]


def _copies_in(cast: Any, given: Any) -> Copies:
    """Return the tensors, lists and dicts in ``cast`` that are not those of the caller."""
    if cast is given:
        return ()
    if isinstance(cast, torch.Tensor):
        return (_TensorCopy(given, cast),)
    if type(cast) not in (tuple, list, dict):
        return ()
    parts, originals = _parts_of(cast), _parts_of(given)
    copies: Copies = ()
    if type(cast) is not tuple:
        copies = (_ListCopy(given, cast, dict(zip(map(id, parts), originals, strict=True)), parts),)
    for part, original in zip(parts, originals, strict=True):
        copies += _copies_in(part, original)
    return copies


def _parts_of(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def wants(device: str, dtype: torch.dtype) -> Callable[[torch.Tensor], bool]:
    return lambda one: one.dtype in CASTABLE and one.dtype != dtype and one.device.type == device
