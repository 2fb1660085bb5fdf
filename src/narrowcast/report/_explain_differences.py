"""How the decisions of two policies, or of two moments, differ site by site."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from narrowcast.observe.explanation import has_several_models, place_name
from narrowcast.report._text import printable

_WIDTH = 79
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_MOST = 40
_SILENT = ("view", "no floats")
UNLISTED = "unlisted"
_AS_FORWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What became of one operator at one place.

    Attributes:
        module: its path in the model, with the model's class before it where several models were called;
            empty outside of modules.
        op: with the operators that it is inside of: ``"einsum > bmm"``.
        inputs, outputs: formats, as ``"fp32+bf16"``.
        computes: what the inputs were cast to; empty: they stayed.
        by: ``"table"``, ``"unlisted"``, or the rule.
        calls: in one step.
    """

    module: str
    op: str
    inputs: str
    computes: str
    outputs: str
    by: str
    calls: float

    @property
    def words(self) -> str:
        """The same but for the place: ``fp32 as bf16 -> bf16, by table``."""
        by = self.by if self.by == UNLISTED else f"by {self.by}"
        computes = f" as {self.computes}" if self.computes else ""
        times = "" if self.calls == 1 else f", {self.calls:g} calls"
        return f"{self.inputs}{computes} -> {self.outputs}, {by}{times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One operator at one place about which it was decided otherwise; an empty side: it is not there."""

    module: str
    op: str
    before: tuple[Decided, ...]
    after: tuple[Decided, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def decided_sites(found: Mapping[str, Any]) -> list[Decided]:
    """The decisions in what ``observe.explained`` returned, in the order in which they were made first.

    What ran outside of every region is left out, backward and the optimizer too: nothing is decided there;
    and so is what computes nothing.
    """
    sites = [site for site in found["sites"] if site["kind"] not in _SILENT and _is_decided(site)]
    several = has_several_models(found)
    return [_decided(site, several=several) for site in sites]


def _is_decided(site: Mapping[str, Any]) -> bool:
    if site["because"].startswith(_AS_FORWARD):
        return False
    return bool(site["listed"] or site["rule"] is not None or site["because"].startswith(UNLISTED))


def _decided(site: Mapping[str, Any], *, several: bool) -> Decided:
    by = site["rule"] or ("table" if site["listed"] else UNLISTED)
    return Decided(
        module=printable(place_name(site, several=several)),
        op=printable(" > ".join([*site["within"], site["op"]])),
        inputs="+".join(site["inputs"]) or "-",
        computes=site["computes"] or "",
        outputs="+".join(site["outputs"]) or "-",
        by=printable(by),
        calls=site["calls"],
    )


def differences(before: Iterable[Decided], after: Iterable[Decided]) -> list[Difference]:
    """Where the two differ, in the order of ``before``, then what only ``after`` has."""
    old, new = _by_place(before), _by_place(after)
    return [
        Difference(module=module, op=op, before=tuple(old.get(place, ())), after=tuple(new.get(place, ())))
        for place in {**old, **new}
        for module, op in [place]
        if old.get(place) != new.get(place)
    ]


def _by_place(sites: Iterable[Decided]) -> dict[tuple[str, str], list[Decided]]:
    found: dict[tuple[str, str], list[Decided]] = {}
    for site in sites:
        found.setdefault((site.module, site.op), []).append(site)
    return found


def differences_text(found: Sequence[Difference], before: str, after: str, *, every: bool = False) -> str:
    """The differences in lines of at most 79 columns, repeated layers together.

    Args:
        found: what ``differences`` returned.
        before, after: what the two are called, as names of policies.
        every: each place alone.
    """
    groups: dict[tuple[Any, ...], list[Difference]] = {}
    for one in found:
        pattern = one.module if every else _NUMBER.sub("*", one.module)
        sides = tuple(tuple(site.words for site in side) for side in (one.before, one.after))
        groups.setdefault((pattern, one.op, sides), []).append(one)
    width = max(len(before), len(after))
    lines = []
    for (pattern, op, sides), same in list(groups.items())[: None if every else _MOST]:
        where = (f"{pattern}  x {len(same)}" if len(same) > 1 else same[0].module) or "outside of modules"
        lines += _wrap(f"{where}: {op}", "  ")
        for name, side in zip((before, after), sides, strict=True):
            for words in side or ("not called",):
                lines += _wrap(f"{name:<{width}}  {words}", "    ")
    if len(groups) > _MOST and not every:
        lines.append(f"and {len(groups) - _MOST} more: --all")
    return "\n".join(lines)


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_on_hyphens=False,
    )
