"""``narrowcast report``: what it prints, where it writes, how it refuses."""

import json
import os
import sys

import made_captures
import pytest

from child_processes import finished
from narrowcast.capture import COMPARISON, CaptureWriter
from narrowcast.cli import main

# What forbids torch stands before anything of ours is imported.
WITHOUT_TORCH = """\
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
from narrowcast.cli import main
sys.exit(main(sys.argv[1:]))
"""


def read_json(text):
    return json.loads(text, parse_constant=pytest.fail)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")  # messages are compared whole, not as they are wrapped


@pytest.fixture
def folder(tmp_path):
    return made_captures.trained(tmp_path / "kept", steps=30)


def test_a_folder_gives_the_table_and_the_page(folder, capsys):
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr()
    assert "step time, median" in said.out
    assert "right      yes" in said.out
    assert said.err == f"narrowcast: report: {folder / 'report.html'}\n"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in folder.glob("*.*")) == ["comparison.jsonl", "report.html"]


def test_json_is_on_stdout_alone(folder, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", "--json", "--output", str(page), str(folder / COMPARISON)]) == 0
    said = capsys.readouterr()
    numbers = read_json(said.out)
    assert numbers["verdict"]["right"] == "yes"
    assert numbers["report"] == str(page)
    assert page.is_file()
    assert not (folder / "report.html").exists()


def test_a_run_gives_its_block_and_its_numbers(tmp_path, capsys):
    folder = made_captures.one_run(tmp_path, diverges=250)
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "narrowcast: bf16 on cuda (this GPU computes in bf16)"
    assert main(["report", "--json", str(folder / "capture.jsonl")]) == 0
    numbers = read_json(capsys.readouterr().out)
    assert numbers["totals"]["steps"] == 300
    assert numbers["step_time_s_median"] == pytest.approx(0.0123 / 1.62, rel=0.05)
    assert numbers["devices"] == [
        {"device_type": "cuda", "format": "bf16", "because": "this GPU computes in bf16"}
    ]
    losses = numbers["losses"]["train.py:41"]
    assert (losses["count"], losses["last"], losses["not_finite"]) == (300, "nan", 51)
    assert (numbers["ended"], numbers["notes"]) == (True, [])


def test_torch_is_not_imported_and_ascii_terminals_get_hyphens(folder):
    ended = finished(
        [sys.executable, "-c", WITHOUT_TORCH, "report", folder],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        encoding="ascii",
    )
    assert ended.returncode == 0, ended.stderr
    assert set(ended.stdout.splitlines()[2].strip()) == {"-"}


def test_wrong_use_is_two_and_one_line(tmp_path, capsys):
    made_captures.write_lines(tmp_path / "of-comparison.jsonl", made_captures.start("compare"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "of-doctor").mkdir()
    (tmp_path / "of-doctor" / "report.html").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("pipe", "there is no capture"),
        ("empty", "expected comparison.jsonl (of narrowcast compare) or capture.jsonl"),
        ("of-doctor", f"it has the page {tmp_path / 'of-doctor' / 'report.html'}"),
        ("of-comparison.jsonl", "expected the name comparison.jsonl"),
    ):
        assert main(["report", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert str(tmp_path / name) in said.err
        assert message in said.err


def test_a_page_that_cannot_be_written_is_wrong_use(folder, capsys):
    assert main(["report", str(folder), "--output", str(folder)]) == 2
    why = f"Is a directory; to write it elsewhere: narrowcast report {folder} --output FILE"
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"narrowcast: cannot write the page {folder}: {why}\n")


def test_captures_are_listed_opened_and_cleaned(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    opened = []
    monkeypatch.setattr("typer.launch", lambda page: opened.append(page) or 0)
    assert main(["report", "--list"]) == 0
    assert capsys.readouterr().err == f"narrowcast: there are no captures in {tmp_path / 'runs'}\n"
    names = ["compare-train-1", "compare-train-2", "compare-train-3"]
    folders = [made_captures.trained(tmp_path / "runs" / name, steps=3) for name in names]
    for age, folder in enumerate(reversed(folders)):
        os.utime(folder / COMPARISON, (1e9 - age, 1e9 - age))
    assert main(["report", "--open"]) == 0
    assert opened == [str(folders[-1] / "report.html")]
    capsys.readouterr()
    (folders[0] / "fp32-1/files.jsonl").write_text("")
    assert main(["report", str(folders[0])]) == 0  # writes its page, and is no later for that
    capsys.readouterr()
    assert main(["report", "--list"]) == 0
    listed = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert listed == [str(each) for each in reversed(folders)]
    with CaptureWriter(folders[2] / COMPARISON):
        for answer, left in (False, 3), (True, 2):
            monkeypatch.setattr("typer.confirm", lambda _, answer=answer: answer)
            assert main(["report", "--clean"]) == 0
            said = capsys.readouterr()
            assert str(folders[1]) in said.out
            assert len(list((tmp_path / "runs").iterdir())) == left
    assert set(said.err.splitlines()) == {
        f"narrowcast: {folders[0]} stays: it has files of yours that are to be put back",
        f"narrowcast: {folders[2]} stays: its run goes on",
    }
    assert main(["report", "--clean"]) == 0
    assert list((tmp_path / "runs").iterdir()) == folders[:1]
