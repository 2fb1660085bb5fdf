"""The gradient certificate of an unmodified script, by runs that hold its updates back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowcast.errors import ScriptError
from narrowcast.verify._certificate import CANNOT_TELL
from narrowcast.verify._child import GRADIENTS
from narrowcast.verify._from_probes import certificate_from_probes
from narrowcast.verify._probes import EXACT, MIXED, REFERENCE, read_result
from narrowcast.verify._processes import in_short
from narrowcast.verify._script_runs import ScriptRuns

_MOST_TRIES = 8


def certify_script(runs: ScriptRuns, *, format: str, at_step: int = 0) -> dict[str, Any]:
    """What ``Certificate.to_dict`` gives, for a script.

    It is run three times with the same seed: in FP32 for the gradients of two batches, in mixed precision
    for those of the first, and in FP32 by ops that round only their results, which tells FP32's own rounding
    noise. Updates are held back, so that all are at the same weights. Where a dynamic loss scale still
    overflows, the mixed run is made again with the scale that it came to.

    Args:
        runs: of the script.
        format: what the mixed run computes in.
        at_step: optimizer steps in mixed precision before updates are held back.

    Raises:
        ScriptError: a run read what an earlier one had written.
    """
    try:
        reference = _probe(runs, REFERENCE, at_step)
        mixed = _mixed(runs, at_step)
    except ScriptError as error:
        reason = f"A run whose updates were held back failed: {in_short(error)}."
        return no_certificate(runs.policy, format, at_step, reason)
    exact: Path | None = None
    why_no_exact = None
    try:
        exact = _probe(runs, EXACT, at_step)
    except ScriptError as error:
        why_no_exact = f"{in_short(error)}."
    return certificate_from_probes(
        reference,
        exact,
        mixed,
        policy=runs.policy,
        format=format,
        at_step=at_step,
        why_no_exact=why_no_exact,
    )


def _mixed(runs: ScriptRuns, at_step: int) -> Path:
    """The mixed run, made again while its first batch overflows: a dynamic scale begins with that."""
    scale: float | None = None
    for tried in range(_MOST_TRIES):
        folder = _probe(runs, MIXED, at_step, start_scale=scale)
        good_scale = (read_result(folder) or {}).get("good_scale")
        if good_scale is None:
            break
        # That is one that suits later batches; where the first one wants less, go faster each time.
        scale = good_scale / 4.0**tried
    return folder


def no_certificate(policy: str, format: str, at_step: int, reason: str) -> dict[str, Any]:
    """The same for a script whose gradients could not be had; ``reason`` says why."""
    return {
        "policy": policy,
        "format": format,
        "at_step": at_step,
        "loss_scale": None,
        "error_over_noise": None,
        "relative_error": None,
        "cosine": None,
        "worst_parameter": None,
        "parameters": [],
        "verdict": CANNOT_TELL,
        "reason": reason,
    }


def _probe(runs: ScriptRuns, role: str, at_step: int, *, start_scale: float | None = None) -> Path:
    return runs.start(
        f"gradients-{role}",
        "mixed",
        GRADIENTS,
        steps=0,
        role=role,
        reference=str(runs.folder / f"gradients-{REFERENCE}"),
        at_step=at_step,
        start_scale=start_scale,
    ).folder
