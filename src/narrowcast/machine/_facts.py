"""What this machine has, from torch, the driver's tools and the system, and what does not fit together."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from narrowcast.machine._environment import arithmetic_settings, cpu_capabilities, first_line, processor_name

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
# Of the memory of a container: cgroups v2 and v1.
_LIMITS = [Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes")]
_TOOL_TIMEOUT_S = 10
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
# A display controller: VGA, or 3D such as a datacenter card (PCI class 03).
_DISPLAY_CLASS = "0x03"
_INSTALL = "https://pytorch.org/get-started/locally"
# The oldest driver on Linux for each major CUDA, by NVIDIA's "Minor Version Compatibility", table 1:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}

_Mismatch = tuple[str, str, str, str]


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


def gather_facts() -> dict[str, Any]:
    """Return everything about this machine that decides which formats are fast, as JSON-ready values.

    Keys: ``python``, ``platform``, ``torch`` (version and build), ``cpu``, ``gpus`` (those that torch sees),
    ``nvidia`` (driver and toolkit, from their own tools), ``pci`` (vendors of graphics processors), ``kfd``
    (whether AMD's driver is loaded), ``mps``, ``xpu`` and ``arithmetic`` (``arithmetic_settings``). Unknown
    values are null.
    """
    with warnings.catch_warnings():
        # An old driver or an old GPU makes torch warn here; ``mismatches`` reports it in one line.
        warnings.simplefilter("ignore")
        gpus, cuda_error = _visible_gpus()
        return {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "torch": torch_facts(cuda_error),
            "cpu": cpu_facts(cpu_capabilities(), architecture=platform.machine()),
            "gpus": gpus,
            "nvidia": nvidia_facts(),
            "pci": read_pci(),
            "kfd": Path("/dev/kfd").exists(),
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
        "memory_bytes": memory_bytes(),
        "instructions": {
            name: bool(capabilities[key]) if key in capabilities else None for name, key in known.items()
        },
    }


def _usable_cores() -> int | None:
    # A container or a scheduler may give this process fewer than the machine has.
    ask = getattr(os, "sched_getaffinity", None)
    return len(ask(0)) if ask is not None else os.cpu_count()


def memory_bytes() -> int | None:
    """Return the memory of this machine, or of the container if that has less; None if unknown."""
    found = []
    with suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            found.append(int(path.read_text()))
    return min(found, default=None)


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


def nvidia_facts() -> dict[str, Any]:
    """Return NVIDIA's driver, the newest CUDA that it supports, its GPUs, and the toolkit, or null."""
    listed = run_tool("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or ""
    rows = [row.rpartition(",") for row in listed.splitlines() if row.count(",")]
    drivers = [driver.strip() for _, _, driver in rows if re.fullmatch(r"\d+(\.\d+)+", driver.strip())]
    overview = run_tool("nvidia-smi") or "" if drivers else ""
    compiler = run_tool("nvcc", "--version") or run_tool("/usr/local/cuda/bin/nvcc", "--version") or ""
    return {
        "driver": drivers[0] if drivers else None,
        "driver_cuda": _found(r"CUDA[A-Za-z ]*Version\s*:\s*(\d+\.\d+)", overview),
        "gpus": [name.strip() for name, _, _ in rows] if drivers else [],
        "toolkit": _found(r"release (\d+\.\d+)", compiler),
    }


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


# ---- what does not fit together


def mismatches(facts: dict[str, Any]) -> list[dict[str, str]]:
    """Return what makes a device unusable (``"error"``) or slower (``"note"``), by ``gather_facts``.

    Returns:
        JSON-ready values: ``severity``, ``device`` (``"cpu"``, ``"cuda"``, ``"cuda:0"`` ...), ``text`` and
        ``fix``.
    """
    keys = ("severity", "device", "text", "fix")
    found = [*_builds(facts), *_drivers(facts), *_kernels(facts), *_cpu(facts)]
    return [dict(zip(keys, one, strict=True)) for one in found]


def _builds(facts: dict[str, Any]) -> Iterator[_Mismatch]:
    """Find a torch that was built for something else than this machine has."""
    torch, nvidia = facts["torch"], facts["nvidia"]
    if (nvidia["gpus"] or "NVIDIA" in facts["pci"]) and torch["build"] in ("cpu", "xpu"):
        name = nvidia["gpus"][0] if nvidia["gpus"] else "an NVIDIA GPU"
        newest = f" for CUDA {nvidia['driver_cuda']} or older" if nvidia["driver_cuda"] else ""
        text = f"this machine has {name}, and torch {torch['version']} was built without CUDA"
        fix = f"pip uninstall torch, then install the build{newest} that {_INSTALL} names"
        yield "error", "cuda", text, fix
    if torch["build"] == "rocm" and not facts["gpus"] and (facts["kfd"] or "AMD" in facts["pci"]):
        text = f"this torch is a ROCm build and sees no GPU ({torch['cuda_error'] or 'no reason given'})"
        fix = "check that amdgpu is loaded (/dev/kfd) and your user in the groups render and video"
        yield "error", "cuda", text, fix
    if torch["build"] == "cpu" and facts["kfd"]:
        text = f"AMD's driver is loaded, and torch {torch['version']} was built without ROCm"
        fix = f"if rocminfo lists this GPU, install the ROCm build that {_INSTALL} names"
        yield "note", "cuda", text, fix


def _drivers(facts: dict[str, Any]) -> Iterator[_Mismatch]:
    """Compare a CUDA build of torch with the NVIDIA driver."""
    built, nvidia = facts["torch"]["cuda"], facts["nvidia"]
    if facts["torch"]["build"] != "cuda":
        return
    sees_none = not any(gpu["device_type"] == "cuda" for gpu in facts["gpus"])
    oldest, supported = _OLDEST_DRIVER.get(_version(built)[0]), nvidia["driver_cuda"]
    needed = f"{oldest} or newer" if oldest else "of a newer version"
    if nvidia["driver"] is None:
        if sees_none and "NVIDIA" in facts["pci"]:
            text = "this machine has an NVIDIA GPU, and nvidia-smi finds no working driver"
            yield "error", "cuda", text, f"install NVIDIA driver {needed}"
        return
    too_old = bool(oldest and _version(nvidia["driver"])[0] < oldest)
    if supported:
        too_old = _version(supported)[0] < _version(built)[0]
    up_to = f", which supports CUDA up to {supported}" if supported else ""
    if too_old and sees_none:
        fitting = f"CUDA {_version(supported)[0]}" if supported else "an older CUDA"
        text = f"torch was built with CUDA {built}, and the driver is {nvidia['driver']}{up_to}"
        fix = f"update the driver to {needed}, or install the torch build for {fitting} that {_INSTALL} names"
        yield "error", "cuda", text, fix
    elif sees_none and nvidia["gpus"]:
        reason = facts["torch"]["cuda_error"] or "no reason given"
        text = f"nvidia-smi lists {nvidia['gpus'][0]}, and torch sees no GPU ({reason})"
        # If CUDA_VISIBLE_DEVICES hides it, most likely on purpose.
        severity = "note" if "No CUDA GPUs are available" in reason else "error"
        yield severity, "cuda", text, "check CUDA_VISIBLE_DEVICES; after a driver update restart the machine"
    elif supported and _version(supported) < _version(built):
        text = (
            f"torch was built with CUDA {built}, newer than the driver {nvidia['driver']}{up_to}: it runs, "
            "but kernels that are compiled while running (Triton, torch.compile) may not"
        )
        yield "note", "cuda", text, "update the driver"


def _kernels(facts: dict[str, Any]) -> Iterator[_Mismatch]:
    """Find GPUs for which this build of torch has no kernels."""
    built_for = facts["torch"]["architectures"]
    for gpu in facts["gpus"]:
        if gpu["device_type"] != "cuda" or not built_for:
            continue
        gfx = (gpu["gfx"] or "").split(":")[0]
        if not (gfx in built_for if gfx else runs_on(built_for, gpu["capability"])):
            has = gfx or f"compute capability {gpu['capability']}"
            text = f"{gpu['name']} has {has}, and this torch has kernels for {', '.join(built_for)} only"
            yield "error", gpu["device"], text, f"install a torch build that includes it: see {_INSTALL}"


def runs_on(architectures: list[str], capability: str) -> bool:
    """Return whether code for any of ``architectures`` (``"sm_80"``) runs on ``capability`` (``"8.6"``).

    Machine code (``sm_``) runs on the same major version from its minor version up, with a suffix ``a`` on
    that version alone; what ``compute_`` names is compiled by the driver for any later one. CUDA C++
    Programming Guide, "Application Compatibility".
    """
    mine = _version(capability)
    for architecture in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if found is None:
            continue
        theirs = (int(found[2]), int(found[3]))
        if found[4] == "a":
            fits = theirs == mine
        elif found[1] == "sm" or found[4] == "f":
            fits = theirs[0] == mine[0] and theirs[1] <= mine[1]
        else:
            fits = theirs <= mine
        if fits:
            return True
    return False


def _cpu(facts: dict[str, Any]) -> Iterator[_Mismatch]:
    cpu = facts["cpu"]
    if cpu["cores"] and cpu["torch_threads"] * 2 < cpu["cores"] and cpu["torch_threads"] < 4:
        text = f"torch uses {cpu['torch_threads']} of {cpu['cores']} cores"
        yield "note", "cpu", text, "unset OMP_NUM_THREADS, or call torch.set_num_threads"
    wide = [name for name in ("AVX512", "AVX2") if cpu["instructions"].get(name)]
    if facts["torch"]["cpu_kernels"] in ("DEFAULT", "NO AVX") and wide:
        text = f"this CPU has {wide[0]}, and torch uses its plain kernels"
        yield "note", "cpu", text, "unset ATEN_CPU_CAPABILITY"


def _version(text: str | None) -> tuple[int, int]:
    found = re.match(r"(\d+)(?:\.(\d+))?", text or "")
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)
