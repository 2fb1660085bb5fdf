"""The gradient certificate as data, as a table and as HTML."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from narrowcast.errors import SettingError
from narrowcast.observe.capture import ENOUGH_ELEMENTS, PARAMETER_LIMIT, TOTAL_LIMIT, json_ready
from narrowcast.verify._sums import Estimate, Moments

PASS, FAIL, CANNOT_TELL = "pass", "fail", "cannot tell"
MOST_MINIBATCHES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterResult:
    """What mixed precision does to the gradient of one parameter.

    Every norm is Euclidean, computed from the unscaled gradients, and the root mean square over batches. A
    number that is not defined is None, never NaN, and ``reason`` says why. Numbers of a gradient that is not
    finite in mixed precision are infinite.

    Attributes:
        name: as ``model.named_parameters()`` has it.
        shape: of the parameter.
        gradient_norm: of the FP32 gradient of a batch.
        error_norm: of the mixed gradient minus the FP32 one, same batch.
        bias_norm: of the mean error, without what is left of its variance; None below four batches.
        noise_norm: of the FP32 gradient minus that of another batch, same weights.
        rounding_norm: of the FP32 gradient minus one by ops that round only once. A gradient not much larger
            than this is rounding noise.
        error_over_noise: ``error_norm / noise_norm``; for a step of several minibatches, of their mean.
        relative_error: ``error_norm / gradient_norm``.
        cosine: of the angle between the mixed and the FP32 gradient.
        judged: whether totals and verdict include it.
        lost: whether its own error is above the limit for a single parameter.
        reason: why it is not judged, or why a number is None.
    """

    name: str
    shape: tuple[int, ...]
    gradient_norm: float | None = None
    error_norm: float | None = None
    bias_norm: float | None = None
    noise_norm: float | None = None
    rounding_norm: float | None = None
    error_over_noise: float | None = None
    relative_error: float | None = None
    cosine: float | None = None
    judged: bool = False
    lost: bool = False
    reason: str | None = None
    _moments: Moments | None = field(default=None, repr=False)

    @property
    def _own_moments(self) -> Moments | None:
        """Its moments if it has noise, and elements enough for a limit of its own."""
        enough = math.prod(self.shape) >= ENOUGH_ELEMENTS
        return self._moments if self.judged and enough and self.error_over_noise is not None else None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Certificate:
    """How far mixed precision moves a gradient, in units of the difference that another minibatch makes.

    The error has a mean, the bias, which accumulation and ranks do not average away, while noise falls with
    the root of the batch: ``at`` and ``holds_up_to`` tell how far that goes.

    ``str()`` is a table of at most 80 columns with the worst parameters; a notebook shows all.

    Attributes:
        policy: as it was asked for.
        format: what was computed in, as ``"bf16"``.
        at_step: after how many optimizer steps; 0 at the start.
        loss_scale: of the mixed gradients; None without one.
        minibatches: that a step averages: accumulation times ranks. The verdict is for such a step.
        averaged: minibatches in each gradient that was measured.
        samples: in a minibatch; None: not known.
        error_over_noise: of all judged parameters with a second batch together, in a step of ``minibatches``;
            below 0.05 passes. None if there was no noise, as ``reason`` says.
        relative_error: of all judged parameters together, against the FP32 gradient.
        cosine: of all judged parameters together.
        parameters: each one, in the order of the model.
        verdict: ``"pass"``, ``"fail"`` or ``"cannot tell"``.
        reason: for the verdict, in full sentences.
    """

    policy: str
    format: str
    at_step: int = 0
    loss_scale: float | None = None
    minibatches: int = 1
    averaged: int = 1
    samples: int | None = None
    error_over_noise: float | None
    relative_error: float | None
    cosine: float | None
    parameters: tuple[ParameterResult, ...]
    verdict: str
    reason: str
    _moments: Moments | None = field(default=None, repr=False)

    def at(self, k: int) -> Estimate:
        """Return error over noise, and its 95 % interval, of a step that averages ``k`` minibatches::

            certificate.at(32)  # (value=0.0161, low=0.0097, high=0.0267)

        It is sqrt(k |bias|**2 + variance) / (sqrt(2) sigma), of all judged parameters together, without unit.
        Source: |bias|**2 is the mean product of the errors of two batches, the variance of the error is the
        rest, and sigma the deviation of an FP32 gradient between batches. In three small models the ends from
        four batches are 2.3 to 2.8 times apart at k = 1 and 19 or more at 256, from 16 batches 1.7 and 7
        (``benchmarks/certificate_intervals.py``). All are NaN below four batches and without noise.

        Raises:
            SettingError: ``k`` is below 1.
        """
        if not k >= 1:
            raise SettingError(f"expected a number of minibatches of at least 1, got {k}")
        return Estimate(math.nan) if self._moments is None else self._moments.at(k / self.averaged)

    @property
    def holds_up_to(self) -> int | None:
        """Return the largest k that is right: total below 0.05, each parameter of 16 elements below 0.25.

        At most 65,536; 0: not even one minibatch. None below four batches, or without noise.
        """
        if self._moments is None or math.isnan(self.at(1).value):
            return None
        alone = [own.most(PARAMETER_LIMIT) for one in self.parameters if (own := one._own_moments)]
        most = min([self._moments.most(TOTAL_LIMIT), *alone])
        return math.floor(min(MOST_MINIBATCHES, self.averaged * most))

    @property
    def worst_parameter(self) -> ParameterResult | None:
        """The judged one with the largest error over noise, or relative error without noise."""
        return next((parameter for parameter in worst_first(self.parameters) if parameter.judged), None)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, with the name and two numbers of the worst parameter.

        A number that is not finite is ``"inf"``, ``"-inf"`` or ``"nan"``.
        """
        worst, named = self.worst_parameter, ("name", "error_over_noise", "relative_error")
        level = self.at(self.minibatches)
        more = {
            "error_over_noise_interval": None if math.isnan(level.low) else [level.low, level.high],
            "holds_up_to": self.holds_up_to,
            "worst_parameter": None if worst is None else {key: getattr(worst, key) for key in named},
            "parameters": list(map(_public, self.parameters)),
        }
        data: dict[str, Any] = json_ready(_public(self) | more)
        return data

    def __repr__(self) -> str:
        error = "None" if self.error_over_noise is None else f"{self.error_over_noise:.3g}"
        return f"Certificate({self.verdict!r}, {self.policy!r}, error_over_noise={error})"

    def __str__(self) -> str:
        return _as_table(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(_as_table(self, rows=len(self.parameters)))}</pre>"


def _public(record: Certificate | ParameterResult) -> dict[str, Any]:
    return {one.name: getattr(record, one.name) for one in fields(record) if not one.name.startswith("_")}


# ---- as text

_WIDTH = 80


def worst_first(parameters: Iterable[ParameterResult]) -> list[ParameterResult]:
    """Sort judged ones first, then by error over noise, or by relative error if none has noise."""
    parameters = list(parameters)
    by_noise = any(p.judged and p.error_over_noise is not None for p in parameters)

    def badness(parameter: ParameterResult) -> tuple[bool, float]:
        number = parameter.error_over_noise if by_noise else parameter.relative_error
        return parameter.judged, -1.0 if number is None else number

    return sorted(parameters, key=badness, reverse=True)


def _as_table(certificate: Certificate, *, rows: int = 12) -> str:
    lines = [f"gradient certificate: {certificate.verdict}", *textwrap.wrap(certificate.reason, _WIDTH)]
    summary = {
        "error over noise": number(certificate.error_over_noise),
        "relative error": number(certificate.relative_error),
        "cosine": "-" if certificate.cosine is None else f"{certificate.cosine:.6f}",
        "policy": f"{certificate.policy} ({certificate.format})",
        "loss scale": "none" if certificate.loss_scale is None else f"{certificate.loss_scale:g}",
        "at step": str(certificate.at_step),
        "holds for": up_to(certificate) or "not known: that needs four batches with noise",
    }
    lines += [f"{name:<18}{_fit(value, _WIDTH - 18)}" for name, value in summary.items()]
    parameters = worst_first(certificate.parameters)
    if parameters:
        lines += ["", f"{'parameter (worst first)':<38}error/noise rel. error     cosine  judged"]
    for one in parameters[:rows]:
        cosine = "-" if one.cosine is None else f"{one.cosine:.5f}"
        numbers = f"{number(one.error_over_noise):>11}{number(one.relative_error):>11}{cosine:>11}"
        lines.append(f"{_fit(one.name, 37):<38}{numbers}{'yes' if one.judged else 'no':>8}")
    if len(parameters) > rows:
        lines.append(f"and {len(parameters) - rows} more")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Return ``value`` with three digits, as ``0.00412``, ``1.2e-05`` or ``inf``; ``-`` for None."""
    return "-" if value is None else f"{value:.3g}"


def up_to(certificate: Certificate) -> str | None:
    """Say in words what ``holds_up_to`` says: "batches of up to 96 samples (12 of yours averaged)"."""
    k, samples = certificate.holds_up_to, certificate.samples
    if not k:
        return None if k is None else "no batch"
    end = ", the largest that were looked at" if k == MOST_MINIBATCHES else ""
    if samples is None:
        return f"steps of up to {k:,} minibatch{'es' * (k > 1)}{end}"
    yours = "one of yours" if k == 1 else f"{k:,} of yours averaged"
    return f"batches of up to {k * samples:,} samples ({yours}){end}"


def _fit(text: str, width: int) -> str:
    """Return ``text`` on one line without its middle if it is too long; names differ most at their end."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    head = (width - 3) // 3
    return f"{line[:head]}...{line[len(line) - (width - 3 - head) :]}"
