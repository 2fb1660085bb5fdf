"""``nc.explain`` of a model and ``narrowcast explain`` of a script: what ran in which format, and why."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.casting import apply, modules_by_path, unconverted
from narrowcast.errors import PolicyError
from narrowcast.observe.capture import EXPLANATION, Capture, start_event
from narrowcast.observe.explanation import explained, explained_lines, read_explanation, wrapped
from narrowcast.observe.op_trace import OpTrace, together
from narrowcast.policy import (
    Policy,
    class_names,
    format_name,
    policy_name,
    resolve,
    resolved,
    rules_for,
    with_fp32_weights,
)
from narrowcast.verify._model_state import as_before
from narrowcast.verify.compare._runs import EXPLAIN, ScriptRuns, ScriptSettings, why_unseen
from narrowcast.verify.compare._step_probes import explanation_events, note_events

_NOTHING = "the script called no module with parameters: nothing to explain"
_SCHEMA = 1
_MOST_PATHS, _MOST_OPS = 8, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What ``nc.explain`` found; ``str()`` and notebooks show it as a table of at most 79 columns.

    Attributes:
        ran: whether the model was called; False: this is what the policy means before any call.
        found: everything, JSON-ready. Of a call what ``narrowcast explain --json`` writes; else ``model``,
            ``policy``, ``device``, ``format``, ``rules`` with the modules that each names, ``ops``, what
            becomes of each operator outside of modules with rules, and ``notes``, as of layers that cannot
            multiply in fp8.
    """

    ran: bool
    found: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """``found``."""
        return self.found

    def __str__(self) -> str:
        if self.ran:
            return "\n".join(text for text, _ in explained_lines(self.found))
        return "\n".join(_resolved_lines(self.found))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain(
    model: torch.nn.Module,
    policy: Policy | str = "auto",
    /,
    *example_args: Any,
    **example_kwargs: Any,
) -> Explanation:
    """Explain what ``policy`` means for ``model``; with example inputs, what a call ran in which format::

        print(nc.explain(model, "bf16"))
        print(nc.explain(model, "bf16", torch.randn(8, 64)))

    Without inputs nothing is called: it lists which rule is for which modules and operators, and what
    PyTorch's table does with the rest. With inputs the model is called twice under the policy, and every
    operator of the second call is shown: formats in and out, the rule that decided, casts, bytes and time.
    The first call sets things up and is not counted. Gradients, buffers, modes and random states are
    restored. Only the forward is watched; ``narrowcast explain script.py`` watches whole training steps.

    Args:
        model: any module; on the device of its first parameter.
        policy: the name of a preset, a ``Policy``, or the path of one.
        *example_args: what the model is called with.
        **example_kwargs: the same by name.

    Raises:
        PolicyError: the policy does not exist, names modules that the model does not have, or the model has
            one already by ``nc.apply``.
    """
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(f"expected a torch.nn.Module to explain, got {type(model).__name__}")
    wanted = with_fp32_weights(policy)
    name = policy_name(policy)
    parameter = next(model.parameters(), None)
    device = "cpu" if parameter is None else parameter.device.type
    if not example_args and not example_kwargs:
        return Explanation(ran=False, found=_resolved_facts(model, wanted, name, device))
    with as_before(model), apply(model, wanted) as applied:
        notes = _fp8_notes(model, applied.fp8.left_out)
        with OpTrace(wanted, device) as trace:
            trace.paths.add_model(model)
            model(*example_args, **example_kwargs)  # in which PyTorch, the model and the watch set things up
            trace.take()
            trace.rules.clear()
            model(*example_args, **example_kwargs)
        seen, facts = together([trace.take()]), {"unit": "call", "steps": 1, "complete": True}
        events = explanation_events(trace, seen, wanted, device, facts)
    start = start_event([type(model).__name__], name, kind="explain")
    return Explanation(ran=True, found=explained(Capture(events=(start, *events, *note_events(notes)))))


# ---- before any call


def _resolved_facts(model: torch.nn.Module, policy: Policy, name: str, device: str) -> dict[str, Any]:
    """Return the rules with the modules that each names, the decision about each operator, and notes.

    Raises:
        PolicyError: the device cannot compute in what the policy asks for.
    """
    lower = format_name(resolve(policy, device))
    on_device = resolved(policy, device, lower)
    named = [(path, class_names(type(module))) for path, module in modules_by_path(model)]
    ops = []
    for op in dict.fromkeys([*on_device.native, *on_device.table, *on_device.kernels()]):
        decision = on_device.root.decide(op)
        ops.append(
            {
                "op": op,
                "computes": on_device.computes(op),
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
        "rules": [
            {
                "rule": str(rule),
                "for_modules": rule.is_for_modules,
                "modules": [path for path, names in named if rule in rules_for(policy, path, names)],
            }
            for rule in policy.rules
        ],
        "ops": ops,
        "notes": _fp8_notes(model, unconverted(model, policy)),
    }


def _fp8_notes(model: torch.nn.Module, left_out: Mapping[str, str | None]) -> list[str]:
    """Return a sentence for each layer of an fp8 rule that cannot multiply in fp8 (``left_out``: why)."""
    found = [(path or type(model).__name__, why) for path, why in left_out.items() if why is not None]
    return [f"{path} does not multiply in fp8: {why}" for path, why in found]


def _resolved_lines(facts: dict[str, Any]) -> list[str]:
    """The same as lines of at most 79 columns."""
    where = "this CPU" if facts["device"] == "cpu" else facts["device"]
    lines = [*wrapped(f"{facts['model']}: {facts['format']} on {where}, by the policy {facts['policy']}"), ""]
    if facts["rules"]:
        lines.append("By rules, the more specific first: an operator in modules, modules, operators")
    for rule in facts["rules"]:
        lines += wrapped(rule["rule"], first="  ", then="    ")
        if rule["for_modules"]:
            paths = _listed([path or facts["model"] for path in rule["modules"]], _MOST_PATHS)
            lines += wrapped(paths or "no module of this model", first="    ", then="    ")
    lines += [""] * bool(facts["rules"])
    lines.append(f"By PyTorch's table for {facts['table']}, where no rule decides")
    words = {"promote": "the widest of the inputs", "refuse": "refused"}
    decided = [op for op in facts["ops"] if op["rule"] is None and op["computes"] != "as-is"]
    for computes in dict.fromkeys(op["computes"] for op in decided):
        ops = _listed([op["op"] for op in decided if op["computes"] == computes], _MOST_OPS)
        lines += wrapped(f"{words.get(computes, computes)}: {ops}", first="  ", then="    ")
    for note in facts["notes"][:_MOST_PATHS]:
        lines += wrapped(f"Note: {note}.")
    if len(facts["notes"]) > _MOST_PATHS:
        lines.append(f"and {len(facts['notes']) - _MOST_PATHS} more that do not multiply in fp8")
    return lines + wrapped(
        "Any other operator computes in the formats of its inputs. To see what a call runs: "
        "nc.explain(model, policy, example_input)."
    )


def _listed(names: list[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---- a script


def explain_script(
    settings: ScriptSettings, *, steps: int = 2, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Watch a few steps of the script in mixed precision, in a fresh process.

    Args:
        settings: what to run, and how.
        steps: how many are counted, after a first one that is not; times are their mean.
        progress: called with short messages now and then.

    Returns:
        What ``observe.explained`` returns for the capture in ``settings.folder``; with a ``problem`` and
        nothing else if nothing could be seen.

    Raises:
        ScriptError: the script failed.
        FileError: the folder cannot be written.
    """
    folder = ScriptRuns(settings, progress=progress).start("", "mixed", EXPLAIN, watched_steps=steps)
    if (folder / EXPLANATION).is_file():
        return explained(read_explanation(folder / EXPLANATION))
    advice = "watch its model with nc.explain(model, policy, batch)"
    return _empty(settings) | {"problem": why_unseen(folder, advice=advice, verb="watched") or _NOTHING}


def _empty(settings: ScriptSettings) -> dict[str, Any]:
    nothing = dict.fromkeys(("device", "format", "unit", "steps", "complete", "totals"))
    lists: dict[str, Any] = {name: [] for name in ("rules", "sites", "round_trips", "unreached", "notes")}
    return {
        "schema": _SCHEMA,
        "target": list(settings.target),
        "policy": settings.policy,
        **nothing,
        **lists,
        "reasons": dict.fromkeys(nothing, _NOTHING),
        "versions": {},
    }
