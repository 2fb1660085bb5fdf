"""Which formats the hardware has instructions for: read from the hardware, never from a stopwatch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A compute format (``"fp32"``, ``"bf16"`` or ``"fp16"``) and the reason for it, as a clause."""

    format: str
    because: str


@cache
def _cpu_capabilities() -> dict[str, bool]:
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
    capabilities = _cpu_capabilities()
    names = [name for key, name in _CPU_INSTRUCTIONS[format_name] if capabilities.get(key)]
    return " and ".join(names) if names else None


def best_format(device_type: str) -> Choice:
    """The narrowest safe format that ``device_type`` computes in natively.

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
    """Whether ``device_type`` has instructions for ``format_name``; devices other than a CPU are trusted."""
    if format_name == "fp32" or device_type != "cpu":
        return True
    return _cpu_instructions(format_name) is not None


def slow_format_warning(format_name: str, device_type: str) -> str | None:
    """One line to show a person when ``format_name`` is emulated on ``device_type``, else None."""
    if is_native(format_name, device_type):
        return None
    instead = best_format(device_type).format
    advice = "fp32 is faster" if instead == "fp32" else f"--policy {instead} is the fast one"
    return f"{format_name} on this CPU has no instructions and is very slow (10 to 900 times); {advice} here"
