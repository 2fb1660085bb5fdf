"""Whatever a reader accepts, a page, a table and JSON can be made of it."""

import json

import made_captures
import pytest

from narrowcast.capture import read_comparison
from narrowcast.errors import FileError
from narrowcast.report import comparison_table, run_summary, summary
from narrowcast.report._page import comparison_page, run_page

VALUES = [None, "", 0, "nan"]
VALUES += [pytest.param(value, marks=pytest.mark.long) for value in (True, -1, [], {})]


def small():
    runs = made_captures.both(range(3), made_captures.training, steps=4, scale=8.0)
    return runs, [made_captures.certificate(7), made_captures.note("a trait")]


def computing():
    return made_captures.both(range(2), made_captures.computing, calls=4), [made_captures.output()]


def show_all(folder):
    found = read_comparison(folder)
    numbers = summary(found)
    json.dumps(numbers, allow_nan=False)
    assert max(map(len, comparison_table(numbers).splitlines())) <= 79
    comparison_page(found).encode()
    for run in found.runs[:1]:
        json.dumps(run_summary(run.capture), allow_nan=False)
        run_page(run.capture, folder).encode()


@pytest.mark.parametrize("make", [small, computing])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_field_of_another_value_is_refused_or_shown(tmp_path, make, value):
    """Each field of each kind of event at once in all runs, one kind and field after the other."""
    runs, own = make()
    events = {event["event"]: event for event in [*next(iter(runs.values())), *own]}
    shown = 0
    for kind, example in events.items():
        for field in example:
            if field in ("event", "schema", "kind"):
                continue
            alter = {"kind": kind, "field": field, "value": value}
            changed = {name: made_captures.altered(of_run, **alter) for name, of_run in runs.items()}
            folder = made_captures.comparison(tmp_path, changed, *made_captures.altered(own, **alter))
            try:
                show_all(folder)
            except FileError:
                continue
            shown += 1
    assert shown or value in ([], {})
