"""``narrowcast explain --ranges``: how large the numbers of each module are, and what formats lose."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from narrowcast.casting import tensors_inside
from narrowcast.formats import BFLOAT16, FLOAT16, OCP_E4M3, OCP_E5M2, Format
from narrowcast.gradients import parameters_of
from narrowcast.observe import ExponentHistogram
from narrowcast.verify.runs._probes import StepProbe
from narrowcast.verify.runs._runs import (
    Purpose,
    RunSettings,
    ScriptRuns,
    ScriptSettings,
    read_result,
    why_unseen,
    write_result,
)

ACTIVATION, GRADIENT, WEIGHT_GRADIENT = "activation", "gradient", "weight gradient"
_SCHEMA = 1
_FORMATS: dict[str, Format] = {
    "fp16": FLOAT16, "bf16": BFLOAT16, "fp8_e4m3": OCP_E4M3, "fp8_e5m2": OCP_E5M2,
}  # fmt: skip
# fp8 recipes choose a scale for each tensor; fp16 has one loss scale for all gradients.
_WITH_OWN_SCALE = ("fp8_e4m3", "fp8_e5m2")
_LARGEST_LOSS_SCALE = 2.0**16
_NOTHING = "the script called no module with parameters: there are no numbers to count"


def ranges_of_script(
    settings: ScriptSettings, *, steps: int = 2, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Count the numbers of a few steps of the script in FP32, in a fresh process.

    Args:
        settings: what to run; its policy is set aside, as a low format would have lost numbers already.
        steps: how many are counted, after a first one that is not.
        progress: called with short messages.

    Returns:
        JSON-ready: ``schema``, ``target``, ``problem`` (a sentence if there are no numbers, else null),
        ``unit``, ``steps``, ``loss_scale`` (the largest power of two up to 2**16 with which no gradient
        overflows fp16) and ``ranges``, in the order of first calls. Each of these has ``module`` (for weight
        gradients the parameter), ``values`` (what was counted), ``numbers`` (how many), ``exponents`` (of
        each exponent of two how many numbers), ``zeros``, ``nonfinite`` and ``formats``: of each format the
        shares of the finite numbers other than zero that a cast flushes, makes subnormal, keeps normal and
        overflows. fp16 holds gradients times ``loss_scale``; the fp8 formats have the largest scale of
        their own with which nothing overflows.

    Raises:
        ScriptError: the script failed.
        FileError: the folder cannot be written.
    """
    with ScriptRuns(settings, progress=progress) as runs:
        folder = runs.start("", "fp32", Purpose.RANGES, watched_steps=steps)
    found = {"schema": _SCHEMA, "target": list(settings.target), "problem": None}
    result = read_result(folder)
    if result is not None and result["ranges"]:
        return found | result
    advice = "count the numbers of its model by nc.observe.ExponentHistogram"
    problem = why_unseen(folder, advice=advice, verb="watched") or _NOTHING
    return found | {"problem": problem, "unit": None, "steps": 0, "loss_scale": None, "ranges": []}


class RangesProbe(StepProbe):
    """Count the activations, their gradients and the weight gradients of a few steps, by module."""

    def __init__(self, settings: RunSettings, argv: Sequence[str]) -> None:
        super().__init__(settings, argv)
        # By name of the module or parameter, and by what is counted.
        self._histograms: dict[tuple[str, str], ExponentHistogram] = {}
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._models_of_class: Counter[str] = Counter()
        self._handles: list[Any] = []
        # Outputs that were counted: a container returns the same tensor as its last module.
        self._counted: dict[int, weakref.ref[torch.Tensor]] = {}
        self._boundaries = 0
        # What was counted in the first step, which is shown only if there is no other. If calls are counted
        # in place of steps, what follows the second call counts here too.
        self._of_first_step: dict[tuple[str, str], ExponentHistogram] = {}
        # The optimizer whose step begins, until its closure is known; and those that step with a closure.
        self._stepping: torch.optim.Optimizer | None = None
        self._with_closure: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.done or module in self._models:
            return
        # Compiled code calls no hooks of the modules inside.
        if "torch._dynamo" in sys.modules:
            torch.compiler.set_stance("force_eager")
        self._models.add(module)
        kind = type(module).__name__
        self._models_of_class[kind] += 1
        number = self._models_of_class[kind]
        title = kind if number == 1 else f"{kind}-{number}"
        for path, part in module.named_modules():
            name = f"{title}.{path}" if path else title
            hook = functools.partial(self._after_call, name)
            self._handles.append(part.register_forward_hook(hook))

    def _after_call(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_inside(output):
            if not _is_countable(tensor) or self._was_counted(tensor):
                continue
            self._add(name, ACTIVATION, tensor)
            if tensor.requires_grad:
                count_gradient = functools.partial(self._add, name, GRADIENT)
                tensor.register_hook(count_gradient)  # type: ignore[no-untyped-call]

    def _was_counted(self, tensor: torch.Tensor) -> bool:
        reference = self._counted.get(id(tensor))
        if reference is not None and reference() is tensor:
            return True
        self._counted[id(tensor)] = weakref.ref(tensor)
        return False

    def _add(self, name: str, what: str, tensor: torch.Tensor) -> None:
        if self.done:
            return
        self._histograms.setdefault((name, what), ExponentHistogram()).add(tensor)
        if self._boundaries == 1 and self.unit == "call":
            self._of_first_step.setdefault((name, what), ExponentHistogram()).add(tensor)

    def holds_back(self, optimizer: torch.optim.Optimizer) -> bool:
        self._stepping = optimizer
        # Before a closure is evaluated, the gradients are those of the step before.
        if optimizer not in self._with_closure:
            self._add_weight_gradients(optimizer)
        return False

    def closure_of_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        optimizer, self._stepping = self._stepping, None
        # The step of an optimizer inside another one gets the closure that is wrapped already.
        if optimizer is None:
            return closure
        self._with_closure.add(optimizer)

        @functools.wraps(closure)
        def counted() -> Any:
            loss = closure()
            self._add_weight_gradients(optimizer)
            return loss

        return counted

    def _add_weight_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self.done:
            return
        names = self.attachment.parameter_names()
        for parameter in parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is not None and _is_countable(gradient):
                self._add(names.get(id(parameter), "a parameter"), WEIGHT_GRADIENT, gradient)

    def restart(self) -> None:
        self._histograms.clear()
        self._boundaries = 0

    def boundary(self) -> None:
        self._counted.clear()
        self._boundaries += 1
        if self._boundaries == 1:
            # The first step may set things up, as data-dependent weights.
            self._of_first_step = dict(self._histograms)
            self._histograms.clear()
        elif self._boundaries > self.settings.watched_steps:
            self._end()
            self.attachment.stop()

    def _end(self) -> None:
        self.done = True
        for handle in self._handles:
            handle.remove()

    def finish(self) -> None:
        self._end()
        if self._boundaries == 1:
            # What came after the only step, as an evaluation, is no part of it. Of calls all are shown.
            self._histograms = self._of_first_step
        steps = max(1, self._boundaries - 1)

        gradients = []
        for (_, what), histogram in self._histograms.items():
            if what != ACTIVATION:
                gradients.append(histogram)
        loss_scale = _loss_scale_for(gradients)
        ranges = []
        for (name, what), histogram in self._histograms.items():
            ranges.append(_range_of(name, what, histogram, loss_scale))
        write_result(
            self.folder, {"unit": self.unit, "steps": steps, "loss_scale": loss_scale, "ranges": ranges}
        )


def _is_countable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64 and not tensor.is_meta


def _loss_scale_for(gradients: Sequence[ExponentHistogram]) -> float:
    """Return the loss scale that a dynamic rule would find: the largest with which nothing overflows."""
    scale = _LARGEST_LOSS_SCALE
    for histogram in gradients:
        largest = histogram.largest_scale(FLOAT16)
        if largest is not None:
            scale = min(scale, largest)
    return scale


def _range_of(name: str, what: str, histogram: ExponentHistogram, loss_scale: float) -> dict[str, Any]:
    formats = {}
    for short, format_ in _FORMATS.items():
        scale = 1.0
        if short in _WITH_OWN_SCALE:
            scale = histogram.largest_scale(format_) or 1.0
        elif short == "fp16" and what != ACTIVATION:
            scale = loss_scale
        counts = histogram.cast_to(format_, scale=scale)
        formats[short] = {"scale": scale, **counts.shares}

    # Zeros, infinities and NaN are counted before the cast, so they are the same for all formats.
    return {
        "module": name,
        "values": what,
        "numbers": histogram.total,
        "exponents": {str(exponent): count for exponent, count in histogram.exponents.items()},
        "zeros": counts.zeros,
        "nonfinite": counts.infinities + counts.nans,
        "formats": formats,
    }
