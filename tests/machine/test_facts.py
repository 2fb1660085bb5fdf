"""What is found on a machine, and what does not fit together, from facts of machines that are not here."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from narrowcast.machine import _facts, arithmetic_settings, cpu_share_in_use
from narrowcast.machine._facts import cpu_facts, gather_facts, gpu_facts, mismatches, runs_on


def test_facts_of_this_machine_are_json():
    facts = gather_facts()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert set(facts) == {
        *("python", "platform", "torch", "cpu", "gpus", "gpu_driver", "mps", "xpu", "arithmetic"),
    }
    assert facts["cpu"]["torch_threads"] == torch.get_num_threads()
    assert facts["arithmetic"] == arithmetic_settings()
    assert len(facts["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_what_others_use_of_the_cpus_is_of_those_that_this_process_may_use(tmp_path, monkeypatch):
    """CPU 0: 30 of 100 ticks in user, nice, system, irq and steal; CPU 1 all of them; CPU 2 is not ours."""
    before = """cpu  9 9 9 9
cpu0 10 10 10 100 10 5 5 5 0 0
cpu1 0 0 0 0 0 0 0 0 0 0
cpu2 1 0 0 0 0 0 0 0 0 0
"""
    after = """cpu  9 9 9 9
cpu0 20 15 15 160 20 5 5 15 9 9
cpu1 100 0 0 0 0 0 0 0 0 0
cpu2 9 0 0 0 0 0 0 0 0 0
"""
    times = tmp_path / "stat"
    times.write_text(before)
    monkeypatch.setattr(_facts, "_CPU_TIMES", times)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(_facts.time, "sleep", lambda _: times.write_text(after))
    assert cpu_share_in_use(0.1) == pytest.approx((30 + 100) / 200)
    assert cpu_share_in_use(0.1) is None, "no tick has passed"
    times.unlink()
    monkeypatch.setattr(_facts.time, "sleep", lambda _: None)
    assert cpu_share_in_use(0.1) is None


@pytest.mark.parametrize(
    ("device_type", "name", "architecture", "expected"),
    [
        ("cuda", "NVIDIA H100", "9.0", {"capability": "9.4", "gfx": None}),
        ("cuda", "AMD Instinct MI300X", "gfx942:xnack-", {"capability": None, "gfx": "gfx942:xnack-"}),
        ("xpu", "Intel Arc", None, {"capability": None, "gfx": None}),
    ],
)
def test_only_gpus_of_nvidia_have_a_capability(device_type, name, architecture, expected):
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


def machine(torch=None, cpu=None, **others):
    """A machine with nothing wrong, changed."""
    facts = {
        "torch": {"version": "2.13.0", "build": "cpu", "architectures": [], "cpu_kernels": "AVX512"}
        | dict.fromkeys(("cuda", "hip", "cudnn", "cuda_error"))
        | (torch or {}),
        "cpu": {"cores": 8, "torch_threads": 4, "instructions": {"AVX512": True, "AVX2": True}} | (cpu or {}),
        "gpus": [],
        "gpu_driver": None,
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
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020)."

FITS = {
    "a CPU": machine(),
    "a CUDA build without any GPU": machine(CUDA | {"architectures": [], "cuda_error": NO_DRIVER}),
    "a GPU": machine(CUDA, gpu_driver="NVIDIA", gpus=[gpu("9.0")]),
    "a GPU by compiling": machine(CUDA, gpu_driver="NVIDIA", gpus=[gpu("12.0")]),
    "an AMD GPU": machine(ROCM, gpu_driver="AMD", gpus=[gpu(gfx="gfx942:sramecc+:xnack-")]),
    "Metal": machine(mps={"built": True, "available": True}),
}


@pytest.mark.parametrize("name", FITS)
def test_what_fits_is_not_complained_of(name):
    assert mismatches(FITS[name]) == []


# Severity and device, then words of the text and of the fix.
WRONG = {
    "a CPU build beside a driver": (
        machine(gpu_driver="NVIDIA"),
        "note cuda",
        "the driver of a GPU of NVIDIA is installed, and torch 2.13.0 was built for CPUs alone",
        f"if this machine has that GPU, install the build that {SITE} names",
    ),
    "an old driver": (
        machine(CUDA | {"cuda_error": OLD_DRIVER}, gpu_driver="NVIDIA"),
        "error cuda",
        f"this torch was built for CUDA 13.0 and reaches no GPU: {OLD_DRIVER}",
        f"update the driver, or install the build of torch for it that {SITE} names",
    ),
    "a GPU that is hidden": (
        machine(CUDA | {"cuda_error": "No CUDA GPUs are available"}, gpu_driver="NVIDIA"),
        "note cuda",
        "reaches no GPU: No CUDA GPUs are available",
        "check CUDA_VISIBLE_DEVICES",
    ),
    "a ROCm build that sees nothing": (
        machine(ROCM | {"cuda_error": "No HIP GPUs are available"}, gpu_driver="AMD"),
        "note cuda",
        "this torch was built for ROCm 6.4 and reaches no GPU: No HIP GPUs",
        "HIP_VISIBLE_DEVICES",
    ),
    "a GPU without kernels": (
        machine(CUDA, gpus=[gpu("7.0")]),
        "error cuda:0",
        "has compute capability 7.0, and this torch has kernels for sm_80, sm_90, compute_90 only",
        f"install a torch build that includes it: see {SITE}",
    ),
    "an AMD GPU without kernels": (
        machine(ROCM, gpus=[gpu(gfx="gfx1103", name="AMD Y")]),
        "error cuda:0",
        "AMD Y has gfx1103, and this torch has kernels for gfx90a, gfx942 only",
        "install a torch build",
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
def test_code_runs_on_a_gpu_by_cudas_rules(architectures, capability, runs):
    assert runs_on(architectures, capability) is runs
