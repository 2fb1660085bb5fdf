"""``doctor SCRIPT``: where the time of a script's steps goes, in FP32 and in mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from narrowcast.observe.capture import RUN, discard_captures, make_run_folder, read_capture
from narrowcast.observe.profiling import same_size
from narrowcast.verify.compare._comparison import stays_in_fp32
from narrowcast.verify.compare._runs import PROFILE, ScriptRuns, ScriptSettings, read_result, why_unseen

_SCHEMA = 1
_SIZES = 6
_MEASURED = ("matmul", "convolution")


def diagnose(
    settings: ScriptSettings,
    rates: dict[str, Any],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Profile a few steps of the script in FP32 and in mixed precision, each in a fresh process.

    Args:
        settings: what to run, and how.
        rates: of this machine, as in ``machine.examine(...)["rates"]``.
        progress: called with short messages now and then.

    Returns:
        JSON-ready: ``schema``, ``target``, ``policy``, ``problem`` (a sentence if there are no numbers, else
        null), ``device``, ``format``, ``unit`` (``"step"`` or ``"call"``), the profiles ``fp32`` and
        ``mixed``, and ``together``, what both show (``side_by_side``).

    Raises:
        ScriptError: the script failed.
        UnsupportedError: its second run read what the first had written.
        FileError: the folder cannot be written.
    """
    found: dict[str, Any] = {
        "schema": _SCHEMA,
        "target": list(settings.target),
        "policy": settings.policy,
        **dict.fromkeys(("problem", "device", "format", "unit", "fp32", "mixed", "together")),
    }
    why = stays_in_fp32(settings.policy)
    if why is not None:
        return found | {"problem": f"mixed precision stays in fp32 here, since {why}"}
    discard_captures(make_run_folder("doctor", asked=settings.folder))
    runs = ScriptRuns(settings, progress=progress)
    for name in ("fp32", "mixed"):
        folder = runs.start(name, name, PROFILE)
        result = read_result(folder)
        problem = _problem(folder, result)
        if result is None or problem is not None:
            return found | {"problem": problem}
        found[name] = _profile(folder, result)
        found |= {"device": result["profile"]["device"], "unit": result["unit"]}
    found["format"] = found["mixed"]["format"]
    if found["format"] in (None, "fp32"):
        reason = f"the mixed run too computed in FP32 on {found['device']}: there is nothing to compare"
        return found | {"problem": reason, "mixed": None}
    return found | {"together": side_by_side(found, rates)}


def _problem(folder: Path, result: dict[str, Any] | None) -> str | None:
    """Return why a run has no numbers; None if it has."""
    complete = result is not None and None not in (result["profile"], result["plain"])
    advice = "diagnose it without that, or look at it with torch's own profiler"
    problem = why_unseen(folder, advice=advice, verb=None if complete else "profiled")
    if problem is not None:
        return problem
    if result is None:
        return "the run was ended before anything was measured"
    if result["problem"] is not None:
        return str(result["problem"])
    if complete:
        return None
    seen, s = result["seen"], "s" * (result["seen"] > 1)
    if not seen:
        return "the script called no module with parameters and took no optimizer step: nothing to profile"
    what = f"optimizer step{s}" if result["unit"] == "step" else f"call{s} of its modules"
    return f"the script ended after {seen} {what}, and {result['needed']} are needed: let it run longer"


def _profile(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    formats = dict.fromkeys(event["format"] for event in read_capture(folder / RUN).of("device"))
    plain = {f"plain_{name}": value for name, value in result["plain"].items()}
    own = {name: result[name] for name in ("unit", "fused", "reads")}
    return {**result["profile"], **plain, **own, "format": ", ".join(formats) or None}


def side_by_side(found: dict[str, Any], rates: dict[str, Any]) -> dict[str, Any]:
    """Compare the two profiles with each other and with the machine's rates.

    Times of products come from profiled steps, ``speedup`` from steps that ran as they are.

    Returns:
        ``speedup`` of a step; ``products_share`` of the FP32 step; ``products_speedup`` in this script, of
        the products in FP32 by the same in the mixed format, casts not counted; ``sizes``, the products that
        take the most time in FP32, each with its ``share`` there, ``speedup`` in this script and
        ``machine_speedup`` in the machine's rates, null if none is of this size; ``machine_speedup`` over
        all sizes, weighted by time, null unless known for half of it;
        ``limit_here`` and ``limit_machine``, how much faster a step gets if only products get faster by
        either; ``machine_best``, ``speed`` and ``shape`` of the matmul that gains most here, or null.
    """
    fp32, mixed = found["fp32"], found["mixed"]
    mixed_s = {same_size(row["kind"], row["shape"]): row["each_s"] for row in mixed["products"]}
    on_device = [device for device in rates["devices"] if device["device_type"] == found["device"]]
    speeds = _speeds(found["format"], [row for device in on_device for row in device["rows"]])
    sizes, total_s, known_s, faster_s, same_s, same_mixed_s = [], 0.0, 0.0, 0.0, 0.0, 0.0
    for row in fp32["products"]:
        size = same_size(row["kind"], row["shape"])
        mixed_each, machine = mixed_s.get(size), speeds.get(size)
        all_s = row["each_s"] * row["count"]
        total_s += all_s
        if mixed_each:
            same_s, same_mixed_s = same_s + all_s, same_mixed_s + mixed_each * row["count"]
        if machine is not None:
            known_s, faster_s = known_s + all_s, faster_s + all_s / machine
        sizes.append(
            {name: row[name] for name in ("kind", "shape", "count", "share", "each_s")}
            | {
                "speedup": row["each_s"] / mixed_each if mixed_each else None,
                "machine_speedup": machine,
            }
        )
    share = fp32["shares"]["products"]
    here = same_s / same_mixed_s if same_mixed_s else None
    machine_all = known_s / faster_s if known_s > total_s / 2 else None
    best = max(((speed, shape) for (kind, shape), speed in speeds.items() if kind == "matmul"), default=None)
    return {
        "speedup": fp32["plain_step_s"] / mixed["plain_step_s"],
        "products_share": share,
        "products_speedup": here,
        "machine_speedup": machine_all,
        "limit_here": None if here is None else most_speedup(share, here),
        "limit_machine": None if machine_all is None else most_speedup(share, machine_all),
        "machine_best": best and {"speed": best[0], "shape": list(best[1][:2])},
        "sizes": sizes[:_SIZES],
        "sizes_left_out": max(0, len(sizes) - _SIZES),
    }


def most_speedup(share: float, ratio: float) -> float:
    """Amdahl's law: a step of which ``share`` gets ``ratio`` times as fast, and the rest stays."""
    return 1.0 / (1.0 - share + share / ratio)


def _speeds(format_: str, rows: list[dict[str, Any]]) -> dict[Any, float]:
    """Return the speed against FP32 at each size that was measured, by the size as a profile has it."""
    return {
        same_size(rate["kind"], _operands(rate["kind"], rate["shape"])): rate["speed_against_fp32"]
        for rate in rows
        if rate["kind"] in _MEASURED and rate["format"] == format_ and rate["speed_against_fp32"] is not None
    }


def _operands(kind: str, shape: list[int]) -> list[int]:
    """Return the shape of a measured size as a profile has it: square matrices, kernels of 3 x 3."""
    return [*shape, shape[1], shape[1], 3, 3] if kind == "convolution" else shape[:1] * 3
