"""What this machine has, as JSON-ready values from torch, the tools of the driver and the system."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowcast.machine._choice import cpu_capabilities
from narrowcast.machine._environment import arithmetic_settings, processor_name

# What decides how fast a format is; keys as in torch.cpu.get_capabilities().
_X86 = {
    "AVX2": "avx2",
    "AVX512": "avx512_f",
    "AVX512-BF16": "avx512_bf16",
    "AMX-BF16": "amx_bf16",
    "AVX512-FP16": "avx512_fp16",
    "AMX-FP16": "amx_fp16",
}
_ARM = {"Arm BF16": "bf16", "Arm FP16": "fp16_arith", "Arm SVE": "sve", "Arm SVE-BF16": "sve_bf16"}
_TOOL_TIMEOUT_S = 10
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
# A display controller: VGA, or 3D such as a datacenter card (PCI class 03).
_DISPLAY_CLASS = "0x03"


def run_tool(*words: str) -> str | None:
    """Return the stdout of a command; None if it is missing, fails, or takes more than ten seconds."""
    path = shutil.which(words[0])
    if path is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [path, *words[1:]],
            capture_output=True,
            timeout=_TOOL_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.decode(errors="replace") if done.returncode == 0 else None
    return None


def read_pci() -> list[str]:
    """Return the vendors of the graphics processors on the PCI bus, NVIDIA and AMD alone."""
    found = []
    for folder in sorted(Path("/sys/bus/pci/devices").glob("*")):
        with suppress(OSError):
            vendor = (folder / "vendor").read_text().strip()
            if vendor in _VENDORS and (folder / "class").read_text().startswith(_DISPLAY_CLASS):
                found.append(_VENDORS[vendor])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where facts outside torch come from; a test gives others.

    Attributes:
        run: a command's words to its stdout, or None.
        pci: vendors of the graphics processors on the bus.
        exists: whether a path is there.
    """

    run: Callable[..., str | None] = run_tool
    pci: Callable[[], list[str]] = read_pci
    exists: Callable[[str], bool] = os.path.exists


def gather_facts(sources: Sources | None = None) -> dict[str, Any]:
    """Return everything about this machine that decides which formats are fast, as JSON-ready values.

    Keys: ``python``, ``platform``, ``torch`` (version and build), ``cpu``, ``gpus`` (those that torch sees),
    ``nvidia`` (driver and toolkit, from their own tools), ``pci`` (vendors of graphics processors), ``kfd``
    (whether AMD's driver is loaded), ``mps``, ``xpu`` and ``arithmetic`` (``arithmetic_settings``). Unknown
    values are null.
    """
    sources = sources or Sources()
    with warnings.catch_warnings():
        # An old driver or an old GPU makes torch warn here; the mismatch is said in our own line.
        warnings.simplefilter("ignore")
        gpus, cuda_error = _visible_gpus()
        return {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "torch": torch_facts(cuda_error),
            "cpu": cpu_facts(cpu_capabilities(), architecture=platform.machine()),
            "gpus": gpus,
            "nvidia": nvidia_facts(sources.run),
            "pci": sources.pci(),
            "kfd": sources.exists("/dev/kfd"),
            "mps": {"built": torch.backends.mps.is_built(), "available": torch.backends.mps.is_available()},
            "xpu": torch.xpu.is_available(),
            "arithmetic": arithmetic_settings(),
        }


def torch_facts(cuda_error: str | None = None) -> dict[str, Any]:
    """Return the version of torch, what it was built for, and why it reaches no GPU (``cuda_error``)."""
    hip, cuda = torch.version.hip, torch.version.cuda
    build = "rocm" if hip else "cuda" if cuda else "xpu" if torch.version.xpu else "cpu"
    return {
        "version": str(torch.__version__),
        "build": build,
        "cuda": cuda,
        "hip": hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "architectures": list(torch.cuda.get_arch_list()) if torch.cuda.is_available() else [],
        "cuda_error": cuda_error,
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
    }


def cpu_facts(capabilities: Mapping[str, Any], *, architecture: str) -> dict[str, Any]:
    """Return the processor, its memory, torch's threads, and its instructions: yes, no or null."""
    known = _ARM if architecture.lower() in ("arm64", "aarch64") else _X86
    return {
        "name": processor_name(),
        "architecture": architecture,
        "cores": _usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "instructions": {
            name: bool(capabilities[key]) if key in capabilities else None for name, key in known.items()
        },
    }


def _usable_cores() -> int | None:
    # A container or a scheduler may give this process fewer than the machine has.
    ask = getattr(os, "sched_getaffinity", None)
    return len(ask(0)) if ask is not None else os.cpu_count()


def _memory_bytes() -> int | None:
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _visible_gpus() -> tuple[list[dict[str, Any]], str | None]:
    """Return the GPUs that torch sees, and the error of CUDA or ROCm if it sees none."""
    gpus: list[dict[str, Any]] = []
    try:
        for kind in ("cuda", "xpu"):
            module = getattr(torch, kind)
            if module.is_available():
                found = (module.get_device_properties(i) for i in range(module.device_count()))
                gpus += [gpu_facts(kind, i, properties) for i, properties in enumerate(found)]
        if (torch.version.cuda or torch.version.hip) and not torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return gpus, first_line(error)
    return gpus, None


def gpu_facts(device_type: str, index: int, properties: Any) -> dict[str, Any]:
    """Describe one GPU by ``torch.cuda.get_device_properties`` (or the same of XPU)."""
    gfx = str(getattr(properties, "gcnArchName", "") or "")
    is_amd = gfx.startswith("gfx")
    has_capability = device_type == "cuda" and not is_amd
    return {
        "device": f"{device_type}:{index}",
        "device_type": device_type,
        "name": str(properties.name),
        "memory_bytes": int(properties.total_memory),
        "capability": f"{properties.major}.{properties.minor}" if has_capability else None,
        "gfx": gfx if is_amd else None,
    }


def nvidia_facts(run: Callable[..., str | None]) -> dict[str, Any]:
    """Return NVIDIA's driver, the newest CUDA that it supports, its GPUs, and the toolkit, or null."""
    listed = run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or ""
    rows = [row.rpartition(",") for row in listed.splitlines() if row.count(",")]
    drivers = [driver.strip() for _, _, driver in rows if re.fullmatch(r"\d+(\.\d+)+", driver.strip())]
    overview = run("nvidia-smi") or "" if drivers else ""
    compiler = run("nvcc", "--version") or run("/usr/local/cuda/bin/nvcc", "--version") or ""
    return {
        "driver": drivers[0] if drivers else None,
        "driver_cuda": _found(r"CUDA[A-Za-z ]*Version\s*:\s*(\d+\.\d+)", overview),
        "gpus": [name.strip() for name, _, _ in rows] if drivers else [],
        "toolkit": _found(r"release (\d+\.\d+)", compiler),
    }


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type: CUDA adds pages of advice."""
    lines: Iterable[str] = str(error).strip().splitlines()
    return next(iter(lines), type(error).__name__)
