"""``kill -9`` while a checkpoint is written: the last complete one is there, and what is left is removed."""

import os

import pytest
from checkpoint_launches import facts_of

LONG = pytest.mark.long


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize(
    ("kind", "rounds"),
    [("file", 4), pytest.param("file", 120, marks=LONG), pytest.param("folder", 120, marks=LONG)],
)
def test_a_kill_while_saving_loses_nothing(tmp_path, kind, rounds):
    *found, last = facts_of("checkpoint_kills.py", tmp_path, rounds, 0, kind)
    assert len(found) == rounds
    for one in found:
        # A save that was complete may have had no time to report it.
        assert one["found"] in (one["saved"], one["saved"] + 1), one
        assert one["values"] == [one["found"]], one
    if rounds > 100:
        assert any(one["stray"] for one in found), "no kill came inside a save"
    assert last == {"left": []}
