"""Why mixed precision is not faster: where a step loses time, from profiles of the script in both formats."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from narrowcast.observe.explanation import percent
from narrowcast.observe.profiling import same_size

if TYPE_CHECKING:
    from narrowcast.verify.compare._runs import ScriptSettings

_PARTS = {
    "products": "matmuls",
    "casts": "casts",
    "other_ops": "other operators",
    "optimizer": "the optimizer",
    "loading": "loading of data",
    "python": "time outside of operators",
}
_ON_GPU = _PARTS | {"python": "waiting of the GPU"}
_SINGULAR = (_PARTS["optimizer"], _PARTS["loading"], _PARTS["python"], _ON_GPU["python"])
# What a part's share of the lost time has to be, to be named.
_WORTH_NAMING = 0.1
# Share of a step that is not called lost: two profiles of one script differ by as much.
_LITTLE = 0.02
# A step that takes so many times as long under the profiler has rough shares.
_MUCH_LONGER = 1.5


class Reason(NamedTuple):
    """Why mixed precision is not faster.

    Attributes:
        cause: ``"kernels"`` (matmuls take longer), ``"casts"``, ``"other"``, or ``"unknown"``.
        text: the same in words, with the shares.
        share: of the lost time that the cause explains; None: nothing was lost, or it is not known.
    """

    cause: str
    text: str
    share: float | None = None


class Products(NamedTuple):
    """The products of one step that both profiles show.

    Attributes:
        fp32_s: of those that mixed precision computes in the low format, what they take in FP32, by kind.
        low_s: what they take in the low format, casts not counted, by kind.
        kept_s: what those take that mixed precision computes in FP32 too, by kind.
    """

    fp32_s: Counter[str]
    low_s: Counter[str]
    kept_s: Counter[str]

    @classmethod
    def of(cls, fp32: dict[str, Any], mixed: dict[str, Any]) -> Products:
        """Match the products of two profiles by size."""
        low = {same_size(row["kind"], row["shape"]): row for row in mixed["products"] if not is_fp32(row)}
        found = cls(Counter(), Counter(), Counter())
        for row in fp32["products"]:
            other = low.get(same_size(row["kind"], row["shape"]))
            if other is not None:
                found.fp32_s[row["kind"]] += row["each_s"] * row["count"]
                found.low_s[row["kind"]] += other["each_s"] * row["count"]
        for row in mixed["products"]:
            if is_fp32(row):
                found.kept_s[row["kind"]] += row["each_s"] * row["count"]
        return found


def is_fp32(product: dict[str, Any]) -> bool:
    """Return whether a product of a profile was computed in FP32."""
    return bool(product["format"] == "fp32")


def from_profiles(fp32: dict[str, Any], mixed: dict[str, Any], format_: str) -> Reason:
    """Return why mixed precision is not worth it, from the profiles of both runs.

    A part of a step is named if it is slower by more than the times of steps differ; casts are always the
    format's.

    Args:
        fp32, mixed: what ``summarize`` returned, with ``plain_step_s``, ``plain_step_s_low`` and
            ``plain_step_s_high`` of steps without the profiler.
        format_: of the mixed run.
    """
    noise_s = max(run["plain_step_s_high"] - run["plain_step_s_low"] for run in (fp32, mixed))
    more_s = {
        part: mixed["shares"][part] * mixed["plain_step_s"] - fp32["shares"][part] * fp32["plain_step_s"]
        for part in _PARTS
    }
    lost_s = {part: s for part, s in more_s.items() if s > 0}
    total_s = sum(lost_s.values())
    shares: dict[str, float] = {}
    if total_s > _LITTLE * fp32["plain_step_s"]:
        clear = [part for part, s in lost_s.items() if part == "casts" or s > noise_s]
        shares = {part: lost_s[part] / total_s for part in clear if lost_s[part] >= _WORTH_NAMING * total_s}
    worst = max(shares, key=shares.__getitem__, default="")
    cause = {"products": "kernels", "casts": "casts"}.get(worst, "other")
    sentences = [_of_matmuls(fp32, mixed, format_)]
    if shares:
        names = _PARTS if mixed["gpu_busy_share"] is None else _ON_GPU
        named = {names[part]: share for part, share in shares.items()}
        sentences.append(_of_lost_time(named, total_s, format_))
    else:
        sentences.append(f"no part of a step is clearly slower in {format_}")
    longer = max(run["step_s"] / run["plain_step_s"] for run in (fp32, mixed))
    if longer > _MUCH_LONGER:
        sentences.append(f"these are rough, as a step took {longer:.1f}x as long under the profiler")
    return Reason(cause, "; ".join(sentences), shares.get(worst))


def _of_matmuls(fp32: dict[str, Any], mixed: dict[str, Any], format_: str) -> str:
    """Say how much of a step could be faster, and whether it is."""
    share = fp32["shares"]["products"]
    if not fp32["products"]:
        return "no matmuls were seen in a step"
    text = f"matmuls take {percent(share)} of a step in FP32"
    products = Products.of(fp32, mixed)
    low_s, kept_s = products.low_s.total(), products.kept_s.total()
    if kept_s > low_s:
        kinds = ", ".join(kind for kind, s in products.kept_s.most_common() if s >= _WORTH_NAMING * kept_s)
        part = "and ran in FP32" if not low_s else f"and {percent(kept_s / (kept_s + low_s))} ran in FP32"
        return f"{text}, {part} under {format_} too ({kinds})"
    if not low_s:
        return text
    text += f", and ran {_speed(products.fp32_s.total(), low_s)} in {format_}"
    lost_s = products.low_s - products.fp32_s  # of kinds that got slower
    kind, kind_s = max(lost_s.items(), key=lambda item: item[1], default=("", 0.0))
    if kind_s > _LITTLE * fp32["plain_step_s"] and len(products.low_s) > 1:
        slower = _speed(products.fp32_s[kind], products.low_s[kind])
        text += f" ({kind} {slower}, which a rule can keep in fp32: docs/policies.md)"
    return text


def _of_lost_time(shares: dict[str, float], total_s: float, format_: str) -> str:
    """Say which parts of a step take longer, the worst one first."""
    worst, *others = sorted(shares, key=shares.__getitem__, reverse=True)
    lost = f"{total_s:.3g} s" if total_s >= 1 else f"{total_s * 1e3:.3g} ms"
    explain = "explains" if worst in _SINGULAR else "explain"
    first = f"{worst} {explain} {percent(shares[worst])} of what is lost in {format_} ({lost} a step)"
    rest = ", and the rest is no clear part" if sum(shares.values()) < 1 - _WORTH_NAMING else ""
    return "".join([first, *(f", {part} {percent(shares[part])}" for part in others), rest])


def _speed(before_s: float, after_s: float) -> str:
    if after_s <= before_s:
        return f"{before_s / after_s:.2f}x faster"
    return f"{after_s / before_s:.2f}x slower"


def not_looked_for(settings: ScriptSettings, why: str) -> Reason:
    """Return that no profile was made, and the command that makes one."""
    options = [] if settings.policy == "auto" else ["--policy", settings.policy]
    module = ["-m"] if settings.is_module else []
    command = shlex.join(["narrowcast", "doctor", *options, *module, *settings.target])
    return Reason("unknown", f"the reason was not looked for, {why}: {command} looks for it")
