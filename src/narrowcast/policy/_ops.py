"""Names of PyTorch's operators: what a person may write for one, and which overloads it stands for.

An operator is named as the dispatcher does, ``"softmax"`` for all its overloads or ``"softmax.int"`` for one;
those of other libraries with their namespace, ``"mylib::op"``. Overloads that write to an argument (in-place
and ``out=`` forms) are left out: PyTorch's own autocast runs them uncast too, since casting what is written
to would write to a copy.
"""

from __future__ import annotations

import difflib
import functools
from typing import Any

from narrowcast.errors import PolicyError
from narrowcast.policy._torch_internals import operator_names

# What is written before an operator's name, and what the dispatcher has there.
_PREFIXES = {
    "torch.nn.functional.": "",
    "nn.functional.": "",
    "F.": "",
    "torch.nn.": "",
    "nn.": "",
    "torch.linalg.": "linalg_",
    "torch.special.": "special_",
    "torch.fft.": "fft_",
    "torch.Tensor.": "",
    "Tensor.": "",
    "torch.": "",
    "aten::": "",
    "aten.": "",
}
# What a person calls it, where the dispatcher has another word.
_MEANT = {
    "cross_entropy": "cross_entropy_loss",
    "grid_sample": "grid_sampler",
    "logsigmoid": "log_sigmoid",
    "multi_head_attention_forward": "scaled_dot_product_attention",
    "sdpa": "scaled_dot_product_attention",
    "softmin": "softmax",
    "vecdot": "linalg_vecdot",
    "BatchNorm2d": "batch_norm",
    "Conv2d": "conv2d",
    "CrossEntropyLoss": "cross_entropy_loss",
    "GroupNorm": "group_norm",
    "LayerNorm": "layer_norm",
    "Linear": "linear",
    "RMSNorm": "rms_norm",
    "Softmax": "softmax",
}


def canonical_op(name: object) -> str:
    """``name`` as the dispatcher spells it, without ``aten::``; ``"torch.softmax"`` is ``"softmax"``.

    The overload that the dispatcher has no word for is ``"sum.default"``, where there are others beside it.

    Raises:
        PolicyError: PyTorch has no such operator, or only forms of it that a rule cannot be for.
    """
    if not isinstance(name, str) or not name:
        raise PolicyError(f'expected the name of an operator, as "softmax" or "softmax.int", got {name!r}')
    word = _without_prefix(name)
    base = base_of(word)
    if overloads_of(word):
        alone = word.endswith(".default") and len(overloads_of(base)) == 1
        return base if alone else word
    if _names(base):
        raise PolicyError(_not_for_rules(name, base))
    raise PolicyError(f"PyTorch has no operator {name!r}. {_guess(base)}")


def overloads_of(name: str) -> tuple[str, ...]:
    """The overloads that ``name`` stands for, as ``"softmax.int"``; empty where there is none."""
    found = _names(base_of(name))
    if "." in name:
        asked = _qualified(name).removesuffix(".default")
        found = tuple(one for one in found if one == asked)
    return tuple(one.removeprefix("aten::") for one in found if _why_not(one) is None)


def every_operator() -> tuple[str, ...]:
    """Every overload that a rule could be for, of all libraries that are imported."""
    return tuple(one.removeprefix("aten::") for one in operator_names() if _why_not(one) is None)


def operator(name: str) -> Any:
    """The ``torch._ops.OpOverload`` called ``name``, as ``"softmax.int"``."""
    import torch

    namespace, _, rest = _qualified(name).partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def base_of(name: str) -> str:
    """``"softmax"`` for ``"softmax.int"``."""
    return name.partition(".")[0]


def _qualified(name: str) -> str:
    return name if "::" in name else f"aten::{name}"


def _without_prefix(name: str) -> str:
    if name.startswith("torch.ops."):
        library, _, rest = name.removeprefix("torch.ops.").partition(".")
        return rest if library == "aten" else f"{library}::{rest}"
    for prefix, instead in _PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


# ---- what the dispatcher has


def _names(base: str) -> tuple[str, ...]:
    """Qualified names of every overload of ``base``."""
    qualified = _qualified(base)
    if qualified not in _by_base() or not qualified.startswith("aten::"):
        _by_base.cache_clear()  # another library may have been imported, or have defined more
    return _by_base().get(qualified, ())


@functools.cache
def _by_base() -> dict[str, tuple[str, ...]]:
    grouped: dict[str, list[str]] = {}
    for name in operator_names():
        grouped.setdefault(base_of(name), []).append(name)
    return {base: tuple(sorted(names)) for base, names in grouped.items()}


@functools.cache
def _why_not(qualified: str) -> str | None:
    """Why no rule can be for an overload, in words; None where one can."""
    try:
        schema = operator(qualified)._schema
    except (AttributeError, RuntimeError):
        return "has no schema"  # registered with the dispatcher, and not known to Python
    if schema.is_mutable:
        return "writes to an argument"
    if not any("Tensor" in str(argument.type) for argument in schema.arguments):
        return "takes no tensor"
    return None


# ---- what a person may have meant


def _not_for_rules(name: str, base: str) -> str:
    known = ", ".join(sorted(overloads_of(base)))
    if known:
        return f"operator {base!r} has no overload {name!r} that a rule can be for. Known: {known}."
    why = dict.fromkeys(reason for one in _names(base) if (reason := _why_not(one)))
    advice = ""
    if base.endswith("_") and overloads_of(base.rstrip("_")):
        advice = f'; a rule can be for "{base.rstrip("_")}"'
    return f"no rule can be for operator {name!r}, which {' or '.join(why)} and is never cast{advice}"


def _guess(word: str) -> str:
    if word in _MEANT:
        return f'Did you mean "{_MEANT[word]}"?'
    if _is_python_function(word):
        return "It is a Python function: rules are for the operators that it calls."
    if "::" in word:
        return f"Import what defines {word.partition('::')[0]!r} first."
    names = [base.removeprefix("aten::") for base in _by_base() if not base.startswith("aten::_")]
    near = difflib.get_close_matches(word.lower(), names, n=3)
    if near:
        return "Did you mean " + " or ".join(f'"{one}"' for one in near) + "?"
    return 'Operators of another library are named with their namespace, as "mylib::op", once it is imported.'


def _is_python_function(word: str) -> bool:
    import torch

    return callable(getattr(torch.nn.functional, word, None)) and word.islower()
