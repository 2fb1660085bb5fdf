"""Turn ``amp.lists`` into a policy, with a rule wherever a list differs from the device's autocast table.

The name of a function selects the operators that the function calls. Several functions may call one operator:
``softmax`` of ``torch.nn.functional``, of ``torch`` and of tensors is the same. If two names disagree about
an operator, registered functions win, then names that the user moved to another list.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from narrowcast.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from narrowcast.errors import PolicyError
from narrowcast.policy import (
    FP32,
    FP32_APPEND_DTYPE,
    FP32_SET_DTYPE,
    LOWER,
    PROMOTE,
    TABLES,
    Policy,
    Rule,
    base_of,
    native_table,
    overloads_of,
)

FUNCTIONAL, TORCH, TENSOR = "torch.nn.functional", "torch", "torch.Tensor"
MODULES: dict[str, Any] = {FUNCTIONAL: torch.nn.functional, TORCH: torch, TENSOR: torch.Tensor}
HALF, FLOAT, WIDEST, AS_IS, BANNED = "lower", "fp32", "promote", "as-is", "banned"
_LISTS = {"FP16_FUNCS": HALF, "FP32_FUNCS": FLOAT, "CASTS": WIDEST, "SEQUENCE_CASTS": WIDEST}
_OVERRIDES: dict[str, ModuleType] = {
    FUNCTIONAL: functional_overrides,
    TORCH: torch_overrides,
    TENSOR: tensor_overrides,
}
_WORDS = {HALF: "half", FLOAT: "float32", WIDEST: "the widest type", AS_IS: "no list", BANNED: "BANNED_FUNCS"}
# PyTorch promotes the inputs of these itself; tests/apex fails for one of which it does not.
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
Target = tuple[Any, str]
"""A module or class, and the name of a function in it."""


# ---- operators

# The operators that functions call whose name is not that of an operator.
_CALLED = {
    "cross_entropy": "cross_entropy_loss",
    "grid_sample": "grid_sampler",
    "interpolate": " ".join(op for op in TABLES["cuda"] if "upsample" in op),
    "nll_loss": "nll_loss nll_loss2d",
    "sub": "sub rsub",
    "truediv": "div",
}
# Tensor.cpu keeps the dtype of the tensor. apex cast it, which was a bug.
_NOTHING = frozenset({"cpu"})
# Python functions that compute in float32 as a whole, because their operators also occur outside the lists,
# such as the multiplication in local_response_norm. x **= 2 makes x another tensor, as in apex.
_WHOLE = frozenset({
    "__ipow__", "interpolate", "local_response_norm", "multilabel_soft_margin_loss", "norm", "normalize",
    "softmin",
})  # fmt: skip
# apex runs recurrent layers and cells in half, although they are on no list.
_RECURRENT = (
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip
# Kernels of recurrent layers: the rules for the layers decide, or the device's own table.
_RECURRENT_KERNELS = frozenset({
    "_cudnn_rnn", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell",
})  # fmt: skip
# Operators on no list that call listed ones in C++, where apex cast nothing. tests/apex finds them by running
# every operator that PyTorch has samples of with and without casts.
_CALLS_LISTED = (
    "_safe_softmax", "chain_matmul", "corrcoef", "cov", "cumulative_trapezoid", "einsum", "ldexp",
    "linalg_matmul", "linalg_matrix_power", "linalg_multi_dot", "linalg_pinv", "matrix_exp", "matrix_power",
    "mvlgamma", "pairwise_distance", "square", "sum_to_size", "tensordot", "trapezoid", "trapz",
)  # fmt: skip


@functools.cache
def operators_of(name: str) -> tuple[str, ...]:
    """Return the overloads that a function of this name calls, as ``"softmax.int"``."""
    if name in _NOTHING or name == "__ipow__":
        return ()
    word = _word(name)
    called = _CALLED.get(word, word).split()
    return tuple(dict.fromkeys(overload for op in called for overload in overloads_of(op)))


def is_known(name: str) -> bool:
    """Return whether ``operators_of`` finds the operators of this name."""
    return name in _NOTHING or bool(operators_of(name))


def _word(name: str) -> str:
    """Return ``"add"`` for ``"__radd__"``."""
    if not (name.startswith("__") and name.endswith("__")):
        return name
    word = name.strip("_")
    if overloads_of(word) or word in _CALLED:
        return word
    short = word[1:]
    return short if word[:1] in "ri" and (overloads_of(short) or short in _CALLED) else word


# ---- lists


@dataclass(frozen=True, slots=True)
class WholeCast:
    """How one Python function is cast."""

    kind: str  # HALF, FLOAT, WIDEST or BANNED
    alone: bool = False  # whether calls inside it are left uncast
    advice: str = ""  # the error message for half tensors, if they are refused


@dataclass(frozen=True, slots=True)
class _Vote:
    kind: str
    rank: int
    key: Key


def plan(
    half: str, devices: Iterable[str], registered: dict[Key, str]
) -> tuple[Policy, dict[Target, WholeCast]]:
    """Return the casts of the current lists and of registered functions, for models on these device types.

    A policy for functions that PyTorch dispatches as operators, and the Python functions that are cast as a
    whole or refuse half tensors.
    """
    votes = [*_votes(), *(_Vote(kind, _REGISTERED, key) for key, kind in registered.items())]
    whole: dict[Key, WholeCast] = {}
    by_operator: dict[str, list[_Vote]] = {}
    for vote in votes:
        name = vote.key[1]
        _check_known(vote)
        if vote.kind == BANNED:
            advice = next(str(text) for one, text in functional_overrides.BANNED_FUNCS if one == name)
            whole[vote.key] = WholeCast(BANNED, advice=advice)
        elif name in _WHOLE or not is_known(name):
            whole[vote.key] = WholeCast(vote.kind, alone=True)
        elif vote.rank == _REGISTERED:
            whole.pop(vote.key, None)
        for op in operators_of(name):
            by_operator.setdefault(op, []).append(vote)
    wanted = {op: _winner(op, found) for op, found in by_operator.items()}
    policy = Policy(compute=half, rules=_rules(wanted, tuple(devices)))
    targets = {**whole, **_in_place_forms(wanted)}
    return policy, {(MODULES[module], name): how for (module, name), how in targets.items()}


def _in_place_forms(wanted: dict[str, str]) -> dict[Key, WholeCast]:
    """Return the in-place forms of float32 functions, which refuse half tensors."""
    found = {}
    for op in dict.fromkeys(base_of(op) for op, kind in wanted.items() if kind == FLOAT):
        advice = (
            f"{op}_ was called with a half tensor, and computes in float32, which cannot be written into "
            f"one: call {op}, which returns a new tensor in float32, or .float() before"
        )
        for module in (TORCH, TENSOR):
            if hasattr(MODULES[module], f"{op}_"):
                found[module, f"{op}_"] = WholeCast(BANNED, advice=advice)
    return found


def _votes() -> Iterable[_Vote]:
    """Yield the cast of each name that is on a list or was removed from one."""
    for module, overrides in _OVERRIDES.items():
        now = _kinds(overrides)
        before = _ORIGINAL[module]
        for name in {**before, **now}:
            asked = now.get(name) or [AS_IS]
            original = before.get(name, [AS_IS])
            changed = [kind for kind in asked if kind not in original]
            if len(changed) > 1:
                words = " and ".join(_WORDS[kind] for kind in changed)
                raise PolicyError(f"expected {name!r} of {module} on one list of amp.lists, got {words}")
            kind = changed[0] if changed else asked[0]
            yield _Vote(kind, _EDITED if asked != original else _DEFAULT, (module, name))


def _kinds(overrides: ModuleType) -> dict[str, list[str]]:
    """Return the casts that the lists give each name."""
    found: dict[str, list[str]] = {}
    for name, kind in _LISTS.items():
        for entry in getattr(overrides, name, ()):
            found.setdefault(entry, []).append(kind)
    for entry, _ in getattr(overrides, "BANNED_FUNCS", ()):
        found.setdefault(entry, []).append(BANNED)
    return found


# Read before users can edit the lists, since importing the lists imports this module first.
_ORIGINAL = {module: _kinds(overrides) for module, overrides in _OVERRIDES.items()}


def _check_known(vote: _Vote) -> None:
    module, name = vote.key
    if is_known(name) or name in _WHOLE or inspect.isfunction(getattr(MODULES[module], name, None)):
        return
    raise PolicyError(
        f"amp.lists names {name!r} of {module}, for which there is no operator of PyTorch and no function in "
        "Python: take it off the list, and decorate the function of yours that calls it with "
        "amp.half_function or amp.float_function"
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
        # The table casts for the kernel of layers, which cells do not call.
        names = [name for name in _RECURRENT if "cell" in name or "_cudnn_rnn" not in table]
        wanted = {**dict.fromkeys((op for name in names for op in overloads_of(name)), HALF), **wanted}
    others = dict.fromkeys(op for table in tables for op in table)
    wanted = {**dict.fromkeys(others, AS_IS), **wanted}
    inside = {op: AS_IS for name in _CALLS_LISTED for op in overloads_of(name) if op not in wanted}
    found = [
        Rule(op=op, compute=kind)
        for op, kind in wanted.items()
        if not _is_native(op, kind, [table.get(op) for table in tables])
    ]
    return (*found, *(Rule(op=op, compute=kind) for op, kind in inside.items()))


def _is_native(op: str, kind: str, native: list[str | None]) -> bool:
    """Return whether every device casts the operator this way without a rule."""
    if kind == WIDEST and base_of(op) in _PROMOTED_ANYWAY:
        return set(native) <= {None, PROMOTE}
    if op in _RECURRENT_KERNELS:
        return True
    return set(native) <= _NATIVE[kind]
