"""A policy as a frozen value, and what it means on a device."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from narrowcast.errors import PolicyError, near_names
from narrowcast.policy import _presets
from narrowcast.policy._presets import PRESETS
from narrowcast.policy._rule import FP8_RECIPES, Rule, check_no_contradictions

if TYPE_CHECKING:
    import torch

TABLE_NAMES = ("native", "cpu", "cuda", "mps")
_ELSEWHERE = (
    "policy {name!r} holds the model's weights in a low format{masters}, which only nc.Stepper does: "
    "nc.Stepper(model, optimizer, policy={name!r}). Here use 'bf16' or 'fp16', which leave the weights in "
    "fp32"
)
_OTHER_NAMES = {
    "float16": "fp16",
    "half": "fp16",
    "16-mixed": "fp16",
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "32-true": "fp32",
    "00": "O0",
    "01": "O1",
    "02": "O2",
    "03": "O3",
}
_COMPUTE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Policy:
    """Which operator and which module computes in which format. Frozen, pure data; equal when its fields are.

    Attributes:
        compute: the format of what gains by a narrow one: ``"bf16"``, ``"fp16"``, ``"fp32"``, or ``"auto"``,
            which each device resolves for itself.
        rules: what differs from the table; see ``nc.rule``. Two of one selector must not differ.
        tables: which of PyTorch's own autocast tables is followed: ``"native"``, that of the device, or that
            of ``"cpu"``, ``"cuda"`` or ``"mps"`` on every device: those of CPU and CUDA differ in more than
            fifty operators, and a model checked on a CPU behaves as on the GPU with ``"cuda"``.
        master_weights: the model's weights are held in the format that is computed in, and updated through
            fp32 masters. Preset ``"O2"`` is that with ``"auto"``; only ``nc.Stepper`` can.
        low_weights: the weights are held in that format without masters, those of batch norms too. Preset
            ``"O3"``; only ``nc.Stepper`` can.

    Raises:
        PolicyError: at construction, for words that are not known and settings that exclude each other.
    """

    compute: str
    rules: tuple[Rule, ...] = ()
    tables: str = "native"
    master_weights: bool = False
    low_weights: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.compute, str) or self.compute not in (*_COMPUTE_DTYPES, "auto"):
            raise PolicyError(_unknown_format(self.compute))
        object.__setattr__(self, "rules", _checked_rules(self.rules))
        if self.tables not in TABLE_NAMES:
            meant = "cuda" if self.tables == "gpu" else str(self.tables)
            raise PolicyError(f"unknown tables {self.tables!r}. {near_names(meant, TABLE_NAMES)}")
        for name in ("master_weights", "low_weights"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"expected {name} to be a bool, got {getattr(self, name)!r}")
            if getattr(self, name) and self.compute == "fp32":
                raise PolicyError(f"{name} is for weights in a low format: compute must not be 'fp32'")
        if self.master_weights and self.low_weights:
            raise PolicyError("master_weights and low_weights exclude each other: with masters or without?")

    @classmethod
    def preset(cls, name: str) -> Policy:
        """The preset called ``name``; a PolicyError with near names where there is none."""
        if not isinstance(name, str) or name not in _presets.ALL:
            raise PolicyError(_unknown(name))
        preset = _presets.ALL[name]
        return cls(rules=tuple(Rule(**one) for one in preset.rules), **preset.fields)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """The policy in a TOML file that ``save`` or a person wrote.

        Raises:
            PolicyError: no such file, no TOML, unknown keys, a base that is no preset, a newer version, or a
                policy that cannot hold.
        """
        from narrowcast.policy import _toml

        place = _as_path(path)
        return _remembered(_toml.parse(_toml.read(place), place), path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a TOML file that ``load`` reads without loss; an older one at ``path`` is replaced whole.

        Raises:
            PolicyError: the file cannot be written; what was there is as before.
        """
        from narrowcast.policy import _toml

        _toml.write(self, _as_path(path))

    def with_rules(self, *rules: Rule) -> Policy:
        """This policy with more rules; each replaces an earlier one that is for the same thing.

        Raises:
            PolicyError: two of ``rules`` are for the same thing and differ.
        """
        new = _checked_rules(rules)
        selectors = {one.selector for one in new}
        return replace(self, rules=(*(one for one in self.rules if one.selector not in selectors), *new))

    def without_rules(self, *rules: Rule) -> Policy:
        """This policy without these rules; a PolicyError where one is not in it."""
        for one in rules:
            if one not in self.rules:
                raise PolicyError(f'expected a rule of this policy, got "{one}"')
        return replace(self, rules=tuple(one for one in self.rules if one not in rules))

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch's own table of the device is all there is: no rules, no other table."""
        return not self.rules and self.tables == "native"

    @property
    def names_modules(self) -> bool:
        """Whether something must be done to a model for its rules to hold: modules are named, or fp8."""
        return any(one.is_for_modules or one.compute in FP8_RECIPES for one in self.rules)

    @property
    def holds_low_weights(self) -> bool:
        """Whether the model's weights are held in the low format, with masters or without."""
        return self.master_weights or self.low_weights

    def __str__(self) -> str:
        from narrowcast.policy import _text

        return _text.table(self)


def name_of(policy: Policy) -> str | None:
    """The preset that ``policy`` is, for a person; None where it is none."""
    for name, preset in _presets.ALL.items():
        if len(preset.rules) == len(policy.rules) and Policy.preset(name) == policy:
            return name
    return None


# By identity, since a policy that is equal need not be from there.
_files: dict[int, tuple[weakref.ref[Policy], str]] = {}


def _remembered(policy: Policy, path: str | os.PathLike[str]) -> Policy:
    """``policy``, of which ``policy_name`` knows from now on that it is in the file at ``path``."""
    key = id(policy)
    _files[key] = (weakref.ref(policy, lambda _: _files.pop(key, None)), os.fspath(path))
    return policy


def policy_name(policy: Policy | str | os.PathLike[str]) -> str:
    """What a person calls it: the file that it came from, its preset, or its format and what it has besides.

    >>> policy_name(Policy(compute="bf16", tables="cuda"))
    'bf16 with the table for cuda'
    """
    if not isinstance(policy, Policy):
        return os.fspath(policy)
    if id(policy) in _files:
        return _files[id(policy)][1]
    name = name_of(policy)
    if name is not None:
        return name
    besides = []
    if policy.tables != "native":
        besides.append(f"the table for {policy.tables}")
    if policy.holds_low_weights:
        besides.append("fp32 master weights" if policy.master_weights else "low weights")
    if policy.rules:
        besides.append(f"{len(policy.rules)} rule{'s' * (len(policy.rules) != 1)}")
    return f"{policy.compute} with {' and '.join(besides)}"


def _checked_rules(rules: object) -> tuple[Rule, ...]:
    if isinstance(rules, Rule):
        raise PolicyError(
            f'expected a tuple of rules, got one: write a comma after it, (rule,); it is "{rules}"'
        )
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise PolicyError(f"expected a tuple of rules, got {rules!r}")
    found: list[Rule] = []
    for one in rules:
        if not isinstance(one, Rule):
            raise PolicyError(f'expected a rule, as nc.rule.op("softmax", compute="fp32"), got {one!r}')
        found.append(one)
    checked = tuple(dict.fromkeys(found))
    check_no_contradictions(checked)
    return checked


def _as_path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise PolicyError(f"expected the path of a TOML file, got {path!r}")
    return Path(path)


def _unknown_format(compute: object) -> str:
    if isinstance(compute, str) and compute in PRESETS:
        return f'compute is a format, and {compute!r} is a preset: write nc.Policy.preset("{compute}")'
    if _looks_like_a_file(compute):
        return f'compute is a format, and {compute!r} is a file: write nc.Policy.load("{compute}")'
    formats = (*_COMPUTE_DTYPES, "auto")
    word = str(compute).removeprefix("torch.")
    if _OTHER_NAMES.get(word) in formats:
        return f'unknown format {compute!r}. Did you mean "{_OTHER_NAMES[word]}"?'
    return f"unknown format {compute!r}. {near_names(word, formats)}"


def _unknown(name: object) -> str:
    if isinstance(name, str) and name in _OTHER_NAMES:
        return f'unknown policy {name!r}. Did you mean "{_OTHER_NAMES[name]}"? Known: {", ".join(PRESETS)}.'
    return f"unknown policy {name!r}. " + near_names(str(name), PRESETS)


def _looks_like_a_file(name: object) -> bool:
    return isinstance(name, str) and (name.endswith(".toml") or os.sep in name)


def as_policy(policy: Policy | str | os.PathLike[str]) -> Policy:
    """``policy`` itself, the preset that it names, or the one in the TOML file that it names.

    A str is a file's where it ends in ``.toml`` or holds a ``/``.

    Raises:
        PolicyError: there is no such preset or file, or the file holds none.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, os.PathLike):
        return _in_file(policy)
    if not isinstance(policy, str):
        word = str(policy).removeprefix("torch.")
        meant = f'; write "{_OTHER_NAMES[word]}"' if word in _OTHER_NAMES else ""
        raise PolicyError(f"expected a Policy, the name of a preset or a file, got {policy!r}{meant}")
    if _looks_like_a_file(policy):
        return _in_file(policy)
    if policy not in PRESETS and Path(f"{policy}.toml").is_file():
        raise PolicyError(f'unknown policy {policy!r}. Did you mean the file "{policy}.toml"?')
    return _named(policy)


_by_name: dict[str, Policy] = {}


def _named(name: str) -> Policy:
    """One object for each name, so that its places and kernels need not be made again."""
    if name not in _by_name:
        _by_name.setdefault(name, Policy.preset(name))  # another thread may be first
    return _by_name[name]


_by_file: dict[str, tuple[bytes, Policy]] = {}


def _in_file(path: str | os.PathLike[str]) -> Policy:
    """One object for a file as long as it says the same, since a region may name it at each step.

    What it says is compared, not when it was written: two versions may have one size and one time.
    """
    from narrowcast.policy import _toml

    place = os.path.abspath(path)
    said = _toml.read(Path(path))
    kept = _by_file.get(place)
    if kept is None or kept[0] != said:
        kept = _by_file[place] = (said, _remembered(_toml.parse(said, Path(path)), path))
    return kept[1]


def with_fp32_weights(policy: Policy | str | os.PathLike[str]) -> Policy:
    """``policy`` for a caller that leaves the weights as they are.

    Raises:
        PolicyError: it does not exist, or it asks for weights held in a low format.
    """
    wanted = as_policy(policy)
    if wanted.holds_low_weights:
        masters = " and updates fp32 master weights" if wanted.master_weights else ""
        name = "O2" if wanted.master_weights else "O3"
        raise PolicyError(_ELSEWHERE.format(name=name, masters=masters))
    return wanted


def resolve(policy: Policy | str, device_type: str, *, low_weights: bool = False) -> torch.dtype:
    """The dtype that ``policy`` computes in on ``device_type``: bfloat16, float16 or float32.

    Args:
        low_weights: whether the caller can hold weights in a low format, where the policy asks for it.

    Raises:
        PolicyError: the policy does not exist, or asks for low weights of a caller that holds none.
    """
    import torch

    from narrowcast.machine import best_format

    compute = (as_policy if low_weights else with_fp32_weights)(policy).compute
    if compute == "auto":
        compute = best_format(device_type).format
    dtype: torch.dtype = getattr(torch, _COMPUTE_DTYPES[compute])
    return dtype


def dtype_of(word: str) -> torch.dtype:
    """``torch.bfloat16`` for ``"bf16"`` and so on."""
    import torch

    dtype: torch.dtype = getattr(torch, _COMPUTE_DTYPES[word])
    return dtype


def format_name(dtype: torch.dtype) -> str:
    """``"bf16"`` for ``torch.bfloat16`` and so on; torch's own word for what no policy computes in."""
    names = {long: short for short, long in _COMPUTE_DTYPES.items()}
    word = str(dtype).removeprefix("torch.")
    return names.get(word, word)
