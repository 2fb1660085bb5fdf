"""``doctor SCRIPT``: where the time of a script's steps goes, in FP32 and in mixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from narrowcast.errors import FileError
from narrowcast.observe.capture import RUN, discard_captures, make_run_folder, read_capture
from narrowcast.verify.compare._comparison import stays_in_fp32
from narrowcast.verify.compare._probes import read_result
from narrowcast.verify.compare._runs import PROFILE, ScriptSettings, run_process

_SCHEMA = 1
_SIZES = 6
# Between two sizes that are measured lies less than this many times the work, and beyond the largest rates
# hardly change; anything else is not near.
_NEAR = 64
_KINDS = {"matmul": "matmul", "batched matmul": "matmul", "convolution": "convolution"}


class DiagnosisSettings(ScriptSettings):
    """What to diagnose: a run in FP32 and one in the policy, both from the seed."""

    __slots__ = ()


def diagnose(
    settings: DiagnosisSettings,
    rates: dict[str, Any],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Profile a few steps of the script in FP32 and in mixed precision, each in a fresh process.

    Args:
        settings: what to run, and how.
        rates: of this machine, as in ``machine.examine(...)["rates"]``.
        progress: told now and then, in a few words, what is going on.

    Returns:
        JSON-ready: ``schema``, ``target``, ``policy``, ``problem`` (a sentence where there are no numbers,
        else null), ``device``, ``format``, ``unit`` (``"step"`` or ``"call"``), the profiles ``fp32`` and
        ``mixed``, and ``together``, what both say (``side_by_side``).

    Raises:
        ScriptError: the script failed.
        ScriptError: the second run read what the first had written.
        FileError: the folder cannot be written.
    """
    found: dict[str, Any] = {
        "schema": _SCHEMA,
        "target": list(settings.target),
        "policy": settings.policy,
        "problem": None,
        "device": None,
        "format": None,
        "unit": None,
        "fp32": None,
        "mixed": None,
        "together": None,
    }
    why = stays_in_fp32(settings.policy)
    if why is not None:
        return found | {"problem": f"mixed precision stays in fp32 here, since {why}"}
    folder = make_run_folder("doctor", asked=settings.folder)
    discard_captures(folder)
    earlier: dict[str, str] = {}
    for name in ("fp32", "mixed"):
        own = make_run_folder(name, asked=folder / name)
        discard_captures(own)
        (own / "result.json").unlink(missing_ok=True)
        progress(f"profiling it in {name}")
        ended = run_process(
            f"its run {name}",
            settings.whole_run(
                PROFILE, own, "fp32" if name == "fp32" else settings.policy, earlier=dict(earlier)
            ),
            settings.target,
            lambda line, name=name: progress(f"profiling it in {name}: {line}"),  # type: ignore[misc]
        )
        earlier |= dict.fromkeys(ended.written, name)
        problem, facts = _facts_of(own)
        if problem is not None:
            return found | {"problem": problem}
        found[name] = facts
        found |= {"device": facts["device"], "unit": facts["unit"]}
    found["format"] = found["mixed"]["format"]
    if found["format"] in (None, "fp32"):
        reason = f"the mixed run too computed in FP32 on {found['device']}: there is nothing to compare"
        return found | {"problem": reason, "mixed": None}
    return found | {"together": side_by_side(found, rates)}


def _facts_of(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Why there are no numbers of a run, or None and the numbers."""
    result = read_result(folder)
    try:
        capture = read_capture(folder / RUN)
        totals = capture.totals()
        formats = [event["format"] for event in capture.of("device")]
        spawned = any("started processes" in event["text"] for event in capture.of("note"))
    except FileError:
        return "the run left no record of itself", {}
    if totals["aside"] is not None:
        return f"{totals['aside']}: diagnose it without that, or look at it with torch's own profiler", {}
    problem = _problem_of(result, spawned=spawned)
    if result is None or problem is not None:
        return problem, {}
    own = {
        "format": ", ".join(dict.fromkeys(formats)) or None,
        "unit": result["unit"],
        "fused": result["fused"],
    }
    plain = {f"plain_{name}": value for name, value in result["plain"].items()}
    return None, result["profile"] | plain | own | {"reads": result["reads"]}


def _problem_of(result: dict[str, Any] | None, *, spawned: bool) -> str | None:
    if result is None:
        return "the run was ended before anything was measured"
    if result["problem"] is not None:
        return str(result["problem"])
    if result["profile"] is not None and result["plain"] is not None:
        return None
    if spawned:
        return "the script trains in processes that it starts itself, which are not profiled"
    return _too_short(result)


def _too_short(result: dict[str, Any]) -> str:
    seen, needed = result["seen"], result["needed"]
    if not seen:
        return "the script called no module with parameters and took no optimizer step: nothing to profile"
    unit = "optimizer step" if result["unit"] == "step" else "call of its modules"
    many = unit.replace("step", "steps").replace("call", "calls") if seen > 1 else unit
    return f"the script ended after {seen} {many}, and {needed} are needed: let it run longer"


def side_by_side(found: dict[str, Any], rates: dict[str, Any]) -> dict[str, Any]:
    """What the two profiles say together, and the machine's rates about them.

    Times of products come from profiled steps, ``speedup`` from steps that ran as they are.

    Returns:
        ``speedup`` of a step; ``products_share`` of the FP32 step; ``products_speedup`` in this script, of
        the products in FP32 by the same in the mixed format, casts not counted; ``sizes``, the products that
        take the most time in FP32, each with its ``share`` there, ``speedup`` in this script and
        ``machine_speedup`` of the nearest size that was measured on this machine (``machine_shape``);
        ``machine_speedup`` over all sizes, weighted by time, null unless known for half of it;
        ``limit_here`` and ``limit_machine``, how much faster a step gets when products alone get faster by
        either; ``machine_best``, ``speed`` and ``shape`` of the matrix product that gains most here, or null.
    """
    fp32, mixed = found["fp32"], found["mixed"]
    mixed_s = {_key(row): row["each_s"] for row in mixed["products"]}
    rows = [row for device in rates["devices"] if _is_device(device, found) for row in device["rows"]]
    sizes, known_s, faster_s = [], 0.0, 0.0
    same_s, same_mixed_s = 0.0, 0.0
    for row in fp32["products"]:
        each, mixed_each = row["each_s"], mixed_s.get(_key(row))
        together_s = each * row["count"]
        machine = nearest_rate(row, found["format"], rows)
        if mixed_each:
            same_s, same_mixed_s = same_s + together_s, same_mixed_s + mixed_each * row["count"]
        if machine is not None:
            known_s, faster_s = known_s + together_s, faster_s + together_s / machine["speed"]
        sizes.append(
            {
                "kind": row["kind"],
                "shape": row["shape"],
                "count": row["count"],
                "share": row["share"],
                "each_s": each,
                "speedup": each / mixed_each if mixed_each else None,
                "machine_speedup": None if machine is None else machine["speed"],
                "machine_shape": None if machine is None else machine["shape"],
            }
        )
    share, total = fp32["shares"]["products"], sum(r["each_s"] * r["count"] for r in fp32["products"])
    here = same_s / same_mixed_s if same_mixed_s else None
    machine_all = known_s / faster_s if faster_s and known_s > total / 2 else None
    return {
        "speedup": fp32["plain_step_s"] / mixed["plain_step_s"],
        "products_share": share,
        "products_speedup": here,
        "machine_speedup": machine_all,
        "limit_here": None if here is None else most_speedup(share, here),
        "limit_machine": None if machine_all is None else most_speedup(share, machine_all),
        "machine_best": _best_matmul(found["format"], rows),
        "sizes": sizes[:_SIZES],
        "sizes_left_out": max(0, len(sizes) - _SIZES),
    }


def most_speedup(share: float, ratio: float) -> float:
    """Amdahl's law: a step of which ``share`` gets ``ratio`` times as fast, and the rest stays."""
    return 1.0 / (1.0 - share + share / ratio)


def nearest_rate(row: dict[str, Any], format_: str, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Speed against FP32 of the nearest size that was measured, by the number of multiplications, if near.

    Returns:
        ``speed`` and ``shape``; None for kinds that are not measured, or where nothing was.
    """
    kind = _KINDS.get(row["kind"])
    candidates = [
        rate
        for rate in rows
        if rate["kind"] == kind and rate["format"] == format_ and rate["speed_against_fp32"] is not None
    ]
    if not candidates or not row["shape"]:
        return None
    mine = math.log(max(1, _multiplications(row["kind"], row["shape"])))
    best = min(candidates, key=lambda rate: abs(math.log(_of_rate(rate)) - mine))
    apart = mine - math.log(_of_rate(best))
    if abs(apart) > math.log(_NEAR) and not (apart > 0 and best["size"] == "large"):
        return None
    return {"speed": best["speed_against_fp32"], "shape": best["shape"]}


def _best_matmul(format_: str, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    speeds = [
        {"speed": rate["speed_against_fp32"], "shape": rate["shape"]}
        for rate in rows
        if rate["kind"] == "matmul" and rate["format"] == format_ and rate["speed_against_fp32"] is not None
    ]
    return max(speeds, key=lambda speed: float(speed["speed"]), default=None)


def _multiplications(kind: str, shape: list[int]) -> int:
    """Of one product; a convolution's as if its output were as large as its input."""
    if kind == "convolution":
        dimensions = len(shape) // 2
        batch, places, weight = shape[0], math.prod(shape[2:dimensions]), math.prod(shape[dimensions:])
        return batch * places * weight
    return math.prod(shape)


def _of_rate(rate: dict[str, Any]) -> int:
    if rate["kind"] == "convolution":
        batch, channels, height, width = rate["shape"]
        return int(batch * height * width * channels * channels * 9)
    return int(rate["shape"][0]) ** 3


def _is_device(device: dict[str, Any], found: dict[str, Any]) -> bool:
    return bool(device["device_type"] == found["device"])


def _key(row: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    shape = row["shape"]
    if row["kind"] == "matmul":
        return row["kind"], tuple(sorted(shape))
    if row["kind"] == "batched matmul":
        return row["kind"], (shape[0], *sorted(shape[1:]))
    return row["kind"], tuple(shape)
