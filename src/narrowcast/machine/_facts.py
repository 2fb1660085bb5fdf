"""What this machine has, from torch and the system, and what does not fit together."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from narrowcast.machine._environment import arithmetic_settings, cpu_capabilities, first_line, processor_name

# Instructions that decide how fast a format is: their name in reports -> in torch.cpu.get_capabilities().
_X86 = {
    "AVX2": "avx2",
    "AVX512": "avx512_f",
    "AVX512-BF16": "avx512_bf16",
    "AMX-BF16": "amx_bf16",
    "AVX512-FP16": "avx512_fp16",
    "AMX-FP16": "amx_fp16",
}
_ARM = {"Arm BF16": "bf16", "Arm FP16": "fp16_arith", "Arm SVE": "sve", "Arm SVE-BF16": "sve_bf16"}
# Files with the limit of a container's memory, by cgroups v2 and v1.
_MEMORY_LIMITS = [Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes")]
_CPU_TIMES = Path("/proc/stat")
_INSTALL = "https://pytorch.org/get-started/locally"
# What torch raises where no driver is installed, so most likely no GPU either:
# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDAFunctions.cpp
_NO_DRIVER = "Found no NVIDIA driver"
# What it raises where every GPU is hidden, as by CUDA_VISIBLE_DEVICES.
_NO_GPU = "GPUs are available"

_Mismatch = tuple[str, str, str, str]


def gather_facts() -> dict[str, Any]:
    """Return everything about this machine that decides which formats are fast, as JSON-ready values.

    Keys: ``python``, ``platform``, ``torch`` (version and build), ``cpu``, ``gpus`` (those that torch sees),
    ``gpu_driver`` (``"NVIDIA"`` or ``"AMD"`` if a driver is installed), ``mps``, ``xpu`` and ``arithmetic``
    (``arithmetic_settings``). Unknown values are null.
    """
    with warnings.catch_warnings():
        # torch warns of an old driver or an old GPU here; ``mismatches`` reports both in one line.
        warnings.simplefilter("ignore")
        gpus, cuda_error = _visible_gpus()
        return {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "torch": torch_facts(cuda_error),
            "cpu": cpu_facts(cpu_capabilities(), architecture=platform.machine()),
            "gpus": gpus,
            "gpu_driver": installed_gpu_driver(),
            "mps": {"built": torch.backends.mps.is_built(), "available": torch.backends.mps.is_available()},
            "xpu": torch.xpu.is_available(),
            "arithmetic": arithmetic_settings(),
        }


def torch_facts(cuda_error: str | None = None) -> dict[str, Any]:
    """Return the version of torch, what it was built for, and why it reaches no GPU (``cuda_error``)."""
    builds = {"rocm": torch.version.hip, "cuda": torch.version.cuda, "xpu": torch.version.xpu}
    build = next((name for name, version in builds.items() if version), "cpu")
    return {
        "version": str(torch.__version__),
        "build": build,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "architectures": list(torch.cuda.get_arch_list()) if torch.cuda.is_available() else [],
        "cuda_error": cuda_error,
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
    }


def cpu_facts(capabilities: Mapping[str, Any], *, architecture: str) -> dict[str, Any]:
    """Return the processor, its memory, torch's threads, and its instructions: yes, no or null."""
    known = _ARM if architecture.lower() in ("arm64", "aarch64") else _X86
    instructions: dict[str, bool | None] = dict.fromkeys(known)
    for name, key in known.items():
        if key in capabilities:
            instructions[name] = bool(capabilities[key])
    return {
        "name": processor_name(),
        "architecture": architecture,
        "cores": _usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "instructions": instructions,
    }


def _usable_cores() -> int | None:
    # A container or a scheduler may give this process fewer than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def memory_bytes() -> int | None:
    """Return the memory of this machine, or of the container if that has less; None if unknown."""
    limits = []
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(path.read_text()))
    return min(limits, default=None)


def cpu_share_in_use(seconds: float) -> float | None:
    """Wait, and return the share of this process's CPUs in use meanwhile, 0 to 1; None without ``/proc``."""
    before = _cpu_ticks()
    time.sleep(seconds)
    after = _cpu_ticks()
    if before is None or after is None:
        return None
    idle, total = after[0] - before[0], after[1] - before[1]
    return 1.0 - idle / total if total > 0 else None


def _cpu_ticks() -> tuple[int, int] | None:
    """Return the ticks since the system started in which this process's CPUs were idle, and all ticks."""
    try:
        lines = _CPU_TIMES.read_text().splitlines()
        usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    idle = total = 0
    for line in lines:
        name, *fields = line.split()
        if name in usable:
            # The fields user, nice, system, idle, iowait, irq, softirq and steal. Times of guests follow, and
            # are left out, since the first two fields include them.
            ticks = [int(field) for field in fields[:8]]
            idle += ticks[3] + ticks[4]
            total += sum(ticks)
    return idle, total


def _visible_gpus() -> tuple[list[dict[str, Any]], str | None]:
    """Return the GPUs that torch sees, and the error of CUDA or ROCm if it sees none."""
    gpus: list[dict[str, Any]] = []
    try:
        for kind in ("cuda", "xpu"):
            module = getattr(torch, kind)
            if module.is_available():
                for index in range(module.device_count()):
                    gpus.append(gpu_facts(kind, index, module.get_device_properties(index)))
        # If a build for GPUs sees none, this raises an error with the reason.
        if (torch.version.cuda or torch.version.hip) and not torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return gpus, first_line(error)
    return gpus, None


def gpu_facts(device_type: str, index: int, properties: Any) -> dict[str, Any]:
    """Describe one GPU by ``torch.cuda.get_device_properties`` (or the same of XPU)."""
    gpu: dict[str, Any] = {
        "device": f"{device_type}:{index}",
        "device_type": device_type,
        "name": str(properties.name),
        "memory_bytes": int(properties.total_memory),
        "capability": None,
        "gfx": None,
    }
    architecture = str(getattr(properties, "gcnArchName", ""))
    if architecture.startswith("gfx"):
        gpu["gfx"] = architecture
    elif device_type == "cuda":
        gpu["capability"] = f"{properties.major}.{properties.minor}"
    return gpu


def installed_gpu_driver() -> str | None:
    """Return whose driver is installed, ``"NVIDIA"`` or ``"AMD"``; None if neither is."""
    if shutil.which("nvidia-smi") is not None:
        return "NVIDIA"
    if Path("/dev/kfd").exists():
        return "AMD"
    return None


# ---- what does not fit together


def mismatches(facts: dict[str, Any]) -> list[dict[str, str]]:
    """Return what makes a device unusable (``"error"``), or slower or unused (``"note"``).

    ``facts`` are those of ``gather_facts``.

    Returns:
        JSON-ready values: ``severity``, ``device`` (``"cpu"``, ``"cuda"``, ``"cuda:0"`` ...), ``text`` and
        ``fix``.
    """
    keys = ("severity", "device", "text", "fix")
    rows = [*_build(facts), *_kernels(facts), *_cpu(facts)]
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _build(facts: dict[str, Any]) -> Iterator[_Mismatch]:
    """Find a torch that was not built for the GPU here, or that cannot reach it, with torch's reason."""
    build = facts["torch"]["build"]
    version = facts["torch"]["version"]
    driver = facts["gpu_driver"]
    why = facts["torch"]["cuda_error"]

    if build == "cpu" and driver is not None:
        text = f"the driver of a GPU of {driver} is installed, and torch {version} was built for CPUs alone"
        yield "note", "cuda", text, f"if this machine has that GPU, install the build that {_INSTALL} names"

    if why is None or _NO_DRIVER in why:
        return
    built_for = f"CUDA {facts['torch']['cuda']}" if build == "cuda" else f"ROCm {facts['torch']['hip']}"
    text = f"this torch was built for {built_for} and reaches no GPU: {why}"
    if _NO_GPU in why:
        # GPUs are hidden on purpose more often than by mistake.
        yield "note", "cuda", text, "check CUDA_VISIBLE_DEVICES, or HIP_VISIBLE_DEVICES"
    else:
        fix = f"update the driver, or install the build of torch for it that {_INSTALL} names"
        yield "error", "cuda", text, fix


def _kernels(facts: dict[str, Any]) -> Iterator[_Mismatch]:
    """Find GPUs for which this build of torch has no kernels."""
    built_for = facts["torch"]["architectures"]
    for gpu in facts["gpus"]:
        if gpu["device_type"] != "cuda" or not built_for:
            continue
        if gpu["gfx"] is not None:
            has = gpu["gfx"].split(":")[0]
            fits = has in built_for
        else:
            has = f"compute capability {gpu['capability']}"
            fits = runs_on(built_for, gpu["capability"])
        if not fits:
            text = f"{gpu['name']} has {has}, and this torch has kernels for {', '.join(built_for)} only"
            yield "error", gpu["device"], text, f"install a torch build that includes it: see {_INSTALL}"


def runs_on(architectures: list[str], capability: str) -> bool:
    """Return whether code for any of ``architectures`` (``"sm_80"``) runs on ``capability`` (``"8.6"``).

    - Code with the suffix ``a`` runs on that version alone.
    - Machine code (``sm_``), and either kind with the suffix ``f``, runs on the same major version, from its
      minor version up.
    - Other ``compute_`` code runs on that version and any later one: the driver compiles it.

    CUDA C++ Programming Guide, "Application Compatibility".
    """
    gpu = tuple(int(part) for part in capability.split("."))
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if match is None:
            continue
        code = (int(match[2]), int(match[3]))
        if match[4] == "a":
            fits = code == gpu
        elif match[1] == "sm" or match[4] == "f":
            fits = code[0] == gpu[0] and code[1] <= gpu[1]
        else:
            fits = code <= gpu
        if fits:
            return True
    return False


def _cpu(facts: dict[str, Any]) -> Iterator[_Mismatch]:
    """Find what keeps torch from using all cores, or the CPU's vector instructions."""
    cores = facts["cpu"]["cores"]
    threads = facts["cpu"]["torch_threads"]
    # By default torch uses one thread for each physical core, which may be half of the cores that the system
    # counts. Four threads or more are taken to be intended.
    if cores and threads * 2 < cores and threads < 4:
        text = f"torch uses {threads} of {cores} cores"
        yield "note", "cpu", text, "unset OMP_NUM_THREADS, or call torch.set_num_threads"

    instructions = facts["cpu"]["instructions"]
    wide = [name for name in ("AVX512", "AVX2") if instructions.get(name)]
    if wide and facts["torch"]["cpu_kernels"] in ("DEFAULT", "NO AVX"):
        text = f"this CPU has {wide[0]}, and torch uses its plain kernels"
        yield "note", "cpu", text, "unset ATEN_CPU_CAPABILITY"
