"""What does not fit together on a machine: one line each, with the fix. A pure function of the facts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_INSTALL = "https://pytorch.org/get-started/locally"
# The oldest driver on Linux for each major CUDA, by NVIDIA's "Minor Version Compatibility", table 1:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


def mismatches(facts: dict[str, Any]) -> list[dict[str, str]]:
    """Return what makes a device unusable (``"error"``) or slower (``"note"``), by ``gather_facts``.

    Returns:
        JSON-ready values: ``severity``, ``device`` (``"cpu"``, ``"cuda"``, ``"cuda:0"`` ...), ``text`` and
        ``fix``.
    """
    keys = ("severity", "device", "text", "fix")
    found = [*_builds(facts), *_drivers(facts), *_kernels(facts), *_cpu(facts)]
    return [dict(zip(keys, one, strict=True)) for one in found]


_Mismatch = tuple[str, str, str, str]


def _builds(facts: dict[str, Any]) -> Iterator[_Mismatch]:
    """Find a torch that was built for something else than this machine has."""
    torch, nvidia = facts["torch"], facts["nvidia"]
    if (nvidia["gpus"] or "NVIDIA" in facts["pci"]) and torch["build"] in ("cpu", "xpu"):
        name = nvidia["gpus"][0] if nvidia["gpus"] else "an NVIDIA GPU"
        newest = f" for CUDA {nvidia['driver_cuda']} or older" if nvidia["driver_cuda"] else ""
        text = f"this machine has {name}, and torch {torch['version']} was built without CUDA"
        yield (
            "error",
            "cuda",
            text,
            f"pip uninstall torch, then install the build{newest} that {_INSTALL} names",
        )
    if torch["build"] == "rocm" and not facts["gpus"]:
        if facts["kfd"]:
            text = f"this torch is a ROCm build and sees no GPU ({torch['cuda_error'] or 'no reason given'})"
            fix = "check that your user is in the groups render and video, and HIP_VISIBLE_DEVICES"
            yield "error", "cuda", text, fix
        elif "AMD" in facts["pci"]:
            text = "this torch is a ROCm build, and AMD's driver is not loaded (/dev/kfd is missing)"
            fix = "install the amdgpu driver; in a container pass --device=/dev/kfd --device=/dev/dri"
            yield "error", "cuda", text, fix
    if torch["build"] == "cpu" and facts["kfd"]:
        text = f"AMD's driver is loaded, and torch {torch['version']} was built without ROCm"
        yield (
            "note",
            "cuda",
            text,
            f"if rocminfo lists this GPU, install the ROCm build that {_INSTALL} names",
        )


def _drivers(facts: dict[str, Any]) -> Iterator[_Mismatch]:
    """Hold a CUDA build of torch against the NVIDIA driver."""
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
