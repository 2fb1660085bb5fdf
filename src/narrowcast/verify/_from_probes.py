"""A certificate, and the error of outputs, from what probes of a script kept in their folders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from narrowcast.verify._certificate import CANNOT_TELL, FAIL, PASS
from narrowcast.verify._certificate_sums import CertificateSums
from narrowcast.verify._probes import read_result

# Ten roundoffs of bf16, as for gradients of a script without minibatch noise.
_LIMIT = 0.05


def certificate_from_probes(
    reference: Path, exact: Path | None, mixed: Path, *, policy: str, format: str, at_step: int
) -> dict[str, Any]:
    """What ``Certificate.to_dict`` gives, of a script whose probes left these folders.

    Args:
        reference: of the FP32 gradients of two batches.
        exact: of the first batch by exact ops; None: that run failed.
        mixed: of the first batch in mixed precision.
        policy: as it was asked for.
        format: what was computed in.
        at_step: after how many optimizer steps.
    """
    facts = {name: read_result(folder) or {} for name, folder in (("fp32", reference), ("mixed", mixed))}
    sums = CertificateSums()
    for place in range(facts["fp32"].get("optimizers", 0)):
        _add_optimizer(sums, place, reference, exact, mixed)
    scales = facts["mixed"].get("scales") or [None]
    certificate = sums.finish(
        policy=policy,
        format=format,
        at_step=at_step,
        loss_scale=scales[0],
        cannot_tell=_unlike(facts["fp32"], facts["mixed"], at_step),
    )
    return certificate.to_dict()


def _add_optimizer(
    sums: CertificateSums, place: int, reference: Path, exact: Path | None, mixed: Path
) -> None:
    first = _load(reference / f"gradients-{place}-0.pt")
    other = _load(reference / f"gradients-{place}-1.pt")
    low = _load(mixed / f"gradients-{place}-0.pt")
    moved = None if exact is None else _load(exact / f"gradients-{place}-0.pt")
    if first is None or low is None:
        return
    for number, (name, shape) in enumerate(zip(first["names"], first["shapes"], strict=True)):
        sums.add(
            name,
            shape,
            _gradient(first, number),
            _gradient(other, number),
            _gradient(low, number),
            _gradient(moved, number),
        )


def _load(path: Path) -> dict[str, Any] | None:
    try:
        kept: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    except OSError:
        return None
    except RuntimeError:
        # Sparse tensors cannot be mapped.
        kept = torch.load(path, weights_only=True)
    return kept


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
        (fp32["optimizers"] != mixed["optimizers"], "The two runs did not step the same optimizers."),
        (
            fp32["batch"] != mixed["batch"],
            "The FP32 and the mixed run did not see the same batch, though they started with the same seed: "
            "the script draws it from numbers that no seed fixes.",
        ),
        (
            fp32["random"] != mixed["random"],
            "The FP32 and the mixed run drew different random numbers (as masks of dropout), so the "
            "difference of their gradients is not that of the formats.",
        ),
    )
    return next((reason for wrong, reason in checks if wrong), None)


def output_from_probes(fp32: Path, mixed: Path) -> dict[str, Any]:
    """The ``output`` event: how far mixed precision moves the outputs of calls with the same inputs."""
    facts = [read_result(folder) or {"inputs": [], "problem": None} for folder in (fp32, mixed)]
    same = [n for n, (a, b) in enumerate(zip(*(f["inputs"] for f in facts), strict=False)) if a == b]
    error, signal = 0.0, 0.0
    problem = facts[0]["problem"] or facts[1]["problem"]
    for number in same:
        outputs = [torch.load(folder / f"outputs-{number}.pt", weights_only=True) for folder in (fp32, mixed)]
        if [t.shape for t in outputs[0]] != [t.shape for t in outputs[1]]:
            problem = "outputs of the same inputs have other shapes in mixed precision"
            break
        error += _squared([(m.double() - f.double()) for f, m in zip(*outputs, strict=True)])
        signal += _squared([f.double() for f in outputs[0]])
    if problem or not same or not math.isfinite(signal) or signal == 0.0:
        reason = problem or _why_no_output(same, signal)
        return _output(None, None, len(same), CANNOT_TELL, reason)
    relative = math.sqrt(error / signal) if math.isfinite(error) else math.inf
    sqnr = math.inf if error == 0 else -20 * math.log10(relative) if math.isfinite(relative) else -math.inf
    calls = f"{len(same)} call{'s' * (len(same) != 1)} with the same inputs"
    if relative < _LIMIT:
        return _output(relative, sqnr, len(same), PASS, f"below {_LIMIT:g} over {calls}")
    if not math.isfinite(relative):
        return _output(relative, sqnr, len(same), FAIL, "finite in FP32 and not in mixed precision")
    return _output(relative, sqnr, len(same), FAIL, f"{_LIMIT:g} or more over {calls}")


def _why_no_output(same: Sequence[int], signal: float) -> str:
    if not same:
        return "no two calls had the same inputs: they depend on numbers that no seed fixes"
    return (
        "the outputs are all zero in FP32" if signal == 0.0 else "the outputs are not finite in FP32 itself"
    )


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


def _squared(tensors: Sequence[torch.Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in tensors)
