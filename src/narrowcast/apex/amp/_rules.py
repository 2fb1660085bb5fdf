"""Turn ``amp.lists`` into what O1 casts: the preset ``"O1"``, with rules where a user edited the lists.

The preset computes the functions on apex's lists as apex does. The name of a function selects the operators
that it calls. Several functions may call the same operator, such as ``softmax`` of ``torch.nn.functional``,
of ``torch`` and of tensors. Functions that PyTorch writes in Python are no operators: they are cast as a
whole.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from narrowcast.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from narrowcast.errors import PolicyError
from narrowcast.policy import Policy, Rule, base_of, native_table, overloads_of

FUNCTIONAL, TORCH, TENSOR = "torch.nn.functional", "torch", "torch.Tensor"
MODULES: dict[str, Any] = {FUNCTIONAL: torch.nn.functional, TORCH: torch, TENSOR: torch.Tensor}
_OVERRIDES: dict[str, ModuleType] = {
    FUNCTIONAL: functional_overrides,
    TORCH: torch_overrides,
    TENSOR: tensor_overrides,
}
HALF, FLOAT, WIDEST, AS_IS, BANNED = "lower", "fp32", "promote", "as-is", "banned"
_LISTS = {"FP16_FUNCS": HALF, "FP32_FUNCS": FLOAT, "CASTS": WIDEST, "SEQUENCE_CASTS": WIDEST}
_WORDS = {HALF: "half", FLOAT: "float32", WIDEST: "the widest type", AS_IS: "no list", BANNED: "BANNED_FUNCS"}
Key = tuple[str, str]
"""The name of a module and that of a function in it."""
Target = tuple[Any, str]
"""A module or class, and the name of a function in it."""


# ---- the operators that a function calls

# Functions that do not call just the operator of their own name, with the operators that they call.
_CALLED = {
    "cross_entropy": "cross_entropy_loss",
    "grid_sample": "grid_sampler",
    "nll_loss": "nll_loss nll_loss2d",
    "norm": "norm linalg_vector_norm",
    "sub": "sub rsub",
    "truediv": "div",
}
# As in apex, x **= 2 may make x a new tensor of another dtype. The in-place operator cannot change the dtype,
# so the function is cast instead.
_CAST_AS_A_WHOLE = "__ipow__"
# apex runs recurrent layers in half, although they are on no list. On CUDA, PyTorch's table casts the one
# kernel that they call. Elsewhere they get a rule, because their operators would run in different formats.
_RECURRENT_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# Tensor.cpu keeps the dtype of the tensor. apex cast it, which was a bug.
_NEVER_CAST = "cpu"


@functools.cache
def operators_of(name: str) -> tuple[str, ...]:
    """Return the overloads that a function of this name calls, such as ``"softmax.int"``.

    A function that PyTorch writes in Python has none.
    """
    if name == _CAST_AS_A_WHOLE:
        return ()
    word = _operator_word(name)
    overloads: dict[str, None] = {}
    for operator in _CALLED.get(word, word).split():
        overloads.update(dict.fromkeys(overloads_of(operator)))
    return tuple(overloads)


def _operator_word(name: str) -> str:
    """Return ``"add"`` for ``"__add__"``, ``"__radd__"`` and ``"__iadd__"``."""
    if not (name.startswith("__") and name.endswith("__")):
        return name
    word = name.strip("_")
    if word in _CALLED or overloads_of(word):
        return word
    if word[0] in "ri" and (word[1:] in _CALLED or overloads_of(word[1:])):
        return word[1:]
    return word


# ---- the lists


def _casts_by_name(overrides: ModuleType) -> dict[str, list[str]]:
    """Return the casts that a module's current lists ask for each name, one for each list that it is on."""
    casts: dict[str, list[str]] = {}
    for list_name, cast in _LISTS.items():
        for function in getattr(overrides, list_name, ()):
            casts.setdefault(function, []).append(cast)
    for function, _ in getattr(overrides, "BANNED_FUNCS", ()):
        casts.setdefault(function, []).append(BANNED)
    return casts


# The lists before edits of the script: importing amp.lists imports amp first, and with it this module.
_APEXS_LISTS = {module: _casts_by_name(overrides) for module, overrides in _OVERRIDES.items()}


def _listed() -> tuple[dict[Key, str], dict[Key, str]]:
    """Return the cast of each name that is on a list or was removed from one, and those of edited names."""
    casts: dict[Key, str] = {}
    edited: dict[Key, str] = {}
    for module, overrides in _OVERRIDES.items():
        casts_before, casts_now = _APEXS_LISTS[module], _casts_by_name(overrides)
        for name in {**casts_before, **casts_now}:
            before = casts_before.get(name, [AS_IS])
            asked = casts_now.get(name, [AS_IS])

            # A user may add a name to another list and not remove it from its own: the added list counts.
            moved_to = [cast for cast in dict.fromkeys(asked) if cast not in before]
            if len(moved_to) > 1:
                words = " and ".join(_WORDS[cast] for cast in moved_to)
                raise PolicyError(f"expected {name!r} of {module} on one list of amp.lists, got {words}")
            casts[module, name] = moved_to[0] if moved_to else asked[0]
            if asked != before:
                edited[module, name] = casts[module, name]
    return casts, edited


def _check_known(key: Key) -> None:
    module, name = key
    if name == _NEVER_CAST or operators_of(name):
        return
    if inspect.isfunction(getattr(MODULES[module], name, None)):
        return
    raise PolicyError(
        f"amp.lists names {name!r} of {module}, for which there is no operator of PyTorch and no function in "
        "Python: take it off the list, and decorate the function of yours that calls it with "
        "amp.half_function or amp.float_function"
    )


# ---- what O1 casts


@dataclass(frozen=True, slots=True)
class WholeCast:
    """How one Python function is cast.

    Attributes:
        cast: HALF, FLOAT, WIDEST or BANNED.
        alone: whether only its arguments are cast, and not the calls inside it.
        advice: the error message for half tensors, if they are refused.
    """

    cast: str
    alone: bool = False
    advice: str = ""


def plan(
    half: str, devices: Iterable[str], registered: Mapping[Key, str]
) -> tuple[Policy, dict[Target, WholeCast]]:
    """Return the policy of O1 by the current lists, and the Python functions that are cast as a whole.

    Args:
        half: the format of half, ``"fp16"`` or ``"bf16"``.
        devices: the device types of the models.
        registered: functions of PyTorch that were registered, which win over the lists.
    """
    casts, edited = _listed()
    for key in edited:
        _check_known(key)

    # A later entry replaces an earlier one, so that what was registered takes precedence over the lists.
    rules: dict[str, str] = {}
    if not all("_cudnn_rnn" in native_table(device) for device in devices):
        rules.update(dict.fromkeys(_RECURRENT_LAYERS, HALF))
    rules |= _rules(edited, "amp.lists asks", "put both on one list")
    rules |= _rules(registered, "what was registered asks", "register both for the same type")
    casts |= registered

    # Rules of a policy name operators only. Other functions are cast one by one.
    whole: dict[Target, WholeCast] = {}
    for (module, name), cast in casts.items():
        target = (MODULES[module], name)
        if cast == BANNED:
            whole[target] = WholeCast(BANNED, advice=_advice_of(name))
            # PyTorch's table refuses the operator in any format, and apex only in half.
            for operator in operators_of(name):
                rules.setdefault(operator, FLOAT)
        elif cast != AS_IS and name != _NEVER_CAST and not operators_of(name):
            whole[target] = WholeCast(cast, alone=True)

    preset = Policy.preset("O1")
    policy = Policy(compute=half, tables=preset.tables, rules=preset.rules)
    edits = [Rule(op=operator, compute=cast) for operator, cast in rules.items()]
    return policy.with_rules(*edits), whole


def _rules(casts: Mapping[Key, str], who_asks: str, advice: str) -> dict[str, str]:
    """Return the cast of each operator that these functions call; refuse functions that disagree."""
    rules: dict[str, str] = {}
    asked_by: dict[str, Key] = {}
    for key, cast in casts.items():
        for operator in operators_of(key[1]):
            other = asked_by.setdefault(operator, key)
            if casts[other] != cast:
                raise PolicyError(
                    f"{who_asks} for {_WORDS[casts[other]]} for {'.'.join(other)} and for {_WORDS[cast]} "
                    f"for {'.'.join(key)}, which both call PyTorch's operator {base_of(operator)!r}: {advice}"
                )
            rules[operator] = FLOAT if cast == BANNED else cast
    return rules


def _advice_of(name: str) -> str:
    for banned, advice in functional_overrides.BANNED_FUNCS:
        if banned == name:
            return str(advice)
    return ""
