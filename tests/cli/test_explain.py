"""``narrowcast explain`` as a process: the table, JSON, two policies, lock files, exit codes."""

import json

import pytest

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
COMPUTE = """\
    import torch

    model = torch.nn.Linear(16, 16)
    for _ in range(CALLS):
        model(torch.ones(8, 16))
    """


@pytest.fixture
def trains(workshop):
    workshop.write("train.py", TRAIN.replace("LAYERS", ""))
    return workshop


def explained(ended):
    assert ended.code == 0, ended.stderr
    return json.loads(ended.stdout)


def of(found, op, phase="forward"):
    return [site for site in found["sites"] if (site["op"], site["phase"]) == (op, phase)]


def test_the_table_of_a_script_and_whose_options_are_whose(trains):
    folder = trains.folder / "here"
    words = ("explain", "--policy", "bf16", "--run-dir", folder, "train.py", "--json", "--lock", "x")
    ended = trains.narrowcast(*words)
    assert ended.code == 0
    assert ended.stderr.startswith("narrowcast: note: --lock went to train.py; before the name of the script")
    lines = ended.stdout.splitlines()
    assert lines[0] == "train.py --json --lock x: bf16 on this CPU, by the policy bf16"
    assert max(map(len, lines)) <= 79
    assert "  layer_norm                1  bf16" in ended.stdout or "layer_norm" in ended.stdout
    assert "optimizer" in lines
    assert (folder / "stdout.txt").read_text() == "words ['--json', '--lock', 'x']\n", "stopped after 3 steps"
    again = trains.narrowcast("report", folder)
    assert (again.code, again.stdout.splitlines()) == (0, lines), "the same table"
    assert explained(trains.narrowcast("report", folder, "--json"))["explained"]["policy"] == "bf16"
    assert "What ran in which format" in (folder / "report.html").read_text()


def test_json_of_a_rule_from_a_file_and_of_one_that_no_call_reached(trains):
    trains.write("rules.toml", SOFTMAX)
    found = explained(trains.narrowcast("explain", "--json", "-p", "rules.toml", "-m", "train"))
    assert (found["policy"], found["unit"], found["steps"], found["problem"]) == (
        "rules.toml",
        "step",
        2,
        None,
    )
    (softmax,) = of(found, "softmax.int")
    assert (softmax["path"], softmax["outputs"], softmax["rule"]) == ("3", ["fp16"], "softmax: fp16")
    assert [(one["rule"], one["enclosing"]) for one in found["unreached"]] == [("mm: fp16", ["linear"])]
    assert of(found, "mm", "backward")
    without = explained(trains.narrowcast("explain", "--json", "-p", "bf16", "train.py"))
    assert (of(without, "softmax.int")[0]["outputs"], of(without, "softmax.int")[0]["rule"]) == (
        ["bf16"],
        None,
    )


def test_a_rule_that_names_no_module_is_told_once_with_a_near_name(workshop):
    workshop.write("train.py", TRAIN.replace("LAYERS", ""))
    rule = '[[rule]]\nmodule_type = "mine.LayerNrm"\ncompute = "fp32"\n'
    workshop.write("rules.toml", f'version = 1\ncompute = "bf16"\n{rule}')
    ended = workshop.narrowcast("explain", "-p", "rules.toml", "train.py")
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("LayerNrm") == 1
    assert 'it names (did you mean "LayerNorm"?)' in " ".join(ended.stdout.split())


def test_two_policies_side_by_side(trains):
    trains.write("rules.toml", SOFTMAX)
    ended = trains.narrowcast("explain", "-p", "bf16", "--against", "rules.toml", "train.py")
    assert ended.code == 0
    assert ended.stdout.startswith(
        "train.py: the policies bf16 and rules.toml differ about 1 operator in its"
    )
    assert (
        "  3: softmax.int\n"
        "    bf16        bf16 -> bf16, unlisted\n"
        "    rules.toml  bf16 as fp16 -> fp16, by softmax: fp16\n"
    ) in ended.stdout
    found = explained(trains.narrowcast("explain", "-p", "bf16", "--json", "--against", "bf16", "train.py"))
    assert found["differences"] == []
    assert found["totals"]["policy"]["casts"] == found["totals"]["against"]["casts"]


def test_a_lock_holds_until_the_model_or_the_policy_changes(trains):
    words = ("explain", "--policy", "bf16", "--lock", "policy.lock", "train.py")
    ended = trains.narrowcast(*words)
    assert ended.code == 0
    assert "decisions are in policy.lock" in ended.stderr
    text = (trains.folder / "policy.lock").read_text()
    assert trains.narrowcast(*words).code == 0
    assert (trains.folder / "policy.lock").read_text() == text, "the same text for the same decisions"
    same = trains.narrowcast("explain", "--check", "policy.lock", "train.py")
    assert (same.code, same.stdout) == (
        0,
        f"policy.lock: all {text.count('module =')} decisions are as they were.\n",
    )
    trains.write("edited.py", TRAIN.replace("LAYERS", "model.append(nn.Linear(16, 16))"))
    edited = trains.narrowcast("explain", "--check", "policy.lock", "edited.py")
    assert edited.code == 1
    assert "  4: linear\n    locked  not called\n    now     bf16+fp32" in edited.stdout or (
        "  4: linear\n    locked  not called\n    now     fp32+bf16 as bf16 -> bf16, by table"
        in edited.stdout
    )
    safe = trains.narrowcast("explain", "--policy", "safe", "--json", "--check", "policy.lock", "train.py")
    assert safe.code == 1
    answer = json.loads(safe.stdout)
    assert answer["equal"] is False
    assert "policy bf16 is now safe" in answer["around"]
    assert "layer_norm" in {one["op"] for one in answer["differences"]}


def test_a_lock_finds_the_file_of_its_policy_from_any_folder(trains):
    trains.write("rules.toml", SOFTMAX)
    (trains.folder / "locks").mkdir()
    words = ("explain", "--policy", "rules.toml", "--lock", "locks/policy.lock", "train.py")
    assert trains.narrowcast(*words).code == 0
    lock = trains.folder / "locks" / "policy.lock"
    assert 'policy = "../rules.toml"' in lock.read_text()
    for locked in ("locks/policy.lock", lock):
        same = trains.narrowcast("explain", "--check", locked, "train.py")
        assert (same.code, "decisions are as they were.") == (0, same.stdout[-28:-1].strip()), same.stderr
    (trains.folder / "rules.toml").rename(trains.folder / "other.toml")
    gone = trains.narrowcast("explain", "--check", "locks/policy.lock", "train.py")
    assert (gone.code, gone.stdout) == (2, "")
    assert "cannot read the policy rules.toml" in gone.stderr
    assert "(the lock file locks/policy.lock is of it; --policy names another)" in gone.stderr
    named = trains.narrowcast("explain", "-p", "other.toml", "--check", "locks/policy.lock", "train.py")
    assert named.code == 0
    assert "policy rules.toml is now other.toml" in " ".join(named.stdout.split())


@pytest.mark.parametrize("calls", [1, 20])
def test_a_script_that_only_computes(workshop, calls):
    workshop.write("infer.py", COMPUTE.replace("CALLS", str(calls)))
    found = explained(workshop.narrowcast("explain", "--json", "-p", "bf16", "infer.py"))
    (linear,) = of(found, "linear")
    assert (found["unit"], linear["calls"], linear["casts"]) == ("call", 1, 3)
    assert found["complete"] is (calls > 1)
    assert len(found["notes"]) == (calls == 1)


def test_a_script_that_ends_in_its_first_step(workshop):
    workshop.write("train.py", TRAIN.replace("LAYERS", "").replace("range(60)", "range(1)"))
    found = explained(workshop.narrowcast("explain", "--json", "-p", "bf16", "train.py"))
    assert (found["unit"], found["steps"], found["complete"]) == ("step", 1, False)
    assert [one["calls"] for one in of(found, "linear")] == [1, 1]
    assert found["notes"][0].startswith("the script ended before its second step")


def test_a_compiled_model_is_watched_uncompiled(workshop):
    workshop.write("train.py", TRAIN.replace("LAYERS", "model = torch.compile(model)"))
    found = explained(workshop.narrowcast("explain", "--json", "-p", "bf16", "train.py"))
    assert [one["path"] for one in of(found, "linear")] == ["0", "2"]
    assert found["notes"][0].startswith("torch.compile was set aside while watching")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print(1)", "train.py: the script called no module with parameters: nothing to explain.\n"),
        (
            "import torch\nm = torch.nn.Linear(2, 2)\nwith torch.autocast('cpu'):\n    m(torch.ones(1, 2))\n",
            "train.py: the script uses autocast itself, so it was left to it: watch its\n  model with "
            "nc.explain(model, policy, batch).\n",
        ),
    ],
)
def test_a_sentence_instead_of_a_table(workshop, script, said):
    workshop.write("train.py", script)
    ended = workshop.narrowcast("explain", "-p", "bf16", "train.py")
    assert (ended.code, ended.stdout, ended.stderr) == (0, said, "")
    found = explained(workshop.narrowcast("explain", "--json", "-p", "bf16", "train.py"))
    assert found["problem"]
    assert set(found["reasons"]) == {name for name, value in found.items() if value is None}
    locked = workshop.narrowcast("explain", "-p", "bf16", "--lock", "policy.lock", "train.py")
    assert locked.code == 1
    assert "no lock file was written" in locked.stderr
    assert not (workshop.folder / "policy.lock").exists()


def test_a_script_that_fails_is_3(workshop):
    workshop.write("train.py", "raise ValueError('no data')\n")
    ended = workshop.narrowcast("explain", "-p", "bf16", "train.py")
    assert (ended.code, ended.stdout) == (3, "")
    assert ended.stderr.startswith(
        "narrowcast: the script failed with exit code 1 in the run that is watched"
    )
    assert "ValueError: no data" in ended.stderr


def test_a_folder_that_run_uses_again_tells_of_the_newer_run_alone(trains):
    assert trains.narrowcast("explain", "--run-dir", "kept", "train.py").code == 0
    assert trains.narrowcast("report", "kept").stdout.startswith("train.py: bf16")
    assert trains.narrowcast("run", "--policy", "fp16", "--run-dir", "kept", "train.py").code == 0
    shown = trains.narrowcast("report", "kept")
    assert shown.stdout.startswith("narrowcast: fp16 on cpu")
    page = (trains.folder / "kept" / "report.html").read_text()
    assert 'id="formats"' not in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("absent.py",), "cannot run absent.py: No such file or directory"),
        (("--policy", "bf61", "train.py"), "unknown policy 'bf61'. Did you mean \"bf16\"?"),
        (("--policy", "absent.toml", "train.py"), "absent.toml"),
        (("--against", "O3", "train.py"), "holds the model's weights in a low format"),
        (("--check", "absent.lock", "train.py"), "cannot read the lock file absent.lock"),
        (("--check", "newer.lock", "train.py"), "is of version 9, and this narrowcast reads up to 1"),
        (("--lock", "a", "--check", "b", "train.py"), "one of them at a time"),
        (("--steps", "0", "train.py"), "Invalid value for '--steps'"),
        (
            ("--policy", "bf16", "--lock", "no/policy.lock", "train.py"),
            "cannot write the lock file no/policy.lock",
        ),
    ],
)
def test_wrong_use_is_2_and_one_line(trains, words, said):
    (trains.folder / "newer.lock").write_text("version = 9\n")
    ended = trains.narrowcast("explain", *words)
    assert (ended.code, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
