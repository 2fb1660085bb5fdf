"""Policies and presets as frozen values, and the dtype that they resolve to on a device."""

from __future__ import annotations

import html
import itertools
import os
import textwrap
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.errors import PolicyError, near_names
from narrowcast.policy._rule import FP8_RECIPES, OTHER_FORMAT_NAMES, Rule, check_no_contradictions

if TYPE_CHECKING:
    import torch

TABLE_NAMES = ("native", "cpu", "cuda", "mps")
_ELSEWHERE = (
    "policy {name!r} holds the model's weights in a low format{masters}, which only nc.Stepper does: "
    "nc.Stepper(model, optimizer, policy={name!r}). Here use 'bf16' or 'fp16', which leave the weights in "
    "fp32"
)
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
# The width of a policy that is printed, in characters.
_WIDTH = 80
_TARGET_WIDTH = 48
_MANY = 4
_COMPUTE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named policy.

    Attributes:
        meaning: description in one line.
        fields: fields of the ``Policy`` except its rules.
        rules: keyword arguments of each ``Rule``, which is created on use since its check imports torch.
        for_scripts: whether ``narrowcast run`` accepts it; False if only ``nc.Stepper`` supports it.
    """

    meaning: str
    fields: dict[str, Any]
    rules: tuple[dict[str, str], ...] = ()
    for_scripts: bool = True


# Operators that fail in a region on CPU or CUDA when the formats of their floating inputs differ, found by
# tests/policy/test_safe_preset.py, which calls every operator that way. If one device fails, the rule follows
# the table of the other; if both fail, inputs are promoted. Not included:
# - batch_norm and instance_norm write to their running statistics, and a cast would be written to instead;
#   native_batch_norm, native_layer_norm and fake_quantize_* take fp32 parameters with narrow inputs, which a
#   rule would widen;
# - in-place forms, such as x[i] = y, are never cast;
# - fractional_max_pool2d and 3d: only samples passed to a private argument can differ;
#   linear_cross_entropy is experimental Python.
_AS_CUDA_DOES = "addmv chain_matmul linalg_multi_dot mv"
_AS_CPU_DOES = """cholesky_solve grid_sampler_2d grid_sampler_3d linalg_householder_product linalg_lstsq
    linalg_matrix_rank linalg_solve linalg_tensorsolve lu_solve nanquantile orgqr ormqr polar quantile
    triangular_solve"""
PROMOTED = """bilinear complex cross dot embedding_bag heaviside histogram histogramdd index_add index_copy
    index_put index_reduce isclose lerp linalg_cross linalg_ldl_solve linalg_lu_solve linalg_pinv
    linalg_solve_ex linalg_solve_triangular masked_scatter meshgrid put scatter scatter_add scatter_reduce
    sparse_sampled_addmm special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_zeta tensordot vdot
    _sparse_mm.reduce _weight_norm"""
_NORMS = "group_norm layer_norm rms_norm"

# Operators that apex computes in fp32 and PyTorch's table for CUDA does not. PyTorch decomposes cross_entropy
# into a log_softmax in the input's format. Other differences:
# - softmin, interpolate and normalize are Python functions around softmax, upsample_* and norms;
#   log_sigmoid covers multilabel_soft_margin_loss, a Python function that stays in fp32 after it;
# - local_response_norm squares its input with mul, and a rule for mul would affect the whole model: use
#   rule.module_type("torch.nn.LocalResponseNorm", compute="fp32");
# - interpolate(mode="area") is adaptive_avg_pool*, which apex does not cast elsewhere;
# - in-place powers are never cast, and apex's fp32 Tensor.cpu() was a bug.
# Operators that apex's lists lack (rms_norm, einsum, attention) follow PyTorch's table.
_APEX_FP32 = "cross_entropy_loss ctc_loss gelu grid_sampler log_sigmoid std var"


def _each(ops: str, **effect: str) -> tuple[dict[str, str], ...]:
    return tuple({"op": op, **effect} for op in ops.split())


PRESET_TABLE: dict[str, Preset] = {
    "auto": Preset(
        meaning="the fastest safe format of the device, by rates measured on it or by a table",
        fields={"compute": "auto"},
    ),
    "bf16": Preset(
        meaning="matmuls and convolutions in bfloat16, by the device's own table",
        fields={"compute": "bf16"},
    ),
    "fp16": Preset(
        meaning="matmuls and convolutions in float16, by the device's own table",
        fields={"compute": "fp16"},
    ),
    "fp32": Preset(meaning="everything in float32", fields={"compute": "fp32"}),
    "safe": Preset(
        meaning="auto, with mixed inputs promoted, norm outputs lowered, binary_cross_entropy in fp32",
        fields={"compute": "auto"},
        rules=(
            *_each(_NORMS, compute="fp32", output="lower"),
            *_each("binary_cross_entropy", compute="fp32"),
            *_each(_AS_CPU_DOES, compute="fp32"),
            *_each(_AS_CUDA_DOES, compute="lower"),
            *_each(PROMOTED, compute="promote"),
        ),
    ),
    "O0": Preset(meaning="apex's O0: everything in float32", fields={"compute": "fp32"}),
    "O1": Preset(
        meaning="apex's O1: each operator in the format that suits it, one table everywhere",
        fields={"compute": "auto", "tables": "cuda"},
        rules=_each(_APEX_FP32, compute="fp32"),
    ),
    "O2": Preset(
        meaning="weights in a low format too, with fp32 masters; batch norms in float32",
        fields={"compute": "auto", "master_weights": True},
        for_scripts=False,
    ),
    "O3": Preset(
        meaning="apex's O3: everything in a low format, without masters or a loss scale",
        fields={"compute": "auto", "low_weights": True},
        for_scripts=False,
    ),
}
"""Preset name -> preset."""

PRESETS = {name: preset.meaning for name, preset in PRESET_TABLE.items()}
"""Preset name -> description in one line."""


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

    Raises:
        PolicyError: a value is unknown, settings exclude each other, or two rules with the same selector
            differ.
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
                raise PolicyError(f"{name} needs a low format: compute must not be 'fp32'")
        if self.master_weights and self.low_weights:
            raise PolicyError("master_weights and low_weights exclude each other: set one of them")

    @classmethod
    def preset(cls, name: str) -> Policy:
        """Return the preset called ``name``; an unknown name raises PolicyError."""
        if not isinstance(name, str) or name not in PRESET_TABLE:
            if isinstance(name, str) and name in _OTHER_NAMES:
                guess = f'Did you mean "{_OTHER_NAMES[name]}"? Known: {", ".join(PRESETS)}.'
            else:
                guess = near_names(str(name), PRESETS)
            raise PolicyError(f"unknown policy {name!r}. {guess}")
        preset = PRESET_TABLE[name]
        return cls(rules=tuple(Rule(**one) for one in preset.rules), **preset.fields)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy from a TOML file.

        Raises:
            PolicyError: the file is missing or not valid TOML, has unknown keys or a newer version, names an
                unknown base, or describes an invalid policy.
        """
        from narrowcast.policy import _toml

        return _remembered(_toml.parse(_toml.read(Path(path)), Path(path)), path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a TOML file that ``load`` reads, replacing an existing file atomically.

        Raises:
            PolicyError: the file cannot be written; an existing file is unchanged.
        """
        from narrowcast.policy import _toml

        _toml.write(self, Path(path))

    def with_rules(self, *rules: Rule) -> Policy:
        """Return this policy with more rules, each replacing an earlier one with the same selector.

        Raises:
            PolicyError: two of ``rules`` have the same selector and differ.
        """
        new = _checked_rules(rules)
        selectors = {one.selector for one in new}
        return replace(self, rules=(*(one for one in self.rules if one.selector not in selectors), *new))

    @property
    def is_plain(self) -> bool:
        """Whether the policy only follows PyTorch's table of the device."""
        return not self.rules and self.tables == "native"

    @property
    def names_modules(self) -> bool:
        """Whether a model must be modified for the rules: some name modules or an fp8 recipe."""
        return any(one.is_for_modules or one.compute in FP8_RECIPES for one in self.rules)

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
        """Format a heading and one line per rule; consecutive operators with the same effect share one."""
        lines = textwrap.wrap(_heading(self), _WIDTH, subsequent_indent="    ")
        if self.tables != "native":
            lines.append(f"  PyTorch's table for {self.tables} on every device")
        entries: list[tuple[str, str]] = []
        alike = itertools.groupby(self.rules, lambda one: (one.is_for_modules, one.effect))
        for (for_modules, effect), group in alike:
            targets = [one.target for one in group]
            if not for_modules and len(targets) >= _MANY:
                targets = [", ".join(targets)]
            entries += [(target, effect) for target in targets]
        width = min(_TARGET_WIDTH, max((len(target) for target, _ in entries), default=0))
        for target, effect in entries:
            wrapped = textwrap.wrap(target, width, subsequent_indent="  ", break_on_hyphens=False)
            first, *rest = wrapped or [""]
            lines.append(f"  {first:<{width}}  {effect}")
            lines += [f"  {line}" for line in rest]
        return "\n".join(lines)


def name_of(policy: Policy) -> str | None:
    """Return the name of the preset that equals ``policy``, or None."""
    for name, preset in PRESET_TABLE.items():
        if len(preset.rules) == len(policy.rules) and Policy.preset(name) == policy:
            return name
    return None


_kept: dict[int, tuple[weakref.ref[Policy], dict[Any, Any]]] = {}


def kept_for(policy: Policy) -> dict[Any, Any]:
    """Return what this package and ``casting`` keep for one policy object until it is freed.

    By identity: an equal policy may come from elsewhere, and hashing all rules at each region would take
    longer than the region.
    """
    key = id(policy)  # no other policy has it before the entry is removed
    entry = _kept.get(key)
    if entry is None:
        ended = weakref.ref(policy, lambda _: _kept.pop(key, None))
        entry = _kept.setdefault(key, (ended, {}))  # another thread may be faster
    return entry[1]


def _remembered(policy: Policy, path: str | os.PathLike[str]) -> Policy:
    """Return ``policy`` after recording for ``policy_name`` that it came from ``path``."""
    kept_for(policy)["file"] = os.fspath(path)
    return policy


def policy_name(policy: Policy | str | os.PathLike[str]) -> str:
    """Return a short description: the policy's file, its preset, or its format and its differences.

    >>> policy_name(Policy(compute="bf16", tables="cuda"))
    'bf16 with the table for cuda'
    """
    if not isinstance(policy, Policy):
        return os.fspath(policy)
    name: str = kept_for(policy).get("file") or name_of(policy) or _in_words(policy)
    return name


def _in_words(policy: Policy) -> str:
    besides = []
    if policy.tables != "native":
        besides.append(f"the table for {policy.tables}")
    if policy.holds_low_weights:
        besides.append("fp32 master weights" if policy.master_weights else "low weights")
    if policy.rules:
        besides.append(f"{len(policy.rules)} rule{'s' * (len(policy.rules) != 1)}")
    return f"{policy.compute} with {' and '.join(besides)}"


def _checked_rules(rules: object) -> tuple[Rule, ...]:
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


def _looks_like_a_file(name: object) -> bool:
    return isinstance(name, str) and (name.endswith(".toml") or os.sep in name)


def as_policy(policy: Policy | str | os.PathLike[str]) -> Policy:
    """Return ``policy`` itself, or the preset or the TOML file that it names.

    A str names a file if it ends in ``.toml`` or contains a ``/``.

    Raises:
        PolicyError: the preset or file does not exist, or the file is invalid.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, os.PathLike):
        return _in_file(policy)
    if not isinstance(policy, str):
        word = str(policy).removeprefix("torch.")
        meant = f'; write "{_OTHER_NAMES[word]}"' if word in _OTHER_NAMES else ""
        got = repr(policy) + meant if len(repr(policy)) < 50 else type(policy).__name__
        raise PolicyError(f"expected a Policy, the name of a preset or a file, got {got}")
    if _looks_like_a_file(policy):
        return _in_file(policy)
    if policy not in PRESETS and Path(f"{policy}.toml").is_file():
        raise PolicyError(f'unknown policy {policy!r}. Did you mean the file "{policy}.toml"?')
    return _named(policy)


_by_name: dict[str, Policy] = {}


def _named(name: str) -> Policy:
    """Return one object per name, so that scopes and kernels are created once."""
    if name not in _by_name:
        _by_name.setdefault(name, Policy.preset(name))  # another thread may be faster
    return _by_name[name]


_by_file: dict[str, tuple[bytes, Policy]] = {}


def _in_file(path: str | os.PathLike[str]) -> Policy:
    """Return one object per file while its content is unchanged, as a region may name it at each step.

    The content is compared: two versions may have the same size and time.
    """
    from narrowcast.policy import _toml

    place = os.path.abspath(path)
    said = _toml.read(Path(path))
    kept = _by_file.get(place)
    if kept is None or kept[0] != said:
        kept = _by_file[place] = (said, _remembered(_toml.parse(said, Path(path)), path))
    return kept[1]


def with_fp32_weights(policy: Policy | str | os.PathLike[str]) -> Policy:
    """Return ``policy`` for a caller that does not change the weights.

    Raises:
        PolicyError: the policy does not exist or holds the weights in a low format.
    """
    wanted = as_policy(policy)
    if wanted.holds_low_weights:
        masters = " and updates fp32 master weights" if wanted.master_weights else ""
        name = "O2" if wanted.master_weights else "O3"
        raise PolicyError(_ELSEWHERE.format(name=name, masters=masters))
    return wanted


def resolve(policy: Policy | str, device_type: str, *, low_weights: bool = False) -> torch.dtype:
    """Return the dtype that ``policy`` computes in on ``device_type``: bfloat16, float16 or float32.

    Args:
        low_weights: whether the caller supports weights in a low format.

    Raises:
        PolicyError: the policy does not exist, or needs low weights that the caller does not support.
    """
    from narrowcast.machine import best_format

    compute = (as_policy if low_weights else with_fp32_weights)(policy).compute
    return dtype_of(best_format(device_type).format if compute == "auto" else compute)


def dtype_of(word: str) -> torch.dtype:
    """Return ``torch.bfloat16`` for ``"bf16"`` and so on."""
    import torch

    dtype: torch.dtype = getattr(torch, _COMPUTE_DTYPES[word])
    return dtype


def format_name(dtype: torch.dtype) -> str:
    """Return ``"bf16"`` for ``torch.bfloat16`` and so on; torch's name for other dtypes."""
    names = {long: short for short, long in _COMPUTE_DTYPES.items()}
    word = str(dtype).removeprefix("torch.")
    return names.get(word, word)


def _heading(policy: Policy) -> str:
    name = name_of(policy)
    if name is not None:
        return f"{name}: {PRESETS[name]}"
    if policy.master_weights:
        heading = f"O2 in {policy.compute}: {PRESETS['O2']}"
    elif policy.low_weights:
        heading = f"O3 in {policy.compute}: {PRESETS['O3']}"
    else:
        heading = f"{policy.compute}: {PRESETS[policy.compute]}"
    count = len(policy.rules)
    return f"{heading}, with {count} rule{'s' * (count != 1)}" if count else heading
