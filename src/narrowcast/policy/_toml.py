"""Read and write a policy as a TOML file with a version.

    version = 1
    compute = "bf16"

    [[rule]]
    op = "softmax"
    compute = "fp16"

Each field of ``Policy`` and ``Rule`` is a key of the same name. A missing key has its default, or the value
of the preset that ``base = "safe"`` names. The file's rules follow those of the preset and replace rules with
the same selector. ``save`` writes the whole policy, without a base.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from narrowcast._files import replacing
from narrowcast.errors import PolicyError, near_names
from narrowcast.policy._policy import Policy
from narrowcast.policy._rule import Rule

VERSION = 1
_RULE_KEYS = ("module", "module_type", "op", "compute", "output")  # in the order of a file
_HEADER = "# A policy of narrowcast: which operators and modules compute in which format.\n"


def write(policy: Policy, path: Path) -> None:
    """Write ``policy`` to ``path`` atomically.

    Raises:
        PolicyError: the file cannot be written.
    """
    try:
        data = dumps(policy).encode()
        with replacing(path) as file:
            file.write(data)
    except (OSError, ValueError) as error:  # ValueError: an invalid file name, or a glob that is no text
        raise PolicyError(f"cannot write the policy to {path}: {_reason(error)}") from error


def dumps(policy: Policy) -> str:
    """Return ``policy`` as TOML."""
    lines = [_HEADER + f"version = {VERSION}"]
    changed = {f.name: value for f in fields(policy) if (value := getattr(policy, f.name)) != f.default}
    lines += [_line(name, value) for name, value in changed.items() if name != "rules"]
    for rule in policy.rules:
        lines += ["", "[[rule]]"]
        lines += [_line(name, value) for name in _RULE_KEYS if (value := getattr(rule, name)) is not None]
    return "\n".join(lines) + "\n"


def read(path: Path) -> bytes:
    """Return the content of the file at ``path``; raise PolicyError if it cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise PolicyError(f"cannot read the policy {path}: {_reason(error)}") from error


def parse(data: bytes, path: Path) -> Policy:
    """Parse ``data``, the content of the file at ``path``; errors are those of ``Policy.load``."""
    try:
        found = tomllib.loads(data.decode("utf-8-sig"))  # some editors write a byte order mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path} is not TOML: {error}") from error
    _check_version(found.pop("version", None), path)
    rules = found.pop("rule", [])
    known = [f.name for f in fields(Policy) if f.name != "rules"]
    _check_keys(found, ["base", *known, "rule", "version"], str(path))
    if "compute" not in found and "base" not in found:
        raise PolicyError(f'{path} does not say what to compute in: write compute = "auto", or a format')
    if not isinstance(rules, list) or not all(isinstance(one, dict) for one in rules):
        raise PolicyError(f"{path}: expected each rule under a heading [[rule]]")
    own = tuple(_rule(one, f"{path}, rule {n}") for n, one in enumerate(rules, 1))
    try:
        if "base" not in found:
            return Policy(**found, rules=own)
        return replace(Policy.preset(found.pop("base")), **found).with_rules(*own)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from None


def _check_version(version: Any, path: Path) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        got = "none" if version is None else repr(version)
        raise PolicyError(f'{path}: expected "version = {VERSION}" in the first line, got {got}')
    if version > VERSION:
        raise PolicyError(
            f"{path} has version {version}, and this narrowcast reads up to {VERSION}: install a newer one"
        )


def _rule(found: dict[str, Any], where: str) -> Rule:
    _check_keys(found, _RULE_KEYS, where)
    if "compute" not in found:
        raise PolicyError(f"{where} does not say what to compute in: write compute = ...")
    try:
        return Rule(**found)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from None


def _check_keys(found: dict[str, Any], known: Collection[str], where: str) -> None:
    for key in found:
        if key not in known:
            raise PolicyError(f"{where}: unknown key {key!r}. {near_names(key, known)}")


def _line(name: str, value: str | bool) -> str:
    # A JSON string is a TOML string, except that TOML requires DEL to be escaped.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return f"{name} = {text}"


def _reason(error: OSError | ValueError) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error)
