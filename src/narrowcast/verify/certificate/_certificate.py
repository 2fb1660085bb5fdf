"""The gradient certificate as data, as a table and as HTML."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from narrowcast.capture import ENOUGH_ELEMENTS, PARAMETER_LIMIT, TOTAL_LIMIT, Estimate, json_ready
from narrowcast.errors import SettingError
from narrowcast.verify.certificate._sums import Moments

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
        bias_norm: of the mean of the error over batches, without the variance that remains in that mean; None
            below four batches.
        noise_norm: of the FP32 gradient minus that of another batch, same weights.
        rounding_norm: of the FP32 gradient minus an FP32 gradient whose operators compute in float64 and
            round only their results. A gradient whose norm is not much larger is rounding noise.
        error_over_noise: ``error_norm / noise_norm``; for a step of several minibatches, that of the mean of
            their gradients.
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
        """The moments for the limit of this parameter; None if it has no limit of its own."""
        is_large = math.prod(self.shape) >= ENOUGH_ELEMENTS
        has_noise = self.error_over_noise is not None
        if self.judged and is_large and has_noise:
            return self._moments
        return None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Certificate:
    """How far mixed precision moves a gradient, in units of the difference that another minibatch makes.

    The mean of the error is its bias. Accumulation and ranks average noise away, and not the bias: ``at`` and
    ``holds_up_to`` tell up to which batch the noise is large enough.

    ``str()`` is a table of at most 80 columns with the worst parameters; a notebook shows all.

    Attributes:
        policy: as it was asked for.
        format: in which mixed precision computed, as ``"bf16"``.
        at_step: after how many optimizer steps; 0 at the start.
        loss_scale: of the mixed gradients; None without one.
        minibatches: how many a step averages, accumulation times ranks. The verdict is for such a step.
        averaged: how many minibatches each measured gradient averages.
        samples: in a minibatch; None: not known.
        error_over_noise: of a step of ``minibatches``, over all judged parameters whose noise was measured;
            passes below 0.05. None if there was no noise; ``reason`` says so.
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

        The value is ``sqrt(k * |bias|**2 + variance) / (sqrt(2) * sigma)``, over all judged parameters,
        without unit:

        - ``|bias|**2`` is the mean, over pairs of batches, of the product of their errors;
        - ``variance`` is the mean of ``|error|**2`` over batches, minus ``|bias|**2``;
        - ``sigma`` is the standard deviation of an FP32 gradient between batches.

        All three numbers are NaN below four batches, without noise, and if a gradient is not finite in mixed
        precision.

        The interval widens with k and narrows with the number of batches. In three small models, high / low
        from four batches is 2.3 to 2.8 at k = 1 and at least 19 at k = 256; from 16 batches it is 1.7 and 7
        (``benchmarks/certificate_intervals.py``).

        Raises:
            SettingError: ``k`` is below 1.
        """
        if not k >= 1:
            raise SettingError(f"expected a number of minibatches of at least 1, got {k}")
        if self._moments is None:
            return Estimate(math.nan)
        return self._moments.at(k / self.averaged)

    @property
    def holds_up_to(self) -> int | None:
        """Return the largest k for which mixed precision is right, at most 65,536; 0: not even one batch.

        It is right if ``at(k)`` is below 0.05, and the same number of each parameter with 16 elements or more
        is below 0.25. None below four batches, without noise, and if a gradient is not finite in mixed
        precision.
        """
        if self._moments is None or math.isnan(self.at(1).value):
            return None
        # The moments count measured gradients, each of which is the mean of ``averaged`` minibatches.
        most = self._moments.most(TOTAL_LIMIT)
        for parameter in self.parameters:
            own_moments = parameter._own_moments
            if own_moments is not None:
                most = min(most, own_moments.most(PARAMETER_LIMIT))
        return math.floor(min(MOST_MINIBATCHES, self.averaged * most))

    @property
    def worst_parameter(self) -> ParameterResult | None:
        """The judged parameter with the largest error over noise; without noise, relative error."""
        for parameter in worst_first(self.parameters):
            if parameter.judged:
                return parameter
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, with the name and two numbers of the worst parameter.

        A number that is not finite is ``"inf"``, ``"-inf"`` or ``"nan"``.
        """
        # The worst parameter stands by itself, so that a reader of the JSON need not sort for it.
        worst = self.worst_parameter
        worst_named = None
        if worst is not None:
            worst_named = {
                "name": worst.name,
                "error_over_noise": worst.error_over_noise,
                "relative_error": worst.relative_error,
            }
        level = self.at(self.minibatches)
        interval = None
        if not math.isnan(level.low):
            interval = [level.low, level.high]
        derived = {
            "error_over_noise_interval": interval,
            "holds_up_to": self.holds_up_to,
            "worst_parameter": worst_named,
            "parameters": [_public(parameter) for parameter in self.parameters],
        }
        data: dict[str, Any] = json_ready(_public(self) | derived)
        return data

    def __repr__(self) -> str:
        error = "None" if self.error_over_noise is None else f"{self.error_over_noise:.3g}"
        return f"Certificate({self.verdict!r}, {self.policy!r}, error_over_noise={error})"

    def __str__(self) -> str:
        return _as_table(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(_as_table(self, rows=len(self.parameters)))}</pre>"


def _public(record: Certificate | ParameterResult) -> dict[str, Any]:
    names = [attribute.name for attribute in fields(record)]
    return {name: getattr(record, name) for name in names if not name.startswith("_")}


def worst_first(parameters: Iterable[ParameterResult]) -> list[ParameterResult]:
    """Sort by error over noise, or by relative error if none has noise; judged parameters come first."""
    parameters = list(parameters)
    has_noise = any(one.judged and one.error_over_noise is not None for one in parameters)

    def badness(parameter: ParameterResult) -> tuple[bool, float]:
        error = parameter.relative_error
        if has_noise:
            error = parameter.error_over_noise
        # One without a number comes after all that have one.
        if error is None:
            error = -1.0
        return parameter.judged, error

    return sorted(parameters, key=badness, reverse=True)


# ---- as text

_WIDTH = 80
_LABEL_WIDTH = 18
_NAME_WIDTH = 37


def _as_table(certificate: Certificate, *, rows: int = 12) -> str:
    cosine = loss_scale = None
    if certificate.cosine is not None:
        cosine = f"{certificate.cosine:.6f}"
    if certificate.loss_scale is not None:
        loss_scale = f"{certificate.loss_scale:g}"
    summary = {
        "error over noise": number(certificate.error_over_noise),
        "relative error": number(certificate.relative_error),
        "cosine": cosine or "-",
        "policy": f"{certificate.policy} ({certificate.format})",
        "loss scale": loss_scale or "none",
        "at step": str(certificate.at_step),
        "holds for": up_to(certificate) or _why_not_known(certificate),
    }

    lines = [f"gradient certificate: {certificate.verdict}"]
    lines += textwrap.wrap(certificate.reason, _WIDTH)
    for label, value in summary.items():
        lines.append(f"{label:<{_LABEL_WIDTH}}{_fit(value, _WIDTH - _LABEL_WIDTH)}")

    parameters = worst_first(certificate.parameters)
    if parameters:
        name = "parameter (worst first)"
        lines += ["", f"{name:<{_NAME_WIDTH + 1}}error/noise rel. error     cosine  judged"]
    lines += [_row(parameter) for parameter in parameters[:rows]]
    if len(parameters) > rows:
        lines.append(f"and {len(parameters) - rows} more")
    return "\n".join(lines)


def _why_not_known(certificate: Certificate) -> str:
    """Say why ``holds_up_to`` is None."""
    for parameter in certificate.parameters:
        if parameter.error_norm == math.inf:
            return "not known: a gradient is not finite in mixed precision"
    return "not known: that needs four batches with noise"


def _row(parameter: ParameterResult) -> str:
    name = _fit(parameter.name, _NAME_WIDTH)
    ratio, relative = number(parameter.error_over_noise), number(parameter.relative_error)
    cosine = "-"
    if parameter.cosine is not None:
        cosine = f"{parameter.cosine:.5f}"
    judged = "yes" if parameter.judged else "no"
    return f"{name:<{_NAME_WIDTH + 1}}{ratio:>11}{relative:>11}{cosine:>11}{judged:>8}"


def number(value: float | None) -> str:
    """Return ``value`` with three digits, as ``0.00412``, ``1.2e-05`` or ``inf``; ``-`` for None."""
    if value is None:
        return "-"
    return f"{value:.3g}"


def up_to(certificate: Certificate) -> str | None:
    """Say ``holds_up_to`` in words: "batches of up to 96 samples (12 of yours averaged)"; None: not known."""
    k, samples = certificate.holds_up_to, certificate.samples
    if k is None:
        return None
    if k == 0:
        return "no batch"
    end = ""
    if k == MOST_MINIBATCHES:
        end = ", the largest that were looked at"
    if samples is None:
        plural = "es" if k > 1 else ""
        return f"steps of up to {k:,} minibatch{plural}{end}"
    yours = "one of yours"
    if k > 1:
        yours = f"{k:,} of yours averaged"
    return f"batches of up to {k * samples:,} samples ({yours}){end}"


def _fit(text: str, width: int) -> str:
    """Return ``text`` on one line without its middle if it is too long; names differ most at their end."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    head = (width - len("...")) // 3
    tail = width - len("...") - head
    return f"{line[:head]}...{line[-tail:]}"
