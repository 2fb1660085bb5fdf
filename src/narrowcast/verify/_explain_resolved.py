"""What a policy means for a model before anything is called: rules by module, and the rest of the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from narrowcast.casting import named_places, unconverted
from narrowcast.observe.explanation import wrapped
from narrowcast.policy import (
    FP32,
    FP32_APPEND_DTYPE,
    FP32_SET_DTYPE,
    LOWER,
    PROMOTE,
    REFUSE,
    UNLISTED,
    Policy,
    class_names,
    format_name,
    names_module,
    resolve,
    resolved,
)

_SCHEMA = 1
_WIDE = (FP32, FP32_SET_DTYPE, FP32_APPEND_DTYPE)
_MOST_PATHS, _MOST_OPS = 8, 24


def resolved_facts(model: torch.nn.Module, policy: Policy, name: str, device: str) -> dict[str, Any]:
    """JSON-ready: the rules with the modules that each names, what becomes of each operator, and notes.

    Args:
        model: any module; nothing is called.
        policy: what is explained.
        name: what the policy is called.
        device: type of device.

    Raises:
        PolicyError: the device cannot compute in what the policy asks for.
    """
    lower = format_name(resolve(policy, device))
    on_device = resolved(policy, device, lower)
    places = [(path, class_names(type(module))) for path, module in named_places(model)]
    rules = []
    for rule in policy.rules:
        modules = [path for path, names in places if rule.is_for_modules and names_module(rule, path, names)]
        rules.append(
            {
                "rule": str(rule),
                "for_modules": rule.is_for_modules,
                "op": rule.op,
                "compute": rule.compute,
                "output": rule.output,
                "modules": modules,
            }
        )
    asked = dict.fromkeys([*on_device.native, *on_device.table, *on_device.kernels()])
    ops = []
    for op in asked:
        decision = on_device.root.decide(op)
        kind = on_device.native.get(op, UNLISTED) if decision is None else decision.compute
        ops.append(
            {
                "op": op,
                "computes": _words(kind, lower),
                "output": None if decision is None else decision.output,
                "rule": None if decision is None or decision.rule is None else str(decision.rule),
                "because": on_device.why_native(op) if decision is None else decision.because,
            }
        )
    return {
        "schema": _SCHEMA,
        "model": type(model).__name__,
        "policy": name,
        "device": device,
        "format": lower,
        "table": on_device.table_name,
        "rules": rules,
        "ops": ops,
        "notes": fp8_notes(model, unconverted(model, policy)),
    }


def fp8_notes(model: torch.nn.Module, left_out: Mapping[str, str | None]) -> list[str]:
    """A sentence for each layer that an fp8 rule is for and that cannot multiply in fp8.

    Args:
        model: of which the layers are parts.
        left_out: path of each -> why not; None: it could.
    """
    return [
        f"{path or type(model).__name__} does not multiply in fp8: {why}"
        for path, why in left_out.items()
        if why is not None
    ]


def _words(kind: str, lower: str) -> str:
    if kind in _WIDE:
        return "fp32"
    return {LOWER: lower, "lower": lower, PROMOTE: "promote", REFUSE: "refuse", UNLISTED: "as-is"}.get(
        kind, kind
    )


def resolved_lines(facts: dict[str, Any]) -> list[str]:
    """The same as lines of at most 79 columns."""
    where = "this CPU" if facts["device"] == "cpu" else facts["device"]
    lines = wrapped(f"{facts['model']}: {facts['format']} on {where}, by the policy {facts['policy']}")
    lines += ["", *_rule_lines(facts)]
    groups: dict[str, list[str]] = {}
    for op in facts["ops"]:
        if op["rule"] is None and op["computes"] != "as-is":
            groups.setdefault(op["computes"], []).append(op["op"])
    lines.append(f"By PyTorch's table for {facts['table']}, where no rule decides")
    words = {"promote": "the widest of the inputs", "refuse": "refused"}
    for computes, ops in groups.items():
        more = f" and {len(ops) - _MOST_OPS} more" if len(ops) > _MOST_OPS else ""
        named = f"{', '.join(ops[:_MOST_OPS])}{more}"
        lines += wrapped(f"{words.get(computes, computes)}: {named}", first="  ", then="    ")
    notes = facts["notes"]
    for note in notes[:_MOST_PATHS]:
        lines += wrapped(f"Note: {note}.")
    if len(notes) > _MOST_PATHS:
        lines.append(f"and {len(notes) - _MOST_PATHS} more that do not multiply in fp8")
    lines += wrapped(
        "Any other operator computes in the formats that come. To see what a call runs: "
        "nc.explain(model, policy, example_input)."
    )
    return lines


def _rule_lines(facts: dict[str, Any]) -> Iterator[str]:
    if not facts["rules"]:
        return
    yield "By rules, the more specific first: an operator in modules, modules, operators"
    for rule in facts["rules"]:
        yield from wrapped(rule["rule"], first="  ", then="    ")
        if rule["for_modules"]:
            paths = [path or facts["model"] for path in rule["modules"]]
            more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
            said = f"{', '.join(paths[:_MOST_PATHS])}{more}" if paths else "no module of this model"
            yield from wrapped(said, first="    ", then="    ")
    yield ""
