"""Timed runs of both formats take turns, in blocks of as many steps, and else run one after the other."""

import contextlib
import itertools
import math
import os

import pytest
import torch
from training_scripts import trains

from narrowcast.capture import read_capture
from narrowcast.capture._speed import blocks_of
from narrowcast.report import summary
from narrowcast.verify.compare import _timing
from narrowcast.verify.runs import _runs
from narrowcast.verify.runs._runs import Purpose, take_turns

BEFORE = """import fcntl, os, sys, time
log = open(os.environ["NARROWCAST_RUN_DIR"] + "/log", "a", 1)
def note(text): log.write(f"{text} {time.monotonic()}\\n")
"""


def script(*step, before="", steps=60):
    loss = ("loss = net(torch.randn(4, 8)).square().mean()", "time.sleep(0.004)", "note('step')")
    return trains("nn.Linear(8, 1)", *step, *loss, before=BEFORE + before, steps=steps)


@pytest.fixture
def pair(runs):
    """Make a pair of runs; return why they took no turns, and the runs in the order of their ends."""
    begun = []

    def make(text, *arguments, limit_s=math.inf, progress=lambda _: None):
        made, done = runs(text, *arguments), []
        made.progress = progress

        def begin(format_):
            begun.append(made.begin(f"{format_}-{len(begun)}", format_, "timed"))
            return begun[-1]

        why = take_turns(("fp32", "mixed"), begin, done.append, steps=60, limit_s=lambda *_: limit_s)
        assert [run.checked() for run in done] == [run.folder for run in done]
        return why, done

    yield make
    for run in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(run._process.pid, 0)


def noted(run, what):
    lines = (line.split() for line in (run.folder / "log").read_text().splitlines())
    return [float(at) for text, at in lines if text == what]


def test_steps_take_turns_while_all_of_the_other_run_stands_still(pair):
    """Processes that the script forked too: loaders would load ahead."""
    why, done = pair(script(before="if os.fork() == 0:\n    while True: note('tick'); time.sleep(0.002)\n"))
    assert why is None
    captures = [read_capture(run.folder / "capture.jsonl") for run in done]
    blocks = [[len(block) for block in blocks_of(capture, "training")] for capture in captures]
    assert blocks[0] == blocks[1]
    assert len(blocks[0]) >= 4
    # Steps of both runs in one order: between two of one run, the other run does nothing.
    steps = sorted((at, run.format) for run in done for at in noted(run, "step"))
    ticks = {run.format: noted(run, "tick") for run in done}
    assert min(map(len, ticks.values())) > 60
    for (begin, format_), (end, same) in itertools.pairwise(steps):
        other = "fp32" if format_ == "mixed" else "mixed"
        assert same != format_ or not [at for at in ticks[other] if begin < at < end]
    # Pauses count in no time: all times together are no longer than it took.
    times = [step["interval_s"] or 0.0 for capture in captures for step in capture.of("step")]
    assert sum(times) < 1.05 * (steps[-1][0] - steps[0][0])


def test_slow_steps_take_turns_one_by_one_from_the_start(pair, monkeypatch):
    """Also with a temporary file, as a DataLoader with workers has: no other run has its name."""
    monkeypatch.setattr(_runs, "_BLOCK_S", 0.001)
    why, done = pair(script(before="import tempfile\nopen(tempfile.mkdtemp() + '/file', 'w')\n", steps=9))
    assert why is None
    for run in done:
        blocks = blocks_of(read_capture(run.folder / "capture.jsonl"), "training")
        assert [len(block) for block in blocks] == [1] * 6


# What scripts do to files at each step, and what they find then: their own files and no others.
WRITES = r"""
import json, threading, torch
from pathlib import Path
work = Path(sys.argv[1]); os.chdir(work)
assert sorted(os.listdir()) == ["kept", "latest.pt", "sub"], os.listdir()
assert Path("kept").read_text() == "of the user" and torch.load("latest.pt") == "of the user"
rows = open("rows.txt", "a"); kept = open("kept", "r+")
def writes(step):
    rows.write(f"{step}\n"); rows.flush()
    kept.seek(0); kept.write(f"step {step:06}"); kept.flush()
    os.makedirs("runs/events", exist_ok=True)
    with open("runs/events/log", "a") as log: log.write(f"{step}\n")
    torch.save(step, "part.pt"); os.replace("part.pt", "latest.pt")
    torch.save(step, f"sub/step-{step}.pt")
    if step > 1: os.remove(f"sub/step-{step - 2}.pt")
def finds(step):
    steps = list(range(step + 1))
    assert open("rows.txt").read() == open("runs/events/log").read() == "".join(f"{n}\n" for n in steps)
    assert Path("kept").read_text() == f"step {step:06}" and torch.load("latest.pt") == step
    assert set(os.listdir("sub")) == {"in", *(f"step-{n}.pt" for n in steps[-2:])}, os.listdir("sub")
    assert sorted(os.listdir()) == ["kept", "latest.pt", "rows.txt", "runs", "sub"], os.listdir()
# Beside the training, as TensorBoard's writer.
def beside():
    count = 0
    while True:
        with open("runs-of-thread.txt", "a") as file: file.write(f"{count}\n")
        assert [int(line) for line in open("runs-of-thread.txt")] == list(range(count + 1)); count += 1
        time.sleep(0.001)
"""


def contents(folder):
    """Every file in a folder, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def users_files(tmp_path):
    work = tmp_path / "work"
    (work / "sub").mkdir(parents=True)
    (work / "kept").write_text("of the user")
    (work / "sub/in").write_text("too")
    torch.save("of the user", work / "latest.pt")
    return work


def test_runs_that_write_files_take_turns_each_with_its_own(pair, users_files):
    """What each has open, appends to, replaces, removes and reads is what it would find alone."""
    before = contents(users_files)
    why, done = pair(script("writes(step)", "finds(step)", before=WRITES), str(users_files))
    assert why is None
    captures = [read_capture(run.folder / "capture.jsonl") for run in done]
    assert min(len(blocks_of(capture, "training")) for capture in captures) >= 4
    assert contents(users_files) == before
    first, second = (contents(run.folder / "narrowcast-outputs") for run in done)
    assert first.keys() == second.keys()
    steps = "".join(f"{step}\n" for step in range(60)).encode()
    for outputs in first, second:
        (rows,) = (text for name, text in outputs.items() if name.endswith("rows.txt"))
        (log,) = (text for name, text in outputs.items() if name.endswith("runs/events/log"))
        assert rows == log == steps
    assert all(run.changes_files for run in done)


def test_threads_that_write_stand_still_while_the_other_run_has_its_turn(pair, users_files):
    before = contents(users_files)
    start = "thread = threading.Thread(target=beside, daemon=True); thread.start()\n"
    text = script("assert thread.is_alive()", before=WRITES + start)
    why, done = pair(text, str(users_files))
    assert why is None
    assert contents(users_files) == before
    for run in done:
        (lines,) = run.folder.glob("narrowcast-outputs/**/runs-of-thread.txt")
        counts = [int(line) for line in lines.read_text().splitlines()]
        assert counts == list(range(len(counts)))
        assert len(counts) > 20


@pytest.mark.parametrize("moves", [3, 1_000_000])
def test_files_are_exchanged_once_every_thread_stands_still(pair, users_files, monkeypatch, moves):
    """Else the runs go on one after the other."""
    monkeypatch.setattr(_runs, "_PATIENCE_S", 0.5)
    before, asked, set_aside = contents(users_files), [], _runs.set_aside

    def still_moves(group):
        asked.append(group)
        return len(asked) <= moves

    def exchanged(folder):
        assert len(asked) > moves
        return set_aside(folder)

    monkeypatch.setattr(_runs, "_is_any_thread_running", still_moves)
    monkeypatch.setattr(_runs, "set_aside", exchanged)
    why, done = pair(script("writes(step)", "finds(step)", before=WRITES, steps=12), str(users_files))
    assert len(asked) > 3
    if moves > 3:
        assert "does not stand still" in why
    assert [len(noted(run, "step")) for run in done] == [12, 12]
    assert contents(users_files) == before


@pytest.mark.parametrize("turn", ["mixed", "fp32"])
def test_an_interrupt_puts_the_files_of_the_user_back(pair, users_files, turn):
    before, told = contents(users_files), []

    def interrupt(text):
        told.append(text)
        if sum(turn in text for text in told) > 2 and any("mixed" in text for text in told):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair(script("writes(step)", before=WRITES, steps=2000), str(users_files), progress=interrupt)
    assert contents(users_files) == before


# Of a container, less than any run takes.
LIMIT = """from narrowcast.machine import _facts
_facts._MEMORY_LIMITS.append(_facts.Path(os.environ["NARROWCAST_RUN_DIR"], "limit"))
_facts._MEMORY_LIMITS[-1].write_text("100000000\\n")
"""
LOCK = "fcntl.flock(held := open(sys.argv[1]), fcntl.LOCK_EX"
ALONE = {
    "removes a folder": script("if step == 30: os.rename(sys.argv[1], sys.argv[1] + '-moved')"),
    "failed beside": script(before=f"{LOCK} | fcntl.LOCK_NB)"),
    "took no step": script(before=f"{LOCK})"),
    "of the memory": script(before=LIMIT),
    "fewer than 3 steps": script(steps=2),
}


@pytest.mark.parametrize("why", ALONE)
def test_what_cannot_take_turns_runs_one_after_the_other(pair, tmp_path, monkeypatch, why):
    if why == "took no step":
        monkeypatch.setattr(_runs, "_PATIENCE_S", 0.5)
        monkeypatch.setattr(_runs, "_PATIENCE", 0)
    file = tmp_path / "file"
    if why == "removes a folder":
        file.mkdir()
    else:
        file.write_text("of the user")
    said, done = pair(ALONE[why], str(file))
    assert why in said
    assert [run.format for run in done] == ["fp32", "mixed"]
    fp32, mixed = (noted(run, "step") for run in done)
    assert len(fp32) == len(mixed) == (2 if why == "fewer than 3 steps" else 60)
    half = len(fp32) // 2  # the folder is removed then
    assert fp32[-1] < mixed[half] or mixed[-1] < fp32[half]
    assert file.is_dir() or file.read_text() == "of the user"


def test_a_run_that_is_over_its_time_ends(pair):
    why, done = pair(script(steps=2000), limit_s=0.3)
    assert why is None
    assert all(3 <= len(noted(run, "step")) < 1000 for run in done)


@pytest.mark.parametrize("little", [1000, 0])
def test_runs_that_are_not_timed_go_on_side_by_side(compared, monkeypatch, little):
    """Where the timed ones did and took little memory: one begins before the other one ends."""
    monkeypatch.setattr(_timing, "LITTLE_MEMORY", little)
    found = compared(script("time.sleep(0.1)", steps=4), time_limit_s=1.0)
    for names in ("memory-fp32", "memory-mixed"), ("gradients-mixed", "gradients-exact"):
        begun, ended = (
            [(found.folder / name / file).stat().st_mtime for name in names]
            for file in ("narrowcast-run.json", "result.json")
        )
        assert (max(begun) < min(ended)) == (little > 0), (begun, ended)
    assert summary(found)["verdict"]["right"] == "yes"


def test_an_interrupt_ends_a_run_that_goes_on_ahead(runs, monkeypatch):
    made = runs("import time; time.sleep(30)")
    made.beside = True
    made.ahead("ahead", "fp32", Purpose.TIMED)
    process = made._ahead["ahead"]._process

    @contextlib.contextmanager
    def interrupted(_):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(_runs, "only_run_in_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.start("ahead", "fp32", Purpose.TIMED)
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
