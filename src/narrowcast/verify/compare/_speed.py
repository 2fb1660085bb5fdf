"""Why mixed precision is not faster in a script: slow kernels, small layers, or casts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from narrowcast.errors import ScriptError
from narrowcast.observe.capture import Capture
from narrowcast.observe.profiling import same_size
from narrowcast.verify.compare._runs import Purpose, ScriptRuns, read_result

FAST_ENOUGH = 1.05
"""A smaller speedup is explained unless another one was asked for."""

_SHORT_STEP_S = 0.003  # some hundred calls of operators, each of at least several microseconds
# As long as a call takes from Python to its kernel and back, or a few times that.
_SHORT_CALL_S = {"cpu": 1e-4, "cuda": 2e-5}


def speedup_of(fp32: Sequence[Capture], mixed: Sequence[Capture]) -> tuple[float, float] | None:
    """Return the speedup of a step or call, without its interval, and FP32's time in seconds."""
    times = [[s for one in captures for s in step_times_s(one)[1:]] for captures in (fp32, mixed)]
    if not all(times):
        return None
    fp32_s, mixed_s = map(statistics.median, times)
    return (fp32_s / mixed_s, fp32_s) if mixed_s > 0 else None


def step_times_s(capture: Capture) -> list[float]:
    """Return the times of all steps but the first, or of all calls of a script that only computes."""
    steps = [
        s["interval_s"] for s in capture.of("step") if s["optimizer"] == 0 and s["interval_s"] is not None
    ]
    return steps or [call["duration_s"] for call in capture.of("forward")]


def why_not_faster(
    runs: ScriptRuns, step_s: float, slow: Sequence[str], format_: str
) -> dict[str, str] | None:
    """Return ``cause`` and ``reason``, from profiles of a few steps where nothing simpler decides.

    Args:
        runs: makes the profiled runs.
        step_s: time of a step in FP32.
        slow: sentences on formats without fast kernels on this machine.
        format_: what the mixed runs computed in.
    """
    if slow:
        return {"cause": "kernels", "reason": f"no fast kernels: {slow[0]}"}
    if step_s < _SHORT_STEP_S:
        reason = (
            f"layers too small: a step takes only {step_s * 1e3:.2g} ms, most of it for calling operators"
        )
        return {"cause": "small", "reason": f"{reason}. Larger batches or layers would gain"}
    profiles = []
    for name in ("fp32", "mixed"):
        try:
            result = read_result(runs.start(f"profile-{name}", name, Purpose.PROFILE))
        except ScriptError:
            return None
        if result is None or None in (result["profile"], result["plain"]):
            return None
        profiles.append(result["profile"] | {"step_s": result["plain"]["step_s"]})
    fp32, mixed = profiles
    return from_profiles(fp32, mixed, format_)


def from_profiles(fp32: dict[str, Any], mixed: dict[str, Any], format_: str) -> dict[str, str]:
    """Return ``cause`` and ``reason`` from what the runs of ``Purpose.PROFILE`` wrote."""
    products, low = fp32["products"], {same_size(p["kind"], p["shape"]): p for p in mixed["products"]}
    total_s = sum(p["each_s"] * p["count"] for p in products)
    # Weighted by time: a last layer of ten classes does not make a network small.
    typical_s = sum(p["each_s"] ** 2 * p["count"] for p in products) / total_s if total_s else 0.0
    same = [(p, low[key]) for p in products if (key := same_size(p["kind"], p["shape"])) in low]
    low_s = sum(other["each_s"] * p["count"] for p, other in same)
    gain = sum(p["each_s"] * p["count"] for p, _ in same) / low_s if low_s else None
    share, casts = fp32["shares"]["products"], mixed["shares"]["casts"]
    # Both: beside a few long operators of other kinds, calls of short matmuls are not what takes the time.
    if max(typical_s, fp32["ops"]["mean_s"] or 0.0) < _SHORT_CALL_S.get(fp32["device"], 0.0):
        reason = f"layers too small: a matmul takes {typical_s * 1e6:.0f} us, little more than its call"
        return {"cause": "small", "reason": f"{reason}. Larger batches or layers would gain"}
    if gain is not None and gain < FAST_ENOUGH and share > 1 - 1 / FAST_ENOUGH:
        reason = f"no fast kernels: matmuls in {format_} take {1 / gain:.2f} times as long here as in FP32"
        return {
            "cause": "kernels",
            "reason": f"{reason}. A GPU with tensor cores or a CPU with AMX would gain",
        }
    if casts > 1 - 1 / FAST_ENOUGH and mixed["step_s"] * (1 - casts) * FAST_ENOUGH < fp32["step_s"]:
        reason = f"casts take {casts:.0%} of a step, without which it would be faster"
        return {"cause": "casts", "reason": f"{reason}. A larger batch uses each cast of a weight more often"}
    reason = f"matmuls take {share:.0%} of a step in FP32, and {format_} does not make the rest faster"
    return {"cause": "other", "reason": f"{reason}. Larger layers, or less work beside them, would gain"}
