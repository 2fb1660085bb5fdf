"""The lock file: every decision of a policy in a model, to be kept beside the script and checked later.

TOML, one line a site, the same text for the same decisions, so that version control shows what changed. A
policy's file is written as it is seen from the lock's folder, from which it is found wherever one checks.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast.errors import FileError
from narrowcast.report._explain_differences import Decided, decided_sites
from narrowcast.report._text import printable

VERSION = 1
_HEAD = "# What ran in which format: narrowcast explain --lock wrote it, --check compares.\n"
_FACTS = ("policy", "torch", "device", "format")
_SITE: dict[str, type | tuple[type, ...]] = {
    "module": str,
    "op": str,
    "ordinal": int,
    "in": str,
    "as": str,
    "out": str,
    "by": str,
    "calls": (int, float),
}
_ADVICE = "write it anew with narrowcast explain --lock"


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


def lock_of(found: Mapping[str, Any]) -> Lock:
    """The lock of what ``observe.explained`` returned."""
    gpu = found["versions"].get("gpu")
    named = f"{found['device']}: {gpu}" if gpu and found["device"] == "cuda" else found["device"]
    return Lock(
        policy=_moved(found["policy"], Path(), Path()),
        torch=str(found["versions"].get("torch", "unknown")),
        device=printable(str(named)),
        format=found["format"],
        sites=tuple(decided_sites(found)),
    )


def lock_text(lock: Lock) -> str:
    """The file's text; the same for the same lock."""
    lines = [_HEAD, f"version = {VERSION}\n"]
    lines += [f"{name} = {_string(getattr(lock, name))}\n" for name in _FACTS]
    lines.append("sites = [\n")
    seen: dict[tuple[str, str], int] = {}
    for site in lock.sites:
        place = (site.module, site.op)
        seen[place] = seen.get(place, 0) + 1
        fields = {
            "module": _string(site.module),
            "op": _string(site.op),
            "ordinal": str(seen[place]),
            "in": _string(site.inputs),
            "as": _string(site.computes),
            "out": _string(site.outputs),
            "by": _string(site.by),
            "calls": repr(site.calls),
        }
        lines.append(f"  {{{', '.join(f'{name} = {value}' for name, value in fields.items())}}},\n")
    return "".join([*lines, "]\n"])


def write_lock(lock: Lock, path: Path) -> None:
    """Write the file whole or not at all.

    Raises:
        FileError: it cannot be written.
    """
    part = path.parent / f".{path.name[:100]}.{os.getpid()}.part"
    try:
        text = lock_text(replace(lock, policy=_moved(lock.policy, Path(), path.parent)))
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise FileError(f"cannot write the lock file {path}: {error.strerror}") from error


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        FileError: it cannot be read, is no lock file, or is of a newer version.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read the lock file {path}: {error.strerror}") from error
    except ValueError as error:
        raise FileError(f"{path} is no lock file: {error}; {_ADVICE}") from error
    version = values.get("version")
    if isinstance(version, int) and version > VERSION:
        raise FileError(
            f"{path} is of version {version}, and this narrowcast reads up to {VERSION}: update narrowcast, "
            f"or {_ADVICE}"
        )
    sites = values.get("sites")
    if not isinstance(sites, list) or not all(isinstance(one, dict) for one in sites):
        sites = None
    if version != VERSION or sites is None or not all(isinstance(values.get(name), str) for name in _FACTS):
        raise FileError(f"{path} is no lock file: expected version, {', '.join(_FACTS)} and sites; {_ADVICE}")
    facts = {name: values[name] for name in _FACTS}
    facts["policy"] = _moved(facts["policy"], path.parent, Path())
    return Lock(**facts, sites=tuple(_site(one, path) for one in sites))


def _moved(policy: str, seen_from: Path, to: Path) -> str:
    """``policy``, which is seen from one folder, as it is seen from another; names of presets stay."""
    if not policy.endswith(".toml") and "/" not in policy:
        return policy
    try:
        moved = os.path.relpath(seen_from / policy, to)
    except ValueError:  # on another drive
        return str(Path(seen_from / policy).absolute())
    moved = Path(moved).as_posix()
    return moved if moved.endswith(".toml") or "/" in moved else f"./{moved}"


def _site(values: dict[str, Any], path: Path) -> Decided:
    wrong = values.keys() ^ _SITE.keys()
    wrong |= {name for name in _SITE.keys() & values.keys() if not isinstance(values[name], _SITE[name])}
    if wrong:
        raise FileError(f"{path} has a site with a wrong or missing {sorted(wrong)[0]!r}; {_ADVICE}")
    return Decided(
        module=values["module"],
        op=values["op"],
        inputs=values["in"],
        computes=values["as"],
        outputs=values["out"],
        by=values["by"],
        calls=values["calls"],
    )


def facts_changed(before: Lock, after: Lock) -> list[str]:
    """What is around the decisions and changed, in words: ``torch 2.12.0 is now 2.13.0``."""
    return [
        f"{name} {getattr(before, name)} is now {getattr(after, name)}"
        for name in _FACTS
        if getattr(before, name) != getattr(after, name)
    ]


def _string(text: str) -> str:
    """As TOML writes it; printable text needs no more escapes than JSON's."""
    return json.dumps(printable(text), ensure_ascii=False)
