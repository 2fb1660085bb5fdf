"""Which operations compute in which format, as plain data: presets on PyTorch's own tables."""

from narrowcast.policy._policy import PRESETS, Policy, as_policy, format_name, resolve, without_masters

__all__ = ["PRESETS", "Policy", "as_policy", "format_name", "resolve", "without_masters"]
