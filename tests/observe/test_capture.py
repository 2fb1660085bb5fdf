"""The capture file: what is written comes back, whatever the numbers and however the run ended."""

import json
import math

import pytest

from narrowcast.errors import CaptureError, RunFolderError
from narrowcast.observe import SCHEMA, CaptureWriter, read_capture

START = {"event": "start", "schema": SCHEMA, "argv": ["train.py", "nan"], "policy": "bf16", "seed": None}
STEPS = [
    {
        "event": "step",
        "time_s": 0.5 * n,
        "interval_s": None if n == 1 else 0.5,
        "skipped": n == 2,
        "scale": 2.0**n,
        "loss": loss,
    }
    for n, loss in enumerate([0.1, math.nan, math.inf, -math.inf, 5e-324, None], start=1)
]
NOTE = {"event": "note", "text": "gr\u00fc\u00df\nand \u2028 a second line"}
END = {"event": "end", "exit_code": 0, "wall_s": 4.25, "steps": 5, "versions": {"torch": "2.13.0"}}


def same(left, right):
    """Equal, NaN to NaN too."""
    return repr(left) == repr(right)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "capture.jsonl"


def write(path, *events):
    with CaptureWriter(path) as writer:
        writer.write(*events)
    assert writer.error is None


def test_what_was_written_comes_back(path):
    write(path, START, *STEPS, NOTE, END)
    capture = read_capture(path)
    assert same(list(capture.events), [START, *STEPS, NOTE, END])
    assert same(capture.of("step"), STEPS)
    assert (capture.start, capture.end, capture.totals()) == (START, END, END)
    assert capture.of("nothing") == []


def test_each_line_is_json_that_any_reader_takes(path):
    write(path, START, *STEPS, NOTE)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    lines = path.read_text(encoding="ascii").splitlines()
    assert len(lines) == 2 + len(STEPS)
    losses = [json.loads(line, parse_constant=refuse).get("loss") for line in lines[1:-1]]
    assert losses == [0.1, "nan", "inf", "-inf", 5e-324, None]


def test_each_write_is_on_disk_when_it_returns(path):
    writer = CaptureWriter(path)
    writer.write(START)
    assert read_capture(path).events == (START,)
    writer.write(NOTE, NOTE)
    assert len(read_capture(path).events) == 3
    writer.close()


def test_wherever_a_killed_run_was_cut_the_lines_before_can_be_read(path):
    write(path, START, *STEPS[:2])
    whole = path.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        # A line counts as soon as all but its line break is there.
        complete = sum(end - 1 <= cut for end in ends)
        if complete:
            assert same(list(read_capture(path).events), [START, *STEPS[:2]][:complete])
        else:
            with pytest.raises(CaptureError, match="does not begin with a start event"):
                read_capture(path)


def test_totals_of_a_killed_run_are_what_its_steps_tell(path):
    write(path, START, *STEPS[:3], NOTE)
    capture = read_capture(path)
    assert capture.end is None
    totals = capture.totals()
    assert (totals["steps"], totals["skipped_steps"]) == (2, 1)
    assert (totals["wall_s"], totals["final_scale"], totals["final_loss"]) == (1.5, 8.0, math.inf)
    assert totals["exit_code"] is None
    write(path, START)
    assert (read_capture(path).totals()["steps"], read_capture(path).totals()["wall_s"]) == (0, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin with a start event: is it a capture of narrowcast run?"),
        (b"{}\n", ":1 is no event: is it a capture of narrowcast run?"),
        (b"[1]\n", ":1 is no event: is it a capture of narrowcast run?"),
        (b'{"event": "step"}\n', "does not begin with a start event: is it a capture of narrowcast run?"),
        (
            b'{"event": "start", "schema": 1}\n{"event": 3}\n',
            ":2 is no event: is it a capture of narrowcast run?",
        ),
        (
            b'{"event": "start", "schema": 1}\n{broken\n{"event": "end"}\n',
            ":2 is no JSON: Expecting property name enclosed in double quotes",
        ),
        (b"\xff\xfe", " is no text: is it a capture of narrowcast run?"),
        (
            b'{"event": "start", "schema": 99}\n',
            " has schema 99 and this version of narrowcast reads 1: use the version that wrote it",
        ),
        (
            b'{"event": "start"}\n',
            " has schema None and this version of narrowcast reads 1: use the version that wrote it",
        ),
    ],
)
def test_what_is_no_capture_is_refused(path, content, message):
    path.write_bytes(content)
    with pytest.raises(CaptureError) as refused:
        read_capture(path)
    assert str(refused.value) in (f"{path}{message}", f"{path} {message}")


def test_files_that_cannot_be_opened_are_refused(path):
    with pytest.raises(CaptureError) as refused:
        read_capture(path)
    assert str(refused.value) == f"cannot read the capture {path}: No such file or directory"
    path.mkdir()
    with pytest.raises(RunFolderError) as refused:
        CaptureWriter(path)
    assert str(refused.value) == f"cannot write the capture {path}: Is a directory"


def test_a_full_disk_ends_the_capture_and_not_the_run(path, monkeypatch):
    writer = CaptureWriter(path)
    writer.write(START)
    real = writer._file

    class Full:
        """Takes 10 bytes, and then no more."""

        left = 10

        def write(self, data):
            if not self.left:
                raise OSError(28, "No space left on device")
            taken = bytes(data[: self.left])
            self.left -= len(taken)
            return real.write(taken)

    monkeypatch.setattr(writer, "_file", Full())
    writer.write(NOTE)
    assert writer.error.strerror == "No space left on device"
    writer.write(END)
    monkeypatch.undo()
    writer.close()
    assert read_capture(path).events == (START,)
