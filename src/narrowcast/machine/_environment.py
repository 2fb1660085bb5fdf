"""What torch and this machine can do: versions, types of device, FP32 settings, the table of ``auto``."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from narrowcast.errors import DeviceError, UnsupportedError, did_you_mean
from narrowcast.machine._torch_internals import capabilities_before_2_12

_OLDEST_TORCH = (2, 11)
UNREADABLE = "unreadable"
_AUTOCAST_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "ipu", "xla")
# Instructions that compute in a format: their name in ``torch.cpu.get_capabilities()``, and that in messages.
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
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise UnsupportedError(
            f"narrowcast needs torch {oldest} or newer and found {torch.__version__}: "
            f"pip install --upgrade 'torch>={oldest}'"
        )


def versions() -> dict[str, str | int | None]:
    """Return Python, torch, CUDA, operating system, processor, GPU and thread count, as JSON-ready values."""
    return read_each(
        {
            "python": lambda: sys.version.split()[0],
            "torch": lambda: str(torch.__version__),  # a subclass of str, which compares by parts
            "cuda": lambda: torch.version.cuda,
            "platform": platform.platform,
            "processor": processor_name,
            "gpu": lambda: torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "threads": torch.get_num_threads,
        }
    )


def read_each(readings: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Call each reading. One that raises gives ``"unreadable (why)"``: a script may have changed anything."""
    values = {}
    for name, read in readings.items():
        try:
            values[name] = read()
        except Exception as error:
            values[name] = f"{UNREADABLE} ({first_line(error)})"
    return values


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type: CUDA adds pages of advice."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def processor_name() -> str:
    name = None
    if hasattr(torch.cpu, "get_capabilities"):  # since torch 2.12
        name = torch.cpu.get_capabilities().get("cpu_name")
    return str(name or platform.processor() or platform.machine())


def arithmetic_settings() -> dict[str, str | bool]:
    """Return how FP32 matmuls are computed now, as JSON-ready values.

    float32_matmul_precision is torch's: ``"highest"`` is FP32, ``"high"`` allows TF32 or three bf16 matmuls,
    ``"medium"`` one bf16 matmul. The ``allow_tf32`` flags are cuDNN's and cuBLAS's; without a CUDA device
    they change nothing. A script may set them itself, so call this at its end.
    """
    backends: Any = torch.backends
    # Once a script sets ``fp32_precision``, torch's newer names, the older ones raise RuntimeError:
    # https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/Context.cpp ("mix of the legacy and new")
    older = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cuda_matmul_allow_tf32": lambda: backends.cuda.matmul.allow_tf32,
        "cudnn_allow_tf32": lambda: backends.cudnn.allow_tf32,
        "cudnn_benchmark": lambda: backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    }
    newer = {
        "float32_matmul_precision": lambda: (
            f"cuda {backends.cuda.matmul.fp32_precision}, mkldnn {backends.mkldnn.matmul.fp32_precision}"
        ),
        "cuda_matmul_allow_tf32": lambda: backends.cuda.matmul.fp32_precision == "tf32",
        "cudnn_allow_tf32": lambda: backends.cudnn.conv.fp32_precision == "tf32",
    }
    settings = read_each(older)
    # The newer names stand in for those older ones that raised.
    for name, read in newer.items():
        if str(settings[name]).startswith(UNREADABLE):
            settings |= read_each({name: read})
    return settings


def known_device_types() -> tuple[str, ...]:
    """Return the device types with an autocast of their own, an extension's ``privateuse1`` included."""
    return (*_AUTOCAST_DEVICE_TYPES, torch.device("privateuseone").type)  # as an extension renamed it


def check_device(device_type: str, *, present: bool = True) -> None:
    """Refuse a device type that torch does not know or, with ``present``, that this machine lacks.

    Raises:
        DeviceError: with similar names for an unknown type, with the fix for an absent one.
    """
    if device_type not in known_device_types():
        raise DeviceError(
            f"unknown device type {device_type!r} (a type such as 'cuda', without an index). "
            + did_you_mean(device_type, known_device_types())
        )
    # Types without torch.<type>.is_available pass unchecked, such as xla, which is a package of its own.
    is_available = getattr(getattr(torch, device_type, None), "is_available", None)
    if not present or is_available is None or is_available():
        return
    if device_type == "cuda":
        built = torch.version.cuda or torch.version.hip
        why = "torch sees no GPU" if built else "this torch is a CPU build"
        raise DeviceError(
            f"device 'cuda' was asked for and {why}. Use device 'cpu', or install a CUDA build of torch "
            "on a machine with a GPU (python -c 'import torch; print(torch.cuda.is_available())')."
        )
    raise DeviceError(f"device {device_type!r} was asked for and this machine has none. Use device 'cpu'.")


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


def table_format(device_type: str) -> Choice:
    """Return what ``auto`` is where no rates are kept: the narrowest safe format computed natively.

    CUDA and ROCm: bf16 where the device has it (not emulated), else fp16. CPU: bf16 with AMX, AVX10.2 or Arm
    bf16 instructions, or with AVX512-BF16 on other CPUs than Intel's; else fp32. Others: their autocast's
    default.
    """
    if device_type == "cpu":
        instructions = _cpu_instructions("bf16")
        if instructions is None:
            return Choice(format="fp32", because="this CPU has no bf16 instructions, so bf16 would be slower")
        if known_to_be_slow("bf16"):
            return Choice(format="fp32", because=f"this CPU has {instructions} without AMX: bf16 is slower")
        return Choice(format="bf16", because=f"this CPU has {instructions}")
    if device_type == "cuda":
        if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice(format="bf16", because=f"{torch.cuda.get_device_name()} computes in bf16")
        because = "torch sees no GPU here"
        if torch.cuda.is_available():
            because = "this GPU computes in fp16 and not in bf16"
        return Choice(format="fp16", because=because)
    dtype = torch.get_autocast_dtype(device_type)
    return Choice(format=_DTYPE_NAMES.get(dtype, "fp32"), because=f"autocast's default on {device_type!r}")


def known_to_be_slow(format_name: str, kind: str = "matmul") -> str | None:
    """Return what makes matmuls or convolutions of ``format_name`` slower than fp32's on this CPU, or None.

    Measured, as multiples of fp32's speed. bf16 and fp16 matmuls on AMD with AVX2 alone: 0.06 at most. bf16
    matmuls on Intel: 0.19 with AVX512 alone, 0.6 with AVX512-BF16 and no AMX; on AMD with AVX512-BF16 2 to 6.
    fp16 convolutions, forward and backward: 1/6 or less on AMD, where they are emulated; about 1/100 with
    AVX512-FP16 and no AMX-FP16, where the forward pass by itself runs at 0.6.
    """
    instructions = _cpu_instructions(format_name)
    if kind == "matmul" and instructions is None:
        return f"{format_name} on this CPU is emulated: matmuls are 5 to hundreds of times slower"
    if kind == "matmul" and instructions == "AVX512-BF16" and "Intel" in processor_name():
        return "bf16 on this CPU runs on AVX512-BF16 without AMX: matmuls are about 1.7x slower"
    if kind == "convolution" and instructions == "AVX512-FP16":
        return "fp16 on this CPU runs on AVX512-FP16: convolutions are dozens to hundreds of times slower"
    if kind == "convolution" and format_name == "fp16":
        return "fp16 convolutions were 6 to hundreds of times slower on all CPUs that were measured"
    return None
