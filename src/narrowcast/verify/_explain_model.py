"""``nc.explain``: what a policy means for a model, and what one call of it ran in which format."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.casting import apply
from narrowcast.errors import PolicyError
from narrowcast.machine import versions
from narrowcast.observe.capture import Capture, start_event
from narrowcast.observe.explanation import explained, explained_lines
from narrowcast.observe.op_trace import OpTrace, together, trace_events
from narrowcast.policy import Policy, format_name, policy_name, resolve, with_fp32_weights
from narrowcast.verify._explain_resolved import fp8_notes, resolved_facts, resolved_lines
from narrowcast.verify._model_state import as_before


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What ``nc.explain`` found; ``str()`` is a table of at most 79 columns, in notebooks it is shown as one.

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

    def to_json(self) -> str:
        """``found`` as JSON text."""
        return json.dumps(self.found, indent=2, allow_nan=False)

    def __str__(self) -> str:
        if self.ran:
            return "\n".join(text for text, _ in explained_lines(self.found))
        return "\n".join(resolved_lines(self.found))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain(
    model: torch.nn.Module,
    policy: Policy | str = "auto",
    /,
    *example_args: Any,
    **example_kwargs: Any,
) -> Explanation:
    """Say what ``policy`` means for ``model``; with example inputs, what a call of it ran in which format.

    Without inputs nothing is called: which rule is for which modules and operators, and what PyTorch's table
    does with the rest. With inputs the model is called with them twice under the policy, both times watched,
    and every operator of the second call is shown: formats in and out, the rule that decided, casts, bytes,
    and the time that its operations took in that one call; what is set up in the first is not counted.
    Gradients, buffers, modes and random states are afterwards what they were. Only the forward is watched;
    ``narrowcast explain script.py`` watches whole training steps.

    Args:
        model: any module; on the device of its first parameter.
        policy: the name of a preset, a ``Policy``, or the path of one.
        *example_args: what the model is called with. Watching adds some tens of microseconds to each
            operation, which are not counted as its time.
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
        return Explanation(ran=False, found=resolved_facts(model, wanted, name, device))
    with as_before(model), apply(model, wanted) as applied:
        notes = fp8_notes(model, applied.fp8.left_out)
        with OpTrace(wanted, device) as trace:
            trace.paths.add_model(model)
            model(*example_args, **example_kwargs)  # in which PyTorch, the model and the watch set things up
            trace.take()
            trace.rules.clear()
            model(*example_args, **example_kwargs)
        facts = {
            "unit": "call",
            "steps": 1,
            "complete": True,
            "device": device,
            "format": format_name(resolve(wanted, device)),
            "rules": [str(rule) for rule in wanted.rules],
            "versions": versions(),
        }
        events = trace_events(together([trace.take()]), trace.unreached(), facts)
    start = start_event([type(model).__name__], name, kind="explain")
    noted = ({"event": "note", "text": text} for text in notes)
    return Explanation(ran=True, found=explained(Capture(events=(start, *events, *noted))))
