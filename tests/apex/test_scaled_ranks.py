"""DDP around what ``amp.initialize`` returns, on two processes of gloo."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "scripts" / "scaled_ranks.py"
X = [0.1875, 0.125, -0.0625, 0.15625]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes found."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=120) for process in processes]
    for process, (_, stderr) in zip(processes, ended, strict=True):
        assert process.returncode == 0, stderr
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in ended]


@pytest.mark.parametrize(
    "case",
    [" ".join(words) for words in product(("O1", "O2"), ("unscaled", "delayed"), ("copies", "views"))],
)
def test_ranks_train_alike_and_leave_out_the_same_step(ranks, case):
    first, second = (found[case] for found in ranks)
    assert first == second
    # The ranks' gradients are x and 2 x, of which DDP takes the mean; half of it is added by a second block.
    assert first["accumulated"] == [2.25 * x for x in X]
    assert first["first"] == [1 - 0.5 * 2.25 * x for x in X]
    assert first["left out"] == first["first"]
    assert first["scale"] == 2.0**15
    # In half at last under O2.
    wanted = torch.tensor([1 - 0.5 * 3.75 * x for x in X])
    assert first["last"] == (wanted.half() if case.startswith("O2") else wanted).tolist()
