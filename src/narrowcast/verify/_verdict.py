"""The limits, the verdict on the numbers of all parameters, and the certificate made of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from narrowcast.errors import few
from narrowcast.observe.capture import (
    PARAMETER_LIMIT,
    TOTAL_FAILS,
    TOTAL_LIMIT,
    parameter_error,
    parameter_limit,
)
from narrowcast.verify._certificate import (
    CANNOT_TELL,
    FAIL,
    PASS,
    Certificate,
    ParameterResult,
    number,
    up_to,
)
from narrowcast.verify._sums import FEWEST_BATCHES, Estimate, Measured, Moments, Totals

# Reasons of parameters that the verdict depends on.
_NOT_FINITE_FP32 = "its FP32 gradient is not finite"
_NOT_FINITE_MIXED = "its gradient is not finite in mixed precision"
_NOT_FINITE_OTHER = "the FP32 gradient of the second batch is not finite"
_NO_GRADIENT = "no gradient reaches it"
_ZERO_GRADIENT = "its gradient is zero"
_ZERO_FP32 = "its FP32 gradient is zero for this batch, which tests nothing"
_ROUNDING_NOISE = "its gradient is rounding noise in FP32 itself"
_MISSING_FP32 = "it has a gradient in mixed precision and none in FP32, which counts as zero"
_MISSING_MIXED = "it has a gradient in FP32 and none in mixed precision, which counts as zero"

# Relative error that passes whatever the noise: two and a half roundoffs (2**-8) of bf16, by rounding alone.
# Needed because full batches have no noise to divide by, and a large one little. Not for steps that average
# minibatches, whose noise is known: there the bias of rounding counts, however small.
ROUNDING_SIZE = 0.01
# Relative error where both batches are the same: about ten roundoffs of bf16, what is left of them after a
# dozen layers; a direction within 3 degrees of FP32's. Training shrinks the gradient, so the relative error
# grows although rounding stays the same: in the full-batch network of examples/quantized_sine.py in bf16
# from 0.011 to 0.062 after 20 steps and 0.31 after 60. From here to PARAMETER_LIMIT the verdict is therefore
# "cannot tell".
SAME_BATCH_LIMIT = 0.05
# An FP32 gradient is rounding noise if it changes by this share or more when each op rounds only once.
# Measured in networks of convolutions and batch norms: 1e-3 at most for any other gradient, 1.0 for the bias
# of a convolution before a batch norm, whose exact gradient is zero.
ROUNDING_SHARE = 0.1


def _void(parameters: Sequence[ParameterResult], cannot_tell: str | None) -> tuple[str, str] | None:
    """Return the verdict if it does not depend on any ratio."""
    of_fp32, of_mixed, of_second = (
        few(_because(parameters, reason))
        for reason in (_NOT_FINITE_FP32, _NOT_FINITE_MIXED, _NOT_FINITE_OTHER)
    )
    cases = (
        (of_fp32, CANNOT_TELL, f"FP32 itself is not finite: the gradient of {of_fp32}."),
        (of_mixed, FAIL, f"Finite in FP32 and not in mixed precision: the gradient of {of_mixed}."),
        (cannot_tell, CANNOT_TELL, cannot_tell or ""),
        (of_second, CANNOT_TELL, f"FP32 is not finite on the second batch: {of_second}."),
        (not any(p.judged for p in parameters), CANNOT_TELL, _nothing_judged(parameters)),
    )
    return next(((verdict, reason) for holds, verdict, reason in cases if holds), None)


def _nothing_judged(parameters: Sequence[ParameterResult]) -> str:
    if not parameters:
        return "No parameter needs a gradient, so there is nothing to compare."
    if all(p.reason == _ROUNDING_NOISE for p in parameters):
        return (
            "Every FP32 gradient changes wholly with how its ops round: does the loss change when it is "
            "computed twice, for the same batch and random numbers?"
        )
    return f"No gradient can be judged ({few([f'{p.name}: {p.reason}' for p in parameters])})."


def _because(parameters: Sequence[ParameterResult], *reasons: str) -> list[str]:
    return [parameter.name for parameter in parameters if parameter.reason in reasons]


def _lost(parameters: Sequence[ParameterResult], *, has_noise: bool) -> list[tuple[float, str, float]]:
    """Return error, name and limit of each parameter whose own error is above its limit, worst first."""
    lost = []
    for parameter in parameters:
        error = parameter_error(parameter.error_norm, parameter.noise_norm, parameter.gradient_norm)
        if not parameter.judged or error is None:
            continue
        by_noise = has_noise and parameter.noise_norm is not None
        limit = parameter_limit(parameter.shape, has_noise=by_noise)
        if error > limit:
            lost.append((error, parameter.name, limit))
    return sorted(lost, reverse=True)


def _by_total(
    totals: Totals, by_noise: Totals | None, without: Totals, of_step: tuple[str, str] | None
) -> tuple[str, str]:
    """Judge all parameters together; ``of_step``: the verdict on a step of several minibatches."""
    if totals.error == 0:
        return PASS, (
            "The mixed gradients equal the FP32 ones to the bit: nothing was cast that changes a gradient."
        )
    relative = (by_noise or totals).relative_error
    if by_noise is not None and not by_noise.no_noise:
        verdict, reason = of_step or _with_noise(by_noise.error / by_noise.noise, relative)
    elif relative is None:
        which = " with a second batch" * (totals.gradient > 0)
        return FAIL, f"Every FP32 gradient{which} is zero, and the mixed ones are not."
    elif by_noise is None:
        return _without_second_batch(relative)
    else:
        verdict, reason = _without_noise(relative)
    if verdict == PASS and without.error > SAME_BATCH_LIMIT * without.gradient:
        return CANNOT_TELL, (
            f"{reason} But for some parameters there was no second batch, and their relative error is above "
            f"{SAME_BATCH_LIMIT}."
        )
    return verdict, reason


def _with_noise(ratio: float, relative: float | None) -> tuple[str, str]:
    measured = f"Mixed precision moves the gradient by {number(ratio)} of what another minibatch does"
    if ratio < TOTAL_FAILS and (relative is None or relative >= PARAMETER_LIMIT):
        own = "which is zero in FP32" if relative is None else f"but by {number(relative)} of its own size"
        return CANNOT_TELL, (
            f"{measured}, {own}: the first batch's gradient is far smaller than the second's, so that even "
            "losing it wholly would look small."
        )
    if ratio < TOTAL_LIMIT:
        return PASS, f"{measured}; below {TOTAL_LIMIT} passes."
    if relative is not None and relative <= ROUNDING_SIZE:
        return PASS, (
            f"{measured}, where below {TOTAL_LIMIT} passes; but these batches have little noise, and the "
            f"relative error, {number(relative)}, is what rounding alone does (up to {ROUNDING_SIZE})."
        )
    if ratio < TOTAL_FAILS:
        return CANNOT_TELL, (
            f"{measured}: from {TOTAL_LIMIT} to {TOTAL_FAILS} it may be rounding that switches ReLUs on and "
            "off, which is harmless, or a small part of the gradient that is lost."
        )
    return FAIL, f"{measured}; from {TOTAL_FAILS} on fails."


def _alone(parameters: Sequence[ParameterResult], x: float) -> list[tuple[Estimate, str]]:
    """Return error over noise of each parameter that has a limit of its own in a step, worst first."""
    return sorted(((own.at(x), p.name) for p in parameters if (own := p._own_moments)), reverse=True)


def _of_step(
    parameters: Sequence[ParameterResult], moments: Moments | None, k: int, x: float
) -> tuple[str, str]:
    """Judge the mean of ``k`` minibatches, of ``x`` gradients that were measured, by noise alone."""
    if moments is None:
        return CANNOT_TELL, (
            f"A step averages {k} minibatches here, and it takes {FEWEST_BATCHES} batches to tell its error."
        )
    total = moments.at(x)
    single = _alone(parameters, x)
    over = [(at, name) for at, name in single if at.value > PARAMETER_LIMIT]
    measured = (
        f"In a step of {k} minibatches mixed precision moves the gradient by {number(total.value)} of the "
        f"noise ({number(total.low)} to {number(total.high)})"
    )
    lost = [name for at, name in over if at.low > PARAMETER_LIMIT]
    worst = f", most that of {single[0][1]}" if single else ""
    if lost:
        return FAIL, (
            f"{measured}, and the gradient of {few(lost)} by {number(over[0][0].value)}, where "
            f"{PARAMETER_LIMIT} is the limit for a single parameter."
        )
    if total.value >= TOTAL_FAILS and total.low >= TOTAL_LIMIT:
        return FAIL, f"{measured}{worst}; from {TOTAL_FAILS} on fails."
    if total.value < TOTAL_LIMIT and not over:
        return PASS, f"{measured}; below {TOTAL_LIMIT} passes."
    return CANNOT_TELL, (
        f"{measured}{worst}; it passes below {TOTAL_LIMIT}, and each parameter below {PARAMETER_LIMIT}."
    )


def _without_noise(relative: float) -> tuple[str, str]:
    limits = ((SAME_BATCH_LIMIT, PASS), (PARAMETER_LIMIT, CANNOT_TELL), (math.inf, FAIL))
    return next(verdict for limit, verdict in limits if relative <= limit), (
        "Both batches give the same gradient (full-batch training?), so there is no minibatch noise; the "
        f"verdict is by the relative error, {number(relative)}: up to {SAME_BATCH_LIMIT} passes, above "
        f"{PARAMETER_LIMIT} fails."
    )


def _without_second_batch(relative: float) -> tuple[str, str]:
    no_yardstick = "There was no second batch to measure minibatch noise by"
    error = f"the relative error, {number(relative)},"
    if relative <= ROUNDING_SIZE:
        return PASS, f"{no_yardstick}, but {error} is what rounding alone does (up to {ROUNDING_SIZE})."
    if relative > PARAMETER_LIMIT:
        return FAIL, f"{no_yardstick}, but {error} is past any that noise could hide ({PARAMETER_LIMIT})."
    return CANNOT_TELL, f"{no_yardstick}, and {error} does not settle it."


def _notes(parameters: Sequence[ParameterResult], without: Totals | None) -> list[str]:
    """Return sentences to add to the reason; ``without``: totals of parameters without a second batch."""
    notes, every = [], f"of {len(parameters)} parameters"
    alone = [p for p in parameters if p.judged and p.noise_norm is None and p.reason != _NOT_FINITE_OTHER]
    if alone and without is not None:
        which = f"{len(alone)} {every} ({few([p.name for p in alone])})"
        error = number(without.relative_error)
        notes.append(
            f"There was no second batch for {which}: of them only the relative error counts, {error}."
        )
    if names := _because(parameters, _ROUNDING_NOISE):
        notes.append(
            f"Not judged: {len(names)} {every}, whose gradient is rounding noise in FP32 itself "
            f"({few(names)})."
        )
    names = _because(parameters, _NO_GRADIENT, _ZERO_GRADIENT, _ZERO_FP32)
    if names and any(p.judged for p in parameters):
        notes.append(
            f"Not judged: {len(names)} {every}, which got no gradient or a zero one from this batch "
            f"({few(names)})."
        )
    if names := _because(parameters, _MISSING_FP32, _MISSING_MIXED):
        notes.append(f"A gradient on one side only, in FP32 or in mixed precision: {few(names)}.")
    return notes


# ---- a certificate


def certificate_of(
    measured: Sequence[Measured],
    *,
    cannot_tell: str | None = None,
    note: str | None = None,
    rounding_unknown: str | None = None,
    minibatches: int = 1,
    averaged: int = 1,
    **fields: Any,
) -> Certificate:
    """Judge the gradients of all parameters; the arguments that are not below are fields of the certificate.

    Args:
        measured: each parameter.
        cannot_tell: why these numbers do not compare like with like, as a sentence; None: they do.
        note: a sentence to add to the reason.
        rounding_unknown: why FP32's own rounding was not measured, as a sentence; None: it was. If it was
            not, a single parameter cannot fail: its gradient may be rounding noise.
    """
    x = minibatches / averaged
    parameters = tuple(_result(one, x) for one in measured)
    judged = [one for one, result in zip(measured, parameters, strict=True) if result.judged]
    totals, without = Totals.of(judged), Totals.of([one for one in judged if one.noise is None])
    with_noise = [one for one in judged if one.noise is not None]
    by_noise = Totals.of(with_noise) if with_noise else None
    has_noise = by_noise is not None and not by_noise.no_noise
    moments = Moments.total([one.moments for one in with_noise]) if has_noise else None
    lost = _lost(parameters, has_noise=has_noise)
    names = {name for _, name, _ in lost}
    if minibatches > 1:
        names |= {name for at, name in _alone(parameters, x) if at.low > PARAMETER_LIMIT}
    parameters = tuple(replace(one, lost=one.name in names) for one in parameters)
    found = _void(parameters, cannot_tell)
    if found is None:
        of_step = _of_step(parameters, moments, minibatches, x) if minibatches > 1 else None
        found = _by_total(totals, by_noise, without, of_step)
        # A single layer whose gradient is lost, which the total of a large model would not show.
        if lost and (rounding_unknown is None or found[0] != FAIL):
            single = (
                f"The gradient of {few([name for _, name, _ in lost])} is lost in mixed precision: it is off "
                f"by {number(lost[0][0])} of its own size or of minibatch noise, whichever is larger, where "
                f"{lost[0][2]} is the limit for a single parameter."
            )
            found = (CANNOT_TELL, f"{single} {rounding_unknown}") if rounding_unknown else (FAIL, single)
    verdict, reason = found
    notes = [*_notes(parameters, None if by_noise is None else without), *([note] if note else [])]
    certificate = Certificate(
        minibatches=minibatches,
        averaged=averaged,
        error_over_noise=None if by_noise is None else by_noise.error_over_noise(moments, x),
        relative_error=totals.relative_error,
        cosine=totals.cosine,
        parameters=parameters,
        verdict=verdict,
        reason=" ".join([reason, *notes]),
        _moments=moments,
        **fields,
    )
    words = up_to(certificate) if verdict == PASS else None
    if words is None or (certificate.holds_up_to or 0) < minibatches:
        return certificate
    holds = f"Holds for {words}. Larger batches have less noise to hide the error."
    return replace(certificate, reason=" ".join([reason, holds, *notes]))


def _result(one: Measured, x: float) -> ParameterResult:
    if not math.isfinite(one.error.first):
        return ParameterResult(name=one.name, shape=one.shape, reason=_NOT_FINITE_FP32)
    if one.error.missing == "both":
        return ParameterResult(name=one.name, shape=one.shape, reason=_NO_GRADIENT)
    if one.rounding is not None and not math.isfinite(one.rounding.second):
        one = replace(one, rounding=None)
    totals = Totals.of([one])
    judged, reason = _whether_judged(totals, one)
    return ParameterResult(
        name=one.name,
        shape=one.shape,
        gradient_norm=totals.gradient,
        error_norm=totals.error,
        bias_norm=None if one.moments is None else math.sqrt(one.moments.bias),
        noise_norm=None if one.noise is None or math.isinf(totals.noise) else totals.noise,
        rounding_norm=None if one.rounding is None else totals.rounding,
        error_over_noise=None if one.noise is None else totals.error_over_noise(one.moments, x),
        relative_error=totals.relative_error if math.isfinite(one.error.second) else math.inf,
        cosine=totals.cosine,
        judged=judged,
        reason=reason,
        _moments=one.moments,
    )


def _whether_judged(totals: Totals, one: Measured) -> tuple[bool, str | None]:
    """Return whether a parameter is judged, and the first reason that applies."""
    error = one.error
    is_rounding = one.rounding is not None and 0 < totals.rounding >= ROUNDING_SHARE * totals.gradient
    no_gradient = totals.gradient == 0 and not totals.noise > 0
    is_zero = totals.gradient == 0 == totals.error
    cases = (
        (not math.isfinite(error.second), True, _NOT_FINITE_MIXED),
        (is_rounding, False, _ROUNDING_NOISE),
        (math.isinf(totals.noise), True, _NOT_FINITE_OTHER),
        (is_zero, False, _ZERO_GRADIENT if no_gradient else _ZERO_FP32),
        (error.missing == "second", True, _MISSING_MIXED),
        (error.missing == "first", True, _MISSING_FP32),
        (no_gradient, True, "its gradient is zero in FP32 and not in mixed precision"),
        (one.noise is None, True, "there was no second batch to measure noise by"),
        (totals.no_noise, True, "both batches give it the same gradient: no noise to divide by"),
        (totals.gradient == 0, True, "its FP32 gradient is zero for this batch"),
        (totals.mixed == 0, True, "its gradient is zero in mixed precision"),
    )
    return next(((judged, reason) for holds, judged, reason in cases if holds), (True, None))
