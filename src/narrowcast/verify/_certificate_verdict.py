"""The verdict on a certificate's numbers, and the limits it goes by."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    MISSING_FP32,
    MISSING_MIXED,
    NO_GRADIENT,
    NOT_FINITE_FP32,
    NOT_FINITE_MIXED,
    NOT_FINITE_OTHER,
    PASS,
    ROUNDING_NOISE,
    ZERO_FP32,
    ZERO_GRADIENT,
    ParameterResult,
)
from narrowcast.verify._certificate_text import number
from narrowcast.verify._gradient_sums import Totals

# Relative error that passes whatever the noise: two and a half roundoffs of bf16 (2**-8), as products and
# sums of rounded factors have it. Large batches have little noise, and full ones none.
ROUNDING_SIZE = 0.01
# Relative error where both batches are the same: about ten roundoffs of bf16, what is left of them after a
# dozen layers; a direction within 3 degrees of FP32's. Without noise to compare with, a gradient that
# shrinks as training converges makes it larger (the full-batch network of examples/quantized_sine.py in
# bf16: 0.011 at the start, 0.062 after 20 steps, 0.31 after 60), so from here to PARAMETER_LIMIT it tells
# nothing.
SAME_BATCH_LIMIT = 0.05
# Change of an FP32 gradient, where the last bit of the weights moves and each op rounds once only, from which
# on the gradient is rounding noise. Measured in the models above and in that of examples/quantized_sine.py:
# 8e-6 at most for any other gradient, 0.54 at least for the bias of a convolution before a batch norm, whose
# exact gradient is zero. (With moved weights alone 0.14, and less for larger pictures.)
ROUNDING_SHARE = 0.1
_NAMES = 3


def verdict_on(
    parameters: Sequence[ParameterResult],
    totals: Totals,
    by_noise: Totals | None,
    without: Totals,
    *,
    cannot_tell: str | None,
    rounding_unknown: str | None,
) -> tuple[str, str]:
    """The verdict, and the reason for it in full sentences.

    Args:
        parameters: all of them.
        totals: of those that are judged.
        by_noise: of those of them for which there was a second batch; None: there was none.
        without: of the rest of them.
        cannot_tell: why these numbers do not compare like with like.
        rounding_unknown: why FP32's own rounding was not measured.
    """
    found = _void(parameters, cannot_tell)
    if found is None:
        single = _by_parameter(parameters, has_noise=by_noise is not None and not by_noise.no_noise)
        of_all = _by_total(totals, by_noise, without)
        found = single or of_all
        if single is not None and rounding_unknown is not None:
            found = of_all if of_all[0] == FAIL else (CANNOT_TELL, f"{single[1]} {rounding_unknown}")
    verdict, reason = found
    return verdict, " ".join([reason, *_notes(parameters, without if by_noise is not None else None)])


def _void(parameters: Sequence[ParameterResult], cannot_tell: str | None) -> tuple[str, str] | None:
    """What settles it before any ratio is looked at."""
    in_fp32 = [p.name for p in parameters if p.reason == NOT_FINITE_FP32]
    in_mixed = [p.name for p in parameters if p.reason == NOT_FINITE_MIXED]
    of_second = [p.name for p in parameters if p.reason == NOT_FINITE_OTHER]
    cases = (
        (in_fp32, CANNOT_TELL, f"FP32 itself is not finite: the gradient of {_listed(in_fp32)}."),
        (in_mixed, FAIL, f"Not finite in mixed precision, but in FP32: the gradient of {_listed(in_mixed)}."),
        (cannot_tell, CANNOT_TELL, cannot_tell or ""),
        (of_second, CANNOT_TELL, f"FP32 is not finite on the second batch: {_listed(of_second)}."),
        (not any(p.judged for p in parameters), CANNOT_TELL, _nothing_judged(parameters)),
    )
    return next(((verdict, reason) for holds, verdict, reason in cases if holds), None)


def _nothing_judged(parameters: Sequence[ParameterResult]) -> str:
    if not parameters:
        return "No parameter needs a gradient, so there is nothing to compare."
    each = "; ".join(f"{p.name}: {p.reason}" for p in parameters[:_NAMES])
    if all(p.reason == ROUNDING_NOISE for p in parameters):
        return (
            "Every FP32 gradient changes wholly with the last bit of the weights: does the loss change when "
            "it is computed twice, for the same batch and random numbers?"
        )
    return f"No gradient can be judged ({each}{'; and so on' if len(parameters) > _NAMES else ''})."


def _by_parameter(parameters: Sequence[ParameterResult], *, has_noise: bool) -> tuple[str, str] | None:
    """A single layer whose gradient is lost, which the total of a large model would not show."""
    lost = []
    for parameter in parameters:
        error = parameter_error(parameter.error_norm, parameter.noise_norm, parameter.gradient_norm)
        if not parameter.judged or error is None:
            continue
        by_noise = has_noise and parameter.noise_norm is not None
        limit = parameter_limit(parameter.shape, has_noise=by_noise)
        if error > limit:
            lost.append((error, parameter.name, limit))
    if not lost:
        return None
    lost.sort(reverse=True)
    return FAIL, (
        f"The gradient of {_listed([name for _, name, _ in lost])} is lost in mixed precision: it is off by "
        f"{number(lost[0][0])} of its own size or of minibatch noise, whichever is larger, where "
        f"{lost[0][2]} is the limit for a single parameter."
    )


def _by_total(totals: Totals, by_noise: Totals | None, without: Totals) -> tuple[str, str]:
    relative = totals.relative_error
    if relative is None and (by_noise is None or by_noise.no_noise):
        return FAIL, "Every FP32 gradient is zero, and the mixed ones are not."
    if totals.error == 0:
        return PASS, (
            "The mixed gradients equal the FP32 ones to the bit: nothing was cast that changes a gradient."
        )
    if by_noise is None:
        return _without_second_batch(relative)
    relative = by_noise.relative_error
    if relative is None and by_noise.no_noise:
        return FAIL, "Every FP32 gradient with a second batch is zero, and the mixed ones are not."
    verdict, reason = (
        _without_noise(relative)
        if by_noise.no_noise
        else _with_noise(by_noise.error / by_noise.noise, relative)
    )
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


def _without_noise(relative: float | None) -> tuple[str, str]:
    """Both batches are the same; not both of gradient and noise are zero, so there is a relative error."""
    assert relative is not None
    limits = ((SAME_BATCH_LIMIT, PASS), (PARAMETER_LIMIT, CANNOT_TELL), (math.inf, FAIL))
    return next(verdict for limit, verdict in limits if relative <= limit), (
        "Both batches give the same gradient (full-batch training?), so there is no minibatch noise; the "
        f"verdict is by the relative error, {number(relative)}: up to {SAME_BATCH_LIMIT} passes, above "
        f"{PARAMETER_LIMIT} fails."
    )


def _without_second_batch(relative: float | None) -> tuple[str, str]:
    no_yardstick = "There was no second batch to measure minibatch noise by"
    if relative is not None and relative <= ROUNDING_SIZE:
        return PASS, (
            f"{no_yardstick}, but the relative error, {number(relative)}, is what rounding alone does (up to "
            f"{ROUNDING_SIZE})."
        )
    if relative is None or relative > PARAMETER_LIMIT:
        return FAIL, (
            f"{no_yardstick}, but the relative error, {number(relative)}, is past any that noise could hide "
            f"({PARAMETER_LIMIT})."
        )
    return CANNOT_TELL, f"{no_yardstick}, and the relative error, {number(relative)}, does not settle it."


def _notes(parameters: Sequence[ParameterResult], without: Totals | None) -> list[str]:
    """What a reader should know beside the verdict; ``without`` a second batch, where others had one."""
    notes = []
    alone = [p.name for p in parameters if p.judged and p.noise_norm is None and p.reason != NOT_FINITE_OTHER]
    if alone and without is not None:
        notes.append(
            f"There was no second batch for {len(alone)} of {len(parameters)} parameters "
            f"({_listed(alone)}): of them only the relative error counts, {number(without.relative_error)}."
        )
    rounding = [p.name for p in parameters if p.reason == ROUNDING_NOISE]
    if rounding:
        notes.append(
            f"Not judged, since in FP32 itself it is rounding noise: the gradient of {len(rounding)} of "
            f"{len(parameters)} parameters ({_listed(rounding)})."
        )
    unreached = [p.name for p in parameters if p.reason in (NO_GRADIENT, ZERO_GRADIENT, ZERO_FP32)]
    if unreached and any(p.judged for p in parameters):
        notes.append(
            f"Not judged: {len(unreached)} of {len(parameters)} parameters, which got no gradient or a zero "
            f"one from this batch ({_listed(unreached)})."
        )
    one_sided = [p.name for p in parameters if p.reason in (MISSING_FP32, MISSING_MIXED)]
    if one_sided:
        notes.append(f"A gradient on one side only, in FP32 or in mixed precision: {_listed(one_sided)}.")
    return notes


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    return shown if len(names) <= _NAMES else f"{shown} and {len(names) - _NAMES} more"
