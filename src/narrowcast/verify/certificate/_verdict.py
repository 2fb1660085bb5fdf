"""The limits, the verdict on the numbers of all parameters, and the certificate made of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from narrowcast.capture import (
    PARAMETER_LIMIT,
    TOTAL_FAILS,
    TOTAL_LIMIT,
    Estimate,
    parameter_error,
    parameter_limit,
)
from narrowcast.errors import few
from narrowcast.verify.certificate._certificate import (
    CANNOT_TELL,
    FAIL,
    PASS,
    Certificate,
    ParameterResult,
    number,
    up_to,
)
from narrowcast.verify.certificate._sums import FEWEST_BATCHES, Measured, Moments, Totals

# Reasons of single parameters, by which the verdict and its notes find them again.
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
# Needed because full batches have no noise to divide by, and large batches have little. Not for steps that
# average several minibatches: their noise falls with the number, and the bias of rounding does not.
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


class _Verdict(NamedTuple):
    verdict: str
    reason: str


class _Lost(NamedTuple):
    """A parameter whose own error is above its limit; the worst one is the largest."""

    error: float
    name: str
    limit: float


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
    """Judge the gradients of all parameters. Arguments that are not listed are fields of the certificate.

    Args:
        measured: each parameter.
        cannot_tell: why these numbers do not compare like with like, as a sentence; None: they do.
        note: a sentence to add to the reason.
        rounding_unknown: why FP32's own rounding was not measured, as a sentence; None: it was. If it was
            not, a single parameter cannot fail: its gradient may be rounding noise.
    """
    # A step averages ``minibatches``; each gradient measured was already a mean of ``averaged`` of them.
    gradients_in_step = minibatches / averaged
    results = [_result(parameter, gradients_in_step) for parameter in measured]
    both = zip(measured, results, strict=True)
    judged = [parameter for parameter, result in both if result.judged]

    # Only parameters with a second batch have noise to divide by; of the others the relative error counts.
    judged_with_second = [parameter for parameter in judged if parameter.noise is not None]
    judged_without_second = [parameter for parameter in judged if parameter.noise is None]
    totals = Totals.of(judged)
    totals_with_second = Totals.of(judged_with_second) if judged_with_second else None
    totals_without_second = Totals.of(judged_without_second)
    has_noise = totals_with_second is not None and not totals_with_second.no_noise
    moments = None
    if has_noise:
        moments = Moments.total([parameter.moments for parameter in judged_with_second])

    lost = _lost(results, has_noise=has_noise)
    lost_names = {parameter.name for parameter in lost}
    if minibatches > 1:
        lost_names.update(name for _, name in _lost_in_step(results, gradients_in_step))
    results = [replace(result, lost=result.name in lost_names) for result in results]

    judgment = _without_ratios(results, cannot_tell)
    if judgment is None:
        of_step = None
        if minibatches > 1:
            of_step = _verdict_of_step(results, moments, minibatches, gradients_in_step, rounding_unknown)
        judgment = _verdict_of_all(totals, totals_with_second, totals_without_second, of_step)
        # A single layer whose gradient is lost, which the total of a large model would not show. Without
        # FP32's own rounding it is only "cannot tell", which must not soften a fail.
        if lost and (rounding_unknown is None or judgment.verdict != FAIL):
            judgment = _verdict_of_lost(lost, rounding_unknown)

    # If no parameter has a second batch, the verdict itself says so.
    names_without_second = []
    if judged_with_second:
        names_without_second = [parameter.name for parameter in judged_without_second]
    notes = _notes(results, names_without_second, totals_without_second.relative_error)
    if note:
        notes.append(note)
    error_over_noise = None
    if totals_with_second is not None:
        error_over_noise = totals_with_second.error_over_noise(moments, gradients_in_step)
    certificate = Certificate(
        minibatches=minibatches,
        averaged=averaged,
        error_over_noise=error_over_noise,
        relative_error=totals.relative_error,
        cosine=totals.cosine,
        parameters=tuple(results),
        verdict=judgment.verdict,
        reason=" ".join([judgment.reason, *notes]),
        _moments=moments,
        **fields,
    )

    # The reason of a pass also says for which batches it holds, which only a finished certificate can tell.
    holds_for = up_to(certificate)
    holds_for_step = (certificate.holds_up_to or 0) >= minibatches
    if judgment.verdict == PASS and holds_for is not None and holds_for_step:
        holds = f"Holds for {holds_for}. Larger batches have less noise to hide the error."
        certificate = replace(certificate, reason=" ".join([judgment.reason, holds, *notes]))
    return certificate


def _notes(
    parameters: Sequence[ParameterResult], names_without_second: Sequence[str], relative_error: float | None
) -> list[str]:
    """Return sentences to add to the reason.

    Args:
        parameters: judged or not.
        names_without_second: of the judged parameters without a second batch.
        relative_error: of the parameters with these names together.
    """
    notes = []
    of_all = f"of {len(parameters)} parameters"
    has_judged = any(parameter.judged for parameter in parameters)

    if names_without_second:
        notes.append(
            f"There was no second batch for {len(names_without_second)} {of_all} "
            f"({few(names_without_second)}): of them only the relative error counts, "
            f"{number(relative_error)}."
        )

    names = _because(parameters, _ROUNDING_NOISE)
    if names:
        notes.append(
            f"Not judged: {len(names)} {of_all}, whose gradient is rounding noise in FP32 itself "
            f"({few(names)})."
        )

    names = _because(parameters, _NO_GRADIENT, _ZERO_GRADIENT, _ZERO_FP32)
    if names and has_judged:
        notes.append(
            f"Not judged: {len(names)} {of_all}, which got no gradient or a zero one from this batch "
            f"({few(names)})."
        )

    names = _because(parameters, _MISSING_FP32, _MISSING_MIXED)
    if names:
        notes.append(f"A gradient on one side only, in FP32 or in mixed precision: {few(names)}.")
    return notes


def _because(parameters: Sequence[ParameterResult], *reasons: str) -> list[str]:
    return [parameter.name for parameter in parameters if parameter.reason in reasons]


# ---- one parameter


def _result(parameter: Measured, gradients_in_step: float) -> ParameterResult:
    # In ``error``, ``first`` is the FP32 gradient and ``second`` the mixed one of the same batch.
    name, shape = parameter.name, parameter.shape
    if not math.isfinite(parameter.error.first):
        return ParameterResult(name=name, shape=shape, reason=_NOT_FINITE_FP32)
    if parameter.error.missing == "both":
        return ParameterResult(name=name, shape=shape, reason=_NO_GRADIENT)
    # An exact gradient that is not finite, as by an overflow, tells nothing of how FP32 rounds.
    if parameter.rounding is not None and not math.isfinite(parameter.rounding.second):
        parameter = replace(parameter, rounding=None)

    totals = Totals.of([parameter])
    bias_norm = rounding_norm = None
    if parameter.moments is not None:
        bias_norm = math.sqrt(parameter.moments.bias)
    if parameter.rounding is not None:
        rounding_norm = totals.rounding
    noise_norm = error_over_noise = None
    if parameter.noise is not None:
        error_over_noise = totals.error_over_noise(parameter.moments, gradients_in_step)
        if not math.isinf(totals.noise):
            noise_norm = totals.noise
    relative_error = totals.relative_error
    if not math.isfinite(parameter.error.second):
        relative_error = math.inf
    judged, reason = _whether_judged(totals, parameter)
    return ParameterResult(
        name=name,
        shape=shape,
        gradient_norm=totals.gradient,
        error_norm=totals.error,
        bias_norm=bias_norm,
        noise_norm=noise_norm,
        rounding_norm=rounding_norm,
        error_over_noise=error_over_noise,
        relative_error=relative_error,
        cosine=totals.cosine,
        judged=judged,
        reason=reason,
        _moments=parameter.moments,
    )


def _whether_judged(totals: Totals, parameter: Measured) -> tuple[bool, str | None]:
    """Return whether a parameter is judged, and the first reason that applies."""
    if not math.isfinite(parameter.error.second):
        return True, _NOT_FINITE_MIXED
    # Without a measured rounding the total is 0.
    if totals.rounding > 0 and totals.rounding >= ROUNDING_SHARE * totals.gradient:
        return False, _ROUNDING_NOISE
    if math.isinf(totals.noise):
        return True, _NOT_FINITE_OTHER

    zero_in_all_batches = totals.gradient == 0 and totals.noise == 0
    if totals.gradient == 0 and totals.error == 0:
        reason = _ZERO_FP32
        if zero_in_all_batches:
            reason = _ZERO_GRADIENT
        return False, reason
    return True, _why_a_number_is_none(totals, parameter, zero_in_all_batches=zero_in_all_batches)


def _why_a_number_is_none(totals: Totals, parameter: Measured, *, zero_in_all_batches: bool) -> str | None:
    """Return why a number of a parameter that is judged is None or says little; None: all are defined."""
    reason = None
    if parameter.error.missing == "second":
        reason = _MISSING_MIXED
    elif parameter.error.missing == "first":
        reason = _MISSING_FP32
    elif zero_in_all_batches:
        reason = "its gradient is zero in FP32 and not in mixed precision"
    elif parameter.noise is None:
        reason = "there was no second batch to measure noise by"
    elif totals.no_noise:
        reason = "both batches give it the same gradient: no noise to divide by"
    elif totals.gradient == 0:
        reason = "its FP32 gradient is zero for this batch"
    elif totals.mixed == 0:
        reason = "its gradient is zero in mixed precision"
    return reason


def _lost(parameters: Sequence[ParameterResult], *, has_noise: bool) -> list[_Lost]:
    """Return each parameter whose own error is above its limit, worst first."""
    lost = []
    for parameter in parameters:
        error = parameter_error(parameter.error_norm, parameter.noise_norm, parameter.gradient_norm)
        if not parameter.judged or error is None:
            continue
        by_noise = has_noise and parameter.noise_norm is not None
        limit = parameter_limit(parameter.shape, has_noise=by_noise)
        if error > limit:
            lost.append(_Lost(error, parameter.name, limit))
    return sorted(lost, reverse=True)


def _verdict_of_lost(lost: Sequence[_Lost], rounding_unknown: str | None) -> _Verdict:
    worst = lost[0]
    names = few([parameter.name for parameter in lost])
    reason = (
        f"The gradient of {names} is lost in mixed precision: it is off by {number(worst.error)} of its own "
        f"size or of minibatch noise, whichever is larger, where {worst.limit} is the limit for a single "
        "parameter."
    )
    return _verdict_of_single(reason, rounding_unknown)


def _verdict_of_single(reason: str, rounding_unknown: str | None) -> _Verdict:
    """Fail because of single parameters.

    If rounding was not measured, "cannot tell": their gradients may be nothing but rounding.
    """
    if rounding_unknown:
        return _Verdict(CANNOT_TELL, f"{reason} {rounding_unknown}")
    return _Verdict(FAIL, reason)


# ---- all parameters


def _without_ratios(parameters: Sequence[ParameterResult], cannot_tell: str | None) -> _Verdict | None:
    """Return the verdict if it does not depend on any ratio."""
    # What is not finite comes first: it decides, whatever else is known.
    of_fp32 = few(_because(parameters, _NOT_FINITE_FP32))
    if of_fp32:
        return _Verdict(CANNOT_TELL, f"FP32 itself is not finite: the gradient of {of_fp32}.")
    of_mixed = few(_because(parameters, _NOT_FINITE_MIXED))
    if of_mixed:
        reason = f"Finite in FP32 and not in mixed precision: the gradient of {of_mixed}."
        return _Verdict(FAIL, reason)
    if cannot_tell:
        return _Verdict(CANNOT_TELL, cannot_tell)
    of_second = few(_because(parameters, _NOT_FINITE_OTHER))
    if of_second:
        return _Verdict(CANNOT_TELL, f"FP32 is not finite on the second batch: {of_second}.")
    if not any(parameter.judged for parameter in parameters):
        return _Verdict(CANNOT_TELL, _nothing_judged(parameters))
    return None


def _nothing_judged(parameters: Sequence[ParameterResult]) -> str:
    if not parameters:
        return "No parameter needs a gradient, so there is nothing to compare."
    if all(parameter.reason == _ROUNDING_NOISE for parameter in parameters):
        return (
            "Every FP32 gradient changes wholly with how its ops round: does the loss change when it is "
            "computed twice, for the same batch and random numbers?"
        )
    reasons = [f"{parameter.name}: {parameter.reason}" for parameter in parameters]
    return f"No gradient can be judged ({few(reasons)})."


def _verdict_of_all(
    totals: Totals,
    totals_with_second: Totals | None,
    totals_without_second: Totals,
    of_step: _Verdict | None,
) -> _Verdict:
    """Judge all parameters together.

    Args:
        totals: of all judged parameters.
        totals_with_second: of judged parameters with a second batch; None: there are none.
        totals_without_second: of judged parameters without a second batch.
        of_step: the verdict on a step of several minibatches; None: a step is of one.
    """
    if totals.error == 0:
        reason = (
            "The mixed gradients equal the FP32 ones to the bit: nothing was cast that changes a gradient."
        )
        return _Verdict(PASS, reason)

    # Without any second batch the relative error is all there is.
    if totals_with_second is None:
        judgment = _without_second_batch(totals.relative_error)
        # What is no more than rounding passes for a step of one minibatch only.
        if judgment.verdict == PASS and of_step is not None:
            return of_step
        return judgment

    # Only what has noise is divided by it.
    relative = totals_with_second.relative_error
    if not totals_with_second.no_noise:
        judgment = of_step or _with_noise(totals_with_second.error / totals_with_second.noise, relative)
    elif relative is None:
        which = " with a second batch" if totals.gradient > 0 else ""
        return _Verdict(FAIL, f"Every FP32 gradient{which} is zero, and the mixed ones are not.")
    else:
        judgment = _without_noise(relative)

    # Parameters without a second batch must not hide behind those that have one.
    limit = SAME_BATCH_LIMIT * totals_without_second.gradient
    if judgment.verdict == PASS and totals_without_second.error > limit:
        reason = (
            f"{judgment.reason} But for some parameters there was no second batch, and their relative error "
            f"is above {SAME_BATCH_LIMIT}."
        )
        return _Verdict(CANNOT_TELL, reason)
    return judgment


def _with_noise(ratio: float, relative: float | None) -> _Verdict:
    measured = f"Mixed precision moves the gradient by {number(ratio)} of what another minibatch does"
    # A small gradient beside large noise passes whatever happens to it, so such a pass tells nothing.
    if ratio < TOTAL_FAILS and (relative is None or relative >= PARAMETER_LIMIT):
        own = f"but by {number(relative)} of its own size"
        if relative is None:
            own = "which is zero in FP32"
        reason = (
            f"{measured}, {own}: the first batch's gradient is far smaller than the second's, so that even "
            "losing it wholly would look small."
        )
        return _Verdict(CANNOT_TELL, reason)
    if ratio < TOTAL_LIMIT:
        return _Verdict(PASS, f"{measured}; below {TOTAL_LIMIT} passes.")
    if relative is not None and relative <= ROUNDING_SIZE:
        reason = (
            f"{measured}, where below {TOTAL_LIMIT} passes; but these batches have little noise, and the "
            f"relative error, {number(relative)}, is what rounding alone does (up to {ROUNDING_SIZE})."
        )
        return _Verdict(PASS, reason)
    if ratio < TOTAL_FAILS:
        reason = (
            f"{measured}: from {TOTAL_LIMIT} to {TOTAL_FAILS} it may be rounding that switches ReLUs on and "
            "off, which is harmless, or a small part of the gradient that is lost."
        )
        return _Verdict(CANNOT_TELL, reason)
    return _Verdict(FAIL, f"{measured}; from {TOTAL_FAILS} on fails.")


def _without_noise(relative: float) -> _Verdict:
    reason = (
        "Both batches give the same gradient (full-batch training?), so there is no minibatch noise; the "
        f"verdict is by the relative error, {number(relative)}: up to {SAME_BATCH_LIMIT} passes, above "
        f"{PARAMETER_LIMIT} fails."
    )
    if relative <= SAME_BATCH_LIMIT:
        return _Verdict(PASS, reason)
    if relative <= PARAMETER_LIMIT:
        return _Verdict(CANNOT_TELL, reason)
    return _Verdict(FAIL, reason)


def _without_second_batch(relative: float | None) -> _Verdict:
    if relative is None:
        return _Verdict(FAIL, "Every FP32 gradient is zero, and the mixed ones are not.")
    no_yardstick = "There was no second batch to measure minibatch noise by"
    error = f"the relative error, {number(relative)},"
    if relative <= ROUNDING_SIZE:
        reason = f"{no_yardstick}, but {error} is what rounding alone does (up to {ROUNDING_SIZE})."
        return _Verdict(PASS, reason)
    if relative > PARAMETER_LIMIT:
        reason = f"{no_yardstick}, but {error} is past any that noise could hide ({PARAMETER_LIMIT})."
        return _Verdict(FAIL, reason)
    return _Verdict(CANNOT_TELL, f"{no_yardstick}, and {error} does not settle it.")


# ---- a step of several minibatches


def _errors_in_step(
    parameters: Sequence[ParameterResult], gradients_in_step: float
) -> list[tuple[Estimate, str]]:
    """Return error over noise of each parameter that has a limit of its own in a step, worst first.

    A parameter whose error over noise is not known is left out, as where only one batch has noise.
    """
    estimates = []
    for parameter in parameters:
        moments = parameter._own_moments
        if moments is None:
            continue
        estimate = moments.at(gradients_in_step)
        if not math.isnan(estimate.value):
            estimates.append((estimate, parameter.name))
    return sorted(estimates, reverse=True)


def _lost_in_step(
    parameters: Sequence[ParameterResult], gradients_in_step: float
) -> list[tuple[Estimate, str]]:
    """Return those of ``_errors_in_step`` whose whole interval is above the limit, worst first.

    The lower end counts, since a few batches know a bias badly.
    """
    estimates = _errors_in_step(parameters, gradients_in_step)
    return [(estimate, name) for estimate, name in estimates if estimate.low > PARAMETER_LIMIT]


def _verdict_of_step(
    parameters: Sequence[ParameterResult],
    moments: Moments | None,
    minibatches: int,
    gradients_in_step: float,
    rounding_unknown: str | None,
) -> _Verdict:
    """Judge a step that averages several minibatches by error over noise; relative errors do not count.

    Args:
        gradients_in_step: measured gradients that the step averages, each a mean of minibatches itself.
    """
    if moments is None:
        reason = (
            f"A step averages {minibatches} minibatches here, and it takes {FEWEST_BATCHES} batches to tell "
            "its error."
        )
        return _Verdict(CANNOT_TELL, reason)

    total = moments.at(gradients_in_step)
    single = _errors_in_step(parameters, gradients_in_step)
    lost = _lost_in_step(parameters, gradients_in_step)
    measured = (
        f"In a step of {minibatches} minibatches mixed precision moves the gradient by {number(total.value)} "
        f"of the noise ({number(total.low)} to {number(total.high)})"
    )
    # For a fail the lower end of the interval counts too, as for a single parameter.
    total_fails = total.value >= TOTAL_FAILS and total.low >= TOTAL_LIMIT
    # As in ``certificate_of``: "cannot tell" must not soften a fail.
    if lost and (rounding_unknown is None or not total_fails):
        worst_estimate, _ = lost[0]
        names = few([name for _, name in lost])
        reason = (
            f"{measured}, and the gradient of {names} by {number(worst_estimate.value)}, where "
            f"{PARAMETER_LIMIT} is the limit for a single parameter."
        )
        return _verdict_of_single(reason, rounding_unknown)

    worst = ""
    if single:
        _, worst_name = single[0]
        worst = f", most that of {worst_name}"
    if total_fails:
        return _Verdict(FAIL, f"{measured}{worst}; from {TOTAL_FAILS} on fails.")
    is_any_over = any(estimate.value > PARAMETER_LIMIT for estimate, _ in single)
    if total.value < TOTAL_LIMIT and not is_any_over:
        return _Verdict(PASS, f"{measured}; below {TOTAL_LIMIT} passes.")
    reason = f"{measured}{worst}; it passes below {TOTAL_LIMIT}, and each parameter below {PARAMETER_LIMIT}."
    return _Verdict(CANNOT_TELL, reason)
