"""Sites put together for a person: repeated layers are one row, what decides nothing is left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
# In a sentence a number alone is no part of a path.
_IN_PATH = re.compile(r"(?<=\.)\d+(?=\.|\b)")
_SILENT = ("view", "no floats")
_SUMS = ("calls", "wanted_casts", "casts", "cast_bytes", "duration_s")
IN_BACKWARD, IN_OPTIMIZER, OUTSIDE = "backward", "optimizer", "outside of modules"
TABLE, UNLISTED, ASKED, NOTHING = "table", "unlisted", "asked", "-"


@dataclass(slots=True, kw_only=True)
class OpRow:
    """Calls of one operator with one decision, in one module or in several that are alike.

    Attributes:
        op: with what it is inside of: ``"einsum > bmm"``.
        inputs, computes, outputs: formats in words; ``computes`` is ``""`` where nothing is cast.
        by: ``"table"``, ``"rule 2"``, ``"unlisted"``, ``"asked"`` for a cast that the script asked
            for, or ``"-"`` where autocast has no say.
        calls, wanted_casts, casts, cast_bytes, duration_s: of one step, all sites together.
        time_share: of everything that was watched; None where no time was measured.
        sites: how many there are.
    """

    op: str
    inputs: str
    computes: str
    outputs: str
    by: str
    calls: float = 0
    wanted_casts: float = 0
    casts: float = 0
    cast_bytes: float = 0
    duration_s: float = 0.0
    time_share: float | None = None
    sites: int = 0


@dataclass(slots=True, kw_only=True)
class Group:
    """A module, or several whose paths differ in numbers alone, with its rows.

    Attributes:
        name: its path, numbers that differ as ``*``; the model's class for the model itself.
        paths: how many there are.
        rows: in the order in which they ran first.
    """

    name: str
    paths: int
    rows: list[OpRow] = field(default_factory=list)


def grouped(found: Mapping[str, Any], *, every: bool = False) -> list[Group]:
    """The rows of a table.

    Args:
        found: what ``explained`` returned.
        every: each site alone, those that compute nothing too; else repeated layers together, and backward
            and the optimizer as one group each.
    """
    sites = [site for site in found["sites"] if every or site["kind"] not in _SILENT]
    several = has_several_models(found)
    rules = {rule: f"rule {number}" for number, rule in enumerate(rules_of(sites), start=1)}
    by_path: dict[str, dict[tuple[Any, ...], OpRow]] = {}
    for site in sites:
        row = _row(site, rules)
        of_path = by_path.setdefault(_name(site, several=several, every=every), {})
        same = (row.op, row.inputs, row.computes, row.outputs, row.by)
        _add(of_path.setdefault((len(of_path), *same) if every else same, row), row)
    groups = [Group(name=name, paths=1, rows=list(rows.values())) for name, rows in by_path.items()]
    return groups if every else _alike(groups)


def _alike(groups: list[Group]) -> list[Group]:
    """Modules whose paths differ in numbers alone, with the same rows, as one."""
    found: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        rows = tuple((row.op, row.inputs, row.computes, row.outputs, row.by) for row in group.rows)
        found.setdefault((_NUMBER.sub("*", group.name), rows), []).append(group)
    patterns = [pattern for pattern, _ in found]
    merged = []
    for (pattern, _), same in found.items():
        first = same[0]
        for other in same[1:]:
            for row, more in zip(first.rows, other.rows, strict=True):
                _add(row, more)
        if len(same) > 1:
            first.paths = len(same)
            once = patterns.count(pattern) == 1
            first.name = pattern if once else _with_numbers(pattern, [group.name for group in same])
        merged.append(first)
    return merged


def _with_numbers(pattern: str, names: Sequence[str]) -> str:
    """``"blocks.{0,2-5}.norm"`` where one number alone differs; else the pattern."""
    numbers = [_NUMBER.findall(name) for name in names]
    differing = [at for at in range(len(numbers[0])) if len({each[at] for each in numbers}) > 1]
    if len(differing) != 1:
        return pattern
    ranges: list[list[int]] = []
    for number in sorted(int(each[differing[0]]) for each in numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    listed = ",".join("-".join(map(str, each)) for each in ranges)
    parts = iter(numbers[0])
    places = iter(range(len(numbers[0])))
    return _NUMBER.sub(
        lambda _: f"{{{listed}}}" if next(places) == differing[0] and next(parts) else next(parts), names[0]
    )


def has_several_models(found: Mapping[str, Any]) -> bool:
    """Whether paths need the class of their model to be told apart."""
    return len({site["root"] for site in found["sites"] if site["root"]}) > 1


def place_name(place: Mapping[str, Any], *, several: bool) -> str:
    """The path of a module, after its model's class where there are ``several``; empty outside of modules."""
    root, path = place["root"], place["path"]
    return f"{root}.{path}" if several and path else path or root


def merged(
    events: Iterable[Mapping[str, Any]], words: Callable[[Mapping[str, Any]], str], sums: Sequence[str]
) -> list[dict[str, Any]]:
    """Events whose ``words`` differ in numbers of paths alone as one, ``sums`` added up, ``words`` in it.

    Args:
        events: round trips or sizes, as ``explained`` has them.
        words: what is said of one, in which paths are dotted.
        sums: fields that are added; None counts as nothing.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        found.setdefault(_IN_PATH.sub("*", words(event)), []).append(event)
    return [
        {
            **same[0],
            **{name: sum(event[name] or 0 for event in same) for name in sums},
            "words": pattern if len(same) > 1 else words(same[0]),
        }
        for pattern, same in found.items()
    ]


def rules_of(sites: Iterable[Mapping[str, Any]]) -> list[str]:
    """The rules that decided about a site, in the order in which they did first."""
    return list(dict.fromkeys(site["rule"] for site in sites if site["rule"] is not None))


def words_of(formats: Sequence[str]) -> str:
    """``"fp32+bf16"``; ``"-"`` where there is no floating tensor."""
    return "+".join(formats) or NOTHING


def _name(site: Mapping[str, Any], *, several: bool, every: bool) -> str:
    whole, phase = place_name(site, several=several), site["phase"]
    if phase == "optimizer":
        return IN_OPTIMIZER
    if phase == "backward":
        return f"{IN_BACKWARD} of {whole}" if every and whole else IN_BACKWARD
    return whole or OUTSIDE


def _row(site: Mapping[str, Any], rules: Mapping[str, str]) -> OpRow:
    by = TABLE if site["listed"] else UNLISTED
    if site["rule"] is not None:
        by = rules[site["rule"]]
    elif site["phase"] in ("backward", "optimizer") or (
        not site["listed"] and site["because"][:8] != UNLISTED
    ):
        by = NOTHING
    elif site["kind"] == "cast" and by == UNLISTED:
        by = ASKED
    return OpRow(
        op=" > ".join([*site["within"][-1:], site["op"]]),
        inputs=words_of(site["inputs"]),
        computes="fp8" if (site["computes"] or "").startswith("fp8") else site["computes"] or "",
        outputs=words_of(site["outputs"]),
        by=by,
        sites=1,
        time_share=site["time_share"],
        **{name: site[name] for name in _SUMS},
    )


def _add(row: OpRow, more: OpRow) -> None:
    if row is more:
        return
    for name in (*_SUMS, "sites"):
        setattr(row, name, getattr(row, name) + getattr(more, name))
    if more.time_share is not None:
        row.time_share = (row.time_share or 0.0) + more.time_share
