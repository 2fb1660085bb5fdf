"""Replays on two ranks: the rank at fault tells of it, and no bit changes on either."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from child_processes import finished

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parent / "scripts" / "two_ranks.py"


def on_two_ranks(*words):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = finished([*torchrun, *words], env={**os.environ, "OMP_NUM_THREADS": "1"})
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    # Two ranks may print on one line.
    results = [json.loads(found) for found in re.findall(r'\{"rank.*?\}', done.stdout)]
    return sorted(results, key=lambda result: result["rank"]), text


def under_run(folder, *options):
    command = ["-m", "narrowcast", "run", "--policy=fp16", "--loss-scale=8", f"--run-dir={folder}"]
    return on_two_ranks(*command, *options, str(SCRIPT))


def test_a_run_on_two_ranks_ends_with_the_same_bits(tmp_path):
    explained, text = under_run(tmp_path / "explained")
    plain, _ = under_run(tmp_path / "plain", "--no-replay")
    assert [result["told"] for result in explained] == [0, 20]
    assert [result["told"] for result in plain] == [0, 0]
    assert [result["digest"] for result in explained] == [result["digest"] for result in plain]
    assert text.count("rank 1: step 6 was skipped at a loss scale of 8. narrowcast repeated it:") == 1
    assert "forward pass of Net, two_ranks.py" in text
    notes = (tmp_path / "explained" / "capture-rank1.jsonl").read_text()
    assert "step 6 was skipped at a loss scale of 8" in notes


def test_a_stepper_on_two_ranks_ends_with_the_same_bits():
    explained, text = on_two_ranks(str(SCRIPT), "--stepper")
    plain, _ = on_two_ranks(str(SCRIPT), "--stepper", "--no-replay")
    assert [result["told"] for result in explained] == [0, 20]
    assert [result["told"] for result in plain] == [0, 0]
    assert [result["digest"] for result in explained] == [result["digest"] for result in plain]
    assert "forward pass of Net, two_ranks.py" in text
