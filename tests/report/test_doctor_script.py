"""The text of ``narrowcast doctor SCRIPT``, from diagnoses made by hand."""

import pytest
from made_diagnoses import CPU, FOUND, changed, on_a_gpu, read, size
from seen_page import Seen

from narrowcast.report import conclusion, diagnosis_page, diagnosis_text

TEXT = """\
train.py --epochs 2: bf16 beside FP32 on this CPU
worth it   yes: 1.15x faster (95 % interval 1.10x to 1.20x)
A step takes 6.1 ms in FP32 and 5.3 ms in bf16.

Where the time of a step goes                       FP32              bf16
  matmuls (linear, conv, attention)         3.5 ms  57 %      1.4 ms  26 %
  casts between formats                                -      689 us  13 %
  other ops (norms, elementwise, loss)      915 us  15 %      901 us  17 %
  optimizer                                 1.1 ms  18 %      1.6 ms  30 %
  Python and dispatch                       610 us  10 %      742 us  14 %

Matmuls by size, M x N x K              of FP32          here  this machine
  256 x 1024 x 512 (2)                     48 %  3.00x faster  3.30x faster
  256 x 10 x 1024 (3)                       9 %  1.90x faster  2.00x faster
Casts: 11 a step, 6.9 MiB read and written; 4 of weights, 3.1 MiB.
Ops: 85 a step, 54 us each.
Reads of tensors a step: train.py:11 item() 1, train.py:13 bool() 0.5.

What this means
  - Matmuls take 57 % of the FP32 step. By themselves, these sizes are 3.10x
    faster on this machine; with nothing else changed a step would be 1.63x
    faster. Measured: 1.15x faster.
"""
SLOW_MATMULS = {"cause": "kernels", "text": "matmuls take 57 % of a step", "share": 0.9}


def said(found):
    return "\n".join(conclusion(found))


def test_the_text_in_color_and_without():
    text, color = diagnosis_text(FOUND), diagnosis_text(FOUND, color=True)
    assert text.startswith(TEXT)
    assert max(map(len, text.splitlines())) <= 79
    assert "Rounding swallowed 91% of the updates" in text
    assert text != color
    assert color.replace("\x1b[1m", "").replace("\x1b[0m", "") == text


def test_the_page_has_the_figures_of_the_text():
    page = Seen(diagnosis_page(FOUND, CPU))
    for words in (
        "bf16 is worth it for train.py: 1.15x faster.",
        "A step takes 6.1 ms in FP32 and 5.3 ms in bf16. Worth it: yes: 1.15x faster (95 % interval 1.10x to "
        "1.20x).",
        "matmuls (linear, conv, attention) 3.5 ms, 57 % 1.4 ms, 26 % casts between formats - 689 us, 13 %",
        "256 x 1024 x 512 (2) 48 % 3.00x faster 3.30x faster 256 x 10 x 1024 (3) 9 % 1.90x faster",
        "Casts: 11 a step, 6.9 MiB read and written; 4 of weights, 3.1 MiB. Ops: 85 a step, 54 us each.",
        "train.py:11 item() 1, train.py:13 bool() 0.5.",
        "512 x 512 200 800 4.0x 2.00 0.010x",
        *conclusion(FOUND),
    ):
        assert words in page.words
    assert page.all("pre") == []


def test_a_problem_is_a_sentence_without_numbers():
    found = changed(problem="the script uses autocast itself", fp32=None, mixed=None, together=None)
    assert diagnosis_text(found) == "train.py --epochs 2: the script uses autocast itself."
    assert conclusion(found) == []
    slower = changed(together__speedup=0.66, together__speedup_interval=[0.6, 0.7], together__worth_it="no")
    assert "\nworth it   no: 1.52x slower (95 % interval 1.43x to 1.67x)\n" in diagnosis_text(slower)
    busy = changed(together__worth_it="cannot tell", together__by_others=0.9, together__speedup_interval=None)
    answer = "cannot tell: timed as 1.15x faster, but other programs used 90 % of the CPUs"
    assert answer in " ".join(diagnosis_text(busy).split())
    unknown = changed(
        together__speedup=None,
        together__worth_it="cannot tell",
        together__why_unknown="too few turns",
        next="narrowcast doctor --time-limit 0 train.py",
    )
    said_next = "           type next: narrowcast doctor --time-limit 0 train.py\n"
    assert f"\nworth it   cannot tell: too few turns\n{said_next}" in diagnosis_text(unknown)
    long = unknown | {
        "next": "narrowcast doctor --time-limit 0 train.py --data 'my files' --epochs 20 --seed 1"
    }
    typed = (
        "           type next: narrowcast doctor --time-limit 0 train.py --data \\\n"
        "             'my files' --epochs 20 --seed 1\n"
    )
    assert typed in diagnosis_text(long), "a shell reads it as one command"
    assert "Type next: narrowcast doctor --time-limit 0 train.py" in Seen(diagnosis_page(unknown, CPU)).words
    assert "Measured: not known." in said(unknown)
    assert "train.py: the script uses autocast itself." in Seen(diagnosis_page(found, CPU)).words


def test_every_line_fits_whatever_is_in_it():
    conv = size((64, 1024, 256, 256, 1024, 1024, 13, 13), kind="convolution", machine=None, speedup=None)
    attention = size((64, 16, 1024, 128, 64, 16, 1024, 128), kind="attention", machine=None)
    recurrent = size((1000, 640, 1280), kind="recurrent layer", count=10.25)
    large = size((123_456, 123_456, 123_456), kind="matmul", count=1234.5)
    found = changed(
        target=["\x1b]0;x\x07a/very/long/path" * 8, "word " * 30],
        together__sizes=[conv, attention, recurrent, large, *FOUND["together"]["sizes"]],
        together__sizes_left_out=7,
        mixed__reads__sites=[read("\x1b[2Jdeep/down/in/some/package/train.py:12345" * 2, 3)] * 9,
        mixed__ops={"count": 1234567.0, "mean_s": 3.5},
    )
    text = diagnosis_text(found)
    assert max(map(len, text.splitlines())) <= 79
    assert not {"\x1b", "\x07"} & set(text)
    assert "and 7 more" in text
    assert "and 5 more lines" in text
    bmm = size((8, 4, 5, 6), kind="batched matmul")
    assert "bmm 8x4x5x6 (2)" in diagnosis_text(changed(together__sizes=[bmm]))


def test_a_gpu_that_waits():
    text = diagnosis_text(on_a_gpu())
    assert "GPU waits" in text
    assert "Python and dispatch" not in text
    assert "the GPU is busy 55 % of the step" in " ".join(text.split())
    whole = said(on_a_gpu())
    assert "Change first: the GPU waits 45 % of the step for 85 ops from the host" in whole
    assert "Reads of tensors, 1 a step (most at train.py:11, item()), each wait until the GPU" in whole
    assert "train.py:12" not in text, "a read of a tensor that is on the CPU waits for nothing"
    assert "the GPU waits" not in said(on_a_gpu(mixed__gpu_busy_share=0.9))


def test_sizes_that_are_no_multiple_of_eight_on_a_gpu():
    words = "256 x 10 x 1024 takes 9 % of the FP32 time, and 10 is not a multiple of 8"
    assert words in said(on_a_gpu())
    assert "multiple of" not in said(FOUND)
    even, rare = size((256, 16, 1024)), size((256, 10, 1024), share=0.04)
    assert "multiple of" not in said(on_a_gpu(together__sizes=[even, rare]))
    channels = said(
        on_a_gpu(together__sizes=[size((8, 3, 32, 32, 64, 3, 3, 3), kind="convolution", share=0.2)])
    )
    assert "conv 8x3x32x32, 64x3x3x3 takes 20 %" in channels
    assert "and 3 is not a multiple of 8" in channels


@pytest.mark.parametrize(
    ("paths", "words", "otherwise"),
    [
        ({"mixed__shares__optimizer": 0.2}, "the optimizer takes 20 %", {"mixed__shares__optimizer": 0.1}),
        ({"mixed__shares__casts": 0.2}, "casts take 20 % (11 a step, 4 of", {"mixed__shares__casts": 0.05}),
        ({"mixed__loading_share": 0.5}, "loading data takes 50 %", {"mixed__loading_share": 0.1}),
        ({"mixed__shares__other_ops": 0.5}, "loss) take 50 %", {"mixed__shares__other_ops": 0.2}),
        ({"mixed__shares__python": 0.5}, "dispatch take 50 %, around 85 ops", {"mixed__shares__python": 0.2}),
        (
            {"mixed__shares__python": 0.9, "mixed__plain_step_s": 0.02},
            "the script's own Python, or waiting, takes 90 %: 18 ms a step beside 85 ops",
            {"mixed__shares__python": 0.4, "mixed__plain_step_s": 0.02},
        ),
        (
            {"together__products_speedup": 1.0},
            "the matmuls are small: most time goes to 256 x 1024 x 512, where bf16 was 3.00x faster than "
            "FP32; 2048 x 2048 is 4.20x faster",
            {"together__products_speedup": 1.0, "together__sizes": [size((2048, 1024, 1024))]},
        ),
        (
            {"together__products_speedup": 1.0},
            "the matmuls are small",
            {"together__products_speedup": 1.0, "mixed__shares__products": 0.04},
        ),
        ({"together__not_faster": SLOW_MATMULS}, "Why it is not worth it: matmuls take 57 % of a step.", {}),
        ({"fp32__step_s": 12.2e-3}, "profiler a step in FP32 was 2.00x slower", {"fp32__step_s": 9e-3}),
        (
            {"together__limit_machine": None, "together__machine_speedup": None},
            "these sizes were not measured on this machine by themselves. Measured: a step is 1.15x faster",
            {},
        ),
        ({"together__products_speedup": None}, "No matmuls were seen", {}),
        (
            {"together__products_speedup": 0.588, "together__limit_here": 0.715},
            "In this script the matmuls alone were 1.70x slower, casts not counted; with nothing else "
            "changed the step would be 1.40x slower.",
            {},
        ),
    ],
)
def test_each_sentence_has_its_condition(paths, words, otherwise):
    assert words in said(changed(**paths))
    assert words not in said(changed(**otherwise))


def test_what_takes_the_most_time_is_changed_first():
    shares = {"products": 0.1, "casts": 0.16, "other_ops": 0.5, "optimizer": 0.2, "python": 0.3}
    found = changed(mixed__shares=shares, mixed__loading_share=0.45)
    lines = [line for line in conclusion(found) if line.startswith(("Change first", "Then"))]
    starts = ["other ops", "loading data", "Python and dispatch", "the optimizer"]
    assert len(lines) == 4
    for line, start in zip(lines, starts, strict=True):
        assert start in line
    slower = changed(together__products_speedup=0.5, together__not_faster=SLOW_MATMULS)
    (first,) = [line for line in conclusion(slower) if line.startswith("Change first")]
    assert "the matmuls are small" in first, "that they are slower is why the format loses"


@pytest.mark.parametrize(
    ("verdict", "speedup", "words"),
    [
        ("no", 0.8, "bf16 is not worth it for train.py: 1.25x slower."),
        ("cannot tell", None, "We cannot tell whether bf16 is worth it for train.py."),
    ],
)
def test_the_page_begins_with_the_answer(verdict, speedup, words):
    interval = None if speedup is None else [0.7, 0.9]
    found = changed(
        together__worth_it=verdict,
        together__speedup=speedup,
        together__speedup_interval=interval,
        together__why_unknown="too few turns",
    )
    assert words in Seen(diagnosis_page(found, CPU)).words
