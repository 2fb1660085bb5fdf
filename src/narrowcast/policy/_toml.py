"""The TOML file of a policy: what it says, read and written.

    version = 1
    compute = "bf16"

    [[rule]]
    op = "softmax"
    compute = "fp16"

The settings of ``Policy`` (``SETTINGS``) and the fields of ``Rule`` are keys of the same name; each rule is a
``[[rule]]``. A missing key has its default, or the value of the preset that ``base = "safe"`` names. The
file's rules follow those of the preset and replace rules with the same selector. ``save`` writes the whole
policy, without a base.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast._files import replacing
from narrowcast.errors import PolicyError, did_you_mean
from narrowcast.policy._rule import Rule

VERSION = 1
SETTINGS = ("compute", "tables", "master_weights", "low_weights")
"""Fields of ``Policy`` that a file has as keys, in the order of a file."""
_RULE_KEYS = ("module", "module_type", "op", "compute", "output")  # in the order of a file
_HEADER = "# A policy of narrowcast: which operators and modules compute in which format.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFile:
    """What a file says, before it is checked as a policy.

    Attributes:
        base: name of the preset that it starts from, or None.
        settings: its keys among ``SETTINGS``.
        rules: its rules, checked one by one.
    """

    base: Any
    settings: dict[str, Any]
    rules: tuple[Rule, ...]


def read(path: Path) -> bytes:
    """Return the content of the file at ``path``; raise PolicyError if it cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise PolicyError(f"cannot read the policy {path}: {_reason(error)}") from error


def parse(data: bytes, path: Path) -> PolicyFile:
    """Parse ``data``, the content of the file at ``path``.

    Raises:
        PolicyError: not TOML, no version or a newer one, an unknown key, no ``compute``, or an invalid rule.
    """
    try:
        keys = tomllib.loads(data.decode("utf-8-sig"))  # some editors write a byte order mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path} is not TOML: {error}") from error

    _check_version(keys.get("version"), path)
    _check_keys(keys, ["base", *SETTINGS, "rule", "version"], str(path))
    if "compute" not in keys and "base" not in keys:
        raise PolicyError(f'{path} does not say what to compute in: write compute = "auto", or a format')

    tables = keys.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise PolicyError(f"{path}: expected each rule under a heading [[rule]]")
    rules = tuple(_rule(table, f"{path}, rule {number}") for number, table in enumerate(tables, 1))

    settings = {key: value for key, value in keys.items() if key in SETTINGS}
    return PolicyFile(base=keys.get("base"), settings=settings, rules=rules)


def _check_version(version: Any, path: Path) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        got = "none" if version is None else repr(version)
        raise PolicyError(f'{path}: expected the line "version = {VERSION}" above all headings, got {got}')
    if version > VERSION:
        raise PolicyError(
            f"{path} has version {version}, and this narrowcast reads up to {VERSION}: install a newer one"
        )


def _rule(table: dict[str, Any], where: str) -> Rule:
    _check_keys(table, _RULE_KEYS, where)
    if "compute" not in table:
        raise PolicyError(f"{where} does not say what to compute in: write compute = ...")
    try:
        return Rule(**table)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from None


def _check_keys(table: dict[str, Any], known: Collection[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise PolicyError(f"{where}: unknown key {key!r}. {did_you_mean(key, known)}")


def dumps(settings: Mapping[str, str | bool], rules: tuple[Rule, ...]) -> str:
    """Return the text of a file with these keys of ``SETTINGS`` and these rules."""
    lines = [_HEADER + f"version = {VERSION}"]
    lines += [_line(key, value) for key, value in settings.items()]
    for rule in rules:
        lines += ["", "[[rule]]"]
        for key in _RULE_KEYS:
            value = getattr(rule, key)
            if value is not None:
                lines.append(_line(key, value))
    return "\n".join(lines) + "\n"


def write(text: str, path: Path) -> None:
    """Write ``text`` to ``path`` atomically; raise PolicyError if the file cannot be written."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise PolicyError(f"cannot write the policy to {path}: {_reason(error)}") from error


def _line(key: str, value: str | bool) -> str:
    # A JSON string is a TOML string, except that TOML requires DEL to be escaped.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return f"{key} = {text}"


def _reason(error: OSError | ValueError) -> str:
    # ``str`` of an OSError also has its number, and the file name, which is in the message already.
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
