"""What is known of this machine, against what its operating system says."""

import json
import os
import platform
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from narrowcast.errors import DeviceError, UnsupportedError
from narrowcast.machine import (
    Choice,
    arithmetic_settings,
    best_format,
    check_device,
    known_device_types,
    require_torch,
    slow_formats,
    versions,
)
from narrowcast.machine._environment import known_to_be_slow, table_format
from narrowcast.machine._torch_internals import capabilities_before_2_12, default_store

# Flags of /proc/cpuinfo that mean instructions for a format.
FLAGS = {
    "bf16": {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512-BF16"},
    "fp16": {"amx_fp16": "AMX-FP16", "avx512_fp16": "AVX512-FP16"},
}


@pytest.fixture
def instructions(monkeypatch, tmp_path):
    """Give this machine another processor, on which nothing was measured yet."""
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))

    def give(*names, processor="AMD EPYC"):
        where = "narrowcast.machine._environment."
        monkeypatch.setattr(f"{where}cpu_capabilities", lambda: dict.fromkeys(names, True))
        monkeypatch.setattr(f"{where}processor_name", lambda: processor)

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
    choice = table_format("cpu")
    if flags is None:
        assert choice.format in ("fp32", "bf16")
        assert choice.because.startswith("this CPU has ")
        return
    for name, known in FLAGS.items():
        # AVX10.2 has both formats and the flags of neither extension.
        emulated = "is emulated" in (known_to_be_slow(name) or "")
        assert emulated != bool(flags & {*known, "avx10_2"})
    if choice.format == "bf16":
        for flag, shown in FLAGS["bf16"].items():
            assert (flag in flags) == (shown in choice.because)
    elif not flags & {*FLAGS["bf16"], "avx10_2"}:
        assert choice.because == "this CPU has no bf16 instructions, so bf16 would be slower"


def test_torch_2_11_has_capabilities_under_other_names():
    assert set(capabilities_before_2_12()) == {"avx512_bf16", "amx_bf16", "amx_fp16"}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("avx2", "amx_fp16"), None),
        (("avx512_bf16",), "AVX512-BF16"),
        (("avx512_bf16", "amx_bf16"), "AMX-BF16 and AVX512-BF16"),
        (("sve_bf16", "bf16"), "Arm BF16 and Arm SVE-BF16"),
        (("avx10_2",), "AVX10.2"),
    ],
)
def test_a_cpu_is_judged_by_its_instructions(instructions, names, expected):
    instructions(*names)
    found = Choice(format="bf16", because=f"this CPU has {expected}")
    if expected is None:
        found = Choice(format="fp32", because="this CPU has no bf16 instructions, so bf16 would be slower")
    assert table_format("cpu") == found
    table = f"{found.because}; by the table, not measured"
    assert best_format("cpu") == Choice(format=found.format, because=table)


AMD, INTEL = "AMD EPYC", "Intel(R) Xeon(R)"


@pytest.fixture
def keep():
    from kept_rates import keep_rates  # a server that forks imports this file without the path of tests

    return keep_rates


@pytest.mark.parametrize(
    ("processor", "has", "speeds", "auto"),
    [
        (AMD, ("avx512_bf16",), (4.0, 3.1, 2.0), "bf16"),
        (INTEL, ("avx512_bf16", "avx512_fp16"), (0.60, 0.56, 0.74), "fp32"),
        (AMD, ("avx2",), (0.06, 0.06, 0.01), "fp32"),
        (INTEL, ("avx512_bf16", "amx_bf16"), (8.0, 5.0, 4.0), "bf16"),
        # What was measured counts for more than the table, and a tie is fp32.
        (AMD, ("avx512_bf16",), (0.60, 0.56, 0.74), "fp32"),
        (INTEL, ("avx512_bf16", "avx512_fp16"), (2.0, 1.5, 1.3), "bf16"),
        (AMD, ("avx512_bf16",), (1.04, 1.02, 1.02), "fp32"),
        # One kind of work that gains much makes up for one that loses a little.
        (AMD, ("avx512_bf16",), (3.0, 2.0, 0.9), "bf16"),
    ],
)
def test_auto_is_what_the_rates_say(instructions, tmp_path, keep, processor, has, speeds, auto):
    instructions(*has, processor=processor)
    assert keep(tmp_path, speeds) is None
    choice = best_format("cpu")
    assert choice.format == auto
    date = r"measured on \d{4}-\d\d-\d\d, bf16 against fp32: "
    said = [f"{x:.2g}x faster" if x > 1 else f"{1 / x:.2g}x slower" for x in speeds]
    said = ["as fast" if text.startswith("1x") else text for text in said]
    assert re.match(f"{date}{said[0]} in matmul, {said[1]} in matmul with casts", choice.because)


def test_unclear_rates_leave_auto_to_the_table(instructions, tmp_path, keep):
    instructions("avx512_bf16")
    for how in ({"late": True}, {"spread": 0.4}):
        why = keep(tmp_path, (0.9, 0.9, 0.9), **how)
        assert why == "the rates measured for auto on cpu scatter too much to decide: the table decides"
        assert best_format("cpu").because == "this CPU has AVX512-BF16; by the table, not measured"
    assert keep(None, (0.5, 0.5, 0.5)).startswith("the rates that decide auto on cpu were not kept: ")


@pytest.mark.parametrize(("speeds", "auto"), [((2.6, 1.7, 2.4), "bf16"), ((0.5, 0.5, 0.5), "fp32")])
def test_rates_that_scatter_decide_where_their_quartiles_agree(instructions, tmp_path, keep, speeds, auto):
    """As on a virtual machine that others share: quartiles 0.4 either way are not steady."""
    instructions("avx512_bf16")
    assert keep(tmp_path, speeds, spread=0.4) is None
    assert best_format("cpu").format == auto
    assert best_format("cpu").because.startswith("measured on ")


def test_ranks_without_a_process_group_decide_by_the_table(instructions, tmp_path, keep, monkeypatch):
    """Each rank may have other rates, and none can ask rank 0 yet."""
    instructions("avx512_bf16")
    because = "this CPU has AVX512-BF16; by the table, as ranks cannot agree yet"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert best_format("cpu") == Choice(format="bf16", because=because)
    keep(tmp_path, (0.5, 0.5, 0.5))
    assert best_format("cpu") == Choice(format="bf16", because=because)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert best_format("cpu").format == "fp32"


@pytest.mark.parametrize(("speed", "kept"), [(0.06, True), (92.0, False)])
def test_what_was_cut_short_counts_if_it_is_slow(instructions, tmp_path, keep, speed, kept):
    """Also where the table is bf16; a speed above fp32's at a smaller size decides nothing."""
    for has in ("avx2", "avx512_bf16"):
        instructions(has)
        assert (keep(tmp_path / has, (speed, speed, speed), estimated=True) is None) == kept
        by_table = "fp32" if has == "avx2" else "bf16"
        assert best_format("cpu", tmp_path / has).format == ("fp32" if kept else by_table)


def test_damaged_rates_leave_auto_to_the_table(instructions, tmp_path, keep):
    instructions("avx512_bf16")
    keep(tmp_path, (0.5, 0.5, 0.5))
    (path,) = (tmp_path / "rates").iterdir()
    path.write_text("{")
    assert best_format("cpu").format == "bf16"


def test_the_store_of_a_process_group_keeps_what_was_set_first(one_process):
    assert default_store().compare_set("narrowcast/test", "", "first") == b"first"
    assert default_store().compare_set("narrowcast/test", "", "second") == b"first"


EMULATED = "on this CPU is emulated: matmuls are 5 to hundreds of times slower: train with"
ANY_CONVOLUTIONS = (
    "fp16 convolutions were 6 to hundreds of times slower on all CPUs that were measured: train with"
)
SLOW_CONVOLUTIONS = (
    "fp16 on this CPU runs on AVX512-FP16: convolutions are dozens to hundreds of times slower: train with"
)
EMULATED_FP16 = f"fp16 {EMULATED.removesuffix(': train with')}; {ANY_CONVOLUTIONS}"
NO_AMX = (
    "bf16 on this CPU runs on AVX512-BF16 without AMX: matmuls are about 1.7x slower: "
    "train with --policy fp32"
)


@pytest.mark.parametrize(
    ("processor", "has", "auto", "slow"),
    [
        (
            "AMD EPYC",
            ("avx2",),
            "fp32",
            [f"bf16 {EMULATED} --policy fp32", f"{EMULATED_FP16} --policy fp32"],
        ),
        ("AMD EPYC", ("avx512_bf16",), "bf16", [f"{EMULATED_FP16} --policy bf16 or --policy fp32"]),
        (
            "Intel(R) Xeon(R)",
            ("avx512_bf16", "avx512_fp16"),
            "fp32",
            [NO_AMX, f"{SLOW_CONVOLUTIONS} --policy fp32"],
        ),
        (
            "Intel(R) Xeon(R)",
            ("avx512_bf16", "amx_bf16", "avx512_fp16"),
            "bf16",
            [f"{SLOW_CONVOLUTIONS} --policy bf16 or --policy fp32"],
        ),
        (
            "Intel(R) Xeon(R)",
            ("amx_bf16", "amx_fp16", "avx512_fp16"),
            "bf16",
            [f"{ANY_CONVOLUTIONS} --policy bf16 or --policy fp32"],
        ),
    ],
)
def test_formats_are_known_to_be_slow_on_kinds_of_cpu(instructions, processor, has, auto, slow):
    instructions(*has, processor=processor)
    assert best_format("cpu").format == auto
    assert slow_formats(["fp16", "lower", "bf16", "fp32", "fp16"], "cpu") == slow[::-1]
    assert slow_formats(["fp16", "bf16"], "cuda") == []


def test_a_gpu_without_bf16_gets_fp16(monkeypatch):
    asked = []

    def supported(including_emulation=True):
        asked.append(including_emulation)
        return including_emulation

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", supported)
    expected = Choice(format="fp16", because="this GPU computes in fp16 and not in bf16")
    assert table_format("cuda") == expected
    assert asked == [False], "emulated bf16 is slow"


@pytest.mark.gpu
def test_bf16_is_chosen_on_a_gpu_that_has_it():
    choice = table_format("cuda")
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    assert choice.format == ("bf16" if has_bf16 else "fp16")
    if has_bf16:
        assert choice.because == f"{torch.cuda.get_device_name()} computes in bf16"
    check_device("cuda")
    assert versions()["gpu"] == torch.cuda.get_device_name()


def test_the_device_types_are_those_of_torchs_autocast(monkeypatch):
    known = known_device_types()
    for device_type in known:
        assert torch.amp.is_autocast_available(device_type), device_type
    check_device("cpu")
    monkeypatch.setattr("torch.device", lambda name: SimpleNamespace(type="mine"))
    assert known_device_types() == (*known[:-1], "mine")
    check_device("mine")


@pytest.mark.parametrize(("device_type", "meant"), [("cudda", "cuda"), ("cuda:0", "cuda"), ("CPU", "cpu")])
def test_an_unknown_device_is_refused_with_near_names(device_type, meant):
    with pytest.raises(DeviceError, match=f'{device_type}.*without an index.* Did you mean "{meant}"?'):
        check_device(device_type)


@pytest.mark.parametrize(("built", "why"), [("13.0", "torch sees no GPU"), (None, "torch is a CPU build")])
def test_a_missing_gpu_is_refused_with_the_way_out(monkeypatch, built, why):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr("torch.version.hip", None)
    with pytest.raises(DeviceError, match=f"'cuda' was asked for and .*{why}. Use device 'cpu', or"):
        check_device("cuda")


@pytest.mark.parametrize("version", ["1.13.1", "2.10.0+cu128", "2.10.9.dev20250101"])
def test_an_old_torch_is_refused(monkeypatch, version):
    monkeypatch.setattr("torch.__version__", version)
    message = f"needs torch 2.11 or newer and found {version}: pip install --upgrade 'torch>=2.11'"
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        require_torch()


def test_versions_can_be_written_as_json():
    found = versions()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == {"python", "torch", "cuda", "platform", "processor", "gpu", "threads"}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (found["torch"], type(found["torch"])) == (str(torch.__version__), str)
    assert found["threads"] == torch.get_num_threads()


def write_settings(words):
    torch.set_float32_matmul_precision("high")
    found = [arithmetic_settings()]
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    found.append(arithmetic_settings())
    torch.backends.fp32_precision = "tf32"
    sys.stdout.write(json.dumps([*found, arithmetic_settings()]))


def test_settings_are_read_whichever_api_set_them(fork_server, tmp_path):
    """torch's older names raise once a script used the newer ones, for as long as the process lives."""
    here = Path(__file__).parent
    ended = fork_server.run("test_instructions:write_settings", [], folder=tmp_path, cwd=here)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    precisions = [one["float32_matmul_precision"] for one in found]
    assert precisions[:2] == ["high", "cuda tf32, mkldnn bf16"]
    assert [one["cuda_matmul_allow_tf32"] for one in found] == [True, True, True]
