"""A policy as a frozen value, its presets, and what it means on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowcast.errors import PolicyError, near_names

if TYPE_CHECKING:
    import torch

PRESETS = {
    "auto": "the fastest safe format that the device has instructions for",
    "bf16": "matrix products and convolutions in bfloat16, by PyTorch's table for the device",
    "fp16": "matrix products and convolutions in float16, by PyTorch's table for the device",
    "fp32": "everything in float32",
}
"""Preset name -> one line for a person."""

_COMPUTE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which format to compute in. Frozen, pure data; equal when its fields are equal.

    Attributes:
        compute: ``"bf16"``, ``"fp16"``, ``"fp32"``, or ``"auto"``, which each device resolves for itself.
            Ops follow PyTorch's own autocast table of the device.

    Raises:
        PolicyError: at construction, for any other ``compute``.
    """

    compute: str

    def __post_init__(self) -> None:
        if not isinstance(self.compute, str) or self.compute not in PRESETS:
            raise PolicyError(f"unknown policy {self.compute!r}. " + near_names(str(self.compute), PRESETS))

    @classmethod
    def preset(cls, name: str) -> Policy:
        """The preset called ``name``; a PolicyError with near names where there is none."""
        return cls(compute=name)

    def __str__(self) -> str:
        return f"{self.compute}: {PRESETS[self.compute]}"


def as_policy(policy: Policy | str) -> Policy:
    """``policy`` itself, or the preset that it names."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise PolicyError(f"expected a Policy or the name of a preset, got {policy!r}")
    return Policy.preset(policy)


def resolve(policy: Policy | str, device_type: str) -> torch.dtype:
    """The dtype that ``policy`` computes in on ``device_type``: bfloat16, float16 or float32."""
    import torch

    from narrowcast.machine import best_format

    compute = as_policy(policy).compute
    if compute == "auto":
        compute = best_format(device_type).format
    dtype: torch.dtype = getattr(torch, _COMPUTE_DTYPES[compute])
    return dtype


def format_name(dtype: torch.dtype) -> str:
    """``"bf16"`` for ``torch.bfloat16`` and so on; torch's own word for what no policy computes in."""
    names = {long: short for short, long in _COMPUTE_DTYPES.items()}
    word = str(dtype).removeprefix("torch.")
    return names.get(word, word)
