"""``compare`` as a function: which runs it makes, in which order, and what it leaves behind."""

import json
import re

import pytest
from training_scripts import X, trains

from narrowcast.capture import read_comparison
from narrowcast.errors import ScriptError, UnsupportedError
from narrowcast.machine import Choice
from narrowcast.report import summary
from narrowcast.scripts import OUTPUTS
from narrowcast.verify.compare import (
    _comparison,
    _timing,
    compared_instead,
    stays_in_fp32,
)
from narrowcast.verify.runs._runs import RunSettings


@pytest.mark.long
def test_where_auto_is_fp32_another_format_gets_both_answers(compared, monkeypatch):
    """Runs whose steps are slow end after a few, and losses are compared up to there."""
    monkeypatch.setattr(_timing, "_LEAST_SLOW_RUN_S", 0.2)
    text = trains(
        "nn.Linear(8, 1)",
        "x = torch.randn(4, 8)",
        "y = net(x)",
        "time.sleep(0.2 * torch.is_autocast_enabled('cpu') if low else 0)",
        "loss = y.square().mean()",
        before="""import time
low = []
def note(*_): low.append(torch.is_autocast_enabled('cpu'))
""",
        steps=1,
    )
    text = text.replace("for step in range(1):", "net.register_forward_hook(note)\nfor step in range(40):")
    text = text.replace("0.2 * torch.is_autocast_enabled('cpu') if low else 0", "0.2 * low[-1]")
    found = compared(text, fp32_because="this CPU is old", time_limit_s=200.0)  # of three pairs
    said = [note["text"] for note in found.own.of("note")]
    assert said[0] == "auto computes in fp32 here, since this CPU is old; bf16 was compared"
    result = summary(found)
    assert result["verdict"]["right"] == "yes"
    assert result["verdict"]["worth_it"].startswith("no: ")
    why = found.own.last("not_worth_it")["reason"]
    by_sleeping = re.search(r"time outside of operators explains (9\d|100) %", why)
    assert by_sleeping or "to keep to the time limit" in why
    assert result["verdict"]["worth_it"].endswith(why)


def test_a_run_that_its_time_limit_ended_did_not_take_all_steps(compared, monkeypatch):
    """Where auto is fp32, even the FP32 run has a time limit."""
    monkeypatch.setattr(_timing, "_LEAST_SLOW_RUN_S", 0.1)
    step = ("x = torch.randn(4, 8)", "time.sleep(0.05)", "loss = net(x).square().mean()")
    text = trains("nn.Linear(8, 1)", *step, before="import time", steps=400)
    found = compared(text, fp32_because="this CPU is old", time_limit_s=1.0, at_step=0)
    said = [note["text"] for note in found.own.of("note")]
    assert any(
        re.match(r"fp32-1 was ended after \d\d? steps, to keep to the time limit", text) for text in said
    )
    assert not any("each run was ended after" in text for text in said)


TRAINS = """
    import os, random, sys, numpy, torch
    torch.manual_seed(3)
    network = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    for _ in range(12):
        loss = network(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    open(os.environ["NARROWCAST_RUN_DIR"] + "/shown.txt", "w").close()
    print("progress 50 %", end="\\r")
    print(sys.argv[1:], random.random(), numpy.random.rand(), torch.rand(1).item())
    print()
"""


def test_a_comparison_of_two_seeds_from_beginning_to_end(tmp_path, compared):
    told = []
    stale = tmp_path / "kept" / "fp32-1" / "stale.png"
    stale.parent.mkdir(parents=True)
    stale.write_text("of an earlier comparison")
    RunSettings(target=("train.py",), policy="bf16", purpose="timed", folder=stale.parent).write()
    (tmp_path / "kept" / "notes.txt").write_text("not ours")
    asked = {"policy": "fp16", "loss_scale": "2", "seed": 7, "repeats": 2, "time_limit_s": 1.0}
    found = compared(TRAINS, "--policy", "x", progress=told.append, **asked)
    # A third pair, of the first seed, if it is quick enough.
    assert [(run.name, run.format, run.seed) for run in found.runs[:4]] == [
        ("fp32-1", "fp32", 7), ("mixed-1", "mixed", 7), ("mixed-2", "mixed", 8), ("fp32-2", "fp32", 8),
    ]  # fmt: skip
    by_name = {run.name: run for run in found.runs}
    # The same seed gives the same numbers in both formats, and another one others.
    assert by_name["fp32-1"].last_line == by_name["mixed-1"].last_line != by_name["fp32-2"].last_line
    assert by_name["fp32-1"].last_line.startswith("['--policy', 'x'] 0.")
    starts = {name: run.capture.start for name, run in by_name.items()}
    assert [starts[name]["loss_scale"] for name in ("fp32-1", "mixed-1")] == [None, "2"]
    losses = {name: [e["value"] for e in run.capture.of("loss")] for name, run in by_name.items()}
    # 64 products of numbers rounded to 11 bits, their sum, and its square.
    assert losses["mixed-1"] == pytest.approx(losses["fp32-1"], rel=2.0**-8)
    assert losses["mixed-1"] != losses["fp32-1"]
    # The script seeds torch itself; that seed was moved in the second repeat.
    assert losses["fp32-2"][0] != pytest.approx(losses["fp32-1"][0], rel=0.01)
    assert any("seeds" in note["text"] for note in by_name["mixed-2"].capture.of("note"))
    assert found.finished
    assert found.own.last("certificate")["verdict"] == "pass"
    assert [event["format"] for event in found.own.of("memory")] == ["fp32", "mixed"]
    assert told[0] == "run 1 of 11, timing (fp32-1)"
    # The limit of a second may be over before the first run has a process.
    with_time = re.compile(r"run \d+ of \d+(, up to \d+ s left)?, [a-z -]+ \(")
    assert all(with_time.match(text) for text in told), told
    assert not stale.exists()
    kept = tmp_path / "kept"
    assert (kept / "notes.txt").read_text() == "not ours"
    left = {path.name for path in (kept / "fp32-1").iterdir()}
    assert left == {
        "capture.jsonl",
        "narrowcast-run.json",
        "shown.txt",
        "stderr.txt",
        "stdout.txt",
    }
    assert not [path for path in kept.glob("*/*/*.pt") if "narrowcast-tensors" in str(path)]
    again = read_comparison(kept)
    assert json.dumps(again.own.events) == json.dumps(found.own.events)


def test_tensor_memory_counts_tensors_and_not_the_process(compared):
    """Two tensors of 64 MiB in FP32, their half in bf16, and little else but scratch of a kernel."""
    text = """
        import torch
        class Doubles(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x).relu()[:1]
        network = Doubles(8, 4096)
        ballast = [bytearray(2**26)]
        with torch.inference_mode():
            for _ in range(4):
                network(torch.ones(4096, 8))
    """
    found = compared(text, steps=4, time_limit_s=1.0)
    peaks = {event["format"]: event["peak_tensor_bytes"] for event in found.own.of("memory")}
    # The product and its positive part; nothing else is larger than 200 kB.
    assert peaks["fp32"] == pytest.approx(2 * 4096 * 4096 * 4, rel=0.01), found.own.of("memory")
    # A CPU may compute the product in fp32 scratch, which is freed before its positive part is made.
    assert peaks["mixed"] / 4096**2 in (pytest.approx(2 + 2, rel=0.01), pytest.approx(2 + 4, rel=0.01))
    assert found.own.last("output")["verdict"] == "pass"
    assert found.own.last("certificate") is None


def test_tensor_memory_is_that_of_training_after_calls_before_it(compared):
    text = """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Linear(512, 512)
        with torch.no_grad():
            for _ in range(5):
                model(torch.ones(1, 512))
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 512)).square().mean().backward()
            optimizer.step()
    """
    found = compared(text, steps=6, time_limit_s=1.0)
    for event in found.own.of("memory"):
        # Weights, gradients, and the two states of Adam.
        assert event["peak_tensor_bytes"] >= 4 * 512 * 512 * 4, event


def test_a_script_that_deletes_its_run_folder_is_an_error(compared):
    text = "import os, shutil; shutil.rmtree(os.environ['NARROWCAST_RUN_DIR'])"
    with pytest.raises(ScriptError, match=r"fp32-1 left no capture, so there is nothing to compare"):
        compared(text)


def test_a_script_with_its_own_mixed_precision_is_refused(compared):
    text = """
        import torch
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.Linear(8, 1)(torch.randn(4, 8)).sum().backward()
    """
    with pytest.raises(UnsupportedError, match="autocast itself, so its FP32"):
        compared(text)


def test_training_that_collapses_in_mixed_precision_is_a_fail(compared):
    text = trains(
        "nn.Linear(8, 1)",
        "step or net.register_forward_hook(note)",
        X,
        "y = net(x)",
        "if low[-1]: y.register_hook(lambda g: g * float('nan'))",
        "loss = y.square().mean()",
        before="low = []\ndef note(*_): low.append(torch.is_autocast_enabled('cpu'))",
    )
    found = compared(text, policy="fp16")
    certificate = found.own.last("certificate")
    assert certificate["verdict"] == "fail"
    assert "25 steps of SGD in a row were skipped" in certificate["reason"]
    assert summary(found)["verdict"]["right"].startswith("no: ")
    found = compared(text, policy="fp16", steps=4)
    assert "Finite in FP32 and not in mixed precision" in found.own.last("certificate")["reason"]
    assert summary(found)["verdict"]["right"].startswith("no: ")


def test_a_script_without_a_module_is_refused_after_one_run(tmp_path, compared):
    with pytest.raises(UnsupportedError, match="nothing to compare"):
        compared("print('hello')")
    assert not (tmp_path / "kept" / "mixed-1").exists()


def test_each_run_finds_the_users_files_and_leaves_them(tmp_path, compared):
    """What it resumes from is no other in the second run than in the first."""
    text = """
        import os, sys, torch
        network = torch.nn.Linear(8, 1)
        assert open(sys.argv[1]).read() == "of the user" and not os.path.exists(sys.argv[2])
        for _ in range(3):
            network(torch.randn(4, 8))
        for path in sys.argv[1:]:
            torch.save(network.state_dict(), path)
    """
    best, new = tmp_path / "best.pt", tmp_path / "new.pt"
    best.write_text("of the user")
    found = compared(text, str(best), str(new))
    assert best.read_text() == "of the user"
    assert not new.exists()
    (note,) = [note["text"] for note in found.own.of("note") if "outputs" in note["text"]]
    assert note.endswith(f"{best}, {new}")
    for run in "fp32-1", "mixed-2":
        assert len(list((found.folder / run / OUTPUTS).rglob("*.pt"))) == 2


def test_auto_that_is_fp32_here_is_compared_in_bf16(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert stays_in_fp32("fp32") == "the policy is fp32"
    assert stays_in_fp32("bf16") is None
    for choice in Choice(format="fp32", because="it is old"), Choice(format="bf16", because="it is new"):
        monkeypatch.setattr(_comparison, "best_format", lambda _, choice=choice: choice)
        assert stays_in_fp32("auto") == ("it is old" if choice.format == "fp32" else None)
        assert compared_instead("auto") == ("bf16" if choice.format == "fp32" else None)
        # Its rules are for the format of "auto", and would compare FP32 with itself.
        assert stays_in_fp32("safe") == ("it is old" if choice.format == "fp32" else None)
        assert compared_instead("safe") is None
    assert compared_instead("fp32") is None
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert stays_in_fp32("auto") is None
