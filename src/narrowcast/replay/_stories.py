"""Tell the story of a skipped step: where it went wrong, whether precision is to blame, and what helps."""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from narrowcast.errors import few
from narrowcast.machine import first_line
from narrowcast.policy import Policy, format_name, rule
from narrowcast.replay._recording import RecordedCall, RecordedStep
from narrowcast.replay._replay import (
    Caller,
    Finding,
    Observation,
    Surroundings,
    everything_restored,
    find_origin,
    observe,
    without_ddp,
)
from narrowcast.replay._watch import LONGEST_S, Operation, Range, TimeLimit

_MOST_STORIES = 5
_MOST_ATTEMPTS = 20  # how often a skipped step is run again
_MOST_RULES = 3  # in one piece of advice
# Factors on the loss scale, tried one after another to find a scale at which nothing overflows.
_LOWER_SCALES = (2.0**-1, 2.0**-4, 2.0**-8, 2.0**-12)
# If gradients of the loss itself overflow, a skip gets a story only at a loss scale lower by this factor, or
# at _LOW_SCALE if that is higher.
_MUCH_LOWER = 2.0**-8
_LOW_SCALE = 2.0**8
_LONGEST_LINE = 110  # characters
_NO_ADVICE = "nothing is known to help: no scale, rule or format that was tried made it finite"
_NO_TIME = f"there was no time to try what helps: that ends after {LONGEST_S:.0f} s"
_LARGEST_FP16 = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Wording:
    """How advice is written, so that it can be pasted into a Python program or a command line.

    Attributes:
        scale: advises a lower loss scale, which is formatted into it.
        rules: advises rules, from the policy and the paths of modules to keep in fp32.
        bf16: advises bf16.
    """

    scale: str
    rules: Callable[[Policy, Sequence[str]], str]
    bf16: str


def _rules_in_python(policy: Policy, paths: Sequence[str]) -> str:
    rules = ", ".join(f'nc.rule.module("{path}", compute="fp32")' for path in paths)
    if policy.rules:
        return f"{rules}, after the rules that the policy has"
    return rules


def _rules_in_toml(policy: Policy, paths: Sequence[str]) -> str:
    if policy.rules:
        added = ", ".join(f'[[rule]], module = "{path}", compute = "fp32"' for path in paths)
        return f"your policy, with these lines at its end: {added}"
    rules = ", ".join(f'{{module = "{path}", compute = "fp32"}}' for path in paths)
    lines = f'version = 1, compute = "{policy.compute}", rule = [{rules}]'
    return f"--policy p.toml, a file that you write, of the lines {lines}"


FOR_PYTHON = Wording("a loss scale of {:g}", _rules_in_python, 'policy="bf16"')
FOR_SCRIPTS = Wording("--loss-scale {:g}", _rules_in_toml, "--policy bf16")


class SkipStories:
    """Tells the story of the first skip of each kind. The arguments are those of ``SkipExplainer``.

    Attributes:
        told: the stories so far, the oldest first.
    """

    def __init__(
        self,
        policy: Policy,
        say: Callable[[str], None],
        model: nn.Module | None = None,
        wording: Wording = FOR_PYTHON,
    ) -> None:
        self.told: list[str] = []
        self._wording = wording
        self._model = model
        self._policy = policy
        self._say_now = say
        self._kinds: set[tuple[str, ...]] = set()
        self._attempts = 0
        # A skip at a loss scale above this one gets no story: it is known that such scales are too high.
        self._too_high_above = math.inf
        self._told_of_falling_scale = False
        self._time_limit = TimeLimit(lambda: None)  # ``tell`` sets one for each replay

    def tell(
        self,
        step: RecordedStep,
        surroundings: Surroundings,
        *,
        number: int,
        scale: float,
        lower_scale: float,
        names: tuple[str, ...],
    ) -> bool | None:
        """Run a skipped step again, and tell where it went wrong, if it is the first of its kind.

        Args:
            step: the recorded calls of the step.
            surroundings: how its calls are made again.
            number: the number of the step, from 1.
            scale: the loss scale of the step.
            lower_scale: the loss scale that the skip has lowered it to; ``scale`` if it stays.
            names: the parameters whose gradients are not finite. Skips with the same names are of one kind.

        Returns:
            Whether the next such step must be recorded with gradients: this one went wrong in the backward
            pass, or between the model and its loss. None if the step was not run again.
        """
        is_known = names in self._kinds or scale > self._too_high_above
        if is_known or len(self.told) == _MOST_STORIES or self._attempts == _MOST_ATTEMPTS:
            return None
        self._attempts += 1
        head = f"step {number} was skipped"
        if scale != 1.0:
            head += f" at a loss scale of {scale:g}"
        announcement = f"{head}. It is run again, to say where it went wrong, for {LONGEST_S:.0f} s at most"
        self._time_limit = TimeLimit(lambda: self._say_now(announcement))
        try:
            return self._tell(step, surroundings, head, scale, lower_scale, names)
        except Exception as error:  # of any kind: the training must go on
            self._kinds.add(names)
            self._say(f"{head}. Where it went wrong could not be told: {first_line(error)}")
            return False

    def _tell(
        self,
        step: RecordedStep,
        surroundings: Surroundings,
        head: str,
        scale: float,
        lower_scale: float,
        names: tuple[str, ...],
    ) -> bool:
        """Tell a story that begins with ``head``; return what ``tell`` returns."""
        finding = find_origin(step, surroundings, self._time_limit)
        if finding.verdict == "backward":
            if self._time_limit.was_announced:
                self._say_now(f"{head}. Its forward pass is finite: the next such step will tell more")
            return True
        scale_falls = lower_scale < scale
        if finding.verdict == "outside" and scale_falls and scale > _LOW_SCALE:
            # The gradients of the loss itself may overflow at this scale. If a step is skipped at a much
            # lower one too, the scale is not the reason, and that step gets a story.
            self._too_high_above = max(scale * _MUCH_LOWER, _LOW_SCALE)
            return True
        self._kinds.add(names)
        has_ranks = dist.is_available() and dist.is_initialized()
        if finding.call is None and finding.verdict != "outside" and has_ranks:
            return False  # this rank has nothing to tell: another rank's gradients are not finite

        finite_scale = None
        if finding.verdict == "precision" and finding.origin and finding.origin.direction == "backward":
            finite_scale = self._finite_scale(finding, surroundings.mixed, scale)
        # A dynamic scale rises until something overflows, and then falls: such a skip is no fault.
        if finite_scale is not None and scale_falls:
            self._too_high_above = finite_scale
            if not self._told_of_falling_scale:
                self._told_of_falling_scale = True
                where = self._module(finding, finding.origin)
                self._say(
                    f"{head}: the gradients of {where} overflow there, and at {finite_scale:g} they do not. "
                    "The scale falls by itself; further such steps are only counted"
                )
            return False

        # Other modules may overflow only because a dynamic scale is too high, and it falls by itself. Tell of
        # what still overflows at a scale of 1.
        if finding.origin is not None and finding.origin.direction == "backward" and scale_falls:
            finding = self._at_lowest_scale(finding, surroundings.mixed, scale)
        lines = [f"{head}. narrowcast repeated it:"]
        lines += self._where(finding)
        lines.append(f"  verdict  {_verdict(finding)}")
        advice = self._advice(finding, surroundings, finite_scale)
        lines += [f"  try      {line}" for line in advice]
        if finding.verdict == "precision" and not advice:
            lines.append(f"  try      {_NO_TIME if self._time_limit.is_over else _NO_ADVICE}")
        self._say("\n".join(lines))
        return False

    def _say(self, text: str) -> None:
        self.told.append(text)
        self._say_now(text)

    # ---- where

    def _where(self, finding: Finding) -> list[str]:
        origin = finding.origin
        if finding.verdict == "data":
            assert finding.call is not None
            where = f"the input{finding.argument} of {self._module(finding, None)}"
            if finding.samples:
                where += f", sample {', '.join(map(str, finding.samples[:5]))} of the batch"
            return [f"  where    {where}{finding.which_call}"]
        if origin is None:
            return []

        where = f"  where    {origin.direction} pass of {self._module(finding, origin)}{finding.which_call}"
        source = ""
        # An operator in no line of the user's code, as of a plain nn.Linear, has the line of the call.
        site = origin.site
        if site is None and origin.direction == "forward" and finding.call is not None:
            site = finding.call.site
        if site is not None:
            file, line = site
            where += f", {Path(file).name}:{line}"
            source = linecache.getline(file, line).strip()

        lines = [where]
        if source:
            lines.append(f"  line     {_shortened(source)}")
        lines.append(f"  what     {_what(finding, origin)}")
        return lines

    def _module(self, finding: Finding, origin: Operation | None) -> str:
        """Return path and class of the module that ``origin`` belongs to; if None, of the called module."""
        assert finding.call is not None
        inner = origin.module if origin is not None else ""
        outermost = without_ddp(finding.call.module)
        kind = _kind(outermost.get_submodule(inner))
        path = self._path(finding.call, origin)
        if not path:
            return kind
        if self._model is None:  # the path alone does not tell which of several models it starts at
            return f"{path} ({kind}) in {_kind(outermost)}"
        return f"{path} ({kind})"

    def _path(self, call: RecordedCall, origin: Operation | None) -> str:
        """Return the path of the module that ``origin`` belongs to, as rules name it.

        It is the path of the called module in the model, and from there that of the module inside.
        """
        outer = ""
        if self._model is not None:
            for path, module in without_ddp(self._model).named_modules():
                if module is without_ddp(call.module):
                    outer = path
        inner = origin.module if origin is not None else ""
        path = f"{outer}.{inner}".strip(".")
        # Rules do not name the wrapper that torch.compile adds.
        return ".".join(part for part in path.split(".") if part != "_orig_mod")

    # ---- what helps: only what was tried is advised

    def _finite_scale(self, finding: Finding, mixed: Caller, scale: float) -> float | None:
        """Return the first of some lower loss scales, down to 1, at which the backward pass is finite.

        None if it is finite at none of them.
        """
        lower = [scale * factor for factor in _LOWER_SCALES if scale * factor > 1.0]
        if scale > 1.0:
            lower.append(1.0)
        for value in lower:
            if self._is_sound(finding, mixed, value / scale):
                return value
        return None

    def _at_lowest_scale(self, finding: Finding, mixed: Caller, scale: float) -> Finding:
        """Return ``finding`` with the operation that overflows at a loss scale of 1, if it is another one."""
        observation = self._observed(finding, mixed, 1.0 / scale)
        if observation is None or observation.is_sound or observation.origin is None:
            return finding
        if finding.origin is not None and observation.origin.place == finding.origin.place:
            return finding
        return replace(finding, origin=observation.origin, in_fp32=None)

    def _advice(self, finding: Finding, surroundings: Surroundings, finite_scale: float | None) -> list[str]:
        if finding.verdict != "precision" or finding.call is None:
            return []
        finite = f"with it, {_pass(finding)} of {self._module(finding, None)} is finite"
        not_trained = f"{finite}; how well it trains was not tried"
        if not finding.outputs_are_finite:
            finite += "; its backward pass was not tried"
            not_trained = f"{finite}, nor how well it trains"
        advice = []
        if finite_scale is not None:
            advice.append(f"{self._wording.scale.format(finite_scale)}; {finite}")
        paths = self._finite_rules(finding, surroundings)
        by_rules = []
        if paths:
            by_rules.append(f"{self._wording.rules(self._policy, paths)}; {finite}")
        if finding.outputs_are_finite:
            advice += by_rules
        in_bf16 = self._in_bf16(finding.call, surroundings)
        in_fp16 = torch.float16 in surroundings.formats.values()
        if in_fp16 and self._is_sound(finding, in_bf16):
            advice.append(f"{self._wording.bf16}; {not_trained}")
        # For a forward pass bf16 comes first: with rules, the gradients of what computes in fp32 may overflow
        # where they are cast to fp16.
        if not finding.outputs_are_finite:
            advice += by_rules
        return advice

    def _finite_rules(self, finding: Finding, surroundings: Surroundings) -> list[str]:
        """Return the paths of the modules to keep in fp32 so that the call is finite; none if too many."""
        assert finding.call is not None
        paths: list[str] = []
        origin = finding.origin
        while origin is not None and len(paths) < _MOST_RULES:
            path = self._path(finding.call, origin)
            if path in paths or not path:
                return []
            paths.append(path)
            observation = self._observed(finding, self._with_rules(paths, finding.call, surroundings))
            if observation is None:
                return []
            if observation.is_sound:
                return paths
            origin = observation.origin
        return []

    def _observed(self, finding: Finding, caller: Caller, factor: float = 1.0) -> Observation | None:
        """Run the call at fault again as a trial; return None if it raised, or if the time is over."""
        if finding.call is None:
            return None
        backward = finding.outputs_are_finite
        try:
            self._time_limit.check()
            with everything_restored([finding.call.module]):
                return observe(finding.call, caller, self._time_limit, backward=backward, factor=factor)
        except Exception:  # of any kind: advice that cannot be tried is not given
            return None

    def _is_sound(self, finding: Finding, caller: Caller, factor: float = 1.0) -> bool:
        observation = self._observed(finding, caller, factor)
        return observation is not None and observation.is_sound

    def _with_rules(self, paths: list[str], call: RecordedCall, surroundings: Surroundings) -> Caller:
        rules = [rule.module(path, compute="fp32") for path in paths]
        policy = self._policy.with_rules(*rules)
        return surroundings.under(policy, surroundings.formats, self._model_of(call))

    def _in_bf16(self, call: RecordedCall, surroundings: Surroundings) -> Caller:
        formats = dict.fromkeys(surroundings.formats, torch.bfloat16)
        return surroundings.under(Policy(compute="bf16"), formats, self._model_of(call))

    def _model_of(self, call: RecordedCall) -> nn.Module:
        if self._model is None:
            return without_ddp(call.module)
        return self._model


# ---- sentences


def _what(finding: Finding, origin: Operation) -> str:
    format_text = format_name(origin.dtype)
    name = f"{origin.name} in"
    if origin.name == "_to_copy":
        name = "the cast to"
    elif origin.gradient_of:
        name = f"{origin.name}, of the gradient of {origin.gradient_of}, in"
    ranges = " and ".join(map(_range_text, origin.ranges)) or "nothing"
    result = "NaN" if origin.is_nan else "infinity"
    text = f"{name} {format_text}, of values from {ranges}: {result}"
    largest = finding.in_fp32
    if largest is not None:
        finite = "finite, " if origin.is_nan else ""
        text += f"; {_in_fp32(origin)} {finite}up to {largest:.3g}"
    elif origin.name == "_to_copy" and origin.ranges:
        values = origin.ranges[0]
        largest = max(-values.low, values.high)
    if origin.dtype == torch.float16 and largest is not None and largest > _LARGEST_FP16:
        text += f"; fp16 ends at {_LARGEST_FP16:.0f}"
    return text


def _range_text(values: Range) -> str:
    text = f"{values.low:.3g} to {values.high:.3g}"
    if values.nonfinite:
        text += f" ({values.nonfinite} more are not finite)"
    return text


def _kind(module: nn.Module) -> str:
    """Return the name of a module's class; for a compiled module, that of the module inside."""
    return type(getattr(module, "_orig_mod", module)).__name__


def _verdict(finding: Finding) -> str:
    if finding.verdict == "precision":
        origin = finding.origin
        text = f"precision: {_in_fp32(origin)} {_pass(finding)} is finite"
        if finding.outputs_are_finite and origin is not None and origin.direction == "forward":
            text += "; here the outputs are finite too, and the gradients are not"
        return text
    if finding.verdict == "model":
        text = f"model: in fp32 {_pass(finding)} is not finite either"
        if finding.bad_weights:
            text += f", as {few(finding.bad_weights)} holds NaN or infinity"
        return text
    if finding.verdict == "data":
        return "data: the input holds NaN or infinity, and fp32 is not finite on it either"
    if finding.verdict == "outside":
        return (
            "undecided: run again, the outputs of the model are finite, and the gradients that arrived at "
            "them are not; it arises in the code between model and loss, or in something that is not held, "
            "as random numbers of Python"
        )
    return f"undecided: {finding.reason}"


def _in_fp32(origin: Operation | None) -> str:
    """Return words for a run without a policy.

    "in fp32" would mislead if the operator at fault computes in fp32 under the policy too.
    """
    if origin is not None and origin.dtype == torch.float32:
        return "without mixed precision"
    return "in fp32"


def _pass(finding: Finding) -> str:
    """Return the pass of the call that went wrong."""
    return "the backward pass" if finding.outputs_are_finite else "the forward pass"


def _shortened(text: str) -> str:
    """Return ``text``, cut off if it is longer than ``_LONGEST_LINE``."""
    if len(text) <= _LONGEST_LINE:
        return text
    return f"{text[: _LONGEST_LINE - 3]}..."
