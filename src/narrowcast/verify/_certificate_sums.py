"""From gradients to a certificate: one parameter at a time, and none of them kept."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from narrowcast.verify._certificate import (
    MISSING_FP32,
    MISSING_MIXED,
    NO_GRADIENT,
    NO_SECOND_BATCH,
    NOT_FINITE_FP32,
    NOT_FINITE_MIXED,
    NOT_FINITE_OTHER,
    ROUNDING_NOISE,
    ZERO_FP32,
    ZERO_GRADIENT,
    Certificate,
    ParameterResult,
)
from narrowcast.verify._certificate_text import worst_first
from narrowcast.verify._certificate_verdict import ROUNDING_SHARE, verdict_on
from narrowcast.verify._gradient_sums import Sums, Totals, compared

_Measured = tuple[Sums, Sums | None, Sums | None]


class CertificateSums:
    """Collects what each parameter's gradients say, then gives the verdict."""

    def __init__(self) -> None:
        self._members: list[tuple[str, tuple[int, ...], _Measured]] = []

    def add(
        self,
        name: str,
        shape: Iterable[int],
        fp32: torch.Tensor | None,
        other: torch.Tensor | None,
        mixed: torch.Tensor | None,
        perturbed: torch.Tensor | None,
        *,
        second_batch: bool | None = None,
    ) -> None:
        """One parameter by its gradients, unscaled; none of them is kept.

        Args:
            name: of the parameter.
            shape: of the parameter.
            fp32: gradient of the batch in FP32. None where none reached the parameter.
            other: of another batch in FP32, at the same weights.
            mixed: of the batch in mixed precision.
            perturbed: of the batch in FP32 that rounds in another way; None: not measured.
            second_batch: whether there was another batch for this parameter; None: if it has a gradient of
                one. Where there was, an ``other`` of None counts as zeros.
        """
        self.add_measured(
            name,
            shape,
            error=compared(fp32, mixed),
            noise=compared(fp32, other) if second_batch or other is not None else None,
            rounding=None if perturbed is None else compared(fp32, perturbed),
        )

    def add_measured(
        self, name: str, shape: Iterable[int], *, error: Sums, noise: Sums | None, rounding: Sums | None
    ) -> None:
        """One parameter by ``compared`` of its FP32 gradient with each of the others.

        Without ``noise`` there was no second batch for it; then only its relative error counts.
        """
        self._members.append((name, tuple(shape), (error, noise, rounding)))

    def finish(
        self,
        *,
        policy: str,
        format: str,
        at_step: int = 0,
        loss_scale: float | None = None,
        cannot_tell: str | None = None,
        note: str | None = None,
        rounding_unknown: str | None = None,
    ) -> Certificate:
        """The certificate of all that was added.

        Args:
            policy: as it was asked for.
            format: what was computed in.
            at_step: after how many optimizer steps.
            loss_scale: that the mixed gradients were computed at.
            cannot_tell: a sentence on why these numbers do not compare like with like, if they do not.
            note: a sentence that a reader should know beside the verdict.
            rounding_unknown: a sentence on why FP32's own rounding was not measured, if it was not. Then a
                single parameter may be off because its gradient is rounding noise, and fails nothing.
        """
        parameters = tuple(_result(name, shape, *sums) for name, shape, sums in self._members)
        judged = [sums for (_, _, sums), p in zip(self._members, parameters, strict=True) if p.judged]
        totals = Totals.of(judged)
        by_noise = Totals.of(sums for sums in judged if sums[1] is not None)
        without = Totals.of(sums for sums in judged if sums[1] is None)
        second_batch = any(noise is not None for _, noise, _ in judged)
        verdict, reason = verdict_on(
            parameters,
            totals,
            by_noise if second_batch else None,
            without,
            cannot_tell=cannot_tell,
            rounding_unknown=rounding_unknown,
        )
        worst = next((parameter for parameter in worst_first(parameters) if parameter.judged), None)
        return Certificate(
            policy=policy,
            format=format,
            at_step=at_step,
            loss_scale=loss_scale,
            error_over_noise=by_noise.error_over_noise if second_batch else None,
            relative_error=totals.relative_error,
            cosine=totals.cosine,
            worst_parameter=worst,
            parameters=parameters,
            verdict=verdict,
            reason=reason if note is None else f"{reason} {note}",
        )


def _result(
    name: str, shape: tuple[int, ...], error: Sums, noise: Sums | None, rounding: Sums | None
) -> ParameterResult:
    if not math.isfinite(error.first):
        return _unjudged(name, shape, NOT_FINITE_FP32)
    if error.missing == "both":
        return _unjudged(name, shape, NO_GRADIENT)
    if rounding is not None and not math.isfinite(rounding.second):
        rounding = None
    totals = Totals.of([(error, noise, rounding)])
    finite = math.isfinite(error.second)
    judged, reason = _whether_judged(totals, error, noise, rounding)
    return ParameterResult(
        name=name,
        shape=shape,
        gradient_norm=totals.gradient,
        error_norm=totals.error,
        noise_norm=None if noise is None or math.isinf(totals.noise) else totals.noise,
        rounding_norm=None if rounding is None else totals.rounding,
        error_over_noise=None if noise is None else totals.error_over_noise,
        relative_error=totals.relative_error if finite else math.inf,
        cosine=totals.cosine,
        judged=judged,
        reason=reason,
    )


def _whether_judged(
    totals: Totals, error: Sums, noise: Sums | None, rounding: Sums | None
) -> tuple[bool, str | None]:
    """And the reason, of which the first that holds is given."""
    is_rounding = rounding is not None and 0 < totals.rounding >= ROUNDING_SHARE * totals.gradient
    no_gradient = totals.gradient == 0 and not totals.noise > 0
    is_zero = totals.gradient == 0 == totals.error
    cases = (
        (not math.isfinite(error.second), True, NOT_FINITE_MIXED),
        (is_rounding, False, ROUNDING_NOISE),
        (math.isinf(totals.noise), True, NOT_FINITE_OTHER),
        (is_zero, False, ZERO_GRADIENT if no_gradient else ZERO_FP32),
        (error.missing == "second", True, MISSING_MIXED),
        (error.missing == "first", True, MISSING_FP32),
        (no_gradient, True, "its gradient is zero in FP32 and not in mixed precision"),
        (noise is None, True, NO_SECOND_BATCH),
        (totals.no_noise, True, "both batches give it the same gradient: no noise to divide by"),
        (totals.gradient == 0, True, "its FP32 gradient is zero for this batch"),
        (totals.mixed == 0, True, "its gradient is zero in mixed precision"),
    )
    return next(((judged, reason) for holds, judged, reason in cases if holds), (True, None))


def _unjudged(name: str, shape: tuple[int, ...], reason: str) -> ParameterResult:
    return ParameterResult(
        name=name, shape=shape, gradient_norm=None, error_norm=None, noise_norm=None, rounding_norm=None,
        error_over_noise=None, relative_error=None, cosine=None, judged=False, reason=reason,
    )  # fmt: skip
