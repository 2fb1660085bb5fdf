"""``narrowcast explain``: the table, JSON, two policies, lock files, exit codes."""

import json
import re

import pytest

from narrowcast.cli import main

TRAIN = """\
    import sys
    import torch
    from torch import nn

    print("words", sys.argv[1:])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Softmax(-1))
    LAYERS
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        loss = nn.functional.mse_loss(model(torch.ones(8, 16)), torch.zeros(8, 16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("the end")
    """
SOFTMAX = """\
    version = 1
    compute = "bf16"

    [[rule]]
    op = "softmax"
    compute = "fp16"

    [[rule]]
    op = "mm"
    compute = "fp16"
    """
SAVES = "open('best.pt', 'w').close()"
COMPUTE = """\
    import torch

    model = torch.nn.Linear(16, 16)
    for _ in range(CALLS):
        model(torch.ones(8, 16))
    """


@pytest.fixture
def trains(workshop):
    workshop.write("train.py", TRAIN.replace("LAYERS", ""))
    workshop.write("rules.toml", SOFTMAX)
    return workshop


@pytest.fixture(scope="session")
def shared(shared_workshop):
    """A run with a policy from a file, and its lock checked against another model."""
    workshop = shared_workshop
    workshop.write("train.py", TRAIN.replace("LAYERS", ""))
    workshop.write("edited.py", TRAIN.replace("LAYERS", "model.append(nn.Linear(16, 16)); " + SAVES))
    workshop.write("locks/rules.toml", SOFTMAX)
    options = ("--policy", "locks/rules.toml", "--run-dir", "explained", "--lock", "locks/policy.lock")
    ended = workshop.narrowcast("explain", *options, "train.py", "--json", "--lock", "x")
    return workshop, ended, workshop.narrowcast("explain", "--check", "locks/policy.lock", "edited.py")


def explained(ended):
    assert ended.code == 0, ended.stderr
    return json.loads(ended.stdout)


def of(found, op, phase="forward"):
    return [site for site in found["sites"] if (site["op"], site["phase"]) == (op, phase)]


def test_the_table_of_a_script_and_whose_options_are_whose(shared):
    workshop, ended, _ = shared
    assert ended.code == 0
    assert "--lock went to train.py; before the name of the script" in ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "train.py --json --lock x: bf16 on this CPU, by the policy locks/rules.toml"
    assert max(map(len, lines)) <= 79
    (head,) = [number for number, line in enumerate(lines) if line.startswith("what costs most  ")]
    times = [line.split()[-1] for line in lines[head + 1 : head + 11] if line.startswith("  ")]
    assert len(times) == 5
    assert times == sorted(times, key=lambda time: -float(time.replace("<1", "0.5")))
    assert "more rows: narrowcast explain --table shows all, in the order of calls" in ended.stdout
    printed = (workshop.folder / "explained" / "stdout.txt").read_text()
    assert printed == "words ['--json', '--lock', 'x']\n", "stopped after 3 steps"
    assert ended.stderr.endswith("/explained/report.html\n")
    assert "What ran in which format" in (workshop.folder / "explained" / "report.html").read_text()


def test_report_shows_it_again_with_every_number(shared, monkeypatch, capsys):
    workshop, ended, _ = shared
    monkeypatch.chdir(workshop.folder)
    assert main(["report", "explained"]) == 0
    assert capsys.readouterr().out == ended.stdout
    assert "What ran in which format" in (workshop.folder / "explained" / "report.html").read_text()
    assert main(["report", "explained", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["explained"]
    assert (found["unit"], found["steps"], found["problem"]) == ("step", 2, None)
    (softmax,) = of(found, "softmax.int")
    assert (softmax["path"], softmax["outputs"], softmax["rule"]) == ("3", ["fp16"], "softmax: fp16")
    assert [one["rule"] for one in found["unreached"]] == ["mm: fp16"]
    assert of(found, "mm", "backward")


def test_a_lock_finds_its_policy_and_fails_for_another_model(shared):
    workshop, ended, edited = shared
    assert "decisions are in locks/policy.lock" in ended.stderr
    assert 'policy = "rules.toml"' in (workshop.folder / "locks" / "policy.lock").read_text()
    assert edited.code == 1
    assert "  4: linear\n    locked  not called\n    now     " in edited.stdout
    assert re.search("what the script wrote is in .*/narrowcast-outputs\n", edited.stderr)
    assert not (workshop.folder / "best.pt").exists()


@pytest.mark.long
def test_a_lock_holds_for_the_same_model_from_any_folder(shared):
    workshop, _, _ = shared
    lock = workshop.folder / "locks" / "policy.lock"
    same = workshop.narrowcast("explain", "--check", lock, "train.py")
    said = f"all {lock.read_text().count('module =')} decisions are as they were."
    assert (same.code, said in " ".join(same.stdout.split())) == (0, True)


@pytest.mark.long
def test_a_lock_without_its_policy_names_the_option(trains):
    assert trains.narrowcast("explain", "-p", "rules.toml", "--lock", "policy.lock", "train.py").code == 0
    (trains.folder / "rules.toml").rename(trains.folder / "other.toml")
    gone = trains.narrowcast("explain", "--check", "policy.lock", "train.py")
    assert (gone.code, gone.stdout) == (2, "")
    assert "(the lock file policy.lock was written with it; --policy names another)" in gone.stderr
    named = trains.narrowcast("explain", "-p", "safe", "--json", "--check", "policy.lock", "train.py")
    assert named.code == 1
    answer = json.loads(named.stdout)
    assert answer["equal"] is False
    assert "policy rules.toml is now safe" in answer["around"]
    assert "softmax.int" in {one["op"] for one in answer["differences"]}


@pytest.mark.long
def test_two_policies_side_by_side(trains):
    found = explained(
        trains.narrowcast("explain", "-p", "bf16", "--json", "--against", "rules.toml", "train.py")
    )
    (difference,) = found["differences"]
    assert (difference["module"], difference["op"]) == ("3", "softmax.int")
    assert found["totals"]["policy"]["casts"] != found["totals"]["against"]["casts"]
    assert (found["policy"], found["against"]) == ("bf16", "rules.toml")


CLOSURE = """\
    import torch

    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(torch.ones(8, 16)), torch.zeros(8, 16))
        loss.backward()
        return loss

    for _ in range(60):
        optimizer.step(closure)
    """


@pytest.mark.long
def test_a_closure_of_a_step_is_no_part_of_the_optimizer(workshop):
    workshop.write("train.py", CLOSURE)
    found = explained(workshop.narrowcast("explain", "--json", "-p", "bf16", "train.py"))
    of_optimizer = {site["op"] for site in found["sites"] if site["phase"] == "optimizer"}
    assert of_optimizer
    assert "mse_loss" not in of_optimizer
    assert of(found, "mse_loss", "outside")


@pytest.mark.long
@pytest.mark.parametrize("calls", [1, 2, 20])
def test_a_script_that_only_computes(workshop, calls):
    workshop.write("infer.py", COMPUTE.replace("CALLS", str(calls)))
    ended = workshop.narrowcast("explain", "--json", "-p", "bf16", "infer.py")
    found = explained(ended)
    assert ended.stderr.endswith(f"report: {found['report']}\n")
    (linear,) = of(found, "linear")
    assert found["unit"] == "call"
    if calls != 2:
        assert (linear["calls"], linear["casts"]) == (1, 3)
    assert found["complete"] is (calls > 2)
    all_are_shown = [note for note in found["notes"] if "all are shown" in note]
    assert len(all_are_shown) == (calls < 20)


@pytest.mark.long
def test_a_compiled_model_is_watched_uncompiled_for_one_step(workshop):
    script = TRAIN.replace("LAYERS", "model = torch.compile(model)").replace("range(60)", "range(1)")
    workshop.write("train.py", script)
    found = explained(workshop.narrowcast("explain", "--json", "-p", "bf16", "train.py"))
    assert [one["path"] for one in of(found, "linear")] == ["0", "2"]
    assert (found["unit"], found["steps"], found["complete"]) == ("step", 1, False)
    notes = "; ".join(found["notes"])
    assert "torch.compile" in notes
    assert "the script ended before its second step" in notes


AUTOCAST = "import torch\nm = torch.nn.Linear(2, 2)\nwith torch.autocast('cpu'):\n    m(torch.ones(1, 2))\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "said"), [("print(1)", "called no module with parameters"), (AUTOCAST, "uses autocast itself")]
)
def test_a_script_without_numbers_says_why(workshop, script, said):
    workshop.write("train.py", script)
    found = explained(workshop.narrowcast("explain", "-p", "bf16", "--json", "train.py"))
    assert said in found["problem"]
    assert set(found["reasons"]) == {name for name, value in found.items() if value is None}


@pytest.mark.long
def test_without_decisions_no_lock_file_is_written(workshop):
    workshop.write("train.py", "print(1)")
    locked = workshop.narrowcast("explain", "-p", "bf16", "--lock", "policy.lock", "train.py")
    assert locked.code == 1
    assert "no lock file was written" in locked.stderr
    assert not (workshop.folder / "policy.lock").exists()


@pytest.mark.long
def test_a_folder_that_run_uses_again_shows_the_newer_run_alone(trains):
    ended = trains.narrowcast("explain", "-p", "bf16", "--run-dir", "kept", "--table", "train.py")
    assert ended.code == 0
    assert "layer_norm" in ended.stdout
    assert "optimizer" in ended.stdout.splitlines()
    assert "more rows" not in ended.stdout
    assert trains.narrowcast("run", "--policy", "fp16", "--run-dir", "kept", "train.py").code == 0
    assert trains.narrowcast("report", "kept").stdout.startswith("narrowcast: fp16 on cpu")
    assert 'id="formats"' not in (trains.folder / "kept" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "absent.toml", "train.py"), "absent.toml"),
        (("--against", "O3", "train.py"), "holds the model's weights in a low format"),
        (("--check", "absent.lock", "train.py"), "cannot read the lock file absent.lock"),
        (("--check", "newer.lock", "train.py"), "is of version 9, and this narrowcast reads up to 1"),
        (("--lock", "a", "--check", "b", "train.py"), "one of them at a time"),
        (("--steps", "0", "train.py"), "Invalid value for '--steps'"),
    ],
)
def test_wrong_use_is_2_and_one_line(here, capsys, words, said):
    here.write("train.py", "raise SystemError\n")
    here.write("newer.lock", "version = 9\n")
    assert main(["explain", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == 1
