"""The text of doctor, from examinations of machines that are made up."""

import re

from made_captures import squeezed

from narrowcast.report import doctor_text

AMOUNTS = {"matmul": 2e9, "matmul_with_casts": 2e9, "convolution": 18e9, "add": None}


def row(kind, size, shape, format_name, time_s, speed, spread=0.02, steady=True):
    flop = AMOUNTS[kind]
    where = {"kind": kind, "size": size, "shape": list(shape), "format": format_name, "rounds": 9}
    low, high = time_s * (1 - spread / 2), time_s * (1 + spread / 2)
    times = {"time_s_median": time_s, "time_s_low": low, "time_s_high": high}
    rates = {"flop": flop, "element": None if flop else shape[0]}
    return {
        **where,
        **times,
        **{f"rate_{unit}_per_s": amount and amount / time_s for unit, amount in rates.items()},
        "speed_against_fp32": speed,
        "steady": steady,
        "reason": None,
        "expected_time_s": None,
        "out_of_time": False,
    }


def skipped(kind, size, shape, format_name, reason, expected_s=None):
    empty = dict.fromkeys(row(kind, size, shape, format_name, 1.0, 1.0))
    known = {"kind": kind, "size": size, "shape": list(shape), "format": format_name, "rounds": 0}
    return empty | known | {"reason": reason, "expected_time_s": expected_s, "steady": False}


TORCH = {"version": "2.13.0+cpu", "build": "cpu", "cuda": None, "hip": None, "cudnn": None}
FACTS = {
    "torch": TORCH | {"cpu_kernels": "AVX512"},
    "cpu": {
        "name": "Some CPU",
        "cores": 2,
        "torch_threads": 1,
        "memory_bytes": 24 * 2**30,
        "instructions": {"AVX2": True, "AVX512-BF16": True, "AMX-BF16": False, "AMX-FP16": None},
    },
    "gpus": [],
    "nvidia": {"driver": None, "driver_cuda": None, "gpus": [], "toolkit": "13.0"},
    "mps": {"built": False, "available": False},
    "arithmetic": {"float32_matmul_precision": "highest"},
}
CHOICE = {"format": "bf16", "because": "measured on 2026-11-23, bf16 against fp32: 4x in matmul"}
LONG = "one call would take about 6.4 s"
CPU_DEVICE = {
    "device": "cpu",
    "device_type": "cpu",
    "name": "Some CPU",
    "reason": None,
    "choice": CHOICE,
    "slow": ["fp16 is slow here: use fp32"],
    "rows": [
        row("matmul", "small", (64, 64), "fp32", 0.02, 1.0),
        row("matmul", "small", (64, 64), "bf16", 0.05, 0.4),
        row("matmul", "small", (64, 64), "fp16", 0.25, 0.08),
        row("matmul", "medium", (512, 512), "fp32", 0.01, 1.0),
        row("matmul", "medium", (512, 512), "bf16", 0.0025, 4.0),
        row("matmul", "medium", (512, 512), "fp16", 1.0, 0.01),
        row("matmul_with_casts", "small", (64, 64), "fp32", 0.02, 1.0),
        row("matmul_with_casts", "small", (64, 64), "bf16", 0.04, 0.5, spread=0.5),
        skipped("matmul_with_casts", "small", (64, 64), "fp16", "torch cannot do it here: no kernel"),
        row("matmul_with_casts", "medium", (512, 512), "fp32", 0.01, 1.0),
        row("matmul_with_casts", "medium", (512, 512), "bf16", 0.0025, 4.0),
        skipped("matmul_with_casts", "medium", (512, 512), "fp16", LONG, 6.4),
        row("convolution", "large", (8, 128, 56, 56), "fp32", 0.02, 1.0),
        row("convolution", "large", (8, 128, 56, 56), "bf16", 0.01, 2.0),
        skipped("convolution", "large", (8, 128, 56, 56), "fp16", LONG, 12.0),
        row("add", "small", (4096,), "fp32", 1e-6, 1.0),
        row("add", "small", (4096,), "bf16", 1e-6, 1.0),
        row("add", "small", (4096,), "fp16", 4e-6, 0.25),
    ],
}


def examination(*devices, facts=FACTS, mismatches=(), **rates):
    measured = {"source": "measured", "measured_at_s": 1.8e9, "wall_s": 7.25, "file": None}
    measured |= {"devices": list(devices)} | rates
    return {"facts": facts, "mismatches": list(mismatches), "rates": measured}


def gpu(number, name, capability, gigabytes):
    known = {"device": f"cuda:{number}", "name": name, "capability": capability, "gfx": None}
    return known | {"memory_bytes": gigabytes * 2**30}


CPU = examination(CPU_DEVICE)
GPU_FACTS = FACTS | {
    "torch": FACTS["torch"] | {"version": "2.13.0+cu130", "build": "cuda", "cuda": "13.0", "cudnn": 91200},
    "gpus": [gpu(0, "NVIDIA X", "9.0", 80), gpu(1, "NVIDIA Old", "5.0", 8)],
    "nvidia": {"driver": "580.65", "driver_cuda": "13.0", "gpus": [], "toolkit": "13.0"},
}
GPU_DEVICE = {
    "device": "cuda:0",
    "device_type": "cuda",
    "name": "NVIDIA X",
    "reason": None,
    "choice": CHOICE | {"because": "NVIDIA X computes in bf16"},
    "slow": [],
    "rows": [
        row("matmul", "large", (8192, 8192), "fp32", 4e-5, 1.0),
        row("matmul", "large", (8192, 8192), "tf32", 5e-6, 8.0),
        row("matmul", "large", (8192, 8192), "bf16", 2.5e-6, 16.0),
        row("matmul", "large", (8192, 8192), "fp16", 2.5e-6, 16.0),
        row("add", "large", (2**26,), "fp32", 1e-4, 1.0),
        row("add", "large", (2**26,), "bf16", 5e-5, 2.0),
        row("add", "large", (2**26,), "fp16", 5e-5, 2.0),
    ],
}
FEW_KERNELS = "NVIDIA Old has compute capability 5.0, and this torch has kernels for sm_80, sm_90 only"
NO_KERNELS = {"severity": "error", "device": "cuda:1", "text": FEW_KERNELS, "fix": "install another torch"}
FEW_CORES = {"text": "torch uses 1 of 16 cores", "fix": "unset OMP_NUM_THREADS"}
NOTE = {"severity": "note", "device": "cpu"} | FEW_CORES
GPU = examination(
    CPU_DEVICE | {"rows": [], "reason": "it is too hot"},
    GPU_DEVICE,
    facts=GPU_FACTS,
    mismatches=[NO_KERNELS, NOTE],
)
ON_A_CPU = """\
CPU       Some CPU, 2 cores, 1 thread of torch, 24.0 GiB
  has     AVX2, AVX512-BF16
  lacks   AMX-BF16
  unknown AMX-FP16
GPU       none that torch sees
torch     2.13.0+cpu, built for CPUs alone; CPU kernels: AVX512
fp32      matmul precision "highest": exact fp32

How fast each format is on this CPU

                              fp32    bf16            fp16
 ------------------------------------------------------------------
 matmul, GFLOP/s
   64 x 64                     100    40.0    0.40x   8.00   0.080x
   512 x 512                   200     800     4.0x   2.00   0.010x
 matmul with casts, GFLOP/s
   64 x 64                     100    50.0   ~0.50x      -
   512 x 512                   200     800     4.0x      -   (0.002x)
 convolution 3x3, GFLOP/s
   8 x 128 x 56 x 56           900   1,800     2.0x      -   (0.002x)
 addition, G elements/s
   4,096                      4.10    4.10     1.0x   1.02    0.25x

- fp16 not measured in matmul with casts 64 x 64: torch cannot do it here: no
  kernel.
- (): estimated from one call or a smaller size, where a call takes long or the
  time was used up.

x: times the speed of exact fp32. Operands are in the format already; with
casts they are in fp32 and cast at every call, as autocast does with what is
new to it. Forward calls; medians of 9 rounds in which the formats take turns,
whose middle half spans 2 % of the median, 50 % at worst.
~: something else was running; measure again with --fresh when this machine is
quiet.
Measured just now, in 7.2 s.

On this CPU, policy "auto" chooses bf16: measured on 2026-11-23, bf16 against
fp32: 4x in matmul.
- A matmul repays its casts from somewhere between 64 x 64 and 512 x 512: a
  model of smaller layers is slower in bf16 here.
- fp16 is slow here: use fp32.

torch, drivers and devices fit together."""
ON_A_GPU = [
    "GPU NVIDIA X, 80.0 GiB, compute capability 9.0, cuda:0",
    "torch 2.13.0+cu130, built for CUDA 13.0, cuDNN 91200; CPU kernels: AVX512",
    "driver NVIDIA 580.65, CUDA up to 13.0",
    "toolkit CUDA 13.0 (nvcc)",
    "Not measured: this CPU (it is too hot)",
    "fp32 tf32 bf16 fp16",
    "matmul, TFLOP/s",
    "8192 x 8192 50.0 400 8.0x 800 16x 800 16x",
    '- tf32 is off for matmul: torch.set_float32_matmul_precision("high") turns it',
    "PROBLEM, cuda:1: NVIDIA Old has compute capability 5.0, and this torch has",
    "note, cpu: torch uses 1 of 16 cores",
    "fix: unset OMP_NUM_THREADS",
]


def test_the_text_of_a_cpu():
    text = doctor_text(CPU)
    assert squeezed(text) == squeezed(ON_A_CPU)
    assert "\n\n\n" not in text
    assert max(map(len, text.splitlines())) <= 79
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_text_of_a_gpu_and_its_colors():
    plain, colored = doctor_text(GPU), doctor_text(GPU, color=True)
    assert [line for line in squeezed(plain) if line in ON_A_GPU] == ON_A_GPU
    assert max(map(len, plain.splitlines())) <= 79
    assert "\x1b[1;31mPROBLEM" in colored
    assert "\x1b" not in plain
    for sequence in ("\x1b[1m", "\x1b[1;31m", "\x1b[0m"):
        colored = colored.replace(sequence, "")
    assert squeezed(colored) == squeezed(plain)


def said(device, **changed):
    """The text about a device as one line."""
    return " ".join(doctor_text(examination(CPU_DEVICE | device, **changed)).split())


def test_rates_from_the_cache_have_a_date():
    assert re.search(r"Measured on 2027-01-1. ..:..; --fresh measures again\.", said({}, source="cache"))


def test_what_a_busy_machine_left_out_is_one_line():
    late = "the time for this device, 15.0 s, was used up"
    rows = [
        skipped("matmul", "large", (512, 512), name, late, expected_s) | {"out_of_time": True}
        for name, expected_s in (("fp32", 0.5), ("bf16", 1.0), ("fp16", None))
    ]
    whole = said({"rows": [*CPU_DEVICE["rows"][:3], *rows]})
    assert "512 x 512 - - (0.50x) -" in whole
    assert whole.count("was used up") == 2, "the estimates, and the cell without one"
    noisy = [
        row("matmul_with_casts", size, (n, n), "bf16", 0.1, speed, steady=False)
        for size, n, speed in (("small", 64, 0.5), ("medium", 512, 4.0))
    ]
    assert "repays its casts" not in said({"rows": noisy})
