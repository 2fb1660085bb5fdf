"""A certificate, and the error of outputs, from what probes of a script kept in their folders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from narrowcast.observe.capture import OUTPUT_LIMIT
from narrowcast.verify._certificate import CANNOT_TELL, FAIL, PASS
from narrowcast.verify._certificate_sums import CertificateSums
from narrowcast.verify._probes import TENSORS, read_result


def certificate_from_probes(
    reference: Path,
    exact: Path | None,
    mixed: Path,
    *,
    policy: str,
    format: str,
    at_step: int,
    why_no_exact: str | None = None,
) -> dict[str, Any]:
    """What ``Certificate.to_dict`` gives, of a script whose probes left these folders.

    Args:
        reference: of the FP32 gradients of two batches.
        exact: of the first batch by exact ops; None: that run failed.
        mixed: of the first batch in mixed precision.
        policy: as it was asked for.
        format: what was computed in.
        at_step: after how many optimizer steps.
        why_no_exact: a sentence on why there is no ``exact``.
    """
    fp32, low = read_result(reference) or {}, read_result(mixed) or {}
    cannot_tell = _unlike(fp32, low, at_step)
    rounding_unknown = why_no_exact
    if exact is not None and rounding_unknown is None:
        rounding_unknown = _unlike(fp32, read_result(exact) or {}, at_step)
    sums = CertificateSums()
    for place in range(fp32.get("optimizers", 0)):
        problem = _add_optimizer(sums, place, reference, None if rounding_unknown else exact, mixed)
        cannot_tell = cannot_tell or problem
    waiting = fp32.get("never_stepped", 0)
    certificate = sums.finish(
        policy=policy,
        format=format,
        at_step=at_step,
        loss_scale=(low.get("scales") or [None])[0],
        cannot_tell=cannot_tell,
        rounding_unknown=rounding_unknown
        and f"FP32's own rounding could not be measured: {rounding_unknown}",
        note=f"{waiting} of the optimizers did not step in time and was left out." if waiting else None,
    )
    return certificate.to_dict()


def _add_optimizer(
    sums: CertificateSums, place: int, reference: Path, exact: Path | None, mixed: Path
) -> str | None:
    """Add the parameters of one optimizer; returns why they cannot be compared, if so."""
    file = f"{TENSORS}/gradients-{place}"
    first, low = _load(reference / f"{file}-0.pt"), _load(mixed / f"{file}-0.pt")
    if first is None or low is None:
        return "The gradients of a run cannot be read."
    if (first["names"], first["shapes"]) != (low["names"], low["shapes"]):
        return "The optimizers of the FP32 and of the mixed run do not have the same parameters."
    other = _load(reference / f"{file}-1.pt")
    rounded_once = None if exact is None else _load(exact / f"{file}-0.pt")
    for number, (name, shape) in enumerate(zip(first["names"], first["shapes"], strict=True)):
        gradients = [_gradient(kept, number) for kept in (first, other, low, rounded_once)]
        sums.add(name, shape, *gradients, second_batch=other is not None)
    return None


def _load(path: Path) -> Any:
    """What a probe kept there; None where it is missing, cut short, or holds what is no plain tensor."""
    for mapped in (True, False):  # sparse tensors cannot be mapped
        with suppress(OSError, RuntimeError, ValueError, EOFError, UnpicklingError):
            return torch.load(path, weights_only=True, mmap=mapped)
    return None


def _gradient(kept: dict[str, Any] | None, number: int) -> torch.Tensor | None:
    if kept is None or number >= len(kept["gradients"]):
        return None
    gradient: torch.Tensor | None = kept["gradients"][number]
    return gradient


def _unlike(fp32: dict[str, Any], mixed: dict[str, Any], at_step: int) -> str | None:
    """Why the two runs did not see the same batch at the same weights; None: they did."""
    taken = min(facts.get("steps_before", 0) for facts in (fp32, mixed))
    if taken < at_step:
        return f"The script ended after {taken} steps, before step {at_step}."
    if not fp32.get("optimizers") or not mixed.get("optimizers"):
        return "No torch.optim.Optimizer stepped in the runs that keep gradients: updates are made by hand."
    problem = fp32["problem"] or mixed["problem"]
    if problem:
        return str(problem)
    checks = (
        (fp32["optimizers"] != mixed["optimizers"], "Two runs did not step the same optimizers."),
        (
            fp32["batch"] != mixed["batch"],
            "Two runs did not see the same batch, though they started with the same seed: the script draws "
            "it from numbers that no seed fixes.",
        ),
        (
            fp32["random"] != mixed["random"],
            "Two runs drew different random numbers (as masks of dropout), so the difference of their "
            "gradients is not that of the formats.",
        ),
    )
    return next((reason for wrong, reason in checks if wrong), None)


def output_from_probes(fp32: Path, mixed: Path) -> dict[str, Any]:
    """The ``output`` event: how far mixed precision moves the outputs of calls with the same inputs.

    Outputs that stand in the same place of the calls are taken together, and the worst place decides: a
    large output should not hide a small one. Compared is where FP32 is finite.
    """
    facts = [read_result(folder) or {"inputs": [], "problem": None} for folder in (fp32, mixed)]
    same = [n for n, (a, b) in enumerate(zip(*(f["inputs"] for f in facts), strict=False)) if a == b]
    problem = facts[0]["problem"] or facts[1]["problem"]
    sums: dict[int, tuple[float, float]] = {}
    for number in same:
        outputs = [_load(folder / TENSORS / f"outputs-{number}.pt") for folder in (fp32, mixed)]
        if outputs[0] is None or outputs[1] is None:
            problem = problem or "the outputs of a run cannot be read"
        elif [t.shape for t in outputs[0]] != [t.shape for t in outputs[1]]:
            problem = problem or "outputs of the same inputs have other shapes in mixed precision"
        else:
            for place, (wide, narrow) in enumerate(zip(*outputs, strict=True)):
                error, signal = _error_and_signal(wide.double(), narrow.double())
                before = sums.get(place, (0.0, 0.0))
                sums[place] = (before[0] + error, before[1] + signal)
    judged = {place: math.sqrt(e / s) for place, (e, s) in sums.items() if s > 0 and math.isfinite(s)}
    if problem or not judged:
        return _output(None, None, len(same), CANNOT_TELL, problem or _why_no_output(same, sums))
    worst = max(judged, key=judged.__getitem__)
    relative = judged[worst]
    sqnr = math.inf if relative == 0 else -20 * math.log10(relative) if relative < math.inf else -math.inf
    calls = f"{len(same)} call{'s' * (len(same) != 1)} with the same inputs"
    which = f", worst in output {worst + 1} of {len(sums)}" if len(sums) > 1 else ""
    if relative < OUTPUT_LIMIT:
        return _output(relative, sqnr, len(same), PASS, f"below {OUTPUT_LIMIT:g} over {calls}{which}")
    if not math.isfinite(relative):
        return _output(relative, sqnr, len(same), FAIL, f"finite in FP32 and not in mixed precision{which}")
    return _output(relative, sqnr, len(same), FAIL, f"{OUTPUT_LIMIT:g} or more over {calls}{which}")


def _error_and_signal(wide: torch.Tensor, narrow: torch.Tensor) -> tuple[float, float]:
    """Squared norms of the error and of the FP32 output, where that is finite."""
    finite = torch.isfinite(wide)
    error = torch.where(finite, narrow - wide, 0.0)
    if bool((torch.isfinite(error) != finite).logical_and(finite).any()):
        return math.inf, float(torch.where(finite, wide, 0.0).square().sum())
    return float(error.square().sum()), float(torch.where(finite, wide, 0.0).square().sum())


def _why_no_output(same: Sequence[int], sums: Mapping[int, Any]) -> str:
    if not same:
        return "no two calls had the same inputs: they depend on numbers that no seed fixes"
    return "the outputs are all zero or not finite in FP32 itself" if sums else "no output is floating"


def _output(
    relative_error: float | None, sqnr_db: float | None, calls: int, verdict: str, reason: str
) -> dict[str, Any]:
    return {
        "relative_error": relative_error,
        "sqnr_db": sqnr_db,
        "calls": calls,
        "verdict": verdict,
        "reason": reason,
    }
