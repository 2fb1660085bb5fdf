"""The gradient certificate as data, as a table and as HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from narrowcast.observe.capture import json_ready

PASS, FAIL, CANNOT_TELL = "pass", "fail", "cannot tell"

# Reasons that the verdict depends on.
NOT_FINITE_FP32 = "its FP32 gradient is not finite"
NOT_FINITE_MIXED = "its gradient is not finite in mixed precision"
NOT_FINITE_OTHER = "the FP32 gradient of the second batch is not finite"
NO_GRADIENT = "no gradient reaches it"
ZERO_GRADIENT = "its gradient is zero"
ZERO_FP32 = "its FP32 gradient is zero for this batch, which tests nothing"
NO_SECOND_BATCH = "there was no second batch to measure noise by"
ROUNDING_NOISE = "its gradient is rounding noise in FP32 itself"
MISSING_FP32 = "it has a gradient in mixed precision and none in FP32, which counts as zero"
MISSING_MIXED = "it has a gradient in FP32 and none in mixed precision, which counts as zero"


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
        rounding_norm: of the FP32 gradient minus one that FP32 rounds differently (last bit of the weights
            changed, or ops that round only once). A gradient not much larger than this is rounding noise.
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

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON; a number that is not finite is ``"inf"``, ``"-inf"`` or ``"nan"``."""
        return {key: json_ready(value) for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Restore what ``to_dict`` returned."""
        return cls(**{field.name: _from_json(field.name, data[field.name]) for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How far mixed precision moves a gradient, in units of the difference that another minibatch makes.

    ``str()`` is a table of at most 80 columns; a notebook shows HTML.

    Attributes:
        policy: as it was asked for.
        format: what was computed in, as ``"bf16"``.
        at_step: after how many optimizer steps; 0 at the start.
        loss_scale: of the mixed gradients; None without one.
        error_over_noise: of all judged parameters with a second batch together; below 0.05 passes. None if
            there was no noise, as ``reason`` says.
        relative_error: of all judged parameters together, against the FP32 gradient.
        cosine: of all judged parameters together.
        worst_parameter: the judged one with the largest error over noise, or relative error without noise.
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
    worst_parameter: ParameterResult | None
    parameters: tuple[ParameterResult, ...]
    verdict: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON; ``worst_parameter`` is reduced to its name and two numbers."""
        result = {field.name: json_ready(getattr(self, field.name)) for field in fields(self)}
        worst = self.worst_parameter
        if worst is not None:
            named = ("name", "error_over_noise", "relative_error")
            result["worst_parameter"] = {key: json_ready(getattr(worst, key)) for key in named}
        return result | {"parameters": [parameter.to_dict() for parameter in self.parameters]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Restore what ``to_dict`` returned."""
        parameters = tuple(map(ParameterResult.from_dict, data["parameters"]))
        worst = data["worst_parameter"]
        found = None if worst is None else next(p for p in parameters if p.name == worst["name"])
        given = {field.name: _from_json(field.name, data[field.name]) for field in fields(cls)}
        return cls(**given | {"parameters": parameters, "worst_parameter": found})

    def __str__(self) -> str:
        return as_table(self)

    def _repr_html_(self) -> str:
        return as_html(self)


def _from_json(name: str, value: Any) -> Any:
    if name == "shape":
        return tuple(value)
    if value in ("inf", "-inf", "nan") and name not in ("name", "policy", "format", "reason"):
        return float(value)
    return value


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


def as_table(certificate: Certificate) -> str:
    """Return ``certificate`` as lines of at most 80 columns, the worst parameters first."""
    lines = [f"gradient certificate: {certificate.verdict}"]
    lines += textwrap.wrap(certificate.reason, _WIDTH)
    lines += [f"{name:<18}{_fit(value, _WIDTH - 18)}" for name, value in _summary(certificate)]
    rows = worst_first(certificate.parameters)
    if rows:
        lines += ["", f"{'parameter (worst first)':<{_NAME}}" + "".join(f"{head:>11}" for head in _HEADS[:3])]
        lines[-1] += f"{_HEADS[3]:>8}"
    for parameter in rows[:_ROWS]:
        numbers = "".join(f"{text:>11}" for text in _numbers(parameter))
        judged = "yes" if parameter.judged else "no"
        lines.append(f"{_fit(parameter.name, _NAME - 1):<{_NAME}}{numbers}{judged:>8}")
    if len(rows) > _ROWS:
        lines.append(f"and {len(rows) - _ROWS} more")
    return "\n".join(lines)


def as_html(certificate: Certificate) -> str:
    """Return ``certificate`` as a fragment of HTML with every parameter."""

    def row(cells: Iterable[str], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(
        row(
            (
                parameter.name,
                "x".join(map(str, parameter.shape)) or "scalar",
                *_numbers(parameter),
                "yes" if parameter.judged else "no",
                parameter.reason or "",
            )
        )
        for parameter in worst_first(certificate.parameters)
    )
    return (
        f"<div><p><strong>gradient certificate: {html.escape(certificate.verdict)}</strong><br>"
        f"{html.escape(certificate.reason)}</p><table>{''.join(map(row, _summary(certificate)))}</table>"
        f"<table><thead>{row(('parameter', 'shape', *_HEADS, 'why'), 'th')}</thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


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


def _numbers(parameter: ParameterResult) -> tuple[str, str, str]:
    cosine = "-" if parameter.cosine is None else f"{parameter.cosine:.5f}"
    return number(parameter.error_over_noise), number(parameter.relative_error), cosine


def _fit(text: str, width: int) -> str:
    """Return ``text`` on one line without its middle if it is too long; names differ most at their end."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    head = (width - 3) // 3
    return f"{line[:head]}...{line[len(line) - (width - 3 - head) :]}"
