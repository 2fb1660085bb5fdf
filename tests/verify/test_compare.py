"""``compare`` as a function: real runs, and the numbers that are made of their captures."""

import json
import math
from pathlib import Path

import pytest

from narrowcast.errors import ScriptError
from narrowcast.observe import Capture, read_capture
from narrowcast.verify import Comparison, ComparisonSettings, compare, stays_in_fp32


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("NARROWCAST_POLICY", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def settings(folder, *target, **changed):
    given = {"policy": "bf16", "loss_scale": None, "seed": 0, "folder": Path(folder), "target": target}
    return ComparisonSettings(**given | changed)


def capture(*intervals, end=None, **step):
    steps = [
        {"event": "step", "time_s": n, "interval_s": interval, "skipped": False, "scale": None, "loss": 1.0}
        | step
        for n, interval in enumerate(intervals)
    ]
    start = {"event": "start", "schema": 1}
    return Capture(events=(start, *steps, *([] if end is None else [{"event": "end", **end}])))


def numbers(fp32, mixed):
    return Comparison(
        fp32=fp32, mixed=mixed, last_lines=("one", "other"), settings=settings("folder", "train.py")
    ).to_dict()


END = {
    "steps": 3, "skipped_steps": 0, "final_scale": None, "peak_tensor_bytes": None, "final_loss": 0.5,
    "peak_resident_bytes": 100, "wall_s": 1.0, "versions": {"torch": "x"}, "exit_code": 0,
}  # fmt: skip


def test_a_real_script_runs_in_both_formats_from_the_same_seed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        """
import os, sys, numpy, random, torch
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
""",
        encoding="utf-8",
    )
    told = []
    asked = settings(tmp_path / "kept", str(script), "--policy", "x", seed=7, loss_scale="2", policy="fp16")
    result = compare(asked, progress=told.append)
    assert result.last_lines[0] == result.last_lines[1]
    assert result.last_lines[0].startswith("['--policy', 'x'] 0.")
    assert [c.start["seed"] for c in (result.fp32, result.mixed)] == [7, 7]
    assert [c.start["policy"] for c in (result.fp32, result.mixed)] == ["fp32", "fp16"]
    assert [c.start["loss_scale"] for c in (result.fp32, result.mixed)] == [None, "2"]
    first, second = (c.of("step")[0]["loss"] for c in (result.fp32, result.mixed))
    # 64 products of numbers rounded to 11 bits, their sum, and its square.
    assert first == pytest.approx(second, rel=2.0**-8)
    assert first != second
    found = result.to_dict()
    assert (found["fp32"]["steps"], found["mixed"]["steps"], found["mixed"]["final_scale"]) == (12, 12, 2.0)
    assert told
    assert all(text.startswith(("FP32: ", "mixed: ")) for text in told)
    for side in "fp32", "mixed":
        kept = {path.name for path in (tmp_path / "kept" / side).iterdir()}
        assert kept == {"capture.jsonl", "stdout.txt", "stderr.txt", "shown.txt"}


def test_a_script_that_clears_its_folder_left_no_capture(tmp_path):
    script = tmp_path / "deletes.py"
    script.write_text("import os, shutil; shutil.rmtree(os.environ['NARROWCAST_RUN_DIR'])", encoding="utf-8")
    with pytest.raises(ScriptError, match=r"the FP32 run left no capture, so there is nothing"):
        compare(settings(tmp_path / "kept", str(script)))


@pytest.mark.parametrize(
    ("intervals", "median"),
    [
        ((), None),
        ((None,), None),
        ((None, 3.0), 3.0),
        ((None, 1.0, 2.0, 4.0), 2.0),
        # Ten intervals: the first is warm-up.
        ((None, 100.0, *[1.0, 2.0, 3.0] * 3), 2.0),
        # Nine: none is, as a tenth of them is less than one.
        ((None, 100.0, *[1.0] * 3, 5.0, *[9.0] * 4), 9.0),
    ],
)
def test_the_time_of_a_step_is_the_median_after_warm_up(intervals, median):
    found = numbers(capture(*intervals, end=END), capture(*intervals, end=END))
    assert found["fp32"]["step_time_s_median"] == median
    assert found["ratio"]["speed"] == (None if median is None else 1.0)


def test_ratios_say_how_much_faster_and_how_much_more():
    fp32 = capture(None, 3.0, end=END | {"peak_tensor_bytes": 400, "peak_resident_bytes": 1000})
    mixed = capture(None, 2.0, end=END | {"peak_tensor_bytes": 200, "peak_resident_bytes": 1500})
    assert numbers(fp32, mixed)["ratio"] == {
        "speed": 1.5,
        "peak_tensor_bytes": 0.5,
        "peak_resident_bytes": 1.5,
    }


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_comes_out_is_strict_json(loss):
    end = END | {"final_loss": loss, "final_scale": 2.0**-126}
    found = numbers(capture(None, 1.0, end=end), capture(None, 1.0))
    assert found["fp32"]["final_loss"] == str(loss)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["mixed"]["steps"] == 2
    assert (found["mixed"]["peak_resident_bytes"], found["versions"]) == (None, {})


def test_what_would_stay_in_fp32(monkeypatch):
    from narrowcast.machine import Choice, best_format

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert stays_in_fp32("fp32") == "the policy is fp32"
    assert stays_in_fp32("bf16") is None
    assert stays_in_fp32("fp16") is None
    here = best_format("cpu")
    assert stays_in_fp32("auto") == (here.because if here.format == "fp32" else None)
    for choice in Choice(format="fp32", because="it is old"), Choice(format="bf16", because="it is new"):
        monkeypatch.setattr("narrowcast.verify._compare.best_format", lambda _, choice=choice: choice)
        assert stays_in_fp32("auto") == ("it is old" if choice.format == "fp32" else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert stays_in_fp32("auto") is None


def _run_of(tmp_path, name, intervals, device="bf16"):
    path = tmp_path / name
    events = [{"event": "start", "schema": 1}, {"event": "device", "device_type": "cpu", "format": device}]
    events += [
        {"event": "step", "time_s": n, "interval_s": interval, "skipped": False, "scale": None, "loss": 1.0}
        for n, interval in enumerate(intervals)
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return read_capture(path)


@pytest.mark.parametrize(("fp32", "mixed", "doubt"), [
    ([0.02] * 40, [0.01] * 40, None),
    ([0.02] * 40, [0.001, 0.06] * 20, "step times varied 60-fold"),
    ([0.02] * 40, [0.01] * 3, "different numbers of steps (40 and 3)"),
])  # fmt: skip
def test_a_comparison_says_when_not_to_believe_it(fp32, mixed, doubt, tmp_path):
    settings = ComparisonSettings(target=("x.py",), policy="bf16", loss_scale=None, seed=0, folder=tmp_path)
    captures = _run_of(tmp_path, "a", fp32, "fp32"), _run_of(tmp_path, "b", mixed)
    notes = Comparison(fp32=captures[0], mixed=captures[1], last_lines=("", ""), settings=settings).to_dict()[
        "mixed"
    ]["notes"]
    assert [doubt in note for note in notes] == ([True] if doubt else [])
