"""The capture file: what is written comes back, whatever the numbers and however the run ended."""

import json
import math

import made_captures
import pytest

from narrowcast.capture import CaptureWriter, bytes_text, read_capture, start_event
from narrowcast.capture._events import EVENTS, SCHEMA
from narrowcast.errors import FileError

START = made_captures.start(argv=["train.py", "nan"])
LOSSES = [
    {"event": "loss", "time_s": 0.5 * n, "backward": n, "site": "train.py:3", "value": value}
    for n, value in enumerate([0.1, math.nan, math.inf, -math.inf, 5e-324, -0.0], start=1)
]
STEPS = [
    {
        "event": "step",
        "time_s": 0.5 * n,
        "interval_s": None if n == 1 else 0.5,
        "optimizer": 0,
        "skipped": n == 2,
        "scale": 2.0**n,
        "backward": n,
    }
    for n in range(1, 4)
]
NOTE = {"event": "note", "text": "gr\u00fc\u00df\nand \u2028 a second line, \ud800"}
END = made_captures.end(module_calls=None)
EXAMPLES = {
    "busy": {"event": "busy", "share": 0.5},
    "start": START,
    "device": made_captures.device(),
    "loss": LOSSES[0],
    "step": STEPS[1],
    "forward": {"event": "forward", "time_s": 1.0, "duration_s": 0.1, "gradients": True, "training": True},
    "pause": {"event": "pause", "time_s": 1.0, "waited_s": 0.0},
    "note": NOTE,
    "end": END,
    "run": {"event": "run", "name": "fp32-0", "format": "fp32", "seed": 0}
    | {"capture": "fp32-0/capture.jsonl", "last_line": ""},
    "memory": {"event": "memory", "format": "mixed", "peak_tensor_bytes": 3, "reason": None},
    "certificate": made_captures.certificate(3),
    "output": made_captures.output(),
    "not_worth_it": {"event": "not_worth_it", "cause": "small", "reason": "layers too small"},
    "finished": {"event": "finished", "wall_s": 1.0},
    **{event["event"]: event for event in made_captures.explained_events()[1:]},
}
WRONG = (None, True, "words", 1.5, -1, 10**400, math.inf, "nan", [], {}, [None], [[]], {"a": {"b": 1}})


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


def test_the_start_of_a_capture_is_of_this_schema(path):
    write(path, start_event(["train.py"], "auto", loss_scale=None, rank=0, seed=None))
    start = read_capture(path).start
    assert start | {"started": 0} == {
        **{"event": "start", "schema": SCHEMA, "kind": "run", "argv": ["train.py"], "policy": "auto"},
        **{"started": 0, "loss_scale": None, "rank": 0, "seed": None},
    }


def test_each_line_is_json_that_any_reader_takes(path):
    write(path, START, *LOSSES, NOTE)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    lines = path.read_text(encoding="ascii").splitlines()
    assert len(lines) == 2 + len(LOSSES)
    values = [json.loads(line, parse_constant=refuse).get("value") for line in lines[1:-1]]
    assert values == [0.1, "nan", "inf", "-inf", 5e-324, -0.0]


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
            with pytest.raises(FileError, match="does not begin with a start event"):
                read_capture(path)


def test_totals_of_a_killed_run_are_what_its_steps_tell(path):
    write(path, START, *STEPS, NOTE)
    capture = read_capture(path)
    assert capture.end is None
    totals = capture.totals()
    assert (totals["steps"], totals["skipped_steps"]) == (2, 1)
    assert (totals["wall_s"], totals["final_scale"], totals["exit_code"]) == (1.5, 8.0, None)
    write(path, START)
    assert (read_capture(path).totals()["steps"], read_capture(path).totals()["wall_s"]) == (0, None)
    assert set(read_capture(path).totals()) == set(END)


def required(kind):
    return sorted(EVENTS[kind].__required_keys__)


def test_each_event_has_an_example_here():
    assert set(EXAMPLES) == set(EVENTS)
    for kind, event in EXAMPLES.items():
        assert set(required(kind)) <= set(event), kind


def lines(path, event):
    """A capture with ``event`` in it, and where it is."""
    events = [event] if event["event"] == "start" else [START, event]
    path.write_text("".join(json.dumps(one) + "\n" for one in [*events, NOTE]))
    return f"{path}:{len(events)}"


@pytest.mark.parametrize("kind", [*EXAMPLES, "compare"])
def test_a_missing_or_mistyped_field_is_refused(path, kind):
    event = EXAMPLES.get(kind) or made_captures.start("compare")
    more = ["seed", "steps", "repeats", "at_step"] if kind == "compare" else []
    for field in [*required(event["event"]), *more]:
        where = lines(path, {name: value for name, value in event.items() if name != field})
        with pytest.raises(FileError, match=f"{where} is not a valid .*`{field}`"):
            read_capture(path)
        refused = 0
        for value in WRONG:
            lines(path, event | {field: value})
            try:
                kept = next(e for e in read_capture(path).events if e["event"] == event["event"])[field]
                assert kept == value or (value == "nan" and same(kept, math.nan))
            except FileError:
                refused += 1
        assert refused >= len(WRONG) // 2


def test_whether_a_timed_run_has_ended_is_true_or_false(path):
    for ended in (True, False):
        lines(path, EXAMPLES["run"] | {"ended": ended})
        assert read_capture(path).last("run")["ended"] is ended
    where = lines(path, EXAMPLES["run"] | {"ended": "no"})
    with pytest.raises(FileError, match=f"{where} is not a valid 'run' event: .*ended"):
        read_capture(path)


def test_events_and_fields_of_later_versions_of_this_schema_are_kept(path):
    later = {"event": "later", "anything": [{"at": None}]}
    write(path, START | {"more": 1}, later)
    assert read_capture(path).events == (START | {"more": 1}, later)


def test_the_end_of_an_older_capture_has_another_name_for_left_alone(path):
    older = END | {"aside": "the script uses autocast itself"}
    del older["left_alone"]
    write(path, START, older)
    assert read_capture(path).totals()["left_alone"] == "the script uses autocast itself"


FIRST = json.dumps(START).encode() + b"\n"
DEEP = b'{"event": "later", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"


NO_START = " does not begin with a start event: is it a capture of narrowcast?"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *[
            (text, NO_START)
            for text in (b"", b"\n\n", b"{}\n", b"[1]\n", b'"start"\n', b'{"event": "step"}\n', b"PK\x03")
        ],
        *[
            (FIRST + text, ":2 is not an event")
            for text in (b'{"event": 3}\n', b'{"event": ["loss"]}\n', b"[1]\n")
        ],
        *[(FIRST + text + FIRST, ":2 is not valid JSON") for text in (b"{broken\n", DEEP)],
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", " is not text: is it a capture of narrowcast?"),
        (
            b'{"event": "start", "schema": 99}\n',
            f" has schema '99' and this version of narrowcast reads {SCHEMA}",
        ),
        (b'{"event": "start"}\n', f" has schema 'None' and this version of narrowcast reads {SCHEMA}"),
    ],
)
def test_what_is_no_capture_is_refused(path, content, message):
    path.write_bytes(content)
    with pytest.raises(FileError) as refused:
        read_capture(path)
    assert str(refused.value).startswith(f"{path}{message}")


def test_a_last_line_that_cannot_be_read_was_cut_short(path):
    for last in (DEEP, DEEP[:500], b"{", b'{"event": "no'):
        path.write_bytes(FIRST + last)
        assert read_capture(path).events == (START,)


def test_files_that_cannot_be_opened_are_refused(path):
    with pytest.raises(FileError) as refused:
        read_capture(path)
    assert str(refused.value) == f"cannot read the capture {path}: No such file or directory"
    path.mkdir()
    with pytest.raises(FileError, match="Is a directory"):
        read_capture(path)
    with pytest.raises(FileError) as refused:
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


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (7, "7 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (10 * 1024, "10 KiB"),
        (1023 * 1024, "1023 KiB"), (1_048_063, "1023 KiB"), (1_048_570, "1.0 MiB"), (2**20, "1.0 MiB"),
        (2**30 - 1, "1.0 GiB"), (32 * 2**30, "32 GiB"), (2**40 - 1, "1.0 TiB"), (2**51, "2048 TiB"),
    ],
)  # fmt: skip
def test_the_unit_of_a_size_is_that_of_the_number_printed(count, text):
    assert bytes_text(count) == text
