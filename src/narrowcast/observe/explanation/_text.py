"""What ran in which format as a table of at most 79 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from narrowcast.observe.explanation._rows import (
    Group,
    OpRow,
    grouped,
    has_several_models,
    merged,
    place_name,
    rules_of,
)

Line = tuple[str, bool]
"""Text, and whether it is a heading."""

_WIDTH = 79
_MOST_ROWS = 60
_MOST_LISTED = 5
_OP, _CALLS, _IN, _AS, _OUT, _BY, _BYTES, _TIME = 21, 6, 10, 6, 10, 9, 8, 5
_UNITS = ((2**60, "EiB"), (2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def explained_lines(found: Mapping[str, Any], *, every: bool = False) -> list[Line]:
    """The lines of a table.

    Args:
        found: what ``explained`` returned.
        every: each site alone, instead of repeated layers together.
    """
    target = " ".join(found["target"])
    if found["problem"] is not None:
        return _plain(wrapped(f"{target}: {found['problem']}."))
    groups = grouped(found, every=every)
    left_out = 0 if every else _shorten(groups)
    lines = [*_head(found, target), ("", False), *_table(groups, left_out)]
    for part in (_rules(found), _round_trips(found), _odd_shapes(found), _unreached(found)):
        listed = list(part)
        lines += [("", False), *listed] if listed else []
    lines.append(("", False))
    for note in found["notes"]:
        lines += _plain(wrapped(f"Note: {note}."))
    return lines + _plain(wrapped(_help(found)))


def _head(found: Mapping[str, Any], target: str) -> Iterator[Line]:
    totals, unit = found["totals"], found["unit"]
    where = "this CPU" if found["device"] == "cpu" else found["device"]
    for line in wrapped(f"{target}: {found['format']} on {where}, by the policy {found['policy']}"):
        yield line, True
    parts = [
        f"Casts: {count_text(totals['casts'])} of {count_text(totals['ops'])} operations a {unit} "
        f"({percent(totals['cast_share_of_ops'])})",
        f"{size_text(totals['cast_bytes'])} of {size_text(totals['moved_bytes'])} read and written "
        f"({percent(totals['cast_share_of_bytes'])})",
        f"{percent(totals['cast_share_of_time'])} of the time",
    ]
    yield from _plain(wrapped(f"{', '.join(parts)}."))
    narrow = totals["narrow_share_of_product_time"]
    if narrow is None:
        yield from _plain(wrapped(f"Products: none that took time in {_steps(found)}."))
    else:
        yield from _plain(
            wrapped(
                f"Products: {percent(totals['product_share_of_time'])} of the time, of which "
                f"{percent(narrow)} in a format narrower than fp32."
            )
        )


def _table(groups: Sequence[Group], left_out: int) -> Iterator[Line]:
    yield (
        f"{'module, operator':<{_OP + 2}}{'calls':>{_CALLS}}  {'in':<{_IN}}{'as':<{_AS}}{'out':<{_OUT}}"
        f"{'by':<{_BY}}{'casts':>{_BYTES}}{'time':>{_TIME}}",
        True,
    )
    for group in groups:
        name = f"{group.name}  x {group.paths}" if group.paths > 1 else group.name
        yield name if len(name) <= _WIDTH else f"{name[: _WIDTH - 2]}..", False
        for row in group.rows:
            yield _row(row), False
    if left_out:
        yield f"and {left_out} more that took less time: --all", False


def _row(row: OpRow) -> str:
    size = size_text(row.cast_bytes) if row.casts else "-"
    return (
        f"  {_fit(row.op, _OP)}{count_text(row.calls):>{_CALLS}}  {_fit(row.inputs, _IN)}"
        f"{_fit(row.computes, _AS)}{_fit(row.outputs, _OUT)}{_fit(row.by, _BY)}{size:>{_BYTES}}"
        f"{percent(row.time_share).removesuffix(' %'):>{_TIME}}"
    )


def _fit(text: str, width: int) -> str:
    return f"{text:<{width}}" if len(text) < width else f"{text[: width - 3]}.. "


def _shorten(groups: list[Group]) -> int:
    """Leave out the rows that took the least time where there are too many; returns how many."""
    times = sorted((row.duration_s for group in groups for row in group.rows), reverse=True)
    if len(times) <= _MOST_ROWS:
        return 0
    least = times[_MOST_ROWS - 1]
    left_out = 0
    for group in groups:
        kept = [row for row in group.rows if row.duration_s >= least]
        left_out += len(group.rows) - len(kept)
        group.rows[:] = kept
    groups[:] = [group for group in groups if group.rows]
    return left_out


def _rules(found: Mapping[str, Any]) -> Iterator[Line]:
    for number, rule in enumerate(rules_of(found["sites"]), start=1):
        yield from _plain(wrapped(f"rule {number}: {rule}"))


def _round_trips(found: Mapping[str, Any]) -> Iterator[Line]:
    trips = round_trips_in_words(found)
    if not trips:
        return
    yield f"Cast there and back again, a {found['unit']}", True
    for trip in trips[:_MOST_LISTED]:
        often = f"{count_text(trip['count'])} time{'s' * (trip['count'] != 1)}"
        yield from _plain(wrapped(f"{trip['words']}: {often}, {size_text(trip['moved_bytes'])}", first="  "))
    yield from _more(trips)


def round_trips_in_words(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The round trips with their ``words``, those of repeated layers together, the most bytes first."""
    several = has_several_models(found)

    def words(trip: Mapping[str, Any]) -> str:
        first, second = called(trip["first"], several=several), called(trip["second"], several=several)
        return f"{' > '.join(trip['formats'])}: {first}, then {second}"

    trips = merged(found["round_trips"], words, ("count", "moved_bytes"))
    return sorted(trips, key=lambda trip: -trip["moved_bytes"])


def _odd_shapes(found: Mapping[str, Any]) -> Iterator[Line]:
    shapes = odd_shapes_in_words(found)
    if not shapes:
        return
    share = sum(shape["product_time_share"] for shape in shapes)
    known = found["totals"]["narrow_share_of_product_time"] is not None
    said = percent(share if known else None)
    yield f"Sizes that are no multiple of what tensor cores take: {said} of the product time", True
    for shape in shapes[:_MOST_LISTED]:
        part = percent(shape["product_time_share"] if known else None)
        yield from _plain(wrapped(f"{part:>5}  {shape['words']}", first="  "))
    yield from _more(shapes)


def odd_shapes_in_words(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sizes that miss multiples with their ``words``, repeated layers together, the slowest first."""
    several = has_several_models(found)

    def words(shape: Mapping[str, Any]) -> str:
        size = " x ".join(map(str, shape["shape"]))
        where = place_name(shape, several=several) or "outside of modules"
        odd = ", ".join(shape["sizes"])
        return f"{shape['kind']} {size} in {where}: {odd}, not a multiple of {shape['multiple']}"

    shapes = merged(found["odd_shapes"], words, ("calls", "duration_s", "product_time_share"))
    return sorted(shapes, key=lambda shape: -shape["duration_s"])


def _unreached(found: Mapping[str, Any]) -> Iterator[Line]:
    rules = found["unreached"]
    if not rules:
        return
    yield "Rules that no call reached", True
    uncalled = [rule["rule"] for rule in rules if rule["reason"].endswith(" was not called")]
    for rule in rules:
        if rule["rule"] not in uncalled:
            yield from _plain(wrapped(f"{rule['rule']}: {rule['reason']}", first="  "))
    if uncalled:
        yield from _plain(wrapped(f"their operator was not called: {'; '.join(uncalled)}", first="  "))


def _more(listed: Sequence[Any]) -> Iterator[Line]:
    if len(listed) > _MOST_LISTED:
        yield f"  and {len(listed) - _MOST_LISTED} more: --json", False


def _help(found: Mapping[str, Any]) -> str:
    unit = found["unit"]
    return (
        f"Of a {unit}, from {_steps(found)}. in, out: formats of the floating tensors; as: what autocast "
        "cast the inputs to, none: they stay; by: the rule that decided, PyTorch's table, unlisted (autocast "
        "leaves it alone), asked (a cast by the script), - (autocast has no say); "
        "casts: what was read and written to cast; time: percent of the time of all operations, without "
        "Python. Watching slows small operations most: narrowcast doctor says how long a step takes."
    )


def _steps(found: Mapping[str, Any]) -> str:
    steps = found["steps"]
    return f"{steps} {found['unit']}{'s' * (steps != 1)} that {'were' if steps != 1 else 'was'} watched"


def called(place: Mapping[str, str], *, several: bool = False) -> str:
    """A call in words: ``linear in blocks.0.mlp``, ``_to_copy in the backward of head``."""
    where = place_name(place, several=several)
    if place["phase"] == "backward":
        return f"{place['op']} in the backward{f' of {where}' if where else ''}"
    if place["phase"] == "optimizer":
        return f"{place['op']} in the optimizer"
    return f"{place['op']} {f'in {where}' if where else 'outside of modules'}"


def count_text(count: float) -> str:
    """A number of calls: ``12``, ``1.5``, ``120k``, ``3e8``."""
    if count >= 1e5:
        power = len(f"{count:.0f}") - 1
        return f"{count / 10**power:.0f}e{power}" if power > 5 else f"{count / 1e3:.0f}k"
    if 0 < count < 0.01:
        return "<.01"
    return f"{count:.0f}" if count == int(count) or count >= 100 else f"{count:.2g}"


def size_text(count: float) -> str:
    """Bytes in two digits or more: ``1.2 MiB``."""
    for factor, unit in _UNITS:
        if count >= factor:
            value = count / factor
            return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
    return f"{count:.0f} B"


def percent(share: float | None) -> str:
    """``12 %``, ``<1 %``; ``-`` for what is not known."""
    if share is None:
        return "-"
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def wrapped(text: str, *, first: str = "", then: str | None = None) -> list[str]:
    """``text`` in lines of at most 79 columns."""
    whole = text.replace(" %", "\u00a0%")
    lines = textwrap.wrap(
        whole,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=f"{first}  " if then is None else then,
        break_on_hyphens=False,
    )
    return [line.replace("\u00a0", " ") for line in lines]


def _plain(lines: Sequence[str]) -> list[Line]:
    return [(line, False) for line in lines]
