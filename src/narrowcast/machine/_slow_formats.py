"""Formats that are slower than fp32 on this machine, by rates or by what is known of its kind of CPU."""

from __future__ import annotations

from collections.abc import Iterable

from narrowcast._files import cache_folder
from narrowcast.machine._auto import best_format, read_auto_rates, speed_in_words
from narrowcast.machine._environment import known_to_be_slow
from narrowcast.machine._rates import Rate

# Within this, two formats are as fast as each other: the spread of a quiet machine is a few percent.
_AS_FAST = 1.1


def slow_formats(formats: Iterable[str], device_type: str, rates: list[Rate] | None = None) -> list[str]:
    """Return a sentence for each of ``formats`` that is slower than fp32 on this machine, with what to use.

    Decided by the largest matmul and convolution among ``rates`` that was measured steadily or cut short,
    unless a larger one may be fast; on a CPU by default those that decide ``auto``. Where they do not show
    that the largest is fast, what is known of this kind of CPU is said.
    """
    if rates is None:
        rates = []
        if device_type == "cpu":
            kept, _ = read_auto_rates("cpu", cache_folder())
            if kept is not None:
                rates = [Rate(**row) for row in kept["rows"]]
    sentences = []
    for format_name in dict.fromkeys(formats):
        if format_name in ("bf16", "fp16"):
            why = _why_slow(format_name, device_type, rates)
            if why is not None:
                instead = best_format(device_type).format
                other = "" if instead in ("fp32", format_name) else f"--policy {instead} or "
                sentences.append(f"{why}: use {other}--policy fp32")
    return sentences


def _why_slow(format_name: str, device_type: str, rates: list[Rate]) -> str | None:
    """Return what shows that a format is slower than fp32, or None."""
    slower = []
    known = []
    for kind in ("matmul", "convolution"):
        of_kind = [rate for rate in rates if (rate.kind, rate.format) == (kind, format_name)]
        largest = _from_largest_clear(of_kind, rates)
        # Measured rates count for more than what is known of the kind of CPU.
        if largest and all(_is_slow(rate) for rate in largest):
            slower.append(_how_slow(largest[0]))
        elif len(largest) == 1:
            continue  # the largest size is fast
        elif device_type == "cpu":
            known.append(known_to_be_slow(format_name, kind))

    reasons = [fact for fact in known if fact is not None]
    if slower:
        where = "CPU" if device_type == "cpu" else "GPU"
        measured = f"{format_name} on this {where} is slow, as measured forward and backward against fp32"
        reasons.insert(0, f"{measured}: {' and '.join(slower)}")
    return "; ".join(reasons) or None


def _from_largest_clear(of_kind: list[Rate], rates: list[Rate]) -> list[Rate]:
    """Return the rate of the largest size that is clear, and those of larger sizes, which may be fast."""
    # Sizes come from the smallest on.
    from_clear: list[Rate] = []
    for rate in of_kind:
        if rate.is_steady or _is_cut_short_alone(rate, rates):
            from_clear = [rate]
        elif from_clear:
            from_clear.append(rate)
    return from_clear


def _is_cut_short_alone(rate: Rate, rates: list[Rate]) -> bool:
    """Return whether a call took too long in this format, and not in fp32 at the same size.

    On a machine that is busy with something else both do, and that shows nothing.
    """
    if not rate.speed_at_most:
        return False
    for other in rates:
        is_fp32 = other.format == "fp32" and (other.kind, other.shape) == (rate.kind, rate.shape)
        if is_fp32 and other.speed_against_fp32 is not None:
            return True
    return False


def _is_slow(rate: Rate) -> bool:
    """Return whether a rate is below fp32's: measured so, or cut short and so at a smaller size."""
    speed = rate.speed_against_fp32
    if speed is None:
        speed = rate.speed_at_most
    return speed is not None and speed * _AS_FAST < 1


def _how_slow(rate: Rate) -> str:
    """Say how much slower than fp32 a rate is, and at which size."""
    speed = rate.speed_against_fp32
    shape: list[int] | None = rate.shape
    if speed is None:
        speed = rate.speed_at_most
        shape = rate.speed_at_most_shape
    # Slow rates have one of both.
    assert speed is not None
    assert shape is not None
    return f"{speed_in_words(speed)} in {rate.kind}s of {' x '.join(map(str, shape))}"
