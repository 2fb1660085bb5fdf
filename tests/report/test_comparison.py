"""The table of a comparison."""

import made_captures
import pytest
from made_captures import squeezed

from narrowcast.report import comparison_table

SIDE = {
    "step_time_s_median": 0.0123,
    "step_time_s_interval": [0.0121, 0.0126],
    "forward_time_s_median": None,
    "forward_time_s_interval": None,
    "steps": 30,
    "skipped_steps": 0,
    "final_scale": None,
    "final_loss": {"/home/a/train.py:12": 0.123456},
    "peak_tensor_bytes": 2**30,
    "peak_resident_bytes": 512 * 2**20,
    "wall_s": 12.34,
    "format": "fp32",
    "last_line": "accuracy 0.98",
    "runs": ["fp32-0"],
}
UNKNOWN = dict.fromkeys(SIDE) | {"final_loss": {}, "last_line": "", "runs": []}
NO_RATIO = dict.fromkeys(("speedup", "speedup_interval", "memory_ratio", "process_memory_ratio"))
WORST = {"name": "fc.weight", "error_over_noise": 0.0171, "relative_error": 0.01}
CERTIFICATE = made_captures.certificate(
    error_over_noise=0.00712345, worst_parameter=WORST, reason="below 0.05"
)
OF_SITE = {
    "difference": -0.000215,
    "seed_spread": 0.0031,
    "verdict": "pass",
    "reason": "the difference is 0.07 of the spread between 3 seeds",
    "seeds": [0, 1, 2],
    "steps": 30,
    "judged": True,
}
LOSS = {"site": "/home/a/train.py:12", **OF_SITE, "sites": {"/home/a/train.py:12": OF_SITE}}


def made(fp32=SIDE, mixed=SIDE, ratio=NO_RATIO, **changed):
    return {
        "fp32": fp32,
        "mixed": {"format": "bf16", **mixed, "policy": "auto"},
        **NO_RATIO,
        **ratio,
        "certificate": None,
        "output": None,
        "loss": None,
        "verdict": {"right": "cannot tell: nothing was judged", "worth_it": "cannot tell: a time is missing"},
        "next": {"right": None, "worth_it": None},
        "kind": "training",
        "finished": True,
        "notes": [],
        "reasons": {},
        "seed": 0,
        **changed,
    }


FULL = made(
    mixed={
        **SIDE,
        "format": "bf16",
        "step_time_s_median": 0.00615,
        "step_time_s_interval": [0.006, 0.0064],
        "peak_tensor_bytes": 2**29,
        "peak_resident_bytes": 640 * 2**20,
        "skipped_steps": 2,
        "final_scale": 65536.0,
    },
    ratio={
        "speedup": 2.0,
        "speedup_interval": [1.89, 2.1],
        "memory_ratio": 0.5,
        "process_memory_ratio": 1.25,
    },
    certificate=CERTIFICATE,
    loss=LOSS,
    verdict={"right": "yes", "worth_it": "yes: 2.00x faster (95 % interval 1.89x to 2.10x)"},
    notes=["the script has a trait that is worth a note so long that it does not fit on one line", "b"],
)
INFERENCE = made(
    SIDE | {"forward_time_s_median": 0.0005, "forward_time_s_interval": [0.0004, 0.0006], "final_loss": {}},
    SIDE
    | {"forward_time_s_median": 0.25, "forward_time_s_interval": [0.2, 0.3], "final_loss": {}}
    | {"format": "bf16", "peak_tensor_bytes": 3 * 2**20},
    kind="inference",
    output=made_captures.output(sqnr_db=50.17, calls=20),
    verdict={"right": "yes", "worth_it": "yes: 2.00x faster (95 % interval 1.89x to 2.10x)"},
)
LOST = made(
    UNKNOWN | {"final_loss": {"/a/gan.py:3": 1.5, "C:\\a\\gan.py:9": 0.5}},
    UNKNOWN | {"format": "fp16", "final_loss": {"/a/gan.py:3": "nan", "C:\\a\\gan.py:9": 0.5}},
    loss={
        "site": "/a/gan.py:3",
        "difference": None,
        "seed_spread": None,
        "verdict": "fail",
        "reason": "the loss is finite in FP32 and not in mixed precision",
        "seeds": [0],
        "sites": {
            "/a/gan.py:3": {"judged": True},
            "C:\\a\\gan.py:9": {"difference": 0.0, "judged": True},
        },
    },
    verdict={"right": "no: losses: the loss is", "worth_it": "cannot tell: a time is missing"},
    reasons=dict.fromkeys(
        ("fp32.step_time_s_median", "mixed.step_time_s_median"), "no torch.optim.Optimizer stepped"
    )
    | {"fp32.peak_tensor_bytes": "was not made", "mixed.peak_tensor_bytes": "was killed"},
)
TRAINING_TABLE = """\
                            FP32     mixed, bf16   change
step time, median     12.30 ms         6.15 ms   2.00x faster
  95 % in one run   12.10 to 12.60 ms   6.00 to 6.40 ms   1.89x to 2.10x
peak tensor memory    1024 MiB         512 MiB   50 % less
peak process memory    512 MiB         640 MiB   25 % more
final loss (3 seeds)   0.12346         0.12346
optimizer steps             30              30
skipped steps                0               2
final loss scale             -           65536
wall time               12.3 s          12.3 s
final loss: mean of what was passed to backward() in the last tenth of steps,
over the same 3 seeds in both formats
gradients  pass: error over noise 0.00712 (limit 0.05), worst 0.0171 in
           fc.weight; below 0.05
loss       pass: difference -0.000215, spread of seeds 0.0031; the difference
           is 0.07 of the spread between 3 seeds
right      yes
worth it   yes: 2.00x faster (95 % interval 1.89x to 2.10x)
Last line of the script's output, seed 0:
  FP32   accuracy 0.98
  mixed  accuracy 0.98
note: the script has a trait that is worth a note so long that it does not fit
on one line
note: b"""


def test_a_run_that_was_ended_is_told_from_one_that_printed_nothing():
    silent = {"last_line": "", "stopped": True}
    found = FULL | {"fp32": FULL["fp32"] | silent, "mixed": FULL["mixed"] | silent | {"stopped": False}}
    lines = comparison_table(found).splitlines()
    assert "  FP32   (nothing until it was ended; --steps 0 runs it whole)" in lines
    assert "  mixed  (it printed nothing)" in lines


def test_the_table_of_a_training():
    table = comparison_table(FULL)
    assert squeezed(table) == squeezed(TRAINING_TABLE)
    assert "\n\n\n" not in table


@pytest.mark.parametrize(
    ("given", "first", "expected"),
    [
        (
            LOST,
            "FP32 mixed, fp16 change",
            [
                "step time, median - -",
                "final loss, gan.py:3 1.5 nan",
                "final loss, gan.py:9 0.5 0.5 the same",
                "no step time, median: no torch.optim.Optimizer stepped",
                "no peak tensor memory: FP32: was not made",
                "no peak tensor memory: mixed: was killed",
                "loss fail: worst of 2 losses: gan.py:3; the loss is finite in FP32 and",
                "right no: losses: the loss is",
                "FP32 (it printed nothing)",
            ],
        ),
        (
            INFERENCE,
            "FP32 mixed, bf16 change",
            [
                "forward time, median 0.5 ms 250.0 ms",
                "95 % in one run 0.4 to 0.6 ms 200.0 to 300.0 ms",
                "peak tensor memory 1024 MiB 3.0 MiB",
                "output pass: relative error 0.0031, SQNR 50.17 dB, 20 calls; below 0.05 in",
            ],
        ),
        (
            made(UNKNOWN, UNKNOWN | {"format": None}, kind=None, finished=False),
            "This comparison was cut short: these are the numbers up to then.",
            ["FP32 mixed, - change", "right cannot tell: nothing was judged"],
        ),
    ],
    ids=["two losses, one of them lost", "inference", "cut short"],
)
def test_the_table_of_other_comparisons(given, first, expected):
    table = comparison_table(given)
    rows = squeezed(table)
    assert rows[0] == first
    assert [row for row in rows if row in expected] == expected
    assert given is LOST or not [
        row for row in rows if "optimizer steps" in row or row.startswith("final loss")
    ]
    assert max(map(len, table.splitlines())) <= 79
    assert all(line == line.rstrip() for line in table.splitlines())


@pytest.mark.parametrize(
    ("speed", "interval", "shown"),
    [
        (2.0, [1.9, 2.1], "2.00x faster"),
        (1.0, [0.99, 1.01], "1.00x faster?"),
        (0.5, [0.4, 0.625], "2.00x slower"),
        (1.2, [0.9, 1.4], "1.20x faster?"),
        (0.8, [0.5, 1.25], "1.25x slower?"),
        (132.0, [120.0, 140.0], "132x faster"),
    ],
)
def test_a_speedup_has_one_direction(speed, interval, shown):
    table = squeezed(comparison_table(made(ratio={"speedup": speed, "speedup_interval": interval})))
    assert next(row for row in table if row.startswith("step time")).endswith(f"ms {shown}")
    bounds = {0.4: "1.60x to 2.50x", 0.5: "0.80x to 2.00x", 0.9: "0.90x to 1.40x"}
    if interval and interval[0] in bounds:
        assert any(row.endswith(bounds[interval[0]]) for row in table)


@pytest.mark.parametrize("color", [False, True])
def test_what_the_script_wrote_is_shown_as_text(color):
    lines = ["[red]x[/red] [/nothing] :smile: [link=https://a.b]c", "\x1b[31mred\x1b[0m\x07\x1b"]
    given = made(SIDE | {"last_line": lines[0]}, SIDE | {"last_line": lines[1], "format": "[b]bf16\x1b[0m"})
    table = comparison_table(given, color=color)
    assert f"  FP32   {lines[0]}" in table
    assert "  mixed  red\\x07\\x1b" in table
    assert "mixed, [b]bf16" in table
    assert "\x1b[31m" not in table
    assert ("\x1b[1m" in table) == color


def test_what_is_very_long_is_cut():
    site, name = "x" * 10_000 + ".py:1", "\u202e" + "n" * 10_000
    worst = {"name": name, "error_over_noise": None, "relative_error": 1.0}
    certificate = CERTIFICATE | {"worst_parameter": worst, "error_over_noise": None}
    loss = LOSS | {"site": site, "sites": {site: OF_SITE, "b": OF_SITE}}
    side = SIDE | {"final_loss": {site: 1.0, "b": 2.0}, "last_line": "word " * 1000}
    table = comparison_table(made(side, certificate=certificate, loss=loss))
    assert "gradients  pass: relative error 0.0034, worst 1 in" in table
    assert "\\u202en" in table
    shown = " ".join(table.split("FP32   word")[1].split("mixed  ")[0].split())
    assert shown.endswith("word ...")
    assert len(shown) < 210
    assert max(map(len, table.splitlines())) <= 79


def test_a_policy_that_the_format_does_not_tell_is_named():
    mixed = made()["mixed"]
    assert "policy" not in comparison_table(made())
    table = comparison_table(made() | {"mixed": mixed | {"policy": "ours/policy.toml\x1b[31m"}})
    assert table.splitlines()[0] == "mixed: by the policy ours/policy.toml"
    assert "mixed: by the policy safe\n" in comparison_table(made() | {"mixed": mixed | {"policy": "safe"}})


def beside(**changed):
    """A parameter of four elements whose error over noise is beyond the limit."""
    found = made_captures.parameter("head.bias", 0.5) | {"shape": [4], "relative_error": 0.11}
    return found | changed


@pytest.mark.parametrize(
    ("minibatches", "parameter", "why"),
    [
        (1, beside(), "small beside its own gradient: relative error 0.11"),
        (4, beside(), "fewer than 16 elements"),
        (4, beside(shape=[64]), "its interval reaches below 0.25"),
        (1, beside(lost=True), None),
        (1, beside(judged=False), None),
        (1, beside(error_over_noise=0.2), None),
        (1, beside(error_over_noise=None), None),
    ],
)
def test_an_exemption_stands_where_its_number_is(minibatches, parameter, why):
    worst = {key: parameter[key] for key in ("name", "error_over_noise", "relative_error")}
    changed = {"parameters": [parameter], "worst_parameter": worst, "minibatches": minibatches}
    table = " ".join(comparison_table(made(certificate=CERTIFICATE | changed)).split())
    said = f"worst 0.5 in head.bias (beyond 0.25, not counted: {why})"
    assert (said in table) == (why is not None)
    assert ("not counted" in table) == (why is not None)


def test_a_total_beyond_its_limit_that_passes_says_why():
    beyond = {"error_over_noise": 0.475, "relative_error": 0.0034}
    table = " ".join(comparison_table(made(certificate=CERTIFICATE | beyond)).split())
    why = "(beyond 0.05, not counted: rounding alone makes a relative error of 0.0034)"
    assert f"gradients pass: error over noise 0.475 {why}" in table
    failed = comparison_table(made(certificate=CERTIFICATE | beyond | {"verdict": "fail"}))
    assert "error over noise 0.475 (limit 0.05)" in failed
