"""The table of two runs, to the letter."""

import textwrap

import pytest

from narrowcast.report import comparison_table

SIDE = {
    "step_time_s_median": 0.0123,
    "steps": 30,
    "skipped_steps": 0,
    "final_scale": None,
    "final_loss": 0.123456,
    "peak_tensor_bytes": None,
    "peak_resident_bytes": 512 * 2**20,
    "wall_s": 12.34,
    "format": "fp32",
    "last_line": "accuracy 0.98",
    "notes": [],
}
UNKNOWN = dict.fromkeys(SIDE) | {"last_line": "", "notes": []}
NO_RATIO = {"speed": None, "peak_tensor_bytes": None, "peak_resident_bytes": None}


def comparison(fp32, mixed, **ratio):
    return {"fp32": fp32, "mixed": {**mixed, "policy": "auto"}, "ratio": NO_RATIO | ratio}


FULL = comparison(
    {**SIDE, "peak_tensor_bytes": 2**30},
    {
        **SIDE,
        "format": "bf16",
        "step_time_s_median": 0.00615,
        "peak_tensor_bytes": 2**29,
        "peak_resident_bytes": 640 * 2**20,
        "skipped_steps": 2,
        "notes": [
            "the script has a trait that is worth a note so long that it does not fit on one line",
            "b",
        ],
    },
    speed=2.0,
    peak_tensor_bytes=0.5,
    peak_resident_bytes=1.25,
)
TABLES = {
    "everything": (
        FULL,
        """\

                                     FP32   mixed, bf16   mixed is
         ------------------------------------------------------------
         step time, median        12.30 ms       6.15 ms   2.00x faster
         peak process memory       512 MiB       640 MiB   25 % more
         peak GPU tensor memory   1024 MiB       512 MiB   50 % less
         final loss                0.12346       0.12346
         optimizer steps                30            30
         skipped steps                   0             2
         wall time                  12.3 s        12.3 s

        The script's own last line:
          FP32   accuracy 0.98
          mixed  accuracy 0.98
        note: the script has a trait that is worth a note so long that it does not fit
        on one line
        note: b""",
    ),
    "nothing": (
        comparison(UNKNOWN, UNKNOWN),
        """\

          FP32   mixed, -   mixed is
         ----------------------------

        The script's own last line:
          FP32   (it printed nothing)
          mixed  (it printed nothing)""",
    ),
    "one side, not finite, the same": (
        comparison(
            {**UNKNOWN, "final_loss": "nan", "steps": 1},
            {**UNKNOWN, "final_loss": "-inf", "format": "fp16, bf16", "wall_s": 0.04},
            speed=1.004,
            peak_resident_bytes=0.996,
        ),
        """\

                            FP32   mixed, fp16, bf16   mixed is
         ------------------------------------------------------
         final loss          nan                -inf
         optimizer steps       1                   -
         wall time             -               0.0 s

        The script's own last line:
          FP32   (it printed nothing)
          mixed  (it printed nothing)""",
    ),
}


def squeezed(text):
    """Rows word by word: how wide columns are is the business of rich."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip(" -\u2500")]


@pytest.mark.parametrize("what", TABLES)
def test_the_table_is_this(what):
    given, expected = TABLES[what]
    table = comparison_table(given)
    assert squeezed(table) == squeezed(textwrap.dedent(expected))
    assert max(map(len, table.splitlines())) <= 79
    assert all(line == line.rstrip() for line in table.splitlines())


@pytest.mark.parametrize(
    ("speed", "shown"),
    [
        (1.0, "the same"),
        (0.9951, "the same"),
        (1.0049, "the same"),
        (1.006, "1.01x faster"),
        (0.5, "2.00x slower"),
        (0.99, "1.01x slower"),
    ],
)
def test_a_ratio_of_times_is_said_as_faster_or_slower(speed, shown):
    table = comparison_table(FULL | {"ratio": NO_RATIO | {"speed": speed}})
    assert next(row for row in squeezed(table) if row.startswith("step time")).endswith(f"ms {shown}")


@pytest.mark.parametrize(
    ("ratio", "shown"), [(1.004, "the same"), (0.996, "the same"), (1.006, "1 % more"), (0.25, "75 % less")]
)
def test_a_ratio_of_memory_is_said_in_percent(ratio, shown):
    table = comparison_table(FULL | {"ratio": NO_RATIO | {"peak_resident_bytes": ratio}})
    assert next(row for row in squeezed(table) if "process memory" in row).endswith(f"MiB {shown}")


@pytest.mark.parametrize("color", [False, True])
def test_what_the_script_wrote_is_shown_as_text(color):
    lines = ["[red]x[/red] [/nothing] :smile: [link=https://a.b]c", "\x1b[31mred\x1b[0m\x07\x1b"]
    given = comparison(SIDE | {"last_line": lines[0]}, SIDE | {"last_line": lines[1]})
    table = comparison_table(given, color=color)
    assert f"  FP32   {lines[0]}" in table
    assert "  mixed  red\\x07\\x1b" in table
    assert "\x1b[31m" not in table
    assert ("\x1b[1m" in table) == color


def test_a_very_long_line_is_cut():
    table = comparison_table(comparison(SIDE | {"last_line": "word " * 1000}, SIDE))
    shown = " ".join(table.split("FP32   word")[1].split("mixed  ")[0].split())
    assert shown.endswith("word ...")
    assert len(shown) < 210
    assert max(map(len, table.splitlines())) <= 79
