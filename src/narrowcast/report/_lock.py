"""Decisions about operators: where two lists of them differ, and the lock file that keeps one."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from narrowcast._files import replacing
from narrowcast.errors import FileError
from narrowcast.report._explanation import NOTHING, SILENT, UNLISTED, columns_of, place_names
from narrowcast.report._text import printable

VERSION = 1
"""Of the lock file."""

_FIRST_LINE = "# What ran in which format: narrowcast explain --lock wrote it, --check compares.\n"
_FACTS = ("policy", "torch", "device", "format")
_ADVICE = "write it anew with narrowcast explain --lock"


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
        text = self.inputs
        if self.computes:
            text += f" as {self.computes}"
        text += f" -> {self.outputs}, "
        if self.by != UNLISTED:
            text += "by "
        text += self.by
        if self.calls != 1:
            text += f", {self.calls:g} calls"
        return text


def decided_sites(found: Mapping[str, Any]) -> list[Decided]:
    """Return the decisions in what ``explained`` returned, in the order of the first call.

    Left out is what computes nothing, and where nothing is decided: in backward, in the optimizer and outside
    of regions.
    """
    name_of = place_names(found)
    decided = []
    for site in found["sites"]:
        columns = columns_of(site)
        # A backward pass names a rule only where it calls a module again, whose inputs the rule casts.
        if site["kind"] in SILENT or columns.by == NOTHING or site["because"].startswith("backward"):
            continue
        decided.append(
            Decided(
                module=printable(name_of(site)),
                op=printable(columns.op),
                inputs=printable(columns.inputs),
                computes=printable(columns.computes),
                outputs=printable(columns.outputs),
                by=UNLISTED if columns.by == "asked" else printable(columns.by),
                calls=site["calls"],
            )
        )
    return decided


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One operator in one module whose decisions differ; a side on which it was not called is empty."""

    module: str
    op: str
    before: tuple[Decided, ...]
    after: tuple[Decided, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return {
            "module": self.module,
            "op": self.op,
            "before": list(map(msgspec.structs.asdict, self.before)),
            "after": list(map(msgspec.structs.asdict, self.after)),
        }


def differences(before: Iterable[Decided], after: Iterable[Decided]) -> list[Difference]:
    """Return where the two differ, in the order of ``before``, then what only ``after`` has."""
    # By module and operator: the decisions in ``before``, and those in ``after``.
    places: dict[tuple[str, str], tuple[list[Decided], list[Decided]]] = {}
    for site in before:
        old, _ = places.setdefault((site.module, site.op), ([], []))
        old.append(site)
    for site in after:
        _, new = places.setdefault((site.module, site.op), ([], []))
        new.append(site)
    differing = []
    for (module, op), (old, new) in places.items():
        if old != new:
            differing.append(Difference(module=module, op=op, before=tuple(old), after=tuple(new)))
    return differing


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
    """Return the lock of what ``explained`` returned."""
    device, gpu = found["device"], found["versions"].get("gpu")
    if device == "cuda" and gpu:
        device = f"{device}: {gpu}"
    # As ``read_lock`` returns it: "./a.toml" and an absolute path are then equal to "a.toml".
    policy = _moved(found["policy"], Path(), Path())
    return Lock(
        policy=policy,
        torch=str(found["versions"].get("torch", "unknown")),
        device=printable(device),
        format=found["format"],
        sites=tuple(decided_sites(found)),
    )


def facts_changed(before: Lock, after: Lock) -> list[str]:
    """Return what changed besides the decisions, in words: ``torch 2.12.0 is now 2.13.0``."""
    changed = []
    for name in _FACTS:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            changed.append(f"{name} {old} is now {new}")
    return changed


def write_lock(lock: Lock, path: Path) -> None:
    """Write the file whole or not at all.

    Raises:
        FileError: it cannot be written.
    """
    values = msgspec.to_builtins(lock)
    # The path of a policy is written relative to the lock file, which may be read from another folder.
    values["policy"] = _moved(lock.policy, Path(), path.parent)
    lines = [_FIRST_LINE]
    for name in ("version", *_FACTS):
        lines.append(f"{name} = {_toml(values[name])}\n")
    lines.append("sites = [\n")
    for site in values["sites"]:
        fields = ", ".join(f"{name} = {_toml(value)}" for name, value in site.items())
        lines.append(f"  {{{fields}}},\n")
    lines.append("]\n")
    try:
        with replacing(path) as file:
            file.write("".join(lines).encode())
    except OSError as error:
        raise FileError(f"cannot write the lock file {path}: {error.strerror}") from error


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        FileError: it cannot be read, is not a lock file, or is of a newer version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read the lock file {path}: {error.strerror}") from error
    not_a_lock = f"{path} is not a lock file"
    try:
        values = tomllib.loads(content.decode())
    except ValueError as error:  # not UTF-8, or not TOML
        raise FileError(f"{not_a_lock}: {error}; {_ADVICE}") from error
    # Fields of a newer version may be of other types.
    _refuse_newer(values.get("version"), path)
    try:
        lock = msgspec.convert(values, Lock)
    except msgspec.ValidationError as error:
        raise FileError(f"{not_a_lock}: {error}; {_ADVICE}") from error
    return msgspec.structs.replace(lock, policy=_moved(lock.policy, path.parent, Path()))


def _refuse_newer(version: Any, path: Path) -> None:
    if isinstance(version, int) and version > VERSION:
        raise FileError(
            f"{path} is of version {version}, and this narrowcast reads up to {VERSION}: update "
            f"narrowcast, or {_ADVICE}"
        )


def _moved(policy: str, seen_from: Path, to: Path) -> str:
    """Turn a path relative to the folder ``seen_from`` into one relative to ``to``; names of presets stay."""
    if _is_preset(policy):
        return policy
    moved = Path(os.path.relpath(seen_from / policy, to)).as_posix()
    # A file name without ".toml" would be read as the name of a preset.
    if _is_preset(moved):
        return f"./{moved}"
    return moved


def _is_preset(policy: str) -> bool:
    """Return whether ``policy`` is read as the name of a preset, not as a path."""
    return not policy.endswith(".toml") and "/" not in policy


def _toml(value: str | float) -> str:
    if isinstance(value, str):
        # Printable text needs no more escapes in TOML than in JSON.
        return json.dumps(printable(value), ensure_ascii=False)
    return repr(value)
