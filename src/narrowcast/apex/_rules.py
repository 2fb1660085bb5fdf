"""apex's lists as they stand, made into a policy: rules where a device's own autocast table differs.

A function's name stands for the operators that it calls, which other functions may call too: ``softmax`` of
``torch.nn.functional`` is that of ``torch`` and of tensors. Where two names disagree about one operator, what
was registered by the user wins, then what differs from apex's own lists.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from narrowcast.apex import _lists
from narrowcast.apex._operators import (
    FUNCTIONAL,
    INSIDE,
    MODULES,
    RECURRENT,
    TENSOR,
    TORCH,
    WHOLE,
    function_in_python,
    is_known,
    operators_of,
)
from narrowcast.errors import PolicyError
from narrowcast.policy import (
    FP32,
    FP32_APPEND_DTYPE,
    FP32_SET_DTYPE,
    LOWER,
    PROMOTE,
    Policy,
    Rule,
    base_of,
    native_table,
    overloads_of,
)

HALF, FLOAT, WIDEST, AS_IS, BANNED = "lower", "fp32", "promote", "as-is", "banned"
_LISTS = {"FP16_FUNCS": HALF, "FP32_FUNCS": FLOAT, "CASTS": WIDEST, "SEQUENCE_CASTS": WIDEST}
_DOORS = {
    FUNCTIONAL: "functional_overrides",
    TORCH: "torch_overrides",
    TENSOR: "tensor_overrides",
}
_WORDS = {HALF: "half", FLOAT: "float32", WIDEST: "the widest type", AS_IS: "no list", BANNED: "BANNED_FUNCS"}
# What PyTorch promotes by itself; the enumeration in tests/apex fails for one that it does not.
_PROMOTED_ANYWAY = frozenset({
    "add", "addcdiv", "addcmul", "atan2", "cat", "div", "eq", "ge", "gt", "le", "lt", "mul", "ne", "rsub",
    "stack", "sub",
})  # fmt: skip
_NATIVE: dict[str, set[str | None]] = {
    HALF: {LOWER},
    FLOAT: {FP32, FP32_SET_DTYPE, FP32_APPEND_DTYPE},
    WIDEST: {PROMOTE},
    AS_IS: {None},
}
_DEFAULT, _EDITED, _REGISTERED = range(3)
Key = tuple[str, str]
"""The name of a module and that of a function in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the lists ask for.

    Attributes:
        policy: for what goes through PyTorch's dispatcher.
        whole: functions in Python to which there is no operator, and how they are cast.
        banned: functions that refuse half, with the advice of each.
        in_place: in-place forms of what computes in float32, which refuse half.
    """

    policy: Policy
    whole: dict[Key, str] = field(default_factory=dict)
    banned: dict[Key, str] = field(default_factory=dict)
    in_place: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class _Vote:
    kind: str
    rank: int
    key: Key


def plan(
    half: str,
    devices: Iterable[str],
    registered: dict[Key, str],
    *,
    allow_banned: bool = False,
    apart: object = None,
) -> Plan:
    """The lists of this moment for models on these types of device; ``half`` as ``"fp16"``.

    Args:
        registered: functions of the three modules that the user registered, and how they are cast.
        allow_banned: whether what refuses half is computed in float32 instead.
        apart: plans that differ in it have policies of their own.

    Raises:
        PolicyError: a name that no operator and no function can be found for, or two that disagree.
    """
    votes = [*_votes(), *(_Vote(kind, _REGISTERED, key) for key, kind in registered.items())]
    whole: dict[Key, str] = {}
    banned: dict[Key, str] = {}
    by_operator: dict[str, list[_Vote]] = {}
    for vote in votes:
        name = vote.key[1]
        _check_known(vote)
        if vote.kind == BANNED and not allow_banned:
            banned[vote.key] = _message(name)
        elif name in WHOLE or not is_known(name):
            whole[vote.key] = vote.kind
        for op in operators_of(name):
            by_operator.setdefault(op, []).append(vote)
    for key in registered:
        banned.pop(key, None)
    wanted = {op: _winner(op, found) for op, found in by_operator.items()}
    rules, in_place = _rules(wanted, tuple(devices)), _in_place_forms(wanted)
    policy = _policy(half, rules, str(sorted(whole.items())), str(sorted(banned)), str(apart))
    return Plan(policy=policy, whole=whole, banned=banned, in_place=in_place)


def _in_place_forms(wanted: dict[str, str]) -> tuple[Key, ...]:
    names = dict.fromkeys(f"{base_of(op)}_" for op, kind in wanted.items() if kind == FLOAT)
    modules = (TORCH, TENSOR)
    return tuple((module, name) for module in modules for name in names if hasattr(MODULES[module], name))


def _votes() -> Iterable[_Vote]:
    """What each name on a list, or taken from one, asks for."""
    for module, door in _DOORS.items():
        lists = import_module(f"narrowcast.apex.amp.lists.{door}")
        now = _kinds(vars(lists))
        before = _kinds(_lists.ORIGINAL[door])
        for name in {**before, **now}:
            asked = now.get(name) or [AS_IS]
            original = before.get(name, [AS_IS])
            changed = [kind for kind in asked if kind not in original]
            if len(changed) > 1:
                words = " and ".join(_WORDS[kind] for kind in changed)
                raise PolicyError(f"expected {name!r} of {module} on one list of amp.lists, got {words}")
            kind = changed[0] if changed else asked[0]
            yield _Vote(kind, _EDITED if asked != original else _DEFAULT, (module, name))


def _kinds(lists: Any) -> dict[str, list[str]]:
    """Name -> what the lists ask for."""
    found: dict[str, list[str]] = {}
    for name, kind in _LISTS.items():
        for entry in lists.get(name, ()):
            found.setdefault(entry, []).append(kind)
    for entry in lists.get("BANNED_FUNCS", ()):
        found.setdefault(entry[0], []).append(BANNED)
    return found


def _message(name: str) -> str:
    lists = import_module("narrowcast.apex.amp.lists.functional_overrides")
    return next((str(entry[1]) for entry in lists.BANNED_FUNCS if entry[0] == name), "")


def _check_known(vote: _Vote) -> None:
    module, name = vote.key
    if is_known(name) or name in WHOLE:
        return
    if not hasattr(MODULES[module], name):
        raise PolicyError(f"amp.lists names {name!r} of {module}, which has no such function")
    if function_in_python(module, name) is None:
        raise PolicyError(
            f"amp.lists names {name!r} of {module}, for which no operator of PyTorch is known: take it off "
            "the list, and decorate the function of yours that calls it with amp.half_function or "
            "amp.float_function"
        )


def _winner(op: str, votes: list[_Vote]) -> str:
    rank = max(vote.rank for vote in votes)
    best = [vote for vote in votes if vote.rank == rank]
    other = next((vote for vote in best if vote.kind != best[0].kind), None)
    if other is not None:
        first = best[0]
        raise PolicyError(
            f"amp.lists asks for {_WORDS[first.kind]} for {'.'.join(first.key)} and for {_WORDS[other.kind]} "
            f"for {'.'.join(other.key)}, which both call PyTorch's operator {base_of(op)!r}: put both on one "
            "list"
        )
    return FLOAT if best[0].kind == BANNED else best[0].kind


# ---- rules


def _rules(wanted: dict[str, str], devices: tuple[str, ...]) -> tuple[Rule, ...]:
    tables = [native_table(device) for device in devices]
    for table in tables:
        if "_cudnn_rnn" not in table:
            layers = (op for name in RECURRENT for op in overloads_of(name))
            wanted = {**dict.fromkeys(layers, HALF), **wanted}
    others = dict.fromkeys(op for table in tables for op in table)
    wanted = {**dict.fromkeys(others, AS_IS), **wanted}
    inside = {op: AS_IS for name in INSIDE for op in overloads_of(name) if op not in wanted}
    found = [
        Rule(op=op, compute=kind)
        for op, kind in wanted.items()
        if not _is_native(op, kind, [table.get(op) for table in tables])
    ]
    return (*found, *(Rule(op=op, compute=kind) for op, kind in inside.items()))


def _is_native(op: str, kind: str, native: list[str | None]) -> bool:
    """Whether every device does so by itself."""
    if kind == WIDEST and base_of(op) in _PROMOTED_ANYWAY:
        return set(native) <= {None, PROMOTE}
    if op in _RECURRENT_KERNELS:
        return True
    return set(native) <= _NATIVE[kind]


# What recurrent layers come down to, which the rules about them decide about, or the device's own table.
_RECURRENT_KERNELS = frozenset({
    "_cudnn_rnn", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell",
})  # fmt: skip
_policies: weakref.WeakValueDictionary[tuple[object, ...], Policy] = weakref.WeakValueDictionary()


def _policy(half: str, rules: tuple[Rule, ...], *besides: str) -> Policy:
    """One object for the same lists, ``besides`` included, so that its kernels need not be made again."""
    key = (half, rules, *besides)
    found = _policies.get(key)
    if found is None:
        found = _policies[key] = Policy(compute=half, rules=rules)
    return found
