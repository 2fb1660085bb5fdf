"""Text of ``narrowcast explain``, the differences between two policies, and the lock file of decisions."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from narrowcast._files import replacing
from narrowcast.errors import FileError
from narrowcast.observe.explanation import (
    LAYER_NUMBER,
    bytes_text,
    count_text,
    explained_lines,
    has_several_models,
    percent,
    place_name,
    wrapped,
)
from narrowcast.report._text import printable

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
VERSION = 1
"""Of the lock file."""
_MOST = 40
_SILENT = ("view", "no floats")
_UNLISTED = "unlisted"
_HEAD = "# What ran in which format: narrowcast explain --lock wrote it, --check compares.\n"
_FACTS = ("policy", "torch", "device", "format")
_ADVICE = "write it anew with narrowcast explain --lock"


def explain_text(found: Mapping[str, Any], *, every: bool = False, color: bool = False) -> str:
    """Return the result of ``narrowcast explain`` in lines of at most 79 columns.

    Args:
        found: what ``observe.explained`` or ``verify.explain_script`` returned.
        every: each site alone, instead of repeated layers together.
        color: whether to use bold type.
    """
    lines = [(printable(text), heading) for text, heading in explained_lines(found, every=every)]
    return "\n".join(f"{BOLD}{text}{PLAIN}" if heading and color else text for text, heading in lines)


# ---- decisions, and how two lists of them differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What was decided about one operator in one module.

    Attributes:
        module: its path, after the class of its model if there are several; empty outside of modules.
        op: with the operators around it: ``"einsum > bmm"``.
        inputs, outputs: formats, as ``"fp32+bf16"``.
        computes: what the inputs were cast to, or empty.
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
        """All but the place: ``fp32 as bf16 -> bf16, by table``."""
        by = self.by if self.by == _UNLISTED else f"by {self.by}"
        computes = f" as {self.computes}" if self.computes else ""
        times = "" if self.calls == 1 else f", {self.calls:g} calls"
        return f"{self.inputs}{computes} -> {self.outputs}, {by}{times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One operator in one module with other decisions; an empty side: it was not called."""

    module: str
    op: str
    before: tuple[Decided, ...]
    after: tuple[Decided, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return asdict(self)


def decided_sites(found: Mapping[str, Any]) -> list[Decided]:
    """Return the decisions in what ``observe.explained`` returned, in the order of the first call.

    Without what computes nothing, and without backward, the optimizer and code outside of regions, in which
    nothing is decided.
    """
    several, decided = has_several_models(found), []
    for site in found["sites"]:
        by = site["rule"] or ("table" if site["listed"] else _UNLISTED)
        in_region = by != _UNLISTED or site["because"].startswith(_UNLISTED)
        if site["kind"] in _SILENT or not in_region or site["because"].startswith("backward"):
            continue
        decided.append(
            Decided(
                module=printable(place_name(site, several=several)),
                op=printable(" > ".join([*site["within"], site["op"]])),
                inputs="+".join(site["inputs"]) or "-",
                computes=site["computes"] or "",
                outputs="+".join(site["outputs"]) or "-",
                by=printable(by),
                calls=site["calls"],
            )
        )
    return decided


def differences(before: Iterable[Decided], after: Iterable[Decided]) -> list[Difference]:
    """Return where the two differ, in the order of ``before``, then what only ``after`` has."""
    places: dict[tuple[str, str], tuple[list[Decided], list[Decided]]] = {}
    for side, sites in enumerate((before, after)):
        for site in sites:
            places.setdefault((site.module, site.op), ([], []))[side].append(site)
    return [
        Difference(module=module, op=op, before=tuple(old), after=tuple(new))
        for (module, op), (old, new) in places.items()
        if old != new
    ]


def differences_text(found: Sequence[Difference], before: str, after: str, *, every: bool = False) -> str:
    """Return differences in lines of at most 79 columns, repeated layers together.

    Args:
        found: what ``differences`` returned.
        before, after: names of the two sides, as of policies.
        every: each place alone.
    """
    groups: dict[tuple[Any, ...], list[Difference]] = {}
    for one in found:
        pattern = one.module if every else LAYER_NUMBER.sub("*", one.module)
        sides = tuple(tuple(site.words for site in side) for side in (one.before, one.after))
        groups.setdefault((pattern, one.op, sides), []).append(one)
    width = max(len(before), len(after))
    lines = []
    for (pattern, op, sides), same in list(groups.items())[: None if every else _MOST]:
        where = (f"{pattern}  x {len(same)}" if len(same) > 1 else same[0].module) or "outside of modules"
        lines += wrapped(f"{where}: {op}", first="  ", then="      ")
        for name, side in zip((before, after), sides, strict=True):
            for words in side or ("not called",):
                lines += wrapped(f"{name:<{width}}  {words}", first="    ", then="        ")
    if len(groups) > _MOST and not every:
        lines.append(f"and {len(groups) - _MOST} more: --all")
    return "\n".join(lines)


def policies_text(
    one: Mapping[str, Any], other: Mapping[str, Any], found: Sequence[Difference], *, every: bool = False
) -> str:
    """Return where two policies decide differently about a script, and what each costs."""
    names = [printable(each["policy"]) for each in (one, other)]
    target = printable(" ".join(one["target"]))
    what = "decide the same about every operator that it called"
    if found:
        what = f"differ about {len(found)} operator{'s' * (len(found) != 1)} in its modules"
    lines = wrapped(f"{target}: the policies {names[0]} and {names[1]} {what}.")
    if found:
        lines += ["", differences_text(found, *names, every=every), ""]
    width = max(map(len, names))
    for name, each in zip(names, (one, other), strict=True):
        totals = each["totals"]
        lines += wrapped(
            f"{name:<{width}}  {count_text(totals['casts'])} casts a {each['unit']}, "
            f"{bytes_text(totals['cast_bytes'])}; {percent(totals['narrow_share_of_product_time'])} of the "
            "product time narrower than fp32"
        )
    return "\n".join(lines)


# ---- the lock file: TOML, one line a site, the same text for the same decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A lock file that was read.

    Attributes:
        policy: the name that was asked for, or the file, as seen from the working directory.
        torch: the version that decided.
        device: type of the device, with the name of a GPU.
        format: the region's.
        sites: the decisions.
    """

    policy: str
    torch: str
    device: str
    format: str
    sites: tuple[Decided, ...]


class _Site(
    msgspec.Struct,
    forbid_unknown_fields=True,
    rename={"inputs": "in", "computes": "as", "outputs": "out"},
):
    module: str
    op: str
    ordinal: int
    inputs: str
    computes: str
    outputs: str
    by: str
    calls: int | float


class _File(msgspec.Struct):
    version: int
    policy: str
    torch: str
    device: str
    format: str
    sites: list[_Site]


def lock_of(found: Mapping[str, Any]) -> Lock:
    """Return the lock of what ``observe.explained`` returned."""
    gpu = found["versions"].get("gpu")
    named = f"{found['device']}: {gpu}" if gpu and found["device"] == "cuda" else found["device"]
    return Lock(
        policy=_moved(found["policy"], Path(), Path()),
        torch=str(found["versions"].get("torch", "unknown")),
        device=printable(str(named)),
        format=found["format"],
        sites=tuple(decided_sites(found)),
    )


def write_lock(lock: Lock, path: Path) -> None:
    """Write the file whole or not at all.

    Raises:
        FileError: it cannot be written.
    """
    lock = replace(lock, policy=_moved(lock.policy, Path(), path.parent))
    lines = [_HEAD, f"version = {VERSION}\n"]
    lines += [f"{name} = {_toml(getattr(lock, name))}\n" for name in _FACTS]
    lines.append("sites = [\n")
    seen: dict[tuple[str, str], int] = {}
    for site in lock.sites:
        place = (site.module, site.op)
        seen[place] = seen.get(place, 0) + 1
        fields = msgspec.to_builtins(_Site(ordinal=seen[place], **asdict(site)))
        lines.append(f"  {{{', '.join(f'{name} = {_toml(value)}' for name, value in fields.items())}}},\n")
    try:
        with replacing(path) as file:
            file.write("".join([*lines, "]\n"]).encode())
    except OSError as error:
        raise FileError(f"cannot write the lock file {path}: {error.strerror}") from error


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        FileError: it cannot be read, is not a lock file, or is of a newer version.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        version = values.get("version")
        if isinstance(version, int) and version > VERSION:
            raise FileError(
                f"{path} is of version {version}, and this narrowcast reads up to {VERSION}: update "
                f"narrowcast, or {_ADVICE}"
            )
        file = msgspec.convert(values, _File)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"cannot read the lock file {path}: {error.strerror}") from error
    except ValueError as error:
        raise FileError(f"{path} is not a lock file: {error}; {_ADVICE}") from error
    sites = [{name: getattr(site, name) for name in Decided.__slots__} for site in file.sites]
    return Lock(
        policy=_moved(file.policy, path.parent, Path()),
        torch=file.torch,
        device=file.device,
        format=file.format,
        sites=tuple(Decided(**site) for site in sites),
    )


def facts_changed(before: Lock, after: Lock) -> list[str]:
    """Return what changed besides the decisions, in words: ``torch 2.12.0 is now 2.13.0``."""
    return [
        f"{name} {getattr(before, name)} is now {getattr(after, name)}"
        for name in _FACTS
        if getattr(before, name) != getattr(after, name)
    ]


def check_text(before: Lock, after: Lock, found: Sequence[Difference], path: str, *, every: bool) -> str:
    """Return what became of the decisions in a lock file."""
    around = facts_changed(before, after)
    name = printable(path)
    said = f" ({'; '.join(around)})" if around else ""
    if not found:
        return "\n".join(wrapped(f"{name}: all {len(before.sites)} decisions are as they were{said}."))
    count = f"{len(found)} decision{'s' * (len(found) != 1)}"
    lines = wrapped(f"{name}: {count} differ{'s' * (len(found) == 1)}{said}.")
    lines += ["", differences_text(found, "locked", "now", every=every), ""]
    lines += wrapped("If this is meant: write the lock anew with narrowcast explain --lock.")
    return "\n".join(lines)


def _moved(policy: str, seen_from: Path, to: Path) -> str:
    """Return the path ``policy``, relative to one folder, relative to another; names of presets stay."""
    if not policy.endswith(".toml") and "/" not in policy:
        return policy
    try:
        moved = os.path.relpath(seen_from / policy, to)
    except ValueError:  # on another drive
        return str(Path(seen_from / policy).absolute())
    moved = Path(moved).as_posix()
    return moved if moved.endswith(".toml") or "/" in moved else f"./{moved}"


def _toml(value: str | float) -> str:
    # Printable text needs no more escapes in TOML than in JSON.
    return json.dumps(printable(value), ensure_ascii=False) if isinstance(value, str) else repr(value)
