"""Lightning's Trainer and Fabric on two ranks, by gloo."""

import json
import os
import sys
from pathlib import Path

import pytest

from child_processes import output_of

HERE = Path(__file__).parent
pytestmark = pytest.mark.long


def facts_in(text):
    """Every JSON object in ``text``; both ranks may write at once, so that a line may hold two."""
    decoder = json.JSONDecoder()
    facts = []
    place = text.find("{")
    while place >= 0:
        found, end = decoder.raw_decode(text, place)
        facts.append(found)
        place = text.find("{", end)
    return facts


def test_an_infinity_on_one_rank_skips_the_step_on_both():
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    out = output_of(
        [*command, HERE / "scripts" / "lightning_ranks.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    ranks = facts_in(out)
    assert sorted(rank["rank"] for rank in ranks) == [0, 1]
    assert len({rank["bf16"]["sum"] for rank in ranks}) == len({rank["fp16"]["sum"] for rank in ranks}) == 1
    for rank in ranks:
        for policy, scale in (("bf16", 1.0), ("fp16", 2.0**15)):
            facts = rank[policy]
            assert facts["equals host"]
            assert facts["equals Stepper"]
            assert facts["fabric equals Stepper"]
            assert facts["moves"] == 3
            assert facts["scale"] == scale
            assert facts["skips"] == [False, True, False, False]
        assert set(rank["formats"]) == {"torch.float32"}
