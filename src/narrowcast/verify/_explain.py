"""``nc.explain`` of a model and ``narrowcast explain`` of a script: what ran in which format, and why."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.casting import apply
from narrowcast.errors import PolicyError, SettingError
from narrowcast.observe.capture import EXPLANATION, Capture, start_event
from narrowcast.observe.explanation import explained, explained_lines, read_explanation
from narrowcast.observe.op_trace import OpTrace, together
from narrowcast.policy import Policy, policy_name, with_fp32_weights
from narrowcast.verify._model_state import as_before
from narrowcast.verify.compare._runs import EXPLAIN, ScriptRuns, ScriptSettings, why_unseen
from narrowcast.verify.compare._step_probes import explanation_events, note_events

_NOTHING = "the script called no module with parameters: nothing to explain"
_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What ``nc.explain`` found; ``str()`` and notebooks show it as a table of at most 79 columns.

    Attributes:
        found: everything, JSON-ready, as ``narrowcast explain --json`` writes it.
    """

    found: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """``found``."""
        return self.found

    def __str__(self) -> str:
        return "\n".join(text for text, _ in explained_lines(self.found))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain(
    model: torch.nn.Module, policy: Policy | str, /, *inputs: Any, **named_inputs: Any
) -> Explanation:
    """Explain what ``model(*inputs, **named_inputs)`` runs in which format under ``policy``::

        print(nc.explain(model, "bf16", torch.randn(8, 64)))

    The model is called twice under the policy, and every operator of the second call is shown: formats in
    and out, the rule that decided, casts, bytes and time. The first call sets things up and is not counted.
    Gradients, buffers, modes and random states are restored. Only the forward is watched; ``narrowcast
    explain script.py`` watches whole training steps.

    Args:
        model: any module; on the device of its first parameter.
        policy: the name of a preset, a ``Policy``, or the path of one.
        *inputs: what the model is called with.
        **named_inputs: the same by name.

    Raises:
        PolicyError: the policy does not exist, names modules that the model does not have, or the model has
            one already by ``nc.apply``.
        SettingError: without inputs.
    """
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(f"expected a torch.nn.Module to explain, got {type(model).__name__}")
    wanted = with_fp32_weights(policy)
    name = policy_name(policy)
    parameter = next(model.parameters(), None)
    device = "cpu" if parameter is None else parameter.device.type
    if not inputs and not named_inputs:
        raise SettingError(
            "expected the inputs to call the model with, got none: nc.explain(model, policy, inputs)"
        )
    with as_before(model), apply(model, wanted) as applied:
        notes = _fp8_notes(model, applied.fp8.left_out)
        with OpTrace(wanted, device) as trace:
            trace.paths.add_model(model)
            model(*inputs, **named_inputs)  # in which PyTorch, the model and the watch set things up
            trace.take()
            trace.rules.clear()
            model(*inputs, **named_inputs)
        seen, facts = together([trace.take()]), {"unit": "call", "steps": 1, "complete": True}
        events = explanation_events(trace, seen, wanted, device, facts)
    start = start_event([type(model).__name__], name, kind="explain")
    return Explanation(found=explained(Capture(events=(start, *events, *note_events(notes)))))


def _fp8_notes(model: torch.nn.Module, left_out: Mapping[str, str | None]) -> list[str]:
    """Return a sentence for each layer of an fp8 rule that cannot multiply in fp8 (``left_out``: why)."""
    found = [(path or type(model).__name__, why) for path, why in left_out.items() if why is not None]
    return [f"{path} does not multiply in fp8: {why}" for path, why in found]


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
