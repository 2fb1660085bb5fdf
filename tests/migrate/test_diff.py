"""Unified diffs: applied they give the other text; where lines are distinct they are those of difflib."""

import difflib
import re
from importlib import import_module

from hypothesis import example, given
from hypothesis import strategies as st

unified_diff = import_module("narrowcast.migrate._diff").unified_diff
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n")
LINES = st.lists(st.sampled_from([f"{letter}\n" for letter in "abcdefghij"]), max_size=30)
DISTINCT = st.permutations(range(20)).map(lambda order: [f"{one}\n" for one in order])


def applied(before, diff):
    """``before`` with ``diff`` applied, every number in it checked."""
    after, old = [], 0
    lines = iter(diff[2:])
    line = next(lines, None)
    while line is not None:
        start, length, new_start, new_length = (
            int(number or 1) if number != "0" else 0 for number in HUNK.fullmatch(line).groups()
        )
        first = start - bool(length)
        after += before[old:first]
        old = first
        assert len(after) == new_start - bool(new_length)
        new = len(after)
        while (line := next(lines, None)) is not None and not line.startswith("@@"):
            if line[0] in " -":
                assert before[old] == line[1:]
                old += 1
            if line[0] in " +":
                after.append(line[1:])
        assert (old - first, len(after) - new) == (length, new_length)
    return after + before[old:]


@given(st.one_of(LINES, DISTINCT), st.one_of(LINES, DISTINCT))
@example([], ["a\n"])
@example(["a\n"], [])
@example(["a\n"] * 9, ["a\n"] * 8)
def test_a_diff_that_is_applied_gives_the_other_text(before, after):
    diff = list(unified_diff(before, after, "x.py"))
    assert bool(diff) == (before != after)
    assert applied(before, diff) == after


def test_it_is_that_of_difflib_where_lines_are_distinct():
    before = [f"{number}\n" for number in range(60)]
    after = [*before[:10], "new\n", *before[10:30], *before[33:50], "other\n", *before[51:]]
    theirs = list(difflib.unified_diff(before, after, "x.py", "x.py"))
    assert list(unified_diff(before, after, "x.py")) == theirs


def test_many_lines_that_are_alike_take_no_longer():
    """difflib alone compares each with each: 10 ** 9 steps."""
    before, after = [], []
    for number in range(5000):
        before += [f"def f{number}():\n", *["    x = 1\n"] * 5, "    old()\n", "\n"]
        after += [f"def f{number}():\n", *["    x = 1\n"] * 5, "    new()\n", "\n"]
    diff = list(unified_diff(before, after, "x.py"))
    assert applied(before, diff) == after
    assert sum(line[0] == "-" for line in diff[2:]) == 5000
