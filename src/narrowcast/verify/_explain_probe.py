"""What is watched inside a script's own process to say what ran in which format."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from narrowcast.attach import Attachment, Observer
from narrowcast.machine import versions
from narrowcast.observe.capture import EXPLANATION, CaptureWriter, start_event
from narrowcast.observe.op_trace import OpTrace, together, trace_events
from narrowcast.policy import as_policy, format_name, resolve

_FIRST_ONLY = "the script ended before its second {unit}: what is shown is the first, in which much is set up"
_COMPILED = "torch.compile was set aside while watching; compiled code fuses operators and makes fewer casts"


class ExplainProbe(Observer):
    """Watches every operator of a few steps, and stops the script.

    A step is what lies between two steps of the optimizer that stepped first; in a script that makes none,
    what lies between two outermost calls of the module that was called twice first. The first step, in which
    much is set up, is left out where there are others; times are the mean of those that are counted.

    Args:
        folder: where to keep what was seen.
        policy: the name or the file of what is in force.
        argv: of the script.
        steps: how many to count, after the first.
    """

    def __init__(self, folder: Path, policy: str, argv: Sequence[str], steps: int) -> None:
        self._folder = folder
        self._policy = policy
        self._argv = argv
        self._steps = steps
        self._device = "cpu"
        self._trace: OpTrace | None = None
        self._parts: list[Any] = []
        self._pace: torch.optim.Optimizer | None = None
        self._pacing_module: weakref.ref[torch.nn.Module] | None = None
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._by_calls = False
        self._eager = False
        self._compiled = False
        self._done = False

    def attached(self, attachment: Attachment) -> None:
        self._attachment = attachment

    # ---- what the script does

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._done:
            return
        if self._trace is None:
            parameter = next(module.parameters(), None)
            self._device = "cpu" if parameter is None else parameter.device.type
            self._trace = OpTrace(as_policy(self._policy), self._device)
            self._trace.__enter__()
        if not self._eager and "torch._dynamo" in sys.modules:
            self._eager = True
            torch.compiler.set_stance("force_eager")
        if self._eager and not self._compiled:
            self._compiled = "OptimizedModule" in {type(part).__name__ for part in module.modules()}
        self._trace.paths.add_model(module)

    def returned(self, module: torch.nn.Module, output: Any) -> None:
        if self._done or self._attachment.optimizers:
            return
        self._by_calls = True
        if self._pacing_module is None and module in self._called:
            self._pacing_module = weakref.ref(module)
        self._called.add(module)
        if self._pacing_module is not None and self._pacing_module() is module:
            self._boundary()

    def holds_back(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._trace is not None:
            self._trace.paths.in_optimizer = True
        return False

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._trace is not None:
            self._trace.paths.in_optimizer = False
        if self._by_calls:  # it called modules before it made its optimizer
            self._by_calls = False
            self._parts.clear()
        if self._pace is None:
            self._pace = optimizer
        if optimizer is self._pace:
            self._boundary()

    def _boundary(self) -> None:
        if self._done or self._trace is None:
            return
        self._parts.append(self._trace.take())
        if len(self._parts) == 1 + self._steps:
            self.finish()
            self._attachment.stop()

    # ---- the end

    def finish(self) -> None:
        """Write what was seen; when the script has ended by itself, too."""
        if self._done or self._trace is None:
            return
        self._done = True
        self._trace.__exit__(None, None, None)
        unit = "call" if self._by_calls else "step"
        rest = self._trace.take()
        first, others = self._parts[:1], self._parts[1:]
        if others:
            seen = together(others, also=first[0] if self._by_calls else None)
        else:
            seen = together([*first, *([rest] if self._by_calls or not first else [])])
        notes = [] if others else [_FIRST_ONLY.format(unit=unit)]
        if self._compiled:
            notes.append(_COMPILED)
        policy = as_policy(self._policy)
        facts = {
            "unit": unit,
            "steps": max(1, len(others)),
            "complete": bool(others),
            "device": self._device,
            "format": format_name(resolve(policy, self._device)),
            "rules": [str(rule) for rule in policy.rules],
            "versions": versions(),
        }
        with CaptureWriter(self._folder / EXPLANATION) as writer:
            writer.write(
                start_event(self._argv, self._policy, kind="explain"),
                *trace_events(seen, self._trace.unreached(), facts),
                *({"event": "note", "text": text} for text in notes),
            )
