"""``narrowcast compare`` on real scripts: what it prints, how it fails, what it leaves."""

import json
from pathlib import Path

import pytest

TRAINS = """\
    import random, sys
    import torch
    from torch import nn

    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    data = torch.randn(16, 8)
    print("first numbers", random.random(), torch.rand(1).item(), file=sys.stderr)
    for step in range(30):
        loss = network(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}", end="\\r")
    print()
    print(f"[red]loss[/red] \\x1b[31m{loss.item():.1f}\\x1b[0m [/nothing]")
    """
SIDE_KEYS = {
    "step_time_s_median", "steps", "skipped_steps", "final_scale", "final_loss", "peak_tensor_bytes",
    "peak_resident_bytes", "wall_s", "format", "last_line", "notes",
}  # fmt: skip


def test_json_has_the_documented_keys_and_both_runs_the_same_start(workshop):
    workshop.write("trains.py", TRAINS)
    words = ("compare", "--policy", "bf16", "--run-dir", "kept", "--seed", "3", "--json", "trains.py")
    ours = workshop.narrowcast(*words)
    assert ours.code == 0, ours.stderr
    assert ours.stderr == ""
    result = json.loads(ours.stdout)
    assert set(result) == {"fp32", "mixed", "ratio", "seed", "folder", "versions"}
    assert set(result["fp32"]) == SIDE_KEYS
    assert set(result["mixed"]) == SIDE_KEYS | {"policy"}
    assert set(result["ratio"]) == {"speed", "peak_tensor_bytes", "peak_resident_bytes"}
    fp32, mixed = result["fp32"], result["mixed"]
    assert (result["seed"], result["folder"]) == (3, str(workshop.folder / "kept"))
    assert (fp32["format"], mixed["format"], mixed["policy"]) == ("fp32", "bf16", "bf16")
    assert (fp32["steps"], mixed["steps"], fp32["skipped_steps"], mixed["skipped_steps"]) == (30, 30, 0, 0)
    assert result["ratio"]["speed"] == fp32["step_time_s_median"] / mixed["step_time_s_median"]
    assert result["versions"]["torch"]
    # Rounding to 8 bits moves each product by at most 2**-9 of it, and there are two layers and a square.
    assert fp32["final_loss"] == pytest.approx(mixed["final_loss"], rel=2.0**-5)
    assert fp32["final_loss"] != mixed["final_loss"]
    said = [(workshop.folder / "kept" / side / "stderr.txt").read_text() for side in ("fp32", "mixed")]
    first_numbers = [text.splitlines()[0] for text in said]
    assert first_numbers[0] == first_numbers[1]
    assert first_numbers[0].startswith("first numbers ")
    first_losses = [
        json.loads((workshop.folder / "kept" / side / "capture.jsonl").read_text().splitlines()[2])["loss"]
        for side in ("fp32", "mixed")
    ]
    assert first_losses[0] == pytest.approx(first_losses[1], rel=2.0**-5)


def test_the_table_shows_what_the_script_wrote_as_it_is_and_nothing_of_an_earlier_comparison(workshop):
    workshop.write("trains.py", TRAINS)
    for side in "fp32", "mixed":
        for name in "capture-rank1.jsonl", "capture.jsonl", "stdout.txt":
            workshop.write(f"kept/{side}/{name}", "stale")
    workshop.write("kept/fp32/picture.png", "of the script")
    words = ("compare", "--policy", "fp16", "--loss-scale", "256", "--run-dir", "kept", "trains.py")
    ours = workshop.narrowcast(*words, environment={"PYTHONIOENCODING": "ascii"})
    assert ours.code == 0, ours.stderr
    assert ours.stderr == f"narrowcast: captures and output of both runs: {workshop.folder / 'kept'}\n"
    lines = ours.stdout.splitlines()
    assert max(map(len, lines)) <= 79
    assert set(lines[2].strip()) == {"-"}
    assert lines[1].split() == ["FP32", "mixed,", "fp16", "mixed", "is"]
    assert "optimizer steps" in ours.stdout
    assert (
        sum(line.startswith(("  FP32   [red]loss[/red] ", "  mixed  [red]loss[/red] ")) for line in lines)
        == 2
    )
    assert all(line.endswith(" [/nothing]") for line in lines if "[red]" in line)
    assert "\x1b" not in ours.stdout
    assert "stale" not in ours.stdout
    left = sorted(str(p.relative_to(workshop.folder / "kept")) for p in workshop.folder.glob("kept/*/*"))
    mine = ("capture.jsonl", "stderr.txt", "stdout.txt")
    assert left == sorted([f"{s}/{n}" for s in ("fp32", "mixed") for n in mine] + ["fp32/picture.png"])


FAILURES = {
    "in FP32": (
        "import sys; print('reason', file=sys.stderr); sys.exit(4)",
        ["narrowcast: the script failed with exit code 4 in its FP32 run; it ended with:", "reason"],
    ),
    "only when mixed": (
        """\
        import torch
        network = torch.nn.Linear(2, 2)
        def train():
            kinds = []
            network.register_forward_hook(lambda module, args, output: kinds.append(output.dtype))
            network(torch.ones(1, 2))
            assert kinds == [torch.float32], kinds
        train()
        """,
        [
            "narrowcast: the script failed with exit code 1 in its mixed run, after its FP32 run had "
            "succeeded; it ended with:",
            "Traceback (most recent call last):",
            '  File "fails.py", line 8, in <module>',
            "    train()",
            '  File "fails.py", line 7, in train',
            "    assert kinds == [torch.float32], kinds",
            "AssertionError: [torch.bfloat16]",
        ],
    ),
    "killed": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        [
            "narrowcast: the script was killed by SIGKILL (out of memory?) in its FP32 run; it wrote nothing "
            "to stderr"
        ],
    ),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_script_that_fails_is_three_and_says_which_run(workshop, how):
    text, expected = FAILURES[how]
    script = workshop.write("fails.py", text)
    ours = workshop.narrowcast("compare", "--policy", "bf16", "--run-dir", "kept", "--json", "fails.py")
    assert (ours.code, ours.stdout) == (3, "")
    lines = [line.replace(str(script), "fails.py") for line in ours.stderr.splitlines() if "^^^" not in line]
    side = "mixed" if "mixed" in how else "fp32"
    assert lines == [*expected, f"all of its output: {workshop.folder / 'kept' / side}"]


def test_a_script_that_never_steps_and_prints_no_text_is_compared_as_far_as_it_goes(workshop):
    """No optimizer: no step time. What is no UTF-8 is shown with a sign for it. A NaN stays a NaN."""
    workshop.write(
        "odd.py",
        """\
        import sys, torch
        loss = torch.nn.Linear(2, 1)(torch.full((1, 2), float("nan"))).sum()
        loss.backward()
        sys.stdout.buffer.write(b"caf\\xe9\\n")
        """,
    )
    ours = workshop.narrowcast("compare", "--policy", "bf16", "--json", "odd.py")
    assert ours.code == 0, ours.stderr

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    result = json.loads(ours.stdout, parse_constant=refuse)
    for side in "fp32", "mixed":
        run = result[side]
        assert (run["step_time_s_median"], run["steps"], run["final_loss"]) == (None, 0, "nan")
        assert run["last_line"] == "caf\ufffd"
    assert result["ratio"]["speed"] is None
    (note,) = result["mixed"]["notes"]
    assert note.startswith("no torch.optim.Optimizer stepped")
    assert Path(result["folder"]).parent == workshop.cache / "runs"


def test_a_script_that_leaves_by_the_back_door_and_prints_nothing_is_compared_too(workshop):
    """``os._exit`` ends a run before its capture has its last line."""
    workshop.write("leaves.py", "import os; os._exit(0)")
    ours = workshop.narrowcast("compare", "--policy", "bf16", "leaves.py")
    assert ours.code == 0, ours.stderr
    assert [" ".join(line.split()) for line in ours.stdout.splitlines() if line.strip("\u2500 ")] == [
        "FP32 mixed, - mixed is",
        "optimizer steps 0 0",
        "skipped steps 0 0",
        "The script's own last line:",
        "FP32 (it printed nothing)",
        "mixed (it printed nothing)",
    ]
