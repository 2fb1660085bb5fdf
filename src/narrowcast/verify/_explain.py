"""``nc.explain`` of a model and ``narrowcast explain`` of a script: what ran in which format, and why."""

from __future__ import annotations

import functools
import html
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.attach import RULE_NOTE
from narrowcast.capture import EXPLANATION, Capture, CaptureWriter, start_event
from narrowcast.casting import apply
from narrowcast.errors import FileError, PolicyError, SettingError
from narrowcast.machine import best_format, versions
from narrowcast.observe.op_trace import OpTrace, together, trace_events
from narrowcast.policy import Policy, as_policy, format_name, policy_name, resolve, with_fp32_weights
from narrowcast.report import explain_text, explained, read_explanation
from narrowcast.verify.runs._model_state import as_before
from narrowcast.verify.runs._probes import StepProbe
from narrowcast.verify.runs._runs import (
    Purpose,
    RunSettings,
    ScriptRuns,
    ScriptSettings,
    full_disk,
    why_unseen,
)

_NOTHING = "the script called no module with parameters: nothing to explain"
_FIRST_ONLY = "the script ended before its second step: only the first is shown, which sets much up"
_ALL_CALLS = "the script made too few calls to leave the first out: all are shown, and the first sets much up"
_COMPILED = "torch.compile was set aside while watching; compiled code fuses operators and makes fewer casts"
_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation:
    """What ``nc.explain`` found; ``str()`` and notebooks show it as a table of at most 79 columns.

    Attributes:
        found: everything, JSON-ready, as ``narrowcast explain --json`` writes it.
    """

    found: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, JSON-ready, as ``narrowcast explain --json`` writes it."""
        return self.found

    def __repr__(self) -> str:
        return f"Explanation({len(self.found['sites'])} rows)"

    def __str__(self) -> str:
        return explain_text(self.found, whole=True)

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
    if not inputs and not named_inputs:
        raise SettingError(
            "expected the inputs to call the model with, got none: nc.explain(model, policy, inputs)"
        )
    policy_value = with_fp32_weights(policy)
    device = _device_of(model)
    notes = []
    with as_before(model), apply(model, policy_value) as applied:
        for path, why in applied.fp8.left_out.items():
            notes.append(f"{path or type(model).__name__} does not multiply in fp8: {why}")
        with OpTrace(policy_value, device) as trace:
            trace.paths.add_model(model)
            model(*inputs, **named_inputs)  # not counted: PyTorch, the model and the trace set things up
            trace.take()
            trace.rules.clear()
            model(*inputs, **named_inputs)
        seen = together([trace.take()])
        events = _watched_events(trace, seen, policy_value, device, unit="call", steps=1, complete=True)
    start = start_event([type(model).__name__], policy_name(policy), kind="explain")
    capture = Capture(events=(start, *events, *_note_events(notes)))
    return Explanation(found=explained(capture))


# ---- a script


def explain_script(
    settings: ScriptSettings, *, steps: int = 2, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Watch a few steps of the script in mixed precision, in a fresh process.

    Args:
        settings: what to run, and how.
        steps: how many are counted, after a first one that is not; times are their mean.
        progress: called with short messages.

    Returns:
        What ``report.explained`` returns for the capture in ``settings.folder``; with a ``problem`` and
        nothing else if nothing could be seen.

    Raises:
        ScriptError: the script failed.
        FileError: the folder cannot be written.
    """
    with ScriptRuns(settings, progress=progress) as runs:
        folder = runs.start("", "mixed", Purpose.EXPLAIN, watched_steps=steps)
    # A probe that saw nothing leaves no explanation, and the capture of the run tells why.
    if (folder / EXPLANATION).is_file():
        full = full_disk(folder, EXPLANATION)
        try:
            return explained(read_explanation(folder / EXPLANATION))
        except FileError as error:
            if not full:
                raise
            raise FileError(f"the explanation is incomplete{full}") from error
    advice = "watch its model with nc.explain(model, policy, batch)"
    problem = why_unseen(folder, advice=advice, verb="watched") or _NOTHING
    unknown = ("device", "format", "because", "unit", "steps", "complete", "totals")
    return {
        "schema": _SCHEMA,
        "target": list(settings.target),
        "policy": settings.policy,
        "problem": problem,
        **dict.fromkeys(unknown),
        "rules": [],
        "sites": [],
        "unreached": [],
        "notes": [],
        "reasons": dict.fromkeys(unknown, problem),
        "versions": {},
    }


class ExplainProbe(StepProbe):
    """Trace every operator of a few steps.

    The first step, which sets much up, counts only if there is no other. Times are means over the steps.
    """

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        super().__init__(settings, argv)
        self._device = "cpu"
        self._trace: OpTrace | None = None
        self._traced_steps: list[Any] = []
        self._events: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._compiled = False

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.done:
            return
        # PyTorch has a table of autocast for each device type, and only a model tells which one is used.
        if self._trace is None:
            self._device = _device_of(module)
            self._trace = OpTrace(as_policy(self.settings.policy), self._device)
            self._trace.__enter__()
        # Compiled code calls other operators than the model does. Without Dynamo nothing is compiled.
        if "torch._dynamo" in sys.modules and not self._compiled:
            torch.compiler.set_stance("force_eager")
            self._compiled = "OptimizedModule" in {type(part).__name__ for part in module.modules()}
        self._trace.paths.add_model(module)

    def holds_back(self, optimizer: torch.optim.Optimizer) -> bool:
        self._set_in_optimizer(True)
        return False

    def closure_of_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(closure)
        def outside_of_the_optimizer() -> Any:
            self._set_in_optimizer(False)
            try:
                return closure()
            finally:
                self._set_in_optimizer(True)

        return outside_of_the_optimizer

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._set_in_optimizer(False)
        super().stepped(optimizer)

    def _set_in_optimizer(self, value: bool) -> None:
        if self._trace is not None:  # the first call of a model makes it
            self._trace.paths.in_optimizer = value

    def restart(self) -> None:
        self._traced_steps.clear()

    def boundary(self) -> None:
        if self._trace is None:
            return
        self._traced_steps.append(self._trace.take())
        # The first step sets much up, so one more is traced than is counted.
        if len(self._traced_steps) > self.settings.watched_steps:
            self._end()
            self.attachment.stop()

    def _end(self) -> None:
        """Stop tracing while the models still exist, whose names ``unreached`` compares with the rules."""
        if self.done or self._trace is None:
            return
        self.done = True
        self._trace.__exit__(None, None, None)
        after_last_step = self._trace.take()
        by_calls = self.unit == "call"
        counted = self._traced_steps[1:]
        if counted and by_calls:
            # A script that only calls modules may call some of them before the first boundary alone.
            seen = together(counted, also=self._traced_steps[0])
        elif counted:
            seen = together(counted)
        elif by_calls:
            # Some modules may be called only at the end, so all calls are shown.
            seen = together([*self._traced_steps, after_last_step])
            self._notes.append(_ALL_CALLS)
        else:
            # What came after the only step is no part of it. Without any step it is all that was seen.
            seen = together(self._traced_steps or [after_last_step])
            self._notes.append(_FIRST_ONLY)
        if self._compiled:
            self._notes.append(_COMPILED)
        self._events = _watched_events(
            self._trace,
            seen,
            as_policy(self.settings.policy),
            self._device,
            unit=self.unit,
            steps=max(1, len(counted)),
            complete=bool(counted),
        )

    def finish(self) -> None:
        self._end()
        if not self._events:
            return
        # Rules that name no module are among those that no call reached, so their notes are not needed.
        of_run = [text for text in self.attachment.notes if not text.startswith(RULE_NOTE)]
        start = start_event(self.argv, self.settings.policy, kind="explain")
        with CaptureWriter(self.folder / EXPLANATION) as writer:
            writer.write(start, *self._events, *_note_events([*self._notes, *of_run]))


def _note_events(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"event": "note", "text": text} for text in texts]


def _device_of(model: torch.nn.Module) -> str:
    for parameter in model.parameters():
        return parameter.device.type
    return "cpu"


def _watched_events(
    trace: OpTrace, seen: Any, policy: Policy, device: str, **facts: Any
) -> list[dict[str, Any]]:
    """Return the events of an explanation, between its start and its notes."""
    because = "as asked"
    if policy.compute == "auto":
        because = best_format(device).because
    totals = {
        **facts,
        "device": device,
        "format": format_name(resolve(policy, device)),
        "because": because,
        "rules": [str(rule) for rule in policy.rules],
        "versions": versions(),
    }
    return trace_events(seen, trace.rules.unreached(), totals)
