"""Casting the tensors inside whatever a module takes or returns, without touching the original."""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from narrowcast.casting._torch_internals import unseen_by_the_compiler

_HALVES = frozenset({torch.float16, torch.bfloat16})
_ValueT = TypeVar("_ValueT")


def cast_floating(
    value: _ValueT, dtype: torch.dtype, *, only: Iterable[torch.dtype] | None = None
) -> _ValueT:
    """The same structure with its floating tensors in ``dtype``; the very same object if none needed a cast.

    Args:
        value: a tensor of any shape and device, or any nesting of lists, tuples (named ones,
            ``PackedSequence`` and ``torch.return_types`` too), dicts (subclasses too), sets, deques,
            dataclasses (frozen and slotted ones and Hugging Face ``ModelOutput`` too), ``SimpleNamespace``,
            ``UserDict``, ``UserList`` and ``torch.distributions.Distribution`` objects. Anything else passes
            through untouched: what is inside an object of an unknown class stays as it was.
        dtype: format of the cast tensors.
        only: formats that are cast; by default ``torch.float16`` and ``torch.bfloat16``. Integer, bool and
            complex tensors are never cast.

    Returns:
        ``value`` itself where nothing was cast, else a copy of the containers on the way to what was cast;
        parts in which nothing was cast are shared with ``value``, and an object that occurs twice, or
        contains itself, does so in the copy. Casts are differentiable and stay on the tensor's device.
        Widening is exact, NaN, infinities and the sign of zero included; narrowing rounds to nearest even and
        overflows to infinity, as ``Tensor.to``. Keys of dicts are not cast.

    >>> cast_floating((torch.ones(2, dtype=torch.bfloat16), torch.arange(2)), torch.float32)
    (tensor([1., 1.]), tensor([0, 1]))
    """
    formats = _HALVES if only is None else frozenset(only)
    if isinstance(value, torch.Tensor):
        wanted = value.dtype in formats and value.dtype != dtype and value.dtype.is_floating_point
        return value.to(dtype) if wanted else value  # type: ignore[return-value]

    def wants(tensor: torch.Tensor) -> bool:
        its = tensor.dtype
        return its in formats and its != dtype and its.is_floating_point

    return cast_where(value, dtype, wants)


def cast_where(value: _ValueT, dtype: torch.dtype, wants: Callable[[torch.Tensor], bool]) -> _ValueT:
    """As ``cast_floating``, for the tensors of which ``wants`` is true."""
    if torch.compiler.is_compiling():
        return _cast_plainly(value, dtype, wants)  # type: ignore[no-any-return]
    if not _contains(value, wants, set()):
        return value
    result: _ValueT = _Cast(dtype, wants).walk(value)
    return result


def _cast_plainly(value: Any, dtype: torch.dtype, wants: Callable[[torch.Tensor], bool]) -> Any:
    """For code that Dynamo traces, which cannot follow identities: plain trees; others break the graph."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if wants(value) else value
    cls = type(value)
    if cls is dict:
        return {key: _cast_plainly(part, dtype, wants) for key, part in value.items()}
    if cls is tuple or cls is list:
        return cls([_cast_plainly(part, dtype, wants) for part in value])
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return cls(*[_cast_plainly(part, dtype, wants) for part in value])
    if value is None or isinstance(value, int | float | str):
        return value
    return _cast_untraced(value, dtype, wants)


@unseen_by_the_compiler
def _cast_untraced(value: Any, dtype: torch.dtype, wants: Callable[[torch.Tensor], bool]) -> Any:
    return _Cast(dtype, wants).walk(value)


def _contains(value: object, wants: Callable[[torch.Tensor], bool], seen: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return wants(value)
    kind = _kind_of(type(value))
    if kind is None or id(value) in seen:
        return False
    seen.add(id(value))
    return any(_contains(part, wants, seen) for part in kind.parts(value))


class _Cast:
    """One rebuilding of one value. Copies are known by the identity of their original before they are filled,
    so that a value that contains itself ends, as ``copy.deepcopy`` does it."""

    def __init__(self, dtype: torch.dtype, wants: Callable[[torch.Tensor], bool]) -> None:
        self.dtype = dtype
        self.wants = wants
        self.copies: dict[int, Any] = {}

    def walk(self, value: Any) -> Any:
        key = id(value)
        if key in self.copies:
            return self.copies[key]
        if isinstance(value, torch.Tensor):
            if not self.wants(value):
                return value
            self.copies[key] = value.to(self.dtype)
            return self.copies[key]
        kind = _kind_of(type(value))
        if kind is None or not _contains(value, self.wants, set()):
            return value
        return kind.rebuild(value, self)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """How to look into values of one class, and how to make another with other parts."""

    parts: Callable[[Any], Iterable[object]]
    rebuild: Callable[[Any, _Cast], Any]


# --- sequences ----------------------------------------------------------------------------------------------


def _rebuild_tuple(value: Any, cast: _Cast) -> Any:
    items = [cast.walk(item) for item in value]
    if id(value) in cast.copies:  # made meanwhile, by a list inside that contains this tuple
        return cast.copies[id(value)]
    cls = type(value)
    # A namedtuple's own constructor takes fields and PackedSequence's checks devices; both are done already.
    copy = cls(items) if hasattr(cls, "n_sequence_fields") else tuple.__new__(cls, items)
    cast.copies[id(value)] = copy
    _copy_attributes(value, copy, cast)
    return copy


def _rebuild_list(value: Any, cast: _Cast) -> Any:
    copy = list.__new__(type(value))
    cast.copies[id(value)] = copy
    list.extend(copy, [cast.walk(item) for item in list.__iter__(value)])
    _copy_attributes(value, copy, cast)
    return copy


def _rebuild_deque(value: Any, cast: _Cast) -> Any:
    copy = value.__copy__()
    cast.copies[id(value)] = copy
    copy.clear()
    copy.extend([cast.walk(item) for item in value])
    return copy


def _rebuild_set(value: Any, cast: _Cast) -> Any:
    copy = type(value)([cast.walk(item) for item in value])
    cast.copies[id(value)] = copy
    return copy


# --- dicts --------------------------------------------------------------------------------------------------


def _dict_parts(value: Any) -> Iterator[object]:
    yield from dict.values(value)
    yield from _attribute_parts(value)


def _rebuild_dict(value: Any, cast: _Cast) -> Any:
    # The base class's methods: Hugging Face's ModelOutput refuses update() and makes every item an attribute.
    base: type[dict[Any, Any]] = OrderedDict if isinstance(value, OrderedDict) else dict
    copy = (defaultdict if isinstance(value, defaultdict) else base).__new__(type(value))
    cast.copies[id(value)] = copy
    if isinstance(value, defaultdict):
        copy.default_factory = value.default_factory
    for key in base.__iter__(value):
        base.__setitem__(copy, key, cast.walk(dict.__getitem__(value, key)))
    if getattr(value, "__dict__", None) is value:  # the "attribute dict" idiom: its items are its attributes
        copy.__dict__ = copy
    else:
        _copy_attributes(value, copy, cast)
    return copy


# --- objects with attributes --------------------------------------------------------------------------------


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in {"__dict__", "__weakref__"}:
                mangled = name.startswith("__") and not name.endswith("__")
                yield f"_{base.__name__.lstrip('_')}{name}" if mangled else name


def _attribute_parts(value: Any) -> Iterator[object]:
    own = getattr(value, "__dict__", None)
    if own and own is not value:
        yield from own.values()
    for name in _slots(type(value)):
        if hasattr(value, name):
            yield getattr(value, name)


def _copy_attributes(value: Any, copy: Any, cast: _Cast) -> None:
    own = getattr(value, "__dict__", None)
    if own:
        copy.__dict__.update({name: cast.walk(part) for name, part in own.items()})
    for name in _slots(type(value)):
        if hasattr(value, name):
            object.__setattr__(copy, name, cast.walk(getattr(value, name)))  # a frozen class refuses its own


def _rebuild_object(value: Any, cast: _Cast) -> Any:
    cls = type(value)
    copy = (
        types.SimpleNamespace.__new__(cls)
        if isinstance(value, types.SimpleNamespace)
        else object.__new__(cls)
    )
    cast.copies[id(value)] = copy
    _copy_attributes(value, copy, cast)
    return copy


# --- which is which -----------------------------------------------------------------------------------------


def _iterate_with_attributes(value: Any) -> Iterator[object]:
    yield from value
    yield from _attribute_parts(value)


_TUPLE = _Kind(iter, _rebuild_tuple)
_LIST = _Kind(iter, _rebuild_list)
_DICT = _Kind(dict.values, _rebuild_dict)
_SET = _Kind(iter, _rebuild_set)
_OBJECT = _Kind(_attribute_parts, _rebuild_object)
_BUILT_IN: dict[type, _Kind | None] = {
    tuple: _TUPLE,
    list: _LIST,
    dict: _DICT,
    OrderedDict: _Kind(_dict_parts, _rebuild_dict),
    set: _SET,
    frozenset: _SET,
    **dict.fromkeys((type(None), bool, int, float, complex, str, bytes, torch.Size), None),
}
# Weak, since programs make classes too.
_found: weakref.WeakKeyDictionary[type, _Kind | None] = weakref.WeakKeyDictionary()


def _kind_of(cls: type) -> _Kind | None:
    if cls in _BUILT_IN:
        return _BUILT_IN[cls]
    try:
        return _found[cls]
    except KeyError:
        kind = _found[cls] = _find_kind(cls)
        return kind


def _find_kind(cls: type) -> _Kind | None:
    for base, kind in (
        (tuple, _Kind(_iterate_with_attributes, _rebuild_tuple)),
        (list, _Kind(_iterate_with_attributes, _rebuild_list)),
        (dict, _Kind(_dict_parts, _rebuild_dict)),
        (deque, _Kind(iter, _rebuild_deque)),
        ((set, frozenset), _SET),
        ((torch.distributions.Distribution, UserDict, UserList, types.SimpleNamespace), _OBJECT),
    ):
        if issubclass(cls, base):
            return kind
    # A dataclass on top of another built-in type (an exception, say) cannot be made by object.__new__.
    if dataclasses.is_dataclass(cls) and cls.__new__ is object.__new__:
        return _OBJECT
    return None
