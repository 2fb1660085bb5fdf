"""Policies as frozen values, their names, and the dtype that they resolve to on a device."""

from __future__ import annotations

import html
import itertools
import os
import textwrap
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from narrowcast.errors import PolicyError, did_you_mean
from narrowcast.policy import _toml
from narrowcast.policy._presets import PRESET_TABLE, PRESETS
from narrowcast.policy._rule import FP8_RECIPES, OTHER_FORMAT_NAMES, Rule, check_no_contradictions

if TYPE_CHECKING:
    import torch

TABLE_NAMES = ("native", "cpu", "cuda", "mps")
_COMPUTE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# What people write in place of a preset, for suggestions.
_OTHER_NAMES = {
    **OTHER_FORMAT_NAMES,
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
    "32-true": "fp32",
    "00": "O0",
    "01": "O1",
    "02": "O2",
    "03": "O3",
}
# Widths of a policy that is printed, and of its first column, in characters.
_WIDTH = 80
_TARGET_WIDTH = 48
# From this many operators on, those with the same effect share one entry of a policy that is printed.
_MANY = 4


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True, repr=False)
class Policy:
    """The format of each operator and module, as a frozen value that compares by its fields.

    Attributes:
        compute: format of the autocast region: ``"bf16"``, ``"fp16"``, ``"fp32"``, or ``"auto"`` for the best
            format of each device.
        rules: differences from PyTorch's table; see ``nc.rule``.
        tables: PyTorch's autocast table to follow: ``"native"`` for that of the device, or the table of
            ``"cpu"``, ``"cuda"`` or ``"mps"`` on every device. CPU and CUDA differ in more than fifty
            operators; with ``"cuda"`` a model checked on a CPU behaves as on the GPU.
        master_weights: hold the model's weights in the compute format and update them through fp32 master
            weights, as preset ``"O2"`` does. Needs ``nc.Stepper``.
        low_weights: hold the weights, also of batch norms, in the compute format without master weights, as
            preset ``"O3"`` does. Needs ``nc.Stepper``.
        file: the file that ``load`` read the policy from, or None. It is no part of the value.

    Raises:
        PolicyError: a value is unknown, settings exclude each other, or two rules with the same selector
            differ.
    """

    compute: str
    rules: tuple[Rule, ...] = ()
    tables: str = "native"
    master_weights: bool = False
    low_weights: bool = False
    file: str | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.compute, str) or self.compute not in (*_COMPUTE_DTYPES, "auto"):
            raise PolicyError(_unknown_format(self.compute))
        object.__setattr__(self, "rules", _checked_rules(self.rules))  # the class is frozen
        if self.tables not in TABLE_NAMES:
            meant = "cuda" if self.tables == "gpu" else str(self.tables)
            raise PolicyError(f"unknown tables {self.tables!r}. {did_you_mean(meant, TABLE_NAMES)}")

        # A str from a file, as "false", would count as true.
        for name in ("master_weights", "low_weights"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise PolicyError(f"expected {name} to be a bool, got {value!r}")
            if value and self.compute == "fp32":
                raise PolicyError(f"{name} needs a low format: compute must not be 'fp32'")
        if self.master_weights and self.low_weights:
            raise PolicyError("master_weights and low_weights exclude each other: set one of them")

    @classmethod
    def preset(cls, name: str) -> Policy:
        """Return the preset called ``name``; an unknown name raises PolicyError."""
        if not isinstance(name, str) or name not in PRESET_TABLE:
            raise PolicyError(f"unknown policy {name!r}. {_near_presets(name)}")
        preset = PRESET_TABLE[name]
        rules: list[Rule] = []
        for group in preset.rules:
            for op in group.ops.split():
                rules.append(Rule(op=op, compute=group.compute, output=group.output))
        return cls(
            compute=preset.compute,
            rules=tuple(rules),
            tables=preset.tables,
            master_weights=preset.master_weights,
            low_weights=preset.low_weights,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy from a TOML file.

        Raises:
            PolicyError: the file is missing or not valid TOML, has unknown keys or a newer version, names an
                unknown base, or describes an invalid policy.
        """
        return _loaded(_toml.read(Path(path)), path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a TOML file that ``load`` reads, replacing an existing file atomically.

        Raises:
            PolicyError: the file cannot be written; an existing file is unchanged.
        """
        _toml.write(policy_text(self), Path(path))

    def with_rules(self, *rules: Rule) -> Policy:
        """Return this policy with more rules, each replacing an earlier one with the same selector.

        Raises:
            PolicyError: two of ``rules`` have the same selector and differ.
        """
        new = _checked_rules(rules)
        replaced = {rule.selector for rule in new}
        kept = [rule for rule in self.rules if rule.selector not in replaced]
        return replace(self, rules=(*kept, *new))

    @property
    def is_plain(self) -> bool:
        """Whether the policy only follows PyTorch's table of the device."""
        return not self.rules and self.tables == "native"

    @property
    def names_modules(self) -> bool:
        """Whether a model must be modified for the rules: some name modules or an fp8 recipe."""
        return any(rule.is_for_modules or rule.compute in FP8_RECIPES for rule in self.rules)

    @property
    def holds_low_weights(self) -> bool:
        """Whether the model's weights are held in a low format, with master weights or without."""
        return self.master_weights or self.low_weights

    def __repr__(self) -> str:
        name = name_of(self)
        if name is not None:
            return f"Policy.preset({name!r})"
        # The digest tells policies with the same number of rules apart.
        return f"<Policy {_in_words(self)}, {zlib.crc32(repr(self.rules).encode()):08x}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        """Format a heading and an entry for each rule; many operators in a row with one effect share one."""
        lines = textwrap.wrap(_heading(self), _WIDTH, subsequent_indent="    ")
        if self.tables != "native":
            lines.append(f"  PyTorch's table for {self.tables} on every device, in place of its own")

        entries = _entries(self.rules)
        longest = max((len(target) for target, _ in entries), default=0)
        width = min(_TARGET_WIDTH, longest)
        for target, effect in entries:
            wrapped = textwrap.wrap(target, width, subsequent_indent="  ", break_on_hyphens=False)
            lines.append(f"  {wrapped[0]:<{width}}  {effect}")
            lines += [f"  {line}" for line in wrapped[1:]]
        return "\n".join(lines)


# ---- checks of the fields


def _checked_rules(rules: object) -> tuple[Rule, ...]:
    """Return ``rules`` as a tuple without repetitions."""
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise PolicyError(f"expected a tuple of rules, got {rules!r}")
    checked: dict[Rule, None] = {}
    for rule in rules:
        if not isinstance(rule, Rule):
            raise PolicyError(f'expected a rule, as nc.rule.op("softmax", compute="fp32"), got {rule!r}')
        checked[rule] = None
    check_no_contradictions(tuple(checked))
    return tuple(checked)


def _unknown_format(compute: object) -> str:
    if isinstance(compute, str) and compute in PRESETS:
        return f'compute is a format, and {compute!r} is a preset: write nc.Policy.preset("{compute}")'
    if _looks_like_a_file(compute):
        return f'compute is a format, and {compute!r} is a file: write nc.Policy.load("{compute}")'
    formats = (*_COMPUTE_DTYPES, "auto")
    word = str(compute).removeprefix("torch.")
    if _OTHER_NAMES.get(word) in formats:
        return f'unknown format {compute!r}. Did you mean "{_OTHER_NAMES[word]}"?'
    return f"unknown format {compute!r}. {did_you_mean(word, formats)}"


def _near_presets(name: object) -> str:
    if isinstance(name, str) and name in _OTHER_NAMES:
        return f'Did you mean "{_OTHER_NAMES[name]}"? Known: {", ".join(PRESETS)}.'
    return did_you_mean(str(name), PRESETS)


# ---- policies in TOML files


def policy_in(data: bytes, path: Path) -> Policy:
    """Return the policy in ``data``, the content of the file at ``path``; errors are those of ``load``."""
    parsed = _toml.parse(data, path)
    try:
        if parsed.base is None:
            return Policy(**parsed.settings, rules=parsed.rules)
        return replace(Policy.preset(parsed.base), **parsed.settings).with_rules(*parsed.rules)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from None


def policy_text(policy: Policy) -> str:
    """Return ``policy`` as TOML, which ``policy_in`` reads."""
    # Defaults are left out, so that a file says what somebody chose.
    settings = {}
    for setting in fields(policy):
        value = getattr(policy, setting.name)
        if setting.name in _toml.SETTINGS and value != setting.default:
            settings[setting.name] = value
    return _toml.dumps(settings, policy.rules)


def _loaded(data: bytes, path: str | os.PathLike[str]) -> Policy:
    policy = policy_in(data, Path(path))
    object.__setattr__(policy, "file", os.fspath(path))  # the class is frozen; no caller has the object yet
    return policy


# ---- a policy in words


def name_of(policy: Policy) -> str | None:
    """Return the name of the preset that equals ``policy``, or None."""
    for name, preset in PRESET_TABLE.items():
        # Creating the rules of a preset imports torch. A policy without rules equals no preset that has some,
        # so skip those presets for it.
        if bool(preset.rules) == bool(policy.rules) and _preset_object(name) == policy:
            return name
    return None


def policy_name(policy: Policy | str | os.PathLike[str]) -> str:
    """Return a short description: the policy's file, its preset, or its format and its differences.

    >>> policy_name(Policy(compute="bf16", tables="cuda"))
    'bf16 with the table for cuda'
    """
    if not isinstance(policy, Policy):
        return os.fspath(policy)
    return policy.file or name_of(policy) or _in_words(policy)


def _in_words(policy: Policy) -> str:
    """Return the format of a policy that is no preset, and how it differs from the preset of that format."""
    differences = []
    if policy.tables != "native":
        differences.append(f"the table for {policy.tables}")
    if policy.master_weights:
        differences.append("fp32 master weights")
    if policy.low_weights:
        differences.append("low weights")
    if policy.rules:
        differences.append(_count(policy.rules))
    return f"{policy.compute} with {' and '.join(differences)}"


def _heading(policy: Policy) -> str:
    name = name_of(policy)
    if name is not None:
        return f"{name}: {PRESET_TABLE[name].meaning}"
    if policy.master_weights:
        heading = f"O2 in {policy.compute}: {PRESET_TABLE['O2'].meaning}"
    elif policy.low_weights:
        heading = f"O3 in {policy.compute}: {PRESET_TABLE['O3'].meaning}"
    else:
        heading = f"{policy.compute}: {PRESET_TABLE[policy.compute].meaning}"
    if policy.rules:
        heading += f", with {_count(policy.rules)}"
    return heading


def _count(rules: tuple[Rule, ...]) -> str:
    return "1 rule" if len(rules) == 1 else f"{len(rules)} rules"


def _entries(rules: tuple[Rule, ...]) -> list[tuple[str, str]]:
    """Return what rules select and what they do there."""
    entries = []
    # Presets have dozens of operators with the same effect in a row.
    alike = itertools.groupby(rules, lambda rule: (rule.is_for_modules, rule.effect))
    for (for_modules, effect), group in alike:
        targets = [rule.target for rule in group]
        if not for_modules and len(targets) >= _MANY:
            targets = [", ".join(targets)]
        entries += [(target, effect) for target in targets]
    return entries


# ---- what a user may pass as a policy


_by_preset: dict[str, Policy] = {}
_by_file: dict[str, tuple[bytes, Policy]] = {}
"""Absolute path -> the content that was read, and its policy."""


def as_policy(policy: Policy | str | os.PathLike[str]) -> Policy:
    """Return ``policy`` itself, or the preset or the TOML file that it names.

    A str names a file if it ends in ``.toml`` or contains a ``/``.

    Raises:
        PolicyError: the preset or file does not exist, or the file is invalid.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, os.PathLike) or _looks_like_a_file(policy):
        return _file_object(policy)
    if not isinstance(policy, str):
        # The repr of a model or a tensor would fill the screen.
        got = repr(policy)
        if len(got) >= 50:
            got = type(policy).__name__
        # Most people who get here passed a dtype of torch.
        word = str(policy).removeprefix("torch.")
        if word in _OTHER_NAMES:
            got += f'; write "{_OTHER_NAMES[word]}"'
        raise PolicyError(f"expected a Policy, the name of a preset or a file, got {got}")
    if policy not in PRESETS and Path(f"{policy}.toml").is_file():
        raise PolicyError(f'unknown policy {policy!r}. Did you mean the file "{policy}.toml"?')
    return _preset_object(policy)


def _looks_like_a_file(name: object) -> bool:
    return isinstance(name, str) and (name.endswith(".toml") or os.sep in name)


def _preset_object(name: str) -> Policy:
    """Return one object per name, so that scopes and kernels are created once."""
    if name not in _by_preset:
        _by_preset.setdefault(name, Policy.preset(name))  # another thread may be faster
    return _by_preset[name]


def _file_object(path: str | os.PathLike[str]) -> Policy:
    """Return one object per file while its content is unchanged, as a region may name it at each step.

    The content is compared, since two versions of a file may have the same size and time.
    """
    place = os.path.abspath(path)
    content = _toml.read(Path(path))
    kept = _by_file.get(place)
    if kept is None or kept[0] != content:
        kept = _by_file[place] = (content, _loaded(content, path))
    return kept[1]


def with_fp32_weights(policy: Policy | str | os.PathLike[str]) -> Policy:
    """Return ``policy`` for a caller that leaves the weights in fp32; refuse one that needs low weights.

    Raises:
        PolicyError: the policy does not exist or holds the weights in a low format.
    """
    wanted = as_policy(policy)
    if wanted.master_weights:
        raise PolicyError(_needs_a_stepper(wanted, and_masters=" and updates fp32 master weights"))
    if wanted.low_weights:
        raise PolicyError(_needs_a_stepper(wanted, and_masters=""))
    return wanted


def _needs_a_stepper(policy: Policy, and_masters: str) -> str:
    # A policy that the user created has no name that nc.Stepper takes.
    name = policy.file or name_of(policy)
    argument = "policy" if name is None else repr(name)
    return (
        f"policy {policy_name(policy)!r} holds the model's weights in a low format{and_masters}, "
        "which only nc.Stepper does: "
        f"nc.Stepper(model, optimizer, policy={argument}). Here use 'bf16' or 'fp16', which leave the "
        "weights in fp32"
    )


# ---- dtypes


def resolve(policy: Policy | str, device_type: str, *, low_weights: bool = False) -> torch.dtype:
    """Return the dtype that ``policy`` computes in on ``device_type``: bfloat16, float16 or float32.

    Args:
        low_weights: whether the caller supports weights in a low format.

    Raises:
        PolicyError: the policy does not exist, or needs low weights that the caller does not support.
    """
    from narrowcast.machine import best_format

    wanted = as_policy(policy) if low_weights else with_fp32_weights(policy)
    if wanted.compute == "auto":
        return dtype_of(best_format(device_type).format)
    return dtype_of(wanted.compute)


def dtype_of(word: str) -> torch.dtype:
    """Return ``torch.bfloat16`` for ``"bf16"`` and so on."""
    import torch

    dtype: torch.dtype = getattr(torch, _COMPUTE_DTYPES[word])
    return dtype


def format_name(dtype: torch.dtype) -> str:
    """Return ``"bf16"`` for ``torch.bfloat16`` and so on; torch's name for other dtypes."""
    torchs_name = str(dtype).removeprefix("torch.")
    for word, name in _COMPUTE_DTYPES.items():
        if name == torchs_name:
            return word
    return torchs_name
