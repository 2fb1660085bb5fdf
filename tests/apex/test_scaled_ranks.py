"""DDP around what ``amp.initialize`` returns, on two processes of gloo."""

from itertools import product

import pytest
import torch
from two_ranks import found_by_two_ranks

X = [0.1875, 0.125, -0.0625, 0.15625]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes found."""
    return found_by_two_ranks("scaled_ranks.py", tmp_path_factory.mktemp("ranks"))


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
