"""What torch and this machine can do: versions, types of device, FP32 settings, the format of ``auto``."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

from narrowcast.errors import DeviceError, UnsupportedError, near_names
from narrowcast.machine._torch_internals import capabilities_before_2_12

_OLDEST_TORCH = (2, 11)
_T = TypeVar("_T")
_AUTOCAST_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla")
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


def require_torch() -> None:
    """Refuse a torch older than 2.11 in one line instead of failing somewhere inside.

    Raises:
        UnsupportedError: with the version found and the command that upgrades it.
    """
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise UnsupportedError(
            f"narrowcast needs torch {oldest} or newer and found {torch.__version__}: "
            f"pip install --upgrade 'torch>={oldest}'"
        )


def versions() -> dict[str, str | int | None]:
    """Return Python, torch, operating system, processor or GPU, and thread count, as JSON-ready values."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),  # a subclass of str, which compares by parts
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "processor": processor_name(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
    }


def processor_name() -> str:
    read = getattr(torch.cpu, "get_capabilities", None)
    name = read().get("cpu_name") if read is not None else None
    return str(name or platform.processor() or platform.machine())


def arithmetic_settings() -> dict[str, str | bool]:
    """Return how FP32 matmuls are computed now, as JSON-ready values.

    float32_matmul_precision is torch's: ``"highest"`` is FP32, ``"high"`` allows TF32 or three bf16 matmuls,
    ``"medium"`` one bf16 matmul. The ``allow_tf32`` flags are cuDNN's and cuBLAS's; without a CUDA device
    they change nothing. A script may set them itself, so ask at its end.
    """
    cuda = torch.backends.cuda.matmul
    mkldnn = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return {
        # Once a script sets ``fp32_precision``, torch's newer names, the older ones raise RuntimeError:
        # https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/Context.cpp ("mix of the legacy and
        # new")
        "float32_matmul_precision": _either(
            torch.get_float32_matmul_precision,
            lambda: f"cuda {cuda.fp32_precision}, mkldnn {mkldnn.fp32_precision}",
        ),
        "cuda_matmul_allow_tf32": _either(lambda: cuda.allow_tf32, lambda: cuda.fp32_precision == "tf32"),
        "cudnn_allow_tf32": _either(
            lambda: torch.backends.cudnn.allow_tf32,
            lambda: torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
        ),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _either(older: Callable[[], _T], newer: Callable[[], _T]) -> _T:
    try:
        return older()
    except RuntimeError:
        return newer()


def known_device_types() -> tuple[str, ...]:
    """Return the device types with an autocast of their own, an extension's ``privateuse1`` included."""
    return (*_AUTOCAST_DEVICE_TYPES, torch.device("privateuseone").type)  # as an extension renamed it


def check_device(device_type: str, *, present: bool = True) -> None:
    """Refuse a device type that torch does not know or, with ``present``, that this machine lacks.

    Raises:
        DeviceError: with near names for an unknown one, with the fix for an absent one.
    """
    if device_type not in known_device_types():
        raise DeviceError(
            f"unknown device type {device_type!r} (a type such as 'cuda', without an index). "
            + near_names(device_type, known_device_types())
        )
    if not present:
        return
    if device_type == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch sees no GPU" if built else "this torch is a CPU build"
        raise DeviceError(
            f"device 'cuda' was asked for and {why}. Use device 'cpu', or install a CUDA build of torch "
            "on a machine with a GPU (python -c 'import torch; print(torch.cuda.is_available())')."
        )
    if device_type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device 'mps' was asked for and this machine has none. Use device 'cpu'.")


# ---- the format that "auto" chooses


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A compute format (``"fp32"``, ``"bf16"`` or ``"fp16"``) and the reason for it, as a clause."""

    format: str
    because: str


@cache
def cpu_capabilities() -> dict[str, bool]:
    read = getattr(torch.cpu, "get_capabilities", capabilities_before_2_12)
    return {name: bool(value) for name, value in read().items()}


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
