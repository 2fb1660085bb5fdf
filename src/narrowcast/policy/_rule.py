"""Rules: choose the format of an operator or of a part of a model.

    rule.op("softmax", compute="fp16")                                    every softmax
    rule.op("layer_norm", compute="fp32", output="lower")                 fp32 inside, lower outputs
    rule.module("decoder.*.norm", compute="fp32")                         parts of a model, by path
    rule.module("head", op="linear", compute="fp32")                      an operator inside them
    rule.module_type(torch.nn.LayerNorm, compute="fp32", output="bf16")   by class, subclasses included

``compute`` is a format (``"fp32"``, ``"bf16"``, ``"fp16"``), ``"lower"`` (the region's own), ``"promote"``
(the widest format among the inputs), ``"as-is"`` (no cast), ``"refuse"`` (an error), or an fp8 recipe for
linear layers. ``output`` is the format of the outputs; without it they are not cast.

The more specific rule wins: an operator inside a module, then a module, then an operator, then PyTorch's
table. The innermost module wins over outer ones. At one module, a rule for one overload wins over a rule for
all overloads, and a rule with both a path and a class over a rule with only one of them; otherwise the later
rule wins. A rule for a module applies to the operators that PyTorch's table or another rule casts, not to
every operator inside.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowcast.errors import PolicyError, did_you_mean, nearest_name
from narrowcast.policy._ops import base_of, canonical_op

if TYPE_CHECKING:
    import torch

FORMATS = ("fp32", "bf16", "fp16", "lower")
"""Words for a format in a rule."""
FP8_RECIPES = ("fp8_tensorwise", "fp8_rowwise")
"""Words for fp8 in a rule."""
OTHER_FORMAT_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"
}  # fmt: skip
"""Names of formats in torch and elsewhere, for suggestions."""
WIDEST = "widest"
COMPUTES: dict[str, str | None] = {
    **{word: word for word in FORMATS},
    "promote": WIDEST,
    "as-is": None,
    "refuse": None,
    **dict.fromkeys(FP8_RECIPES),
}
"""Each word for ``compute`` of a rule -> the format that operators' inputs are cast to; None: no cast.

``casting/kernels/_operators.py`` knows only ``FORMATS`` and ``WIDEST``: extend it to map a word to another
format.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule, as created by ``op``, ``module`` and ``module_type``.

    Attributes:
        compute: one of ``COMPUTES``.
        output: format of the outputs, one of ``FORMATS``, or None to leave them.
        op: operator, as ``"softmax"`` or ``"softmax.int"``; None: all of a module.
        module: glob over paths in the model, as ``"decoder.*.norm"``; ``*`` runs across dots; None: any.
        module_type: full name of a class of modules, as ``"torch.nn.modules.linear.Linear"``; None: any.

    Raises:
        PolicyError: a value is unknown or a combination is invalid.
    """

    compute: str
    output: str | None = None
    op: str | None = None
    module: str | None = None
    module_type: str | None = None

    def __post_init__(self) -> None:
        _check_word("compute", self.compute, COMPUTES)
        if self.output is not None:
            _check_word("output", self.output, FORMATS)
        if self.op is None and self.module is None and self.module_type is None:
            raise PolicyError("expected a rule to say what it is for: op=, module= or module_type=")
        if self.module is not None:
            _check_text("a glob over module paths", "encoder.*", self.module)
        object.__setattr__(self, "module_type", _class_name(self.module_type))
        if self.op is not None:
            object.__setattr__(self, "op", canonical_op(self.op))
        if self.compute in FP8_RECIPES and (self.op not in (None, "linear") or self.output is not None):
            raise PolicyError(
                f"{self.compute!r} is for linear layers and hands on the region's format: expected a rule "
                f'for a module, for torch.nn.Linear or for op "linear", without output, got "{self}"'
            )
        if self.compute == "refuse" and self.output is not None:
            raise PolicyError("a rule that refuses hands nothing on: leave output out")

    @property
    def selector(self) -> tuple[str | None, str | None, str | None]:
        """What the rule selects. Two rules with the same selector must be equal."""
        return (self.op, self.module, self.module_type)

    @property
    def target(self) -> str:
        """What the rule selects, as text: ``linear in modules "head"``."""
        modules = []
        if self.module is not None:
            modules.append(f'modules "{_printable(self.module)}"')
        if self.module_type is not None:
            modules.append(f"class {_printable(self.module_type.rpartition('.')[2])}")
        in_modules = " of ".join(modules)
        if self.op is None:
            return in_modules
        return f"{self.op} in {in_modules}" if modules else self.op

    @property
    def is_for_modules(self) -> bool:
        """Whether the rule selects modules."""
        return self.module is not None or self.module_type is not None

    def __str__(self) -> str:
        return f"{self.target}: {self.effect}"

    @property
    def effect(self) -> str:
        """What the rule does, as text: ``fp32, handed on in bf16``."""
        if self.output is None:
            return self.compute
        return f"{self.compute}, handed on in {self.output}"


def op(name: str, *, compute: str, output: str | None = None) -> Rule:
    """Create a rule for every call of an operator.

    Args:
        name: as the dispatcher spells it, ``"softmax"`` for all overloads, ``"softmax.int"`` for one; of
            another library ``"mylib::op"``. ``"torch.softmax"`` and ``"F.softmax"`` are understood. In-place
            and ``out=`` forms are never cast, as in PyTorch's own autocast.
        compute: what its floating inputs are cast to; see the module's docstring for the words.
        output: what its floating outputs are cast to; None: they are not cast.

    Only floating tensors on the region's device are cast, fp64 aside. A cast to fp16 overflows to infinity
    beyond 65504; NaN stays NaN; subnormals of the target format are kept.

    Raises:
        PolicyError: no such operator (near names are shown), format or combination.
    """
    return Rule(op=canonical_op(name), compute=compute, output=output)


def module(
    glob: str,
    *,
    compute: str,
    output: str | None = None,
    op: str | None = None,
    type: type[torch.nn.Module] | str | None = None,
) -> Rule:
    """Create a rule for the modules whose path in the model matches ``glob``.

    Without ``op`` the module's floating inputs are cast to ``compute``, every operator inside that a rule or
    PyTorch's table would cast computes in it, and what the module returns is cast to ``output``. With ``op``
    only that operator, wherever it is called inside.

    Args:
        glob: as ``"encoder.layers.*.norm1"``; ``*`` matches dots too, ``""`` is the model itself.
        compute, output: as for ``op``.
        op: an operator inside, as for ``op``.
        type: only modules of this class, subclasses included.

    Raises:
        PolicyError: no such operator, format or combination. That no module matches is found when the policy
            is applied to a model.
    """
    if glob is None:
        raise PolicyError('expected a glob over module paths, as "encoder.*", got None')
    return Rule(module=glob, op=op, compute=compute, output=output, module_type=_class_name(type))


def module_type(
    cls: type[torch.nn.Module] | str, *, compute: str, output: str | None = None, op: str | None = None
) -> Rule:
    """Create a rule for the modules of a class and its subclasses; otherwise as ``module``.

    Args:
        cls: the class, or its full name, as ``"torch.nn.LayerNorm"`` or ``"mypackage.layers.Norm"``.
    """
    name = _class_name(cls)
    if name is None:
        raise PolicyError("expected a class of modules, got None")
    return Rule(module_type=name, op=op, compute=compute, output=output)


def class_names(cls: type) -> tuple[str, ...]:
    """Return the full names of ``cls`` and its bases."""
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)


def check_no_contradictions(rules: tuple[Rule, ...]) -> None:
    """Raise PolicyError if two different rules have the same selector."""
    by_selector: dict[Any, Rule] = {}
    for rule in rules:
        earlier = by_selector.setdefault(rule.selector, rule)
        if earlier != rule:
            raise PolicyError(
                f'two rules contradict each other: "{earlier}" and "{rule}". Keep one; with_rules() of a '
                "policy replaces its earlier rule"
            )


def specificity(rule: Rule) -> tuple[bool, bool, bool, bool]:
    """Return the rank of a rule at one module, or outside of all; the highest wins."""
    is_inside_modules = rule.is_for_modules and rule.op is not None
    is_for_an_overload = rule.op is not None and base_of(rule.op) != rule.op
    is_by_path_and_class = rule.module is not None and rule.module_type is not None
    return (is_inside_modules, rule.is_for_modules, is_for_an_overload, is_by_path_and_class)


# ---- words


def _class_name(cls: Any) -> str | None:
    """Return the full name of a module class, where it is defined, not where it is re-exported.

    A str that names a class outside torch is returned as it is, since the class may not be imported yet.
    """
    if cls is None:
        return None
    import torch

    if isinstance(cls, str):
        name = _full_name(cls)
        if not name.startswith("torch."):
            return name
        cls = _class_in_torch(name, written=cls)
        if cls is None:
            return name  # of a part of torch that is not imported yet
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise PolicyError(f"expected a class of torch.nn.Module, got {cls!r}")
    return class_names(cls)[0]


def _full_name(written: str) -> str:
    _check_text("the full name of a class", "torch.nn.LayerNorm", written)
    name = f"torch.{written}" if written.startswith("nn.") else written
    if "." not in name:
        raise PolicyError(f'expected the full name of a class, as "torch.nn.LayerNorm", got {written!r}')
    return name


def _class_in_torch(name: str, written: str) -> Any:
    """Return what ``name`` (``"torch.nn.LayerNorm"``) is; None where torch has nothing by that name yet.

    Raises:
        PolicyError: a name directly in ``torch.nn``, all of which is imported, that is not there.
    """
    import torch

    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)

    if found is None and name.startswith("torch.nn.") and name.count(".") == 2:
        classes = [word for word in dir(torch.nn) if isinstance(getattr(torch.nn, word), type)]
        # Not did_you_mean, which would list all classes of torch.nn.
        nearest = nearest_name(name.rpartition(".")[2], classes)
        advice = "Look in torch.nn."
        if nearest is not None:
            advice = f'Did you mean "{nearest}"?'
        raise PolicyError(f"there is no class {written!r}. {advice}")
    return found


def _check_text(what: str, example: str, value: Any) -> None:
    if not isinstance(value, str):
        raise PolicyError(f'expected {what}, as "{example}", got {value!r}')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PolicyError(f'expected {what}, as "{example}", got {value!r}, which is no text') from None


def _check_word(what: str, value: Any, known: Collection[str]) -> None:
    if isinstance(value, str) and value in known:
        return
    word = str(value).removeprefix("torch.")
    if word in OTHER_FORMAT_NAMES:
        raise PolicyError(f'unknown {what} {value!r} of a rule. Did you mean "{OTHER_FORMAT_NAMES[word]}"?')
    # did_you_mean would suggest "fp16" for "fp64", the opposite of what was meant.
    if word in ("fp64", "float64", "double"):
        raise PolicyError(
            f"unknown {what} {value!r} of a rule: autocast casts nothing from fp64 or to it. "
            f"Known: {', '.join(known)}."
        )
    raise PolicyError(f"unknown {what} {value!r} of a rule. {did_you_mean(word, known)}")


def _printable(text: str) -> str:
    """Return ``text`` as one printable line."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()
