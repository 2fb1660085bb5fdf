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

    ``rates`` decide; by default those that were kept for ``auto`` on a CPU, and none on other devices. A rate
    is clear if it was measured steadily, or cut short because the format is slow.

    For matmuls, and for convolutions, the format is slow if it is slow at the largest size that has a clear
    rate and at every larger one, whose rates are not clear. If the largest size of all has a clear rate, that
    rate alone decides. Otherwise, if the rates do not show the format to be slow, the sentence says what is
    known of this kind of CPU.
    """
    if rates is None:
        rates = []
        if device_type == "cpu":
            kept, _ = read_auto_rates("cpu", cache_folder())
            if kept is not None:
                rates = [Rate(**row) for row in kept["rows"]]
    sentences = []
    for format_name in dict.fromkeys(formats):
        if format_name not in ("bf16", "fp16"):
            continue
        why = _why_slow(format_name, device_type, rates)
        if why is None:
            continue
        advice = "--policy fp32"
        best = best_format(device_type).format
        if best not in ("fp32", format_name):
            advice = f"--policy {best} or {advice}"
        # ``compare`` and ``doctor`` show it too, which refuse fp32: the advice is for the training.
        sentences.append(f"{why}: train with {advice}")
    return sentences


def _why_slow(format_name: str, device_type: str, rates: list[Rate]) -> str | None:
    """Return the reasons to call a format slower than fp32, as a clause; None if there are none."""
    slower = []
    known = []
    for kind in ("matmul", "convolution"):
        of_kind = [rate for rate in rates if (rate.kind, rate.format) == (kind, format_name)]
        clear, larger_unclear = _largest_clear(of_kind, rates)
        if clear is not None and all(_is_slow(rate) for rate in (clear, *larger_unclear)):
            slower.append(_how_slow(clear))
            continue

        # What is known of the kind of CPU counts only where no rate shows how fast the largest size is.
        is_shown_fast = clear is not None and not larger_unclear
        if device_type == "cpu" and not is_shown_fast:
            known.append(known_to_be_slow(format_name, kind))

    reasons = [fact for fact in known if fact is not None]
    if slower:
        where = "CPU" if device_type == "cpu" else "GPU"
        measured = f"{format_name} on this {where} is slow, as measured forward and backward against fp32"
        reasons.insert(0, f"{measured}: {' and '.join(slower)}")
    return "; ".join(reasons) or None


def _largest_clear(of_kind: list[Rate], rates: list[Rate]) -> tuple[Rate | None, list[Rate]]:
    """Return the clear rate of the largest size, or None, and the unclear rates of larger sizes."""
    # The smallest size comes first.
    clear: Rate | None = None
    larger_unclear: list[Rate] = []
    for rate in of_kind:
        if rate.is_steady or _is_cut_short_alone(rate, rates):
            clear = rate
            larger_unclear = []
        elif clear is not None:
            larger_unclear.append(rate)
    return clear, larger_unclear


def _is_cut_short_alone(rate: Rate, rates: list[Rate]) -> bool:
    """Return whether calls of this size took too long in this format, while fp32 could be measured.

    If fp32 took too long as well, the machine may be busy with something else, and the format may be fast.
    """
    if rate.speed_at_most is None:
        return False
    for other in rates:
        is_fp32_of_same = other.format == "fp32" and (other.kind, other.shape) == (rate.kind, rate.shape)
        if is_fp32_of_same and other.speed_against_fp32 is not None:
            return True
    return False


def _is_slow(rate: Rate) -> bool:
    """Return whether a rate is below fp32's by more than the factor ``_AS_FAST``.

    The two are compared at the rate's size, or at a smaller one if the rate was cut short.
    """
    speed, _ = _speed_and_shape(rate)
    return speed is not None and speed * _AS_FAST < 1


def _how_slow(rate: Rate) -> str:
    """Say how much slower than fp32 a rate is, and at which size."""
    speed, shape = _speed_and_shape(rate)
    assert speed is not None  # it is slow
    return f"{speed_in_words(speed)} in {rate.kind}s of {' x '.join(map(str, shape))}"


def _speed_and_shape(rate: Rate) -> tuple[float | None, list[int]]:
    """Return the speed against fp32, and the shape at which it was measured.

    If the rate was cut short, the shape is a smaller one.
    """
    if rate.speed_against_fp32 is None and rate.speed_at_most_shape is not None:
        return rate.speed_at_most, rate.speed_at_most_shape
    return rate.speed_against_fp32, rate.shape
