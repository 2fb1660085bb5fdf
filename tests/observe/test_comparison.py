"""The capture of a comparison: its runs are found beside it, and nowhere else."""

import json

import made_captures
import pytest

from narrowcast.capture import COMPARISON, read_comparison
from narrowcast.errors import FileError


def test_a_killed_comparison_has_what_it_had(tmp_path):
    found = read_comparison(made_captures.killed(tmp_path))
    assert not found.finished
    assert [run.capture.end is not None for run in found.runs] == [True, True, True, False]
    assert found.own.last("certificate") is None


def test_a_run_that_had_begun_counts_as_far_as_it_came(tmp_path):
    folder = made_captures.trained(tmp_path, steps=4)
    lines = (folder / COMPARISON).read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if '"run"' in line)
    begun = lines[first].replace('"event": "run"', '"event": "run", "ended": false')
    (folder / COMPARISON).write_text("\n".join([*lines[:first], begun]) + "\n")
    (run,) = read_comparison(folder).runs
    capture = folder / run.name / "capture.jsonl"
    whole = capture.read_bytes()
    capture.write_bytes(whole[: len(whole) // 2])
    (run,) = read_comparison(folder).runs
    assert run.capture.end is None
    assert 0 < len(run.capture.of("step")) < 4
    capture.write_bytes(b"")
    assert read_comparison(folder).runs == ()
    (folder / COMPARISON).write_text("\n".join(lines[: first + 1]) + "\n")
    with pytest.raises(FileError, match="start event"):
        read_comparison(folder)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/capture.jsonl",
        "../capture.jsonl",
        "fp32-0/../../capture.jsonl",
        "C:\\capture.jsonl",
        "fp32-0/capture.jsonl\x00",
        "fp32-0/capture.json",
        "",
    ],
)
def test_a_capture_elsewhere_is_not_followed(tmp_path, name):
    folder = made_captures.comparison(tmp_path / "in", {})
    made_captures.write_lines(tmp_path / "capture.jsonl", made_captures.start())
    run = {"event": "run", "name": "x", "format": "fp32", "seed": 0, "capture": name, "last_line": ""}
    with (folder / COMPARISON).open("a") as file:
        file.write(json.dumps(run) + "\n")
    with pytest.raises(FileError, match="not a capture in its folder"):
        read_comparison(folder)


def test_what_is_no_comparison_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"cannot read the capture .*comparison\.jsonl: No such file"):
        read_comparison(tmp_path)
    made_captures.write_lines(tmp_path / COMPARISON, made_captures.start())
    with pytest.raises(FileError, match="is the capture of a run and not of a comparison"):
        read_comparison(tmp_path)
    made_captures.trained(tmp_path, steps=2)
    (tmp_path / "mixed-1" / "capture.jsonl").unlink()
    with pytest.raises(FileError, match=r"cannot read the capture .*mixed-1/capture\.jsonl: No such file"):
        read_comparison(tmp_path)
