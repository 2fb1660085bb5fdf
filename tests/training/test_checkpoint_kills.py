"""``kill -9`` while a checkpoint is written: the last complete one is there, and what is left is removed."""

import os

import pytest
from checkpoint_launches import facts_of

ROUNDS = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 20


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_kill_while_saving_loses_nothing(tmp_path, kind):
    *rounds, last = facts_of("checkpoint_kills.py", tmp_path, ROUNDS, 0, kind)
    assert len(rounds) == ROUNDS
    for one in rounds:
        # A save that was complete may have had no time to say so.
        assert one["found"] in (one["saved"], one["saved"] + 1), one
        assert one["values"] == [one["found"]], one
    assert any(one["stray"] for one in rounds), "no kill came inside a save"
    assert last == {"left": []}
