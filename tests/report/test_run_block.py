"""The block that ends a run."""

import math

import pytest

from narrowcast.capture import Capture
from narrowcast.report import printable, run_block

START = {"event": "start", "schema": 1}
CPU = {"event": "device", "device_type": "cpu", "format": "bf16", "because": "this CPU has AVX512-BF16"}
GPU = CPU | {"device_type": "cuda", "format": "fp16", "because": "this GPU computes in fp16 and not in bf16"}


def end(**changed):
    settings = {"steps": 30, "skipped_steps": 0, "final_scale": None, "wall_s": 1.25, "left_alone": None}
    return {"event": "end", "exit_code": 0, **settings, **changed}


def note(text):
    return {"event": "note", "text": text}


def step(**changed):
    return {"event": "step", "time_s": 2.5, "optimizer": 0, "skipped": False, "scale": 1024.0, **changed}


def losses(*values, site="train.py:9"):
    return [{"event": "loss", "backward": n, "site": site, "value": v} for n, v in enumerate(values, start=1)]


FIRST = "narrowcast: bf16 on cpu (this CPU has AVX512-BF16)"
NUMBERS = "  30 optimizer steps, 0 skipped, loss scale off, 1.2 s"
NO_END = "  note: the capture has no end: the run was killed or is still going on"
BLOCKS = {
    "no scale": ([CPU, end()], [FIRST, NUMBERS]),
    "a loss that was NaN for a while, and one to the end": (
        [CPU, *losses(1.0, math.nan, 2.0), *losses(1.0, math.inf, math.nan, math.nan, site="b.py:2"), end()],
        [
            FIRST,
            NUMBERS,
            "  note: the loss at b.py:2 is inf from backward 2 on: try --policy fp32 to see",
            "        whether FP32 has it too",
        ],
    ),
    "nothing": (
        [end(steps=1, final_scale=65536.0, wall_s=3600.04)],
        [
            "narrowcast: nothing ran in mixed precision",
            "  1 optimizer step, 0 skipped, final loss scale 65536, 3600.0 s",
        ],
    ),
    "no step taken": (
        [CPU, end(steps=0, skipped_steps=8, final_scale=2.0)],
        [
            "narrowcast: WARNING: NOTHING WAS TRAINED: all 8 optimizer steps were skipped",
            FIRST,
            "  0 optimizer steps, 8 skipped, final loss scale 2, 1.2 s",
        ],
    ),
    "the only step not taken": (
        [CPU, end(steps=0, skipped_steps=1, final_scale=2.0)],
        [
            "narrowcast: WARNING: NOTHING WAS TRAINED: the only optimizer step was skipped",
            FIRST,
            "  0 optimizer steps, 1 skipped, final loss scale 2, 1.2 s",
        ],
    ),
    "very many steps not taken": (
        [CPU, end(steps=0, skipped_steps=123456, final_scale=2.0)],
        [
            "narrowcast: WARNING: NOTHING WAS TRAINED: all 123456 optimizer steps were",
            "  skipped",
            FIRST,
            "  0 optimizer steps, 123456 skipped, final loss scale 2, 1.2 s",
        ],
    ),
    "left to itself after some steps": (
        [CPU, end(steps=4, left_alone="it opens torch.autocast itself")],
        [
            f"{FIRST}, then left to the script's",
            "  own mixed precision",
            "  4 optimizer steps before that, 0 skipped, loss scale off, 1.2 s",
        ],
    ),
    "left to itself before anything computed": (
        [CPU, end(steps=0, backwards=0, forwards=0, left_alone="it opens autocast", elsewhere=True)],
        [
            "narrowcast: left to the script's own mixed precision in this process",
            "  0 optimizer steps before that, 0 skipped, loss scale off, 1.2 s",
        ],
    ),
    "left to itself": (
        [end(steps=4, left_alone="it opens torch.autocast itself")],
        [
            "narrowcast: left to the script's own mixed precision",
            "  4 optimizer steps before that, 0 skipped, loss scale off, 1.2 s",
        ],
    ),
    "two devices and long notes": (
        [GPU, CPU, note("a word " * 12 + "x" * 90), note("short"), end(final_scale=2.0**-20)],
        [
            "narrowcast: fp16 on cuda (this GPU computes in fp16 and not in bf16); bf16 on",
            "  cpu (this CPU has AVX512-BF16)",
            "  30 optimizer steps, 0 skipped, final loss scale 9.53674e-07, 1.2 s",
            "  note: a word a word a word a word a word a word a word a word a word a word a",
            "        word a word",
            f"        {'x' * 90}",
            "  note: short",
        ],
    ),
    "killed": (
        [CPU, step(), step(skipped=True), step(time_s=3.5)],
        [FIRST, "  2 optimizer steps, 1 skipped, final loss scale 1024, 3.5 s", NO_END],
    ),
    "markup and control characters": (
        [CPU | {"because": "\x1b[31mx\x1b]0;title\x07"}, note("[red]a[/red]\x1b[0m\x07 is\tb"), end()],
        ["narrowcast: bf16 on cpu (x)", NUMBERS, "  note: [red]a[/red]\\x07 is b"],
    ),
}


@pytest.mark.parametrize("what", BLOCKS)
def test_the_block_that_ends_a_run(what):
    events, expected = BLOCKS[what]
    assert run_block(Capture(events=(START, *events))).splitlines() == expected


def test_a_note_that_was_told_before_training_is_not_repeated():
    told, other = note("bf16 is slow here") | {"told": True}, note("a loss is NaN")
    capture = Capture(events=(START, CPU, told, other, end()))
    assert run_block(capture, with_told=False).splitlines()[2:] == ["  note: a loss is NaN"]
    assert run_block(capture).splitlines()[2:] == ["  note: bf16 is slow here", "  note: a loss is NaN"]


def test_the_path_of_the_capture_stays_on_one_line():
    path = "/a folder/" * 20 + "capture.jsonl"
    block = run_block(Capture(events=(START, CPU, end())), capture_path=path)
    assert block.splitlines()[-1] == f"  capture: {path}"


@pytest.mark.parametrize(
    ("start", "because", "shown"),
    [
        ({"policy": "my.toml", "rules": 4}, "as asked", "bf16 on cpu, by my.toml (4 rules)"),
        ({"policy": "a/\x1b[1mmy", "rules": 1}, "why", "bf16 on cpu (why), by a/my (1 rule)"),
        ({"policy": "safe", "rules": 31}, "as asked", "bf16 on cpu, by safe (31 rules)"),
        ({"policy": "bf16", "rules": 0}, "as asked", "bf16 on cpu (as asked)"),
    ],
)
def test_the_policy_is_named_where_it_has_rules_or_is_a_file(start, because, shown):
    block = run_block(Capture(events=(START | start, CPU | {"because": because}, end())))
    assert block.splitlines()[0] == f"narrowcast: {shown}"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[red]gr\u00fc\u00df[/red] \U0001f600", "[red]gr\u00fc\u00df[/red] \U0001f600"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b[2K\x1b[1A\x1b[?25lx", "x"),
        ("\x1b]8;;https://a.b\x1b\\link\x1b]8;;\x07", "link"),
        ("\x1b", "\\x1b"),
        ("\x1b]never ends", "\\x1b]never ends"),
        ("a\rb\x08\x00\x9b", "a b\\x08\\x00\\x9b"),
        ("tab\there\u2028and\u00a0there", "tab here and there"),
        ("\u202ereversed", "\\u202ereversed"),
        ("\ud800", "\\ud800"),
    ],
)
def test_text_is_made_safe_to_show(written, shown):
    assert printable(written) == shown
