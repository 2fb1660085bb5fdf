"""What ``narrowcast explain`` shows: its text and panel, where two policies differ, and the lock file."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from narrowcast._files import replacing
from narrowcast.errors import FileError
from narrowcast.observe.capture import EXPLANATION
from narrowcast.observe.explanation import (
    LAYER_NUMBER,
    NOTHING,
    OUTSIDE,
    SILENT,
    UNLISTED,
    columns_of,
    explained,
    explained_lines,
    explained_parts,
    place_names,
    read_explanation,
)
from narrowcast.report._render import terminal_text
from narrowcast.report._text import bold, printable, shortened

VERSION = 1
"""Of the lock file."""
_MOST = 40
_MOST_LINES = 800
_HEAD = "# What ran in which format: narrowcast explain --lock wrote it, --check compares.\n"
_FACTS = ("policy", "torch", "device", "format")
_ADVICE = "write it anew with narrowcast explain --lock"


def explain_text(
    found: Mapping[str, Any], *, whole: bool = False, every: bool = False, color: bool = False
) -> str:
    """Return what ``narrowcast explain`` found in lines of at most 79 columns.

    The rows that cost most; with ``whole`` all others too, and with ``every`` each site alone.
    """
    lines = [(printable(text), heading) for text, heading in explained_lines(found, whole=whole, every=every)]
    return "\n".join(bold(text) if heading and color else text for text, heading in lines)


def explain_panel(folder: Path) -> dict[str, Any] | None:
    """Return what the panel of a page shows of the capture of ``narrowcast explain`` in ``folder``.

    None if there is none. ``problem`` is why there is nothing else; ``lines`` are those of the table, and
    ``every`` the same with each site alone, both with the number of lines that are in the capture only.
    """
    try:
        if not (folder / EXPLANATION).is_file():
            return None
        capture = read_explanation(folder / EXPLANATION)
    except (FileError, OSError) as error:
        return {"problem": shortened(str(error), 400)}
    found = explained(capture)
    parts = explained_parts(found)
    every = explained_parts(found, every=True)["groups"]
    costly = list[tuple[Any, ...]]()
    for group, *row in parts["costly"]:
        costly += [(group, None, None), (group, *row)]
    return parts | {
        "problem": found["problem"],
        # In the folder of a comparison it is of another run, which its date shows.
        "started": capture.start["started"],
        "costly": (costly, 0),
        "lines": _lines(parts["groups"], _MOST_LINES // 2),
        "every": _lines(every, _MOST_LINES),
    }


def _lines(groups: Iterable[Any], most: int) -> tuple[list[tuple[Any, ...]], int]:
    """Return at most so many lines of a table, a module or an operator each, and how many are left out."""
    lines = [(group, *row) for group in groups for row in ((None, None), *group.rows.items())]
    return lines[:most], max(0, len(lines) - most)


# ---- decisions, and how two lists of them differ


class Decided(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"inputs": "in", "computes": "as", "outputs": "out"},
):
    """What was decided about one operator in one module, as in a lock file.

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
    calls: int | float

    @property
    def words(self) -> str:
        """All but the place: ``fp32 as bf16 -> bf16, by table``."""
        by = self.by if self.by == UNLISTED else f"by {self.by}"
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
        sides = {"before": self.before, "after": self.after}
        decided = {name: [msgspec.structs.asdict(site) for site in side] for name, side in sides.items()}
        return {"module": self.module, "op": self.op} | decided


def decided_sites(found: Mapping[str, Any]) -> list[Decided]:
    """Return the decisions in what ``observe.explained`` returned, in the order of the first call.

    Without what computes nothing, and without backward, the optimizer and code outside of regions, in which
    nothing is decided.
    """
    name_of, decided = place_names(found), []
    for site in found["sites"]:
        columns = columns_of(site)
        if site["kind"] in SILENT or columns.by == NOTHING or site["because"].startswith("backward"):
            continue
        values = {name: printable(value) for name, value in columns._asdict().items()}
        values["by"] = UNLISTED if columns.by == "asked" else values["by"]
        decided.append(Decided(module=printable(name_of(site)), calls=site["calls"], **values))
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


def differences_text(
    found: Sequence[Difference], sides: tuple[str, str], template: str, *, every: bool, **values: Any
) -> str:
    """Return differences in lines of at most 79 columns, repeated layers together unless ``every``."""
    together: dict[tuple[Any, ...], list[Difference]] = {}
    for one in found:
        pattern = one.module if every else LAYER_NUMBER.sub("*", one.module)
        words = tuple(tuple(site.words for site in side) for side in (one.before, one.after))
        together.setdefault((pattern, one.op, words), []).append(one)
    width = max(map(len, sides))
    shown = [
        {
            "where": (f"{pattern}  x {len(same)}" if len(same) > 1 else same[0].module) or OUTSIDE,
            "op": op,
            "sides": [
                (name.ljust(width), decided or ("not called",))
                for name, decided in zip(sides, words, strict=True)
            ],
        }
        for (pattern, op, words), same in together.items()
    ]
    most = len(shown) if every else _MOST
    return terminal_text(
        template, count=len(found), groups=shown[:most], left_out=max(0, len(shown) - most), **values
    )


def policies_text(
    one: Mapping[str, Any], other: Mapping[str, Any], found: Sequence[Difference], *, every: bool = False
) -> str:
    """Return where two policies decide differently about a script, and what each costs."""
    names = (one["policy"], other["policy"])
    padded = [(each["policy"].ljust(max(map(len, names))), each) for each in (one, other)]
    return differences_text(found, names, "policies.txt", every=every, one=one, other=other, names=padded)


def check_text(before: Lock, after: Lock, found: Sequence[Difference], path: str, *, every: bool) -> str:
    """Return what became of the decisions in a lock file."""
    values = {"before": before, "around": facts_changed(before, after), "path": path}
    return differences_text(found, ("locked", "now"), "check.txt", every=every, **values)


# ---- the lock file: TOML, one line a site, the same text for the same decisions


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a lock file.

    Attributes:
        version: of the file's format.
        policy: the name that was asked for, or the file, as seen from the working directory.
        torch: the version that decided.
        device: type of the device, with the name of a GPU.
        format: the region's.
        sites: the decisions.
    """

    version: int = VERSION
    policy: str
    torch: str
    device: str
    format: str
    sites: tuple[Decided, ...]


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
    values = msgspec.to_builtins(lock) | {"policy": _moved(lock.policy, Path(), path.parent)}
    lines = [_HEAD, *(f"{name} = {_toml(values[name])}\n" for name in ("version", *_FACTS)), "sites = [\n"]
    for site in values["sites"]:
        lines.append(f"  {{{', '.join(f'{name} = {_toml(value)}' for name, value in site.items())}}},\n")
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
        lock = msgspec.convert(values, Lock)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"cannot read the lock file {path}: {error.strerror}") from error
    except ValueError as error:
        raise FileError(f"{path} is not a lock file: {error}; {_ADVICE}") from error
    return msgspec.structs.replace(lock, policy=_moved(lock.policy, path.parent, Path()))


def facts_changed(before: Lock, after: Lock) -> list[str]:
    """Return what changed besides the decisions, in words: ``torch 2.12.0 is now 2.13.0``."""
    return [
        f"{name} {getattr(before, name)} is now {getattr(after, name)}"
        for name in _FACTS
        if getattr(before, name) != getattr(after, name)
    ]


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
