"""Which format ``auto`` chooses: by the instructions of the hardware, held against measured rates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_CPU_INSTRUCTIONS = {
    "bf16": (
        ("amx_bf16", "AMX-BF16"),
        ("avx512_bf16", "AVX512-BF16"),
        ("avx10_2", "AVX10.2"),
        ("bf16", "Arm BF16"),
        ("sve_bf16", "Arm SVE-BF16"),
    ),
    "fp16": (
        ("amx_fp16", "AMX-FP16"),
        ("avx512_fp16", "AVX512-FP16"),
        ("avx10_2", "AVX10.2"),
        ("fp16_arith", "Arm FP16"),
    ),
}
# Within this, two formats are as fast as each other: the spread of a quiet machine is a few percent.
_AS_FAST = 1.1
# How much faster another 16-bit format must be before it is named: the choice is also about range.
_MUCH_FASTER = 1.25
# Where the middle half of the ratios spans more than this share of them, something else was running.
_STEADY = 0.25
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A compute format (``"fp32"``, ``"bf16"`` or ``"fp16"``) and the reason for it, as a clause."""

    format: str
    because: str


@cache
def cpu_capabilities() -> dict[str, bool]:
    # torch.cpu.get_capabilities is public from 2.12 on; 2.11 has the same knowledge under private names.
    read = getattr(torch.cpu, "get_capabilities", None)
    if read is not None:
        return {name: bool(value) for name, value in read().items()}
    probes = {
        "avx512_bf16": "_is_avx512_bf16_supported",
        "amx_bf16": "_is_amx_tile_supported",
        "amx_fp16": "_is_amx_fp16_supported",
    }
    found = {name: getattr(torch.cpu, probe, None) for name, probe in probes.items()}
    return {name: bool(probe()) for name, probe in found.items() if probe is not None}


def _cpu_instructions(format_name: str) -> str | None:
    capabilities = cpu_capabilities()
    names = [name for key, name in _CPU_INSTRUCTIONS[format_name] if capabilities.get(key)]
    return " and ".join(names) if names else None


def best_format(device_type: str) -> Choice:
    """Return the narrowest safe format that ``device_type`` computes in natively.

    CUDA and ROCm: bf16 where the device has it (not emulated), else fp16. CPU: bf16 with AVX512-BF16,
    AMX or Arm bf16 instructions, else fp32. Any other device: the default of its autocast.
    """
    if device_type == "cpu":
        instructions = _cpu_instructions("bf16")
        if instructions:
            return Choice(format="bf16", because=f"this CPU has {instructions}")
        return Choice(format="fp32", because="this CPU has no bf16 instructions, so bf16 would be slower")
    if device_type == "cuda":
        if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice(format="bf16", because=f"{torch.cuda.get_device_name()} computes in bf16")
        return Choice(format="fp16", because="this GPU computes in fp16 and not in bf16")
    dtype = torch.get_autocast_dtype(device_type)
    return Choice(format=_DTYPE_NAMES.get(dtype, "fp32"), because=f"autocast's default on {device_type!r}")


def is_native(format_name: str, device_type: str) -> bool:
    """Return whether ``device_type`` has instructions for ``format_name``; only CPUs are checked."""
    if format_name == "fp32" or device_type != "cpu":
        return True
    return _cpu_instructions(format_name) is not None


def slow_format_warning(format_name: str, device_type: str) -> str | None:
    """Return a warning if ``format_name`` is emulated on ``device_type``, else None."""
    if is_native(format_name, device_type):
        return None
    instead = best_format(device_type).format
    advice = "fp32 is faster" if instead == "fp32" else f"--policy {instead} is the fast one"
    return f"{format_name} on this CPU has no instructions and is very slow (10 to 900 times); {advice} here"


def agreement(choice: Choice, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare a choice with rows of ``measure_device``; it stays the choice whatever the result.

    Judged by the largest matmul that was measured both in fp32 and in the chosen format, where the
    arithmetic decides and not the overhead of a call.

    Returns:
        JSON-ready values: ``format``, ``because``; ``rates_agree``, null if nothing was measured on a quiet
        machine; ``judged_at`` (the shape); ``speed_against_fp32``; ``faster_format``, another 16-bit format
        that is faster by a quarter or more, or null.
    """
    products = [row for row in rows if row["kind"] == "matmul" and _is_steady(row)]
    judged = [row for row in products if row["format"] == choice.format]
    found: dict[str, Any] = {
        "format": choice.format,
        "because": choice.because,
        "rates_agree": None,
        "judged_at": None,
        "speed_against_fp32": None,
        "faster_format": None,
    }
    if not judged:
        return found
    mine = judged[-1]
    others = {
        row["format"]: row["speed_against_fp32"]
        for row in products
        if row["shape"] == mine["shape"] and row["format"] in {"bf16", "fp16"} - {choice.format}
    }
    best = max(others, key=others.__getitem__, default=None)
    faster = best if best and others[best] > _MUCH_FASTER * mine["speed_against_fp32"] else None
    slower_than_fp32 = mine["speed_against_fp32"] * _AS_FAST < 1
    return found | {
        "rates_agree": faster is None and not slower_than_fp32,
        "judged_at": mine["shape"],
        "speed_against_fp32": mine["speed_against_fp32"],
        "faster_format": faster,
    }


def _is_steady(row: dict[str, Any]) -> bool:
    speed = row["speed_against_fp32"]
    low, high = row.get("speed_against_fp32_low"), row.get("speed_against_fp32_high")
    return speed is not None and (low is None or high is None or high - low <= _STEADY * speed)
