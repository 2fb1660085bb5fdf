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
    "O2": "weights held in a low format too, fp32 master weights in nc.Stepper, batch norms in float32",
}
"""Preset name -> one line for a person."""

_O2_ELSEWHERE = (
    "policy 'O2' holds the model's weights in a low format and updates fp32 master weights, which only "
    "nc.Stepper does: nc.Stepper(model, optimizer, policy=\"O2\"). Here use 'bf16' or 'fp16', which leave "
    "the weights in fp32"
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
    "O0": "fp32",
    "O1": "auto",
}
_COMPUTE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which format to compute in. Frozen, pure data; equal when its fields are equal.

    Attributes:
        compute: ``"bf16"``, ``"fp16"``, ``"fp32"``, or ``"auto"``, which each device resolves for itself.
            Ops follow PyTorch's own autocast table of the device.
        master_weights: the model's weights are held in the format that is computed in, and updated through
            fp32 masters. Preset ``"O2"`` is that with ``"auto"``; only ``nc.Stepper`` can.

    Raises:
        PolicyError: at construction, for any other ``compute``, and masters of weights in fp32.
    """

    compute: str
    master_weights: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.compute, str) or self.compute not in (*_COMPUTE_DTYPES, "auto"):
            raise PolicyError(_unknown(self.compute))
        if not isinstance(self.master_weights, bool):
            raise PolicyError(f"expected master_weights to be a bool, got {self.master_weights!r}")
        if self.master_weights and self.compute == "fp32":
            raise PolicyError("master_weights are for weights in a low format: compute must not be 'fp32'")

    @classmethod
    def preset(cls, name: str) -> Policy:
        """The preset called ``name``; a PolicyError with near names where there is none."""
        return cls(compute="auto", master_weights=True) if name == "O2" else cls(compute=name)

    def __str__(self) -> str:
        if not self.master_weights:
            return f"{self.compute}: {PRESETS[self.compute]}"
        name = "O2" if self.compute == "auto" else f"O2 in {self.compute}"
        return f"{name}: {PRESETS['O2']}"


def _unknown(name: object) -> str:
    if isinstance(name, str) and name in _OTHER_NAMES:
        return f'unknown policy {name!r}. Did you mean "{_OTHER_NAMES[name]}"? Known: {", ".join(PRESETS)}.'
    return f"unknown policy {name!r}. " + near_names(str(name), PRESETS)


def as_policy(policy: Policy | str) -> Policy:
    """``policy`` itself, or the preset that it names."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        word = str(policy).removeprefix("torch.")
        meant = f'; write "{_OTHER_NAMES[word]}"' if word in _OTHER_NAMES else ""
        raise PolicyError(f"expected a Policy or the name of a preset, got {policy!r}{meant}")
    return Policy.preset(policy)


def without_masters(policy: Policy | str) -> Policy:
    """``policy`` for a caller that keeps no master weights.

    Raises:
        PolicyError: it does not exist, or it asks for master weights.
    """
    wanted = as_policy(policy)
    if wanted.master_weights:
        raise PolicyError(_O2_ELSEWHERE)
    return wanted


def resolve(policy: Policy | str, device_type: str, *, master_weights: bool = False) -> torch.dtype:
    """The dtype that ``policy`` computes in on ``device_type``: bfloat16, float16 or float32.

    Args:
        master_weights: whether the caller keeps master weights, where the policy asks for them.

    Raises:
        PolicyError: the policy does not exist, or asks for master weights of a caller that keeps none.
    """
    import torch

    from narrowcast.machine import best_format

    compute = (as_policy if master_weights else without_masters)(policy).compute
    if compute == "auto":
        compute = best_format(device_type).format
    dtype: torch.dtype = getattr(torch, _COMPUTE_DTYPES[compute])
    return dtype


def format_name(dtype: torch.dtype) -> str:
    """``"bf16"`` for ``torch.bfloat16`` and so on; torch's own word for what no policy computes in."""
    names = {long: short for short, long in _COMPUTE_DTYPES.items()}
    word = str(dtype).removeprefix("torch.")
    return names.get(word, word)
