"""The gradient certificate as data, as a table and as HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from narrowcast.observe.capture import json_ready

PASS, FAIL, CANNOT_TELL = "pass", "fail", "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterResult:
    """What mixed precision does to the gradient of one parameter.

    Every norm is Euclidean, computed in float64 from the unscaled gradients. A number that is not defined is
    None, never NaN, and ``reason`` says why. Numbers of a gradient that is not finite in mixed precision are
    infinite.

    Attributes:
        name: as ``model.named_parameters()`` has it.
        shape: of the parameter.
        gradient_norm: of the FP32 gradient of the batch.
        error_norm: of the mixed gradient minus the FP32 one, same batch.
        noise_norm: of the FP32 gradient minus that of another batch, same weights.
        rounding_norm: of the FP32 gradient minus one by ops that round only once. A gradient not much larger
            than this is rounding noise.
        error_over_noise: ``error_norm / noise_norm``.
        relative_error: ``error_norm / gradient_norm``.
        cosine: of the angle between the mixed and the FP32 gradient.
        judged: whether totals and verdict include it.
        reason: why it is not judged, or why a number is None.
    """

    name: str
    shape: tuple[int, ...]
    gradient_norm: float | None = None
    error_norm: float | None = None
    noise_norm: float | None = None
    rounding_norm: float | None = None
    error_over_noise: float | None = None
    relative_error: float | None = None
    cosine: float | None = None
    judged: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How far mixed precision moves a gradient, in units of the difference that another minibatch makes.

    ``str()`` is a table of at most 80 columns with the worst parameters; a notebook shows all.

    Attributes:
        policy: as it was asked for.
        format: what was computed in, as ``"bf16"``.
        at_step: after how many optimizer steps; 0 at the start.
        loss_scale: of the mixed gradients; None without one.
        error_over_noise: of all judged parameters with a second batch together; below 0.05 passes. None if
            there was no noise, as ``reason`` says.
        relative_error: of all judged parameters together, against the FP32 gradient.
        cosine: of all judged parameters together.
        parameters: each one, in the order of the model.
        verdict: ``"pass"``, ``"fail"`` or ``"cannot tell"``.
        reason: for the verdict, in full sentences.
    """

    policy: str
    format: str
    at_step: int
    loss_scale: float | None
    error_over_noise: float | None
    relative_error: float | None
    cosine: float | None
    parameters: tuple[ParameterResult, ...]
    verdict: str
    reason: str

    @property
    def worst_parameter(self) -> ParameterResult | None:
        """The judged one with the largest error over noise, or relative error without noise."""
        return next((parameter for parameter in worst_first(self.parameters) if parameter.judged), None)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, with the name and two numbers of the worst parameter.

        A number that is not finite is ``"inf"``, ``"-inf"`` or ``"nan"``.
        """
        worst, named = self.worst_parameter, ("name", "error_over_noise", "relative_error")
        shown = None if worst is None else {key: getattr(worst, key) for key in named}
        data: dict[str, Any] = json_ready(asdict(self) | {"worst_parameter": shown})
        return data

    def __str__(self) -> str:
        return _as_table(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(_as_table(self, rows=len(self.parameters)))}</pre>"


# ---- as text

_ROWS = 12
_WIDTH = 80
_NAME = 38
_HEADS = ("error/noise", "rel. error", "cosine", "judged")


def worst_first(parameters: Iterable[ParameterResult]) -> list[ParameterResult]:
    """Sort judged ones first, then by error over noise, or by relative error if none has noise."""
    parameters = list(parameters)
    by_noise = any(p.judged and p.error_over_noise is not None for p in parameters)

    def badness(parameter: ParameterResult) -> tuple[bool, float]:
        number = parameter.error_over_noise if by_noise else parameter.relative_error
        return parameter.judged, -1.0 if number is None else number

    return sorted(parameters, key=badness, reverse=True)


def _as_table(certificate: Certificate, *, rows: int = _ROWS) -> str:
    lines = [f"gradient certificate: {certificate.verdict}", *textwrap.wrap(certificate.reason, _WIDTH)]
    lines += [f"{name:<18}{_fit(value, _WIDTH - 18)}" for name, value in _summary(certificate)]
    cells = [(_fit(p.name, _NAME - 1), *_cells(p)) for p in worst_first(certificate.parameters)]
    if cells:
        lines.append("")
    for name, *numbers, judged in [("parameter (worst first)", *_HEADS)] * bool(cells) + cells[:rows]:
        lines.append(f"{name:<{_NAME}}{''.join(f'{text:>11}' for text in numbers)}{judged:>8}")
    if len(cells) > rows:
        lines.append(f"and {len(cells) - rows} more")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Return ``value`` with three digits, as ``0.00412``, ``1.2e-05`` or ``inf``; ``-`` for None."""
    return "-" if value is None else f"{value:.3g}"


def _summary(certificate: Certificate) -> list[tuple[str, str]]:
    return [
        ("error over noise", number(certificate.error_over_noise)),
        ("relative error", number(certificate.relative_error)),
        ("cosine", "-" if certificate.cosine is None else f"{certificate.cosine:.6f}"),
        ("policy", f"{certificate.policy} ({certificate.format})"),
        ("loss scale", "none" if certificate.loss_scale is None else f"{certificate.loss_scale:g}"),
        ("at step", str(certificate.at_step)),
    ]


def _cells(parameter: ParameterResult) -> tuple[str, str, str, str]:
    cosine = "-" if parameter.cosine is None else f"{parameter.cosine:.5f}"
    judged = "yes" if parameter.judged else "no"
    return number(parameter.error_over_noise), number(parameter.relative_error), cosine, judged


def _fit(text: str, width: int) -> str:
    """Return ``text`` on one line without its middle if it is too long; names differ most at their end."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    head = (width - 3) // 3
    return f"{line[:head]}...{line[len(line) - (width - 3 - head) :]}"
