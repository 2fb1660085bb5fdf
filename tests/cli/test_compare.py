"""``narrowcast compare`` on real scripts: what it prints, in which order it runs, and what it leaves."""

import json
import re
import shlex
from types import SimpleNamespace

import made_captures
import pytest

from narrowcast.capture import read_capture, read_comparison
from narrowcast.cli import _output, main
from narrowcast.cli.compare import _compare
from narrowcast.errors import UnsupportedError
from narrowcast.machine._environment import table_format
from narrowcast.report._right import next_for_right, next_for_speed
from narrowcast.verify.compare import ComparisonSettings
from narrowcast.verify.runs._runs import RunSettings

# A script that saves and never reads what it saved; its order of draws is that of torch alone.
TRAINS = """\
    import os, random, sys
    from pathlib import Path
    import numpy, torch
    from torch import nn

    numbers = random.random(), numpy.random.rand(), torch.rand(1).item(), hash("a set's order")
    print("first numbers", *numbers, file=sys.stderr)
    print("words", sys.argv[1:])
    Path(os.environ["NARROWCAST_RUN_DIR"], "shown.txt").write_text(os.environ["NARROWCAST_RUN_DIR"])
    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    for step in range(30):
        loss = network(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.save(network.state_dict(), "checkpoint.pt")
        with open("log.txt", "a") as log:
            log.write(f"{step}\\n")
        print(f"[red]step[/red] {step}", end="\\r")
    """
TINY = """\
    import torch
    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(100):
        optimizer.zero_grad()
        net(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    """
# Eight pairs, AB BA.
RUNS = [f"{name}-{n}" for n in range(1, 9) for name in sorted(("fp32", "mixed"), reverse=n % 2 == 0)]
ASIDE = ["memory-fp32", "memory-mixed", "gradients-reference", "gradients-mixed", "gradients-exact"]
QUICK, LONGER = ["--steps", "20", "--time-limit", "3"], ["--steps", "100", "--time-limit", "3"]
THEIRS = ("--policy", "x", "--json", "--steps=5", "-m")


def strict(text):
    """The JSON document that ``text`` is, whole and with nothing around it."""
    assert text.startswith("{\n")
    assert text.endswith("}\n")
    return json.loads(text, parse_constant=pytest.fail)


def started(folder):
    """Names of all runs in ``folder``, in the order in which they began."""
    captures = {
        path.parent.name: read_capture(path.with_name("capture.jsonl"))
        for path in folder.glob("*/narrowcast-run.json")
    }
    return sorted(captures, key=lambda name: captures[name].start["started"])


def prints(folder, name):
    return (folder / name / "stdout.txt").read_text(), (folder / name / "stderr.txt").read_text()


# ---- a script that trains


@pytest.fixture(scope="session")
def trained(shared_workshop):
    """A comparison, into a folder where another one had been."""
    shared_workshop.write("trains.py", TRAINS)
    made_captures.trained(shared_workshop.folder / "kept", steps=2)
    for name in "fp32-1", "gradients-mixed":
        run = shared_workshop.write(f"kept/{name}/stale.txt", "stale").parent
        RunSettings(target=("trains.py",), policy="bf16", purpose="timed", folder=run).write()
    for name in "capture.jsonl", "capture-rank1.jsonl", "report.html":
        shared_workshop.write(f"kept/{name}", "stale")
    shared_workshop.write("kept/notes.txt", "of a person")
    # A speedup that is as good as asked for needs no runs that explain it.
    options = ("--policy", "bf16", "--run-dir", "kept", "--seed", "3", "--steps", "12", "--json")
    options += ("--min-speedup", "0.001", "--time-limit", "0")
    return shared_workshop.narrowcast("compare", *options, "trains.py", *THEIRS)


@pytest.fixture(scope="session")
def kept(shared_workshop):
    return shared_workshop.folder / "kept"


@pytest.mark.cpu_kind
def test_numbers_of_a_script_that_trains(trained, kept):
    ended = "each run was ended after 12 optimizer steps; --steps 0 runs the whole script"
    result = strict(trained.stdout)
    fp32, mixed = result["fp32"], result["mixed"]
    assert (result["kind"], result["seed"], result["finished"]) == ("training", 3, True)
    assert (result["folder"], result["report"]) == (str(kept), str(kept / "report.html"))
    assert (fp32["format"], mixed["format"], mixed["policy"]) == ("fp32", "bf16", "bf16")
    assert [side[key] for side in (fp32, mixed) for key in ("steps", "skipped_steps", "final_scale")] == [
        12, 0, None, 12, 0, None,
    ]  # fmt: skip
    # Parameters and gradients of 8 * 32 + 32 + 32 + 1 numbers, and the least that a process with torch takes.
    assert all(side["peak_tensor_bytes"] >= 2 * 321 * 4 for side in (fp32, mixed))
    assert all(side["peak_resident_bytes"] > 50 * 2**20 for side in (fp32, mixed))
    (site,) = fp32["final_loss"]
    assert site == "trains.py:15"
    # Rounding to 8 bits moves each product by at most 2**-9 of it, and there are two layers and a square.
    assert fp32["final_loss"][site] == pytest.approx(mixed["final_loss"][site], rel=2.0**-5)
    assert fp32["final_loss"] != mixed["final_loss"]
    assert (result["loss"]["verdict"], result["loss"]["seed_spread"]) == ("not judged", None)
    assert (result["certificate"]["verdict"], result["verdict"]["right"]) == ("pass", "yes")
    assert 0 < result["certificate"]["error_over_noise"] < 0.05
    assert result["certificate"]["worst_parameter"]["name"].startswith("Sequential.")
    assert result["notes"][0] == ended
    # The step that ends a run is its twelfth, before the script says so.
    assert fp32["last_line"] == mixed["last_line"] == "[red]step[/red] 10"
    assert all(run.capture.end["stopped"] for run in read_comparison(kept).runs)


def test_runs_take_turns_and_those_that_are_not_timed_come_last(trained, kept):
    assert started(kept) == RUNS + ASIDE
    runs = read_comparison(kept).runs
    assert [(run.name, run.format, run.seed) for run in runs] == [
        (name, name.partition("-")[0], 3) for name in RUNS
    ]
    begins = [read_capture(kept / name / "capture.jsonl").start for name in RUNS]
    assert [begin["policy"] for begin in begins] == ["fp32", "bf16", "bf16", "fp32"] * 4
    assert [begin["seed"] for begin in begins] == [3] * 16


def test_runs_share_their_seed_and_have_folders_of_their_own(trained, kept):
    said = [re.findall("first numbers .*", prints(kept, name)[1]) for name in RUNS + ASIDE]
    assert len({numbers for (numbers,) in said}) == 1
    assert all((kept / name / "shown.txt").read_text() == str(kept / name) for name in RUNS + ASIDE)
    # What follows the script's name is its own.
    assert {prints(kept, name)[0].splitlines()[0] for name in RUNS + ASIDE} == {f"words {list(THEIRS)}"}
    assert read_comparison(kept).own.start["argv"] == ["trains.py", *THEIRS]


def test_talk_is_on_stderr_and_says_what_nobody_could_tell(trained, kept):
    said = [line for line in trained.stderr.splitlines() if not line.startswith("narrowcast: run ")]
    assert said == [
        "narrowcast: note: --policy went to trains.py; before the name of the script it would be for "
        "narrowcast",
        f"narrowcast: report: {kept / 'report.html'}",
    ]


def test_an_earlier_comparison_goes_and_other_files_stay(trained, kept):
    left = {path.relative_to(kept).parts[0] for path in kept.rglob("*") if path.is_file()}
    # Made up by hand, without the settings that a run of ours has: nobody else's folder is deleted.
    by_hand = {f"{format_}-{seed}" for format_ in ("fp32", "mixed") for seed in range(3)} - set(RUNS)
    assert left == {*RUNS, *ASIDE, *by_hand, "comparison.jsonl", "report.html", "notes.txt"}
    assert not list(kept.rglob("stale.txt"))
    assert (kept / "notes.txt").read_text() == "of a person"
    assert "stale" not in (kept / "report.html").read_text()[:100]
    assert not list(kept.glob("*/narrowcast-tensors")), "tensors that were compared are as large as the model"


def test_report_shows_the_same_again(trained, kept, capsys):
    assert main(["report", "--json", str(kept)]) == 0
    assert strict(capsys.readouterr().out) == strict(trained.stdout)
    assert main(["report", str(kept)]) == 0
    assert "\n  FP32   [red]step[/red] 10\n  mixed  [red]step[/red] 10\n" in capsys.readouterr().out


# ---- three seeds, a module, the whole of it


@pytest.fixture(scope="session")
def three_seeds(shared_workshop):
    shared_workshop.write("package/__init__.py", "")
    shared_workshop.write(
        "package/train.py",
        """\
        import sys, torch
        torch.manual_seed(5)
        data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        network = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        for step in range(11):
            batch = data[torch.randint(0, 64, (8,))]
            loss = (network(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(sys.argv[1:], __name__, data[0, 0].item(), torch.rand(1).item())
        """,
    )
    options = ("--repeats", "3", "--steps", "0", "--at-step", "2", "--seed", "7", "--strict")
    words = (*options, "--policy", "fp16", "--loss-scale", "256", "--run-dir", "three", "-m", "package.train")
    return shared_workshop.narrowcast("compare", *words, "a word")


@pytest.mark.long
def test_three_seeds_give_a_verdict_on_the_losses(three_seeds, shared_workshop):
    assert three_seeds.code == 0, three_seeds.stderr
    assert "warning" not in three_seeds.stderr
    assert three_seeds.stdout.startswith("\n")
    assert re.search(r"^right +yes$", three_seeds.stdout, re.MULTILINE)
    result = strict(shared_workshop.narrowcast("report", "--json", "three").stdout)
    loss = result["loss"]
    assert loss["verdict"] == "pass"
    assert abs(loss["difference"]) < loss["seed_spread"]
    assert re.fullmatch(r"the difference is 0\.\d\d of the spread between 3 seeds", loss["reason"])
    assert (result["mixed"]["final_scale"], result["certificate"]["loss_scale"]) == (256.0, 256.0)
    assert (result["certificate"]["format"], result["certificate"]["at_step"]) == ("fp16", 2)
    # --steps 0 runs the whole script, which needs no note.
    assert (result["fp32"]["steps"], result["mixed"]["steps"]) == (11, 11)
    assert not [note for note in result["notes"] if "was ended" in note]


# ---- exit codes, on comparisons that are made up


@pytest.fixture
def compared(here, monkeypatch, capsys):
    """A function that ends a comparison which left the folder that ``make`` wrote: exit code and stderr."""
    here.write("trains.py", "raise SystemExit('nobody runs this')")
    monkeypatch.setattr("narrowcast.verify.compare.slow_here", lambda policy: [])

    def end(make, *words):
        def compare(settings, *, progress):
            return read_comparison(make(settings.folder))

        monkeypatch.setattr("narrowcast.verify.compare.compare_script", compare)
        code = main(["compare", "--policy", "bf16", "--run-dir", "made", *words, "trains.py"])
        return code, [line for line in capsys.readouterr().err.splitlines() if "report: " not in line]

    return end


def made(folder, seeds=3, changed=(), **verdict):
    runs = made_captures.both(range(seeds), made_captures.training, steps=20) | dict(changed)
    return made_captures.comparison(folder, runs, made_captures.certificate(**verdict))


def untold(folder):
    return made(folder, verdict="cannot tell", reason="masks of dropout differ")


def one_seed(folder):
    return made(folder, seeds=1)


def one_seed_ten_times_higher(folder):
    events = made_captures.training(0, mixed=True, steps=9)
    far = [event | ({"value": 99.0} if event["event"] == "loss" else {}) for event in events]
    return made(folder, seeds=1, changed={"mixed-0": far})


def untold_losses(folder):
    """One of three seeds alone is far higher in mixed precision."""
    events = made_captures.training(1, mixed=True, steps=20)
    far = [event | ({"value": 9.0} if event["event"] == "loss" else {}) for event in events]
    return made(folder, changed={"mixed-1": far})


def diverged(folder):
    """Gradients pass at the start of a training whose losses become NaN later."""
    return made(folder, changed={"mixed-1": made_captures.training(1, mixed=True, steps=20, diverges=15)})


@pytest.mark.parametrize("words", [("--repeats", "3"), ("--json", "--strict")])
@pytest.mark.parametrize(
    ("make", "code", "code_strict"),
    [
        (made_captures.trained, 0, 0),
        (made_captures.inference, 0, 0),
        (made_captures.fp16, 1, 1),
        (diverged, 1, 1),
        (untold, 0, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_exit_code_says_how_the_check_went(compared, make, code, code_strict, words):
    assert compared(make, *words) == (code_strict if "--strict" in words else code, [])


@pytest.mark.parametrize(
    ("least", "strict", "code"), [("1.5", 0, 0), ("2", 0, 1), ("1.62", 0, 0), ("1.62", 1, 1)]
)
def test_min_speedup_fails_what_is_not_worth_it(compared, least, strict, code):
    def make(folder):
        runs = made_captures.both(range(3), made_captures.training, steps=100)
        return made_captures.comparison(folder, runs, made_captures.certificate(), min_speedup=float(least))

    assert compared(make, "--min-speedup", least, *["--strict"] * strict) == (code, [])


def test_where_auto_is_fp32_a_narrow_format_is_compared(compared, monkeypatch):
    from narrowcast.machine import Choice

    old = Choice(format="fp32", because="this CPU is old")
    monkeypatch.setattr("narrowcast.verify.compare._comparison.best_format", lambda device_type: old)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    said = ["narrowcast: auto computes in fp32 here, since this CPU is old; comparing bf16"]
    assert compared(made_captures.trained, "--policy", "auto") == (0, said)


def test_without_a_terminal_progress_is_a_line_every_ten_seconds(monkeypatch, capsys):
    now = SimpleNamespace(monotonic=lambda: now.s, s=0.0)
    monkeypatch.setattr(_output, "time", now)
    with _output.shown_progress() as progress:
        for now.s in (1, 9, 10, 15, 21):
            progress(f"run 2 of 5 at {now.s}")
    assert capsys.readouterr().err == "narrowcast: run 2 of 5 at 10\nnarrowcast: run 2 of 5 at 21\n"


@pytest.mark.parametrize("least", ["0", "-1", "nan", "inf"])
def test_a_min_speedup_is_above_zero(compared, least):
    code, (said,) = compared(made_captures.trained, "--min-speedup", least)
    assert (code, "--min-speedup to be a number above 0" in said) == (2, True)


def test_a_slow_format_is_said_before_the_first_run(compared, monkeypatch):
    monkeypatch.setattr("narrowcast.verify.compare.slow_here", lambda policy: [f"{policy} is slow"])

    def make(folder):
        raise UnsupportedError("the first run")

    assert compared(make) == (2, ["narrowcast: note: bf16 is slow", "narrowcast: the first run"])


@pytest.mark.parametrize(
    ("make", "repeats", "code"),
    [(one_seed, "1", 0), (one_seed_ten_times_higher, "1", 1), (untold_losses, "3", 1)],
)
def test_strict_counts_losses_from_three_repeats_on_or_far_off(compared, make, repeats, code):
    assert compared(make, "--strict", "--repeats", repeats) == (code, [])
    assert compared(make, "--repeats", repeats) == (0, [])


# ---- what is said before the runs


def test_that_a_format_is_slow_is_said_once(tmp_path, monkeypatch, capsys):
    """Before the runs; the page and the JSON have it among the notes."""
    slow = "bf16 on this CPU is slow"
    folder = made_captures.comparison(
        tmp_path / "kept",
        made_captures.both(range(1), made_captures.training),
        made_captures.certificate(),
        made_captures.note(slow),
        made_captures.note("another"),
    )
    monkeypatch.setattr("narrowcast.verify.compare.slow_here", lambda _: [slow])
    monkeypatch.setattr("narrowcast.verify.compare.compare_script", lambda *_, **__: read_comparison(folder))
    settings = ComparisonSettings(target=("train.py",), policy="bf16", folder=folder)
    for as_json in (False, True):
        _compare(settings, as_json=as_json, strict=False)
        said = capsys.readouterr()
        assert said.err.startswith(f"narrowcast: note: {slow}\n")
        assert said.out.count(slow) == as_json
        assert said.out.count("another") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "worth_it", "changed"),
    [
        ("cannot tell: x", "no: x", {}),
        ("no: x", "cannot tell: x", {}),
        ("no: x", "yes: x", {"policy": "safe"}),
        ("cannot tell: gradients: x", "yes: x", {"steps": 100, "options": LONGER}),  # --at-step
        ("cannot tell: x", "yes: x", {"argv": ["tiny"], "options": [*QUICK, "-m"]}),
    ],
)
def test_the_commands_to_type_next_are_of_this_version(workshop, right, worth_it, changed):
    workshop.write("tiny.py", TINY)
    start = {"argv": ["tiny.py"], "policy": "bf16", "repeats": 1, "steps": 20, "options": QUICK}
    start |= {"safe_format": table_format("cpu").format} | changed
    training = {"kind": "training", "formats": "bf16", "steps": start["steps"]}
    commands = [
        next_for_right(right, start, **training, was_stopped=True),
        next_for_speed(worth_it, start, was_stopped=True),
    ]
    for command in filter(None, commands):
        name, *words = shlex.split(command)
        found = workshop.narrowcast(*words)
        assert name == "narrowcast"
        assert found.code in (0, 1), f"{command}\n{found.stderr}"
