"""Which operations compute in which format, as plain data: rules, presets, PyTorch's own tables, one file."""

from narrowcast.policy import _rule as rule
from narrowcast.policy._ops import base_of, canonical_op, every_operator, operator, overloads_of
from narrowcast.policy._policy import (
    Policy,
    as_policy,
    dtype_of,
    format_name,
    policy_name,
    resolve,
    with_fp32_weights,
)
from narrowcast.policy._presets import ALL as PRESET_TABLE
from narrowcast.policy._presets import PRESETS, Preset
from narrowcast.policy._resolved import (
    UNLISTED,
    Decision,
    ResolvedPolicy,
    Scope,
    names_module,
    resolved,
    rules_for,
)
from narrowcast.policy._rule import COMPUTES, FORMATS, FP8_RECIPES, Rule, class_names
from narrowcast.policy._tables import (
    FP32,
    FP32_APPEND_DTYPE,
    FP32_SET_DTYPE,
    LOWER,
    PROMOTE,
    REFUSE,
    TABLES,
    autocast_key,
    native_table,
)
from narrowcast.policy._toml import dumps as policy_text
from narrowcast.policy._toml import parse as policy_in

__all__ = [
    "COMPUTES",
    "FORMATS",
    "FP8_RECIPES",
    "FP32",
    "FP32_APPEND_DTYPE",
    "FP32_SET_DTYPE",
    "LOWER",
    "PRESETS",
    "PRESET_TABLE",
    "PROMOTE",
    "REFUSE",
    "TABLES",
    "UNLISTED",
    "Decision",
    "Policy",
    "Preset",
    "ResolvedPolicy",
    "Rule",
    "Scope",
    "as_policy",
    "autocast_key",
    "base_of",
    "canonical_op",
    "class_names",
    "dtype_of",
    "every_operator",
    "format_name",
    "names_module",
    "native_table",
    "operator",
    "overloads_of",
    "policy_in",
    "policy_name",
    "policy_text",
    "resolve",
    "resolved",
    "rule",
    "rules_for",
    "with_fp32_weights",
]
