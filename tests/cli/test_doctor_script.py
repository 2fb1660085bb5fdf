"""``narrowcast doctor SCRIPT`` as a process: text, JSON, exit codes, and whose options are whose."""

import json
from pathlib import Path

import pytest

SHORT = ("doctor", "--budget-s", "0.3", "--policy", "bf16")
SCRIPT = """\
    import sys
    import torch

    print("words", sys.argv[1:])
    open("best.pt", "w").close()
    model = torch.nn.Linear(32, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        loss = model(torch.ones(8, 32)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    """


@pytest.mark.long
def test_text_and_json_of_a_script(workshop):
    workshop.write("train.py", SCRIPT)
    folder = workshop.folder / "here"
    ended = workshop.narrowcast(*SHORT, "--run-dir", folder, "train.py", "--json", "-m", "--policy", "x")
    assert ended.code == 0
    assert "--policy went to train.py; before the name of the script" in ended.stderr
    begins = "train.py --json -m --policy x: bf16 beside FP32 on this CPU\nworth it   "
    assert ended.stdout.startswith(begins)
    assert max(map(len, ended.stdout.splitlines())) <= 79
    assert len(ended.stdout.splitlines()) <= 50, "at most a screen"
    text = " ".join(ended.stdout.split())
    assert "Casts: 7 a step" in text  # input, weight, bias, output back; the output's gradient and two others
    assert "train.py:13 item() 1." in text
    outputs = f"what each run of the script wrote is in its folder, as {folder}/fp32/narrowcast-outputs\n"
    assert outputs in ended.stderr
    assert ended.stderr.endswith(f"narrowcast: report: {folder / 'report.html'}\n")
    assert "What this means" in (folder / "report.html").read_text()
    assert not (workshop.folder / "best.pt").exists()
    assert "What this means" in text
    said = (folder / "fp32" / "stdout.txt").read_text()
    assert said == "words ['--json', '-m', '--policy', 'x']\n"
    answer = workshop.narrowcast(*SHORT, "--json", "-m", "train")
    assert answer.code == 0
    found = json.loads(answer.stdout)
    assert set(found) == {
        "schema", "target", "policy", "problem", "device", "format", "unit", "fp32", "mixed", "together",
        "notes", "conclusion", "machine", "report", "next",
    }  # fmt: skip
    assert (found["next"] is not None) == (found["together"]["worth_it"] == "cannot tell")
    assert found["target"] == ["train"]
    assert "What this means" in Path(found["report"]).read_text()
    assert found["conclusion"]
    assert sum(found["mixed"]["shares"].values()) == pytest.approx(1)


@pytest.mark.long
@pytest.mark.parametrize("words", [SHORT, ("explain", "--policy", "bf16")], ids=["doctor", "explain"])
def test_a_script_that_fails_is_3(workshop, words):
    workshop.write("train.py", "raise ValueError('no data')\n")
    ended = workshop.narrowcast(*words, "train.py")
    assert (ended.code, ended.stdout) == (3, "")
    assert "narrowcast: the script failed with exit code 1" in ended.stderr
    assert "ValueError: no data" in ended.stderr
