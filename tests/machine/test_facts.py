"""What is found on a machine, from the tools and properties of machines that are not here."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from narrowcast.machine import _facts, arithmetic_settings
from narrowcast.machine._facts import (
    cpu_facts,
    gather_facts,
    gpu_facts,
    mismatches,
    nvidia_facts,
    run_tool,
    runs_on,
)

LISTED = "NVIDIA GeForce RTX 4090, 535.183.01\nNVIDIA T4, 535.183.01\n"
OVERVIEW = """\
Thu Jan  1 00:00:00 2026
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 535.183.01             Driver Version: 535.183.01   CUDA Version: 12.2     |
|-----------------------------------------+----------------------+----------------------+
"""
COMPILER = """\
nvcc: NVIDIA (R) Cuda compiler driver
Cuda compilation tools, release 13.0, V13.0.88
"""


def tools(listed=None, overview=None, compiler=None):
    def run(*words):
        if words[0] == "nvidia-smi":
            return listed if len(words) > 1 else overview
        return compiler if words == ("nvcc", "--version") else None

    return run


def test_this_machine_can_be_written_as_json():
    facts = gather_facts()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert set(facts) == {
        *("python", "platform", "torch", "cpu", "gpus", "nvidia", "pci", "kfd", "mps", "xpu", "arithmetic"),
    }
    assert facts["cpu"]["torch_threads"] == torch.get_num_threads()
    assert facts["arithmetic"] == arithmetic_settings()
    assert len(facts["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (tools(), (None, None, [], None)),
        (
            tools(LISTED, OVERVIEW, COMPILER),
            ("535.183.01", "12.2", ["NVIDIA GeForce RTX 4090", "NVIDIA T4"], "13.0"),
        ),
        # A name with a comma in it; a later nvidia-smi calls the number something else.
        (tools("A, B, 580.65\n", "| CUDA UMD Version: 13.0 |"), ("580.65", "13.0", ["A, B"], None)),
        (tools("No devices were found\n", OVERVIEW), (None, None, [], None)),
        (tools("NVIDIA T4, [N/A]\n", OVERVIEW), (None, None, [], None)),
        (tools("\n,\n", "", "release"), (None, None, [], None)),
    ],
)
def test_the_tools_of_nvidia_are_read_with_care(monkeypatch, run, expected):
    monkeypatch.setattr(_facts, "run_tool", run)
    assert nvidia_facts() == dict(zip(("driver", "driver_cuda", "gpus", "toolkit"), expected, strict=True))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('text')", "text\n"),
        ("raise SystemExit(9)", None),
        ("import os; os.write(1, b'\\xff')", "\ufffd"),
    ],
)
def test_a_tool_answers_or_not(program, expected):
    assert run_tool(sys.executable, "-c", program) == expected


@pytest.mark.parametrize(
    ("device_type", "name", "architecture", "expected"),
    [
        ("cuda", "NVIDIA H100", "9.0", {"capability": "9.4", "gfx": None}),
        ("cuda", "AMD Instinct MI300X", "gfx942:xnack-", {"capability": None, "gfx": "gfx942:xnack-"}),
        ("xpu", "Intel Arc", None, {"capability": None, "gfx": None}),
    ],
)
def test_gpus_of_three_makers(device_type, name, architecture, expected):
    properties = SimpleNamespace(name=name, total_memory=2**34, gcnArchName=architecture, major=9, minor=4)
    common = {"device": f"{device_type}:1", "device_type": device_type, "name": name, "memory_bytes": 2**34}
    assert gpu_facts(device_type, 1, properties) == common | expected


def test_instructions_are_yes_no_or_unknown():
    x86 = cpu_facts({"avx2": True, "avx512_bf16": 1, "amx_fp16": False}, architecture="x86_64")
    unknown = dict.fromkeys(("AVX512", "AMX-BF16", "AVX512-FP16"))
    assert x86["instructions"] == unknown | {"AVX2": True, "AVX512-BF16": True, "AMX-FP16": False}
    arm = cpu_facts({"bf16": True, "fp16_arith": True, "sve": False}, architecture="arm64")
    known = {"Arm BF16": True, "Arm FP16": True, "Arm SVE": False}
    assert arm["instructions"] == known | {"Arm SVE-BF16": None}


def machine(torch=None, nvidia=None, cpu=None, **others):
    """A machine with nothing wrong, changed."""
    facts = {
        "torch": {"version": "2.13.0", "build": "cpu", "architectures": [], "cpu_kernels": "AVX512"}
        | dict.fromkeys(("cuda", "hip", "cudnn", "cuda_error"))
        | (torch or {}),
        "cpu": {"cores": 8, "torch_threads": 4, "instructions": {"AVX512": True, "AVX2": True}} | (cpu or {}),
        "gpus": [],
        "nvidia": {"driver": None, "driver_cuda": None, "gpus": [], "toolkit": None} | (nvidia or {}),
        "pci": [],
        "kfd": False,
        "mps": {"built": False, "available": False},
        "xpu": False,
    }
    return facts | others


def gpu(capability=None, gfx=None, name="NVIDIA X"):
    place = {"device": "cuda:0", "device_type": "cuda", "name": name, "memory_bytes": 2**34}
    return place | {"capability": capability, "gfx": gfx}


CUDA = {"build": "cuda", "cuda": "13.0", "cudnn": 91200, "architectures": ["sm_80", "sm_90", "compute_90"]}
ROCM = {"build": "rocm", "hip": "6.4", "architectures": ["gfx90a", "gfx942"]}
SITE = "https://pytorch.org/get-started/locally"
NEW_DRIVER = {"driver": "580.65", "driver_cuda": "13.0", "gpus": ["NVIDIA X"]}
OLD_DRIVER = {"driver": "535.183.01", "driver_cuda": "12.2", "gpus": ["NVIDIA X"]}

FITS = {
    "a CPU": machine(),
    "a CPU build beside a compiler": machine(nvidia={"toolkit": "13.0"}),
    "a CUDA build without any GPU": machine(CUDA | {"architectures": []}),
    "a GPU": machine(CUDA, NEW_DRIVER | {"toolkit": "13.1"}, gpus=[gpu("9.0")]),
    "a GPU under a newer driver": machine(CUDA | {"cuda": "12.8"}, NEW_DRIVER, gpus=[gpu("9.0")]),
    "a GPU by compiling": machine(CUDA, NEW_DRIVER, gpus=[gpu("12.0")]),
    "an AMD GPU": machine(ROCM, kfd=True, pci=["AMD"], gpus=[gpu(gfx="gfx942:sramecc+:xnack-")]),
    "Metal": machine(mps={"built": True, "available": True}),
    "an AMD graphics card beside a CUDA build": machine(CUDA | {"architectures": []}, pci=["AMD"]),
}


@pytest.mark.parametrize("name", FITS)
def test_what_fits_is_not_complained_of(name):
    assert mismatches(FITS[name]) == []


# Severity and device, then words of the text and of the fix.
WRONG = {
    "a CPU build beside a GPU": (
        machine(nvidia=OLD_DRIVER),
        "error cuda",
        "this machine has NVIDIA X, and torch 2.13.0 was built without CUDA",
        f"install the build for CUDA 12.2 or older that {SITE} names",
    ),
    "a CPU build and no driver": (
        machine(pci=["NVIDIA"]), "error cuda", "an NVIDIA GPU, and torch 2.13.0", "install the build that",
    ),
    "no driver": (
        machine(CUDA, pci=["NVIDIA"]),
        "error cuda",
        "nvidia-smi finds no working driver",
        "install NVIDIA driver 580 or newer",
    ),
    "an old driver": (
        machine(CUDA, OLD_DRIVER),
        "error cuda",
        "built with CUDA 13.0, and the driver is 535.183.01, which supports CUDA up to 12.2",
        f"update the driver to 580 or newer, or install the torch build for CUDA 12 that {SITE} names",
    ),
    "a driver a little older": (
        machine(CUDA | {"cuda": "13.2"}, NEW_DRIVER, gpus=[gpu("9.0")]),
        "note cuda",
        "newer than the driver 580.65, which supports CUDA up to 13.0: it runs",
        "update the driver",
    ),
    "a GPU that CUDA does not reach": (
        machine(CUDA | {"cuda_error": "CUDA unknown error"}, NEW_DRIVER),
        "error cuda",
        "nvidia-smi lists NVIDIA X, and torch sees no GPU (CUDA unknown error)",
        "check CUDA_VISIBLE_DEVICES",
    ),
    "a GPU that is hidden": (
        machine(CUDA | {"cuda_error": "No CUDA GPUs are available"}, NEW_DRIVER),
        "note cuda",
        "(No CUDA GPUs are available)",
        "check CUDA_VISIBLE_DEVICES",
    ),
    "a GPU without kernels": (
        machine(CUDA, NEW_DRIVER, gpus=[gpu("7.0")]),
        "error cuda:0",
        "has compute capability 7.0, and this torch has kernels for sm_80, sm_90, compute_90 only",
        f"install a torch build that includes it: see {SITE}",
    ),
    "an AMD GPU without kernels": (
        machine(ROCM, kfd=True, gpus=[gpu(gfx="gfx1103", name="AMD Y")]),
        "error cuda:0",
        "AMD Y has gfx1103, and this torch has kernels for gfx90a, gfx942 only",
        "install a torch build",
    ),
    "a ROCm build without a driver": (
        machine(ROCM, pci=["AMD"]), "error cuda", "(no reason given)", "check that amdgpu is loaded",
    ),
    "a ROCm build that sees nothing": (
        machine(ROCM | {"cuda_error": "No HIP GPUs"}, kfd=True),
        "error cuda",
        "this torch is a ROCm build and sees no GPU (No HIP GPUs)",
        "render and video",
    ),
    "a CPU build beside AMD's driver": (
        machine(kfd=True), "note cuda", "torch 2.13.0 was built without ROCm", "install the ROCm build",
    ),
    "one thread": (
        machine(cpu={"cores": 16, "torch_threads": 1}), "note cpu", "1 of 16 cores", "unset OMP_NUM_THREADS",
    ),
    "plain kernels": (
        machine({"cpu_kernels": "DEFAULT"}), "note cpu", "has AVX512, and torch", "ATEN_CPU_CAPABILITY",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mismatch_is_one_line_with_its_fix(name):
    facts, kind, text, fix = WRONG[name]
    (found,) = mismatches(facts)
    assert f"{found['severity']} {found['device']}" == kind
    assert text in found["text"]
    assert fix in found["fix"]


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_80"], "8.9", True),
        (["sm_86"], "8.0", False),
        (["sm_80"], "9.0", False),
        (["compute_80"], "9.0", True),
        (["sm_90a"], "9.0", True),
        (["sm_90a", "compute_90a"], "10.0", False),
        (["sm_100f"], "10.3", True),
        (["sm_100f"], "12.0", False),
        (["sm_120"], "12.1", True),
        (["sm_120"], "10.0", False),
        (["gfx942", "sm_"], "9.0", False),
    ],
)
def test_which_code_runs_on_which_gpu(architectures, capability, runs):
    assert runs_on(architectures, capability) is runs
