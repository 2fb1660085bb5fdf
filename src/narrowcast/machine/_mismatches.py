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
    """What ``gather_facts`` found that makes a device unusable (``"error"``) or slower (``"note"``).

    Returns:
        JSON-ready values: ``severity``, ``device`` (``"cpu"``, ``"cuda"``, ``"cuda:0"`` ...), ``text`` and
        ``fix``.
    """
    return [*_build(facts), *_driver(facts), *_kernels(facts), *_libraries(facts), *_processor(facts)]


def _error(device: str, text: str, fix: str) -> dict[str, str]:
    return {"severity": "error", "device": device, "text": text, "fix": fix}


def _note(device: str, text: str, fix: str) -> dict[str, str]:
    return {"severity": "note", "device": device, "text": text, "fix": fix}


def _build(facts: dict[str, Any]) -> Iterator[dict[str, str]]:
    """A torch that was built for something else than this machine has."""
    build, nvidia = facts["torch"]["build"], facts["nvidia"]
    version = facts["torch"]["version"]
    name = nvidia["gpus"][0] if nvidia["gpus"] else "an NVIDIA GPU"
    has_nvidia = bool(nvidia["gpus"]) or "NVIDIA" in facts["pci"]
    if has_nvidia and build in ("cpu", "xpu"):
        newest = f" for CUDA {nvidia['driver_cuda']} or older" if nvidia["driver_cuda"] else ""
        yield _error(
            "cuda",
            f"this machine has {name}, and torch {version} was built without CUDA",
            f"pip uninstall torch, then install the build{newest} that {_INSTALL} names",
        )
    if build == "rocm" and not facts["gpus"]:
        has_amd = "AMD" in facts["pci"] or facts["kfd"]
        if not has_amd:
            yield _note(
                "cuda",
                "this torch is a ROCm build, and the machine shows no AMD GPU: it computes on the CPU",
                f"nothing, or install the build for this machine that {_INSTALL} names",
            )
        elif not facts["kfd"]:
            yield _error(
                "cuda",
                "this torch is a ROCm build, and AMD's driver is not loaded (/dev/kfd is missing)",
                "install the amdgpu driver; in a container pass --device=/dev/kfd --device=/dev/dri",
            )
        else:
            reason = facts["torch"]["cuda_error"] or "no reason given"
            yield _error(
                "cuda",
                f"this torch is a ROCm build and sees no GPU ({reason})",
                "check that your user is in the groups render and video, and HIP_VISIBLE_DEVICES",
            )
    if build == "cpu" and facts["kfd"]:
        yield _note(
            "cuda",
            f"AMD's driver is loaded, and torch {version} was built without ROCm",
            f"if rocminfo lists this GPU, install the ROCm build that {_INSTALL} names",
        )
    if facts["mps"]["built"] and not facts["mps"]["available"]:
        yield _note(
            "mps",
            "torch was built for Metal and finds no device",
            "macOS 14 or newer on Apple silicon is needed, outside a virtual machine",
        )


def _driver(facts: dict[str, Any]) -> Iterator[dict[str, str]]:
    """A CUDA build of torch against the NVIDIA driver."""
    built, nvidia = facts["torch"]["cuda"], facts["nvidia"]
    if facts["torch"]["build"] != "cuda":
        return
    sees_none = not any(gpu["device_type"] == "cuda" for gpu in facts["gpus"])
    if nvidia["driver"] is None:
        if sees_none and "NVIDIA" in facts["pci"]:
            oldest = _OLDEST_DRIVER.get(_major(built))
            yield _error(
                "cuda",
                "this machine has an NVIDIA GPU, and nvidia-smi finds no working driver",
                f"install NVIDIA driver {oldest} or newer" if oldest else "install NVIDIA's driver",
            )
        return
    supported = nvidia["driver_cuda"]
    oldest = _OLDEST_DRIVER.get(_major(built))
    too_old = (
        _pair(supported)[0] < _major(built)
        if supported
        else bool(oldest and _major(nvidia["driver"]) < oldest)
    )
    up_to = f", which supports CUDA up to {supported}" if supported else ""
    if too_old and sees_none:
        newer = f"update the driver to {oldest} or newer" if oldest else "update the driver"
        fitting = f"CUDA {_pair(supported)[0]}" if supported else "an older CUDA"
        yield _error(
            "cuda",
            f"torch was built with CUDA {built}, and the driver is {nvidia['driver']}{up_to}",
            f"{newer}, or install the torch build for {fitting} that {_INSTALL} names",
        )
    elif sees_none and nvidia["gpus"]:
        reason = facts["torch"]["cuda_error"] or "no reason given"
        # Hidden by CUDA_VISIBLE_DEVICES, most likely on purpose.
        say = _note if "No CUDA GPUs are available" in reason else _error
        yield say(
            "cuda",
            f"nvidia-smi lists {nvidia['gpus'][0]}, and torch sees no GPU ({reason})",
            "check CUDA_VISIBLE_DEVICES; after an update of the driver, restart the machine",
        )
    elif supported and _pair(supported) < _pair(built):
        yield _note(
            "cuda",
            f"torch was built with CUDA {built}, newer than the driver {nvidia['driver']}{up_to}: it runs, "
            "but kernels that are compiled while running (Triton, torch.compile) may not",
            "update the driver",
        )


def _kernels(facts: dict[str, Any]) -> Iterator[dict[str, str]]:
    """GPUs for which this build of torch has no kernels."""
    built_for = facts["torch"]["architectures"]
    for gpu in facts["gpus"]:
        if gpu["device_type"] != "cuda" or not built_for:
            continue
        if gpu["gfx"]:
            mine, fits = gpu["gfx"].split(":")[0], gpu["gfx"].split(":")[0] in built_for
        else:
            mine, fits = f"compute capability {gpu['capability']}", runs_on(built_for, gpu["capability"])
        if not fits:
            yield _error(
                gpu["device"],
                f"{gpu['name']} has {mine}, and this torch has kernels for {', '.join(built_for)} only",
                f"install a torch build that includes it: see {_INSTALL}",
            )


def runs_on(architectures: list[str], capability: str) -> bool:
    """Whether code for any of ``architectures`` (``"sm_80"``) runs on ``capability`` (``"8.6"``).

    Machine code (``sm_``) runs on the same major version from its minor version up, with a suffix ``a`` on
    that version alone; what ``compute_`` names is compiled by the driver for any later one. CUDA C++
    Programming Guide, "Application Compatibility".
    """
    mine = _pair(capability)
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


def _libraries(facts: dict[str, Any]) -> Iterator[dict[str, str]]:
    built, toolkit = facts["torch"]["cuda"], facts["nvidia"]["toolkit"]
    if not any(gpu["capability"] for gpu in facts["gpus"]):
        return
    if facts["torch"]["cudnn"] is None:
        yield _note(
            "cuda", "torch finds no cuDNN: convolutions are slow", "pip install --force-reinstall torch"
        )
    if built and toolkit and _major(toolkit) != _major(built):
        yield _note(
            "cuda",
            f"nvcc is of CUDA {toolkit} and torch was built with CUDA {built}: training is fine, and "
            "building a CUDA extension for torch is refused",
            f"for that alone, install the CUDA toolkit {built}",
        )


def _processor(facts: dict[str, Any]) -> Iterator[dict[str, str]]:
    cpu = facts["cpu"]
    if cpu["cores"] and cpu["torch_threads"] * 2 < cpu["cores"] and cpu["torch_threads"] < 4:
        yield _note(
            "cpu",
            f"torch uses {cpu['torch_threads']} of {cpu['cores']} cores",
            "unset OMP_NUM_THREADS, or call torch.set_num_threads",
        )
    wide, kernels = cpu["instructions"].get("AVX512"), facts["torch"]["cpu_kernels"]
    if kernels in ("DEFAULT", "NO AVX") and (wide or cpu["instructions"].get("AVX2")):
        yield _note(
            "cpu",
            f"this CPU has {'AVX512' if wide else 'AVX2'}, and torch uses its plain kernels",
            "unset ATEN_CPU_CAPABILITY",
        )


def _pair(version: str | None) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _major(version: str | None) -> int:
    found = re.match(r"\d+", version or "")
    return int(found[0]) if found else 0
