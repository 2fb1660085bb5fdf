"""Rules for modules under a script, from the first call of each model on; notes on rules without effect."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from narrowcast.attach._torch_internals import fsdp_param_dtype, is_fsdp
from narrowcast.casting import Applied, modules_by_path
from narrowcast.errors import few
from narrowcast.observe.op_trace import near_module
from narrowcast.policy import (
    FP8_RECIPES,
    Policy,
    Rule,
    class_names,
    format_name,
    names_module,
    rules_for,
    unreached,
)

RULE_NOTE = "the rule for "
"""Beginning of the notes on rules that nothing in the script matched."""
_NAMED_NOTHING = " named no module of what the script called "

_MATMULS = ("mm", "addmm", "bmm", "baddbmm")
_NAME_THE_WHOLE = ": nn.Linear calls linear, and @ calls matmul: name these, as rules do not reach inside"

_LOW = (torch.bfloat16, torch.float16)
_FP32_OVER_FSDP = (
    "{} computes in {} under policy fp32 too, since its FSDP casts weights and inputs to it (param_dtype of "
    "its mixed precision): leave param_dtype out"
)
_RULE_OVER_FSDP = (
    "FSDP casts the weights of {} to {} (param_dtype of its mixed precision) before a rule computes there in "
    "fp32, so from rounded weights: leave param_dtype out there, or set it to torch.float32"
)


def notes_on_unreached(policy: Policy, already_said: list[str]) -> list[str]:
    """Return a note on each rule for an operator that no call reached.

    A rule gets no note if one in ``already_said`` says that it named no module.
    """
    notes = []
    for rule in unreached(policy):
        note = f"{RULE_NOTE}{rule.target} was reached by no call inside a model"
        if f"{RULE_NOTE}{rule.target}{_NAMED_NOTHING}" in "\n".join(already_said):
            continue
        if rule.op in _MATMULS:
            note += _NAME_THE_WHOLE
        notes.append(note)
    return notes


def note_on_sharded(policy: Policy, model: nn.Module) -> str | None:
    """Return a note if ``policy`` asks for fp32 where FSDP has already cast the weights to a low format."""
    kind = type(model).__name__
    param_dtypes: dict[str, torch.dtype | None] = {}  # by path: what FSDP casts the weights there to
    fp32_by_rule: list[str] = []  # modules with cast weights in which a rule computes in fp32
    for path, module in modules_by_path(model):
        # A module that FSDP does not shard by itself gets the dtype of the one above it, or of its wrapper,
        # which has the same path and came first.
        above, _, _ = path.rpartition(".")
        param_dtypes.setdefault(path, param_dtypes.get(above))
        if is_fsdp(module):
            param_dtypes[path] = fsdp_param_dtype(module)
        if param_dtypes[path] not in _LOW:
            continue
        rules = rules_for(policy, path, class_names(type(module)))
        if any(rule.op is None and rule.compute == "fp32" for rule in rules):
            where = f"{kind}.{path}" if path else kind
            if where not in fp32_by_rule:  # a wrapper has the path of what it wraps
                fp32_by_rule.append(where)

    low = [dtype for dtype in _LOW if dtype in param_dtypes.values()]
    if not low:
        return None
    low_formats = few([format_name(dtype) for dtype in low])
    if policy.compute == "fp32":
        return _FP32_OVER_FSDP.format(kind, low_formats)
    if fp32_by_rule:
        return _RULE_OVER_FSDP.format(few(fp32_by_rule), low_formats)
    return None


def _guess(rule: Rule, model: nn.Module) -> str:
    """Return in brackets what a rule without effect in ``model`` may have meant, or an empty string."""
    named = [(path, class_names(type(module))) for path, module in modules_by_path(model)]
    selected = [path for path, names in named if names_module(rule, path, names)]
    # A rule without effect may select modules: lists of modules, which are not called themselves, or, with
    # fp8, modules without a linear layer.
    if selected and rule.compute not in FP8_RECIPES:
        written = f"{selected[0]}.*".lstrip(".")
        return f' (it is not called itself: name the modules in it, as "{written}")'
    return near_module(rule, named)


class ModuleRules:
    """The rules of ``policy`` for modules, in force in each model of a script from its first call on.

    A path in a rule starts at the module that the script calls. If the script calls a part first and the
    whole model later, paths start at the whole model from then on.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # Weak, since a script may make many models, one after the other.
        self._applied: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()
        # Those of models that are gone too: copies of these may still be under the rules.
        self._all_applied: list[Applied] = []

        # For the notes at the end.
        self._models: list[str] = []  # the class of each model, also of parts that a whole has replaced
        self._misses: dict[Rule, int] = {}  # in how many of them the rule matched no module
        self._guesses: dict[Rule, str] = {}  # what the rule may have meant
        self._left_out: dict[str, list[str]] = {}  # reason -> layers that do not multiply in fp8

    def attach(self, model: nn.Module) -> None:
        """Apply the rules to ``model``, which the script calls for the first time."""
        if not self._policy.names_modules:
            return
        if any(model in set(whole.modules()) for whole in self._applied):
            return
        # The script has called parts of this model before.
        inside = set(model.modules())
        for part in list(self._applied):
            if part in inside:
                applied_to_part = self._applied.pop(part)
                applied_to_part.remove()
                self._all_applied.remove(applied_to_part)

        kind = type(model).__name__
        self._models.append(kind)
        applied = Applied(
            model,
            self._policy,
            opens=False,
            strict=False,
            how_to_end="narrowcast run and nc.attached hold it until they end; give them the rules",
        )
        self._applied[model] = applied
        self._all_applied.append(applied)
        for rule in applied.missed:
            self._misses[rule] = self._misses.get(rule, 0) + 1
            if not self._guesses.get(rule):
                self._guesses[rule] = _guess(rule, model)
        for path, why in applied.fp8.left_out.items():
            layer = f"{kind}.{path}" if path else kind
            self._left_out.setdefault(why, []).append(layer)

    def remove(self) -> list[str]:
        """End the rules; return notes on those that matched in no model, and on layers that do not use fp8.

        A second call returns none.
        """
        for applied in self._all_applied:
            applied.remove()
        self._all_applied.clear()
        self._applied.clear()
        notes = self._notes()
        self._models.clear()
        self._misses.clear()
        self._guesses.clear()
        self._left_out.clear()
        return notes

    def _notes(self) -> list[str]:
        called = ", ".join(sorted(set(self._models)))
        notes = []
        for rule, misses in self._misses.items():
            if misses == len(self._models):
                guess = self._guesses[rule]
                notes.append(f"{RULE_NOTE}{rule.target}{_NAMED_NOTHING}({called}){guess}")
        for why, paths in self._left_out.items():
            verb = "does" if len(paths) == 1 else "do"
            notes.append(f"{few(paths)} {verb} not multiply in fp8: {why}")
        return notes
