"""The gradient certificate: mixed precision's error in units of minibatch noise, as data and arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from narrowcast.observe.capture import json_ready
from narrowcast.verify._certificate_text import as_html, as_table

PASS, FAIL, CANNOT_TELL = "pass", "fail", "cannot tell"

# Reasons that the verdict looks for.
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

    Every norm is Euclidean, computed in float64 from the unscaled gradients. A number that cannot be had is
    None, never NaN, and ``reason`` says why; one of a gradient that is not finite in mixed precision is
    infinite.

    Attributes:
        name: as ``model.named_parameters()`` has it.
        shape: of the parameter.
        gradient_norm: of the FP32 gradient of the batch.
        error_norm: of the mixed gradient minus the FP32 one, same batch.
        noise_norm: of the FP32 gradient minus that of another batch, same weights.
        rounding_norm: of the FP32 gradient minus that which FP32 rounds in another way (the last bit of the
            weights moved, or ops that round once only); of its size, the gradient is rounding noise.
        error_over_noise: ``error_norm / noise_norm``.
        relative_error: ``error_norm / gradient_norm``.
        cosine: of the angle between the mixed and the FP32 gradient.
        judged: whether the totals and the verdict count it.
        reason: why it is not judged, or why a number is None.
    """

    name: str
    shape: tuple[int, ...]
    gradient_norm: float | None
    error_norm: float | None
    noise_norm: float | None
    rounding_norm: float | None
    error_over_noise: float | None
    relative_error: float | None
    cosine: float | None
    judged: bool
    reason: str | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: a number that is not finite as ``"inf"``, ``"-inf"`` or ``"nan"``."""
        return {key: json_ready(value) for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of ``to_dict``."""
        return cls(**{field.name: _from_json(field.name, data[field.name]) for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How far mixed precision moves a gradient, measured in the difference that another minibatch makes.

    ``str()`` is a table of at most 80 columns; in a notebook it is shown as HTML.

    Attributes:
        policy: as it was asked for.
        format: what was computed in, as ``"bf16"``.
        at_step: after how many optimizer steps; 0 at the start.
        loss_scale: that the mixed gradients were computed at; None without one.
        error_over_noise: of all judged parameters together for which there was a second batch; below 0.05
            passes. None where ``reason`` says so.
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
        """JSON-ready: numbers that are not finite as strings, ``worst_parameter`` by name and two numbers."""
        worst = self.worst_parameter
        named = ("name", "error_over_noise", "relative_error")
        return {
            "policy": self.policy,
            "format": self.format,
            "at_step": self.at_step,
            "loss_scale": json_ready(self.loss_scale),
            "error_over_noise": json_ready(self.error_over_noise),
            "relative_error": json_ready(self.relative_error),
            "cosine": json_ready(self.cosine),
            "worst_parameter": None if worst is None else {key: worst.to_dict()[key] for key in named},
            "parameters": [parameter.to_dict() for parameter in self.parameters],
            "verdict": self.verdict,
            "reason": self.reason,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of ``to_dict``."""
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
