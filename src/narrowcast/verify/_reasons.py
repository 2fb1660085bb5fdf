"""Why mixed precision is not faster: where a step loses time, from profiles of the script in both formats."""

from __future__ import annotations

import shlex
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from narrowcast.observe.profiling import same_size
from narrowcast.report import percent, speed_text

if TYPE_CHECKING:
    from narrowcast.verify.runs._runs import ScriptSettings

_PARTS = {
    "products": "matmuls",
    "casts": "casts",
    "other_ops": "other operators",
    "optimizer": "the optimizer",
    "loading": "loading of data",
    "python": "time outside of operators",
}
_ON_GPU = _PARTS | {"python": "waiting of the GPU"}
# Names after which a verb is in the singular.
_SINGULAR = (_PARTS["optimizer"], _PARTS["loading"], _PARTS["python"], _ON_GPU["python"])
# The smallest share that is named: for a part of a step, of the lost time; for a kind of matmul, of the time
# of all matmuls that stay in FP32.
_WORTH_NAMING = 0.1
# A smaller share of a step is not called lost, since two profiles of one script differ by as much.
_LITTLE = 0.02
# The shares are called rough if the profiler makes a step so many times as long.
_MUCH_LONGER = 1.5


# Kind and size of a product, as ``same_size`` returns them.
Size = tuple[str, tuple[int, ...]]


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


class Product(msgspec.Struct, frozen=True):
    """The matrix products (matmuls, convolutions, attention) of one size and format in a step, together."""

    kind: str
    shape: tuple[int, ...]
    format: str
    count: float
    share: float
    each_s: float

    @property
    def is_fp32(self) -> bool:
        return self.format == "fp32"

    @property
    def size(self) -> Size:
        """A key that is the same for products that take the same time."""
        return same_size(self.kind, self.shape)

    @property
    def time_s(self) -> float:
        """How long they take together in a step."""
        return self.each_s * self.count


class TimedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a run's profile that this module uses. Those with ``plain_`` come from timed runs."""

    products: list[Product]
    shares: dict[str, float]
    gpu_busy_share: float | None
    step_s: float
    plain_step_s: float
    plain_step_s_low: float
    plain_step_s_high: float

    @classmethod
    def of(cls, profile: dict[str, Any]) -> Self:
        """Convert a profile of ``summarize``, merged with the times of ``TimedPairs.plain_times``."""
        return msgspec.convert(profile, cls)

    @property
    def noise_s(self) -> float:
        """The width of the interval of a step's time."""
        return self.plain_step_s_high - self.plain_step_s_low

    @property
    def low_products(self) -> dict[Size, Product]:
        """The products in a low format, by their size."""
        return {product.size: product for product in self.products if not product.is_fp32}

    def part_s(self, part: str) -> float:
        """Return how long a part of a step takes without the profiler."""
        return self.shares[part] * self.plain_step_s


class MatmulTimes(NamedTuple):
    """Seconds that matmuls take in one step, by their kind.

    Attributes:
        fp32_s: in the FP32 run, of the sizes that the mixed run computes in the low format.
        low_s: of the same matmuls in the low format, without their casts.
        kept_s: in the mixed run, of the matmuls that it too computes in FP32.
    """

    fp32_s: dict[str, float]
    low_s: dict[str, float]
    kept_s: dict[str, float]

    @classmethod
    def of(cls, fp32: TimedProfile, mixed: TimedProfile) -> MatmulTimes:
        """Match the products of two profiles by size."""
        times = cls(defaultdict(float), defaultdict(float), defaultdict(float))
        for product in mixed.products:
            if product.is_fp32:
                times.kept_s[product.kind] += product.time_s

        low_products = mixed.low_products
        for product in fp32.products:
            low = low_products.get(product.size)
            if low is not None:
                # A rule may keep some matmuls of a size in FP32.
                count = min(product.count, low.count)
                times.fp32_s[product.kind] += product.each_s * count
                times.low_s[product.kind] += low.each_s * count
        return times


def from_profiles(fp32: TimedProfile, mixed: TimedProfile, format_: str) -> Reason:
    """Return why mixed precision is not worth it, from the profiles of both runs.

    A part of a step is named if it is slower by more than the noise in the times of steps; casts are named
    without regard to it. ``format_`` is that of the mixed run.
    """
    lost_s, total_s = _lost_time(fp32, mixed)
    shares = _shares_worth_naming(fp32, mixed, lost_s, total_s)
    # The worst part is the cause, whatever else is slower too.
    worst = max(shares, key=shares.__getitem__, default="")
    cause = {"products": "kernels", "casts": "casts"}.get(worst, "other")

    sentences = [_of_matmuls(fp32, mixed, format_)]
    if shares:
        names = _PARTS
        if mixed.gpu_busy_share is not None:
            names = _ON_GPU
        named = {names[part]: share for part, share in shares.items()}
        sentences.append(_of_lost_time(named, total_s, format_))
    else:
        sentences.append(f"no part of a step is clearly slower in {format_}")
    longer = max(fp32.step_s / fp32.plain_step_s, mixed.step_s / mixed.plain_step_s)
    if longer > _MUCH_LONGER:
        sentences.append(f"these are rough, as a step took {longer:.1f}x as long under the profiler")
    return Reason(cause, "; ".join(sentences), shares.get(worst))


def _lost_time(fp32: TimedProfile, mixed: TimedProfile) -> tuple[dict[str, float], float]:
    """Return by how much each part of a step is slower in mixed precision, and the sum of these."""
    lost_s: dict[str, float] = {}
    for part in _PARTS:
        more_s = mixed.part_s(part) - fp32.part_s(part)
        if more_s > 0:
            lost_s[part] = more_s
    return lost_s, sum(lost_s.values())


def _shares_worth_naming(
    fp32: TimedProfile, mixed: TimedProfile, lost_s: dict[str, float], total_s: float
) -> dict[str, float]:
    """Return the share of the lost time of each part that is clearly slower."""
    if total_s <= _LITTLE * fp32.plain_step_s:
        return {}
    noise_s = max(fp32.noise_s, mixed.noise_s)
    shares: dict[str, float] = {}
    for part, part_s in lost_s.items():
        # More casts are no noise, however short: the format brings them.
        is_clear = part == "casts" or part_s > noise_s
        if is_clear and part_s >= _WORTH_NAMING * total_s:
            shares[part] = part_s / total_s
    return shares


def _of_matmuls(fp32: TimedProfile, mixed: TimedProfile, format_: str) -> str:
    """Say how much of a step matmuls take in FP32, and whether they are faster in mixed precision."""
    if not fp32.products:
        return "no matmuls were seen in a step"
    text = f"matmuls take {percent(fp32.shares['products'])} of a step in FP32"
    times = MatmulTimes.of(fp32, mixed)
    low_s, kept_s = sum(times.low_s.values()), sum(times.kept_s.values())

    # Most matmuls ran in FP32 all the same: a kernel is missing, or a rule keeps them.
    if kept_s > low_s:
        longest_first = sorted(times.kept_s, key=times.kept_s.__getitem__, reverse=True)
        kinds = [kind for kind in longest_first if times.kept_s[kind] >= _WORTH_NAMING * kept_s]
        which = "and ran in FP32"
        if low_s:
            which = f"and {percent(kept_s / (kept_s + low_s))} ran in FP32"
        return f"{text}, {which} under {format_} too ({', '.join(kinds)})"
    # Both are 0, since kept_s is at most low_s here: the mixed run has no matmul in FP32, and none of the
    # sizes of the FP32 run to compare.
    if not low_s:
        return text

    text += f", and ran {speed_text(sum(times.fp32_s.values()) / low_s)} in {format_}"
    # One kind may be slower where all together are faster, as attention without a fused kernel.
    lost_s = {kind: kind_s - times.fp32_s[kind] for kind, kind_s in times.low_s.items()}
    worst = max(lost_s, key=lost_s.__getitem__)
    if len(lost_s) > 1 and lost_s[worst] > _LITTLE * fp32.plain_step_s:
        slower = speed_text(times.fp32_s[worst] / times.low_s[worst])
        text += f" ({worst} {slower}, which a rule can keep in fp32: docs/policies.md)"
    return text


def _of_lost_time(shares: dict[str, float], total_s: float, format_: str) -> str:
    """Say which parts of a step take longer, the worst one first; ``shares``: of the lost time, by name."""
    worst, *others = sorted(shares, key=shares.__getitem__, reverse=True)
    lost = f"{total_s * 1e3:.3g} ms"
    if total_s >= 1:
        lost = f"{total_s:.3g} s"
    explain = "explains" if worst in _SINGULAR else "explain"
    text = f"{worst} {explain} {percent(shares[worst])} of what is lost in {format_} ({lost} a step)"
    for part in others:
        text += f", {part} {percent(shares[part])}"
    if sum(shares.values()) < 1 - _WORTH_NAMING:
        text += ", and the rest is no clear part"
    return text


def not_looked_for(settings: ScriptSettings, why: str) -> Reason:
    """Return that no profile was made, and the command that makes one."""
    command = doctor_command(settings)
    return Reason("unknown", f"the reason was not looked for, {why}: {command} looks for it")


def doctor_command(settings: ScriptSettings, *options: str) -> str:
    """Return the command that profiles a script, as it is typed."""
    words = ["narrowcast", "doctor"]
    if settings.policy != "auto":
        words += ["--policy", settings.policy]
    words += options
    if settings.is_module:
        words.append("-m")
    return shlex.join([*words, *settings.target])
