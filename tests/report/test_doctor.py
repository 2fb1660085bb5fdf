"""The text and the page of doctor, from examinations of machines that are made up."""

import re

import made_captures
import pytest
from made_captures import squeezed
from made_diagnoses import CHOICE, CPU, CPU_DEVICE, FACTS, GPU, examination, row, skipped
from seen_page import Seen

from narrowcast.report import doctor_page, doctor_text

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
   64 x 64                     100    50.0    0.50x      -
   512 x 512                   200     800     4.0x      -   (0.002x)
 convolution 3x3, GFLOP/s
   8 x 128 x 56 x 56           900   1,800     2.0x      -   (0.002x)
 addition, G elements/s
   4,096                      4.10    4.10     1.0x   1.02   ~0.25x

- fp16 not measured in matmul with casts 64 x 64: torch cannot do it here: no
  kernel.
- (): cut short, as one call takes long: counted as the speed at the largest
  smaller size that was measured.

x: times the speed of exact fp32. Operands are in the format already; with
casts they are in fp32 and cast at every call, as autocast does with what is
new to it. Forward and backward pass together (of additions the forward pass:
the backward pass computes nothing); medians of 9 rounds in which the formats
take turns, whose middle half spans 2 % of the median, 50 % at worst.
~: something else was running; measure again with --fresh when this machine is
quiet.
Measured just now, in 7.2 s.

On this CPU, policy "auto" chooses bf16: measured on 2026-11-23, bf16 against
fp32: 4x faster in matmul.
- A matmul repays its casts from somewhere between 64 x 64 and 512 x 512: a
  model of smaller layers is slower in bf16 here.
- fp16 is slow here: use fp32.

torch, drivers and devices fit together."""
ON_A_GPU = [
    "GPU NVIDIA X, 80.0 GiB, compute capability 9.0, cuda:0",
    "torch 2.13.0+cu130, built for CUDA 13.0, cuDNN 91200; CPU kernels: AVX512",
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
    assert "512 x 512 - - - -" in whole
    assert "512 x 512: the time for this device, 15.0 s, was used up." in whole
    assert "(" not in whole.partition("512 x 512 - - - -")[2].partition("x: times")[0], "no estimate"
    fp32 = skipped("matmul", "large", (512, 512), "fp32", "one call takes 6 s", 6.0)
    cut_short = said({"rows": [fp32, row("matmul", "large", (512, 512), "bf16", 0.1, None)]})
    assert "x)" not in cut_short
    assert "one call takes 6 s" in cut_short
    noisy = [
        row("matmul_with_casts", size, (n, n), "bf16", 0.1, speed, steady=False)
        for size, n, speed in (("small", 64, 0.5), ("medium", 512, 4.0))
    ]
    assert "repays its casts" not in said({"rows": noisy})


@pytest.mark.parametrize("found", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_page_says_what_the_text_says(found):
    page, text = Seen(doctor_page(found)), doctor_text(found)
    table = [line for line in squeezed(text) if re.match(r"[\d,]+( x \d+)* .*\d$|.*\dx\)?$|.*/s$", line)]
    assert len(table) > 3
    assert [line for line in table if line not in page.words] == []
    said = " ".join(text.split())
    for words in (
        "fp16 not measured in matmul with casts 64 x 64: torch cannot do it here: no kernel.",
        "(): cut short, as one call takes long",
        "A matmul repays its casts from somewhere between 64 x 64 and 512 x 512: a model of smaller layers",
        "tf32 is off for matmul",
        "fp16 is slow here: use fp32.",
        "medians of 9 rounds",
        "~: something else was running",
        "Some CPU, 2 cores, 1 thread of torch, 24.0 GiB",
        "NVIDIA X, 80.0 GiB, compute capability 9.0, cuda:0",
        "Not measured: this CPU (it is too hot)",
        "torch, drivers and devices fit together.",
    ):
        assert (words in page.words) == (words in said), words
    assert 'Policy "auto" chooses bf16 on this CPU' in page.words
    assert ("Problem, cuda:1. NVIDIA Old has compute" in page.words) == (found is GPU)
    assert page.all("pre") == []


def test_nothing_of_a_hostile_machine_becomes_markup():
    cpu, hostile = FACTS["cpu"] | {"name": made_captures.HOSTILE}, {"because": made_captures.HOSTILE}
    device = CPU_DEVICE | {"choice": CHOICE | hostile, "slow": [made_captures.HOSTILE]}
    page = doctor_page(examination(device, facts=FACTS | {"cpu": cpu}))
    assert made_captures.BREAKS_OUT not in page
    assert made_captures.IMAGE not in page
