"""What is said of this machine, against what its operating system says."""

import json
import os
import platform
import sys
from pathlib import Path

import pytest
import torch

from child_processes import output_of
from narrowcast.errors import DeviceError, UnsupportedError
from narrowcast.machine import (
    Choice,
    best_format,
    check_device,
    is_native,
    known_device_types,
    require_torch,
    slow_format_warning,
    versions,
)

# Flags of /proc/cpuinfo that mean instructions for a format.
FLAGS = {
    "bf16": {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512-BF16"},
    "fp16": {"amx_fp16": "AMX-FP16", "avx512_fp16": "AVX512-FP16"},
}


@pytest.fixture
def instructions(monkeypatch):
    """Give this machine other instructions."""

    def give(*names):
        monkeypatch.setattr("narrowcast.machine._choice.cpu_capabilities", lambda: dict.fromkeys(names, True))

    return give


def flags_of_this_machine():
    """The flags that Linux lists for an x86 processor; None on any other machine."""
    info = Path("/proc/cpuinfo")
    if not info.exists() or platform.machine() != "x86_64":
        return None
    line = next(line for line in info.read_text().splitlines() if line.startswith("flags"))
    flags = set(line.split(":")[1].split())
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":  # torch is made to report an older CPU
        flags = {flag for flag in flags if not flag.startswith(("avx512", "amx", "avx10"))}
    return flags


@pytest.mark.cpu_kind
def test_the_format_of_this_cpu_is_what_its_flags_say():
    flags = flags_of_this_machine()
    choice = best_format("cpu")
    assert (choice.format == "bf16") == is_native("bf16", "cpu")
    if flags is None:
        assert choice.format in ("fp32", "bf16")
        assert choice.because.startswith("this CPU has ")
        return
    for name, known in FLAGS.items():
        # AVX10.2 has both formats and the flags of neither extension.
        assert is_native(name, "cpu") == bool(flags & {*known, "avx10_2"})
    if choice.format == "bf16":
        for flag, shown in FLAGS["bf16"].items():
            assert (flag in flags) == (shown in choice.because)
    else:
        assert choice.because == "this CPU has no bf16 instructions, so bf16 would be slower"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), Choice(format="fp32", because="this CPU has no bf16 instructions, so bf16 would be slower")),
        (("avx2", "avx512f", "amx_fp16"), best_format),
        (("avx512_bf16",), Choice(format="bf16", because="this CPU has AVX512-BF16")),
        (
            ("avx512_bf16", "amx_bf16"),
            Choice(format="bf16", because="this CPU has AMX-BF16 and AVX512-BF16"),
        ),
        (("bf16",), Choice(format="bf16", because="this CPU has Arm BF16")),
        (("sve_bf16", "bf16"), Choice(format="bf16", because="this CPU has Arm BF16 and Arm SVE-BF16")),
        (("avx10_2",), Choice(format="bf16", because="this CPU has AVX10.2")),
    ],
)
def test_a_cpu_is_judged_by_its_instructions(instructions, names, expected):
    instructions(*names)
    if not isinstance(expected, Choice):
        expected = Choice(format="fp32", because="this CPU has no bf16 instructions, so bf16 would be slower")
    assert best_format("cpu") == expected


def test_a_slow_format_is_warned_of_with_the_fast_one(instructions):
    instructions()
    slow = "on this CPU has no instructions and is very slow (10 to 900 times)"
    assert slow_format_warning("bf16", "cpu") == f"bf16 {slow}; fp32 is faster here"
    assert slow_format_warning("fp16", "cpu") == f"fp16 {slow}; fp32 is faster here"
    assert slow_format_warning("fp32", "cpu") is None
    assert slow_format_warning("fp16", "cuda") is None
    instructions("amx_bf16")
    assert slow_format_warning("bf16", "cpu") is None
    assert slow_format_warning("fp16", "cpu") == f"fp16 {slow}; --policy bf16 is the fast one here"
    instructions("amx_bf16", "amx_fp16")
    assert slow_format_warning("fp16", "cpu") is None


def test_a_gpu_without_bf16_gets_fp16(monkeypatch):
    asked = []

    def supported(including_emulation=True):
        asked.append(including_emulation)
        return including_emulation

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", supported)
    expected = Choice(format="fp16", because="this GPU computes in fp16 and not in bf16")
    assert best_format("cuda") == expected
    assert asked == [False], "emulated bf16 is slow"


@pytest.mark.gpu
def test_the_format_of_this_gpu():
    choice = best_format("cuda")
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    assert choice.format == ("bf16" if has_bf16 else "fp16")
    if has_bf16:
        assert choice.because == f"{torch.cuda.get_device_name()} computes in bf16"
    check_device("cuda")
    assert versions()["gpu"] == torch.cuda.get_device_name()


def test_devices_that_torch_knows(monkeypatch):
    known = known_device_types()
    for device_type in known:
        assert torch.amp.is_autocast_available(device_type), device_type
    check_device("cpu")
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "mine")
    assert known_device_types() == (*known[:-1], "mine")
    check_device("mine")


@pytest.mark.parametrize(("device_type", "meant"), [("cudda", "cuda"), ("cuda:0", "cuda"), ("CPU", "cpu")])
def test_an_unknown_device_is_refused_with_near_names(device_type, meant):
    with pytest.raises(DeviceError) as refused:
        check_device(device_type)
    assert str(refused.value) == (
        f"unknown device type {device_type!r} (a type such as 'cuda', without an index). "
        f'Did you mean "{meant}"? Known: {", ".join(known_device_types())}.'
    )


@pytest.mark.parametrize("built", ["13.0", None])
def test_a_gpu_that_is_not_there_is_refused_with_the_way_out(monkeypatch, built):
    import narrowcast as nc

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr("torch.version.hip", None)
    why = "torch sees no GPU" if built else "this torch is a CPU build"
    with pytest.raises(DeviceError) as refused:
        check_device("cuda")
    assert str(refused.value) == (
        f"device 'cuda' was asked for and {why}. Use device 'cpu', or install a CUDA build of torch "
        "on a machine with a GPU (python -c 'import torch; print(torch.cuda.is_available())')."
    )
    with pytest.raises(DeviceError, match="cuda"):
        nc.autocast("cuda")
    with pytest.raises(DeviceError, match=r"'cudda'.* Did you mean .cuda.\?"):
        nc.autocast("cudda")


@pytest.mark.parametrize("version", ["1.13.1", "2.2.0", "2.10.0+cu128", "2.10.9.dev20250101"])
def test_an_old_torch_is_refused(monkeypatch, version):
    monkeypatch.setattr("torch.__version__", version)
    with pytest.raises(UnsupportedError) as refused:
        require_torch()
    assert str(refused.value) == (
        f"narrowcast needs torch 2.11 or newer and found {version}: pip install --upgrade 'torch>=2.11'"
    )


def test_versions_can_be_written_as_json():
    found = versions()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == {"python", "torch", "cuda", "platform", "processor", "gpu", "threads"}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"] == str(torch.__version__)
    assert type(found["torch"]) is str
    assert found["threads"] == torch.get_num_threads()
    assert found["processor"]


def test_settings_are_read_whichever_api_set_them():
    """torch's older names raise once a script used the newer ones, for as long as the process lives."""
    program = """
import json, torch
from narrowcast.machine import arithmetic_settings
torch.set_float32_matmul_precision("high")
print(json.dumps(arithmetic_settings()))
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
print(json.dumps(arithmetic_settings()))
torch.backends.fp32_precision = "tf32"
print(json.dumps(arithmetic_settings()))
"""
    found = [json.loads(line) for line in output_of([sys.executable, "-c", program]).splitlines()]
    precisions = [one["float32_matmul_precision"] for one in found]
    assert precisions[:2] == ["high", "cuda tf32, mkldnn bf16"]
    assert [one["cuda_matmul_allow_tf32"] for one in found] == [True, True, True]
