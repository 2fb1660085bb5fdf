"""``fully_shard`` around what ``amp.initialize`` returned trains as DDP does, on two processes of gloo."""

import pytest
import torch
from two_ranks import found_by_two_ranks

from narrowcast.apex import amp


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes found."""
    return found_by_two_ranks("sharded_ranks.py", tmp_path_factory.mktemp("ranks"))


def flat(nested):
    return torch.cat([torch.tensor(one, dtype=torch.float64).flatten() for one in nested])


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_it_trains_as_ddp_does(ranks, level):
    """The mean of two ranks' gradients is a sum of two numbers, the same in any order and bucket.

    Norms of shards add up in another order than those of whole tensors: a few units of 2**-24 in the factor
    by which gradients are clipped, of which AdamW leaves as much in an update of at most its rate a step.
    """
    first, second = (rank[level]["fully_shard"] for rank in ranks)
    for key in ("masters", "weights", "exported", "scale"):
        assert first[key] == second[key]
    ddp = ranks[0][level]["ddp"]
    assert first["scale"] == ddp["scale"] == (2.0**10 if level == "O0" else 2.0**15)
    limit = 4 * 2.0**-6 * 64 * 2.0**-24
    for key in ("masters", "exported"):
        assert (flat(first[key]) - flat(ddp[key])).abs().max() <= limit
    assert first["losses"][1] != first["losses"][0]
    wide = 2.0**-8 if level == "O2" else limit  # at most one step of bf16 below 2
    assert (flat(first["weights"]) - flat(ddp["weights"])).abs().max() <= wide


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_no_rank_keeps_what_is_not_its_part(ranks, level):
    """After the first block the weights as they were, and their masters, are gone from memory."""
    for rank in ranks:
        assert rank[level]["fully_shard"]["whole tensors left"] == 0
        assert rank[level]["ddp"]["whole tensors left"] > 0


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_undone_the_optimizer_has_the_attributes_of_before(ranks, level):
    for rank in ranks:
        assert [rank[level][wrapped]["attributes left"] for wrapped in ("fully_shard", "ddp")] == [[], []]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sharding_after_a_step_is_refused_in_every_block(ranks, level):
    for rank in ranks:
        raised, dtypes = rank["late"][level]
        assert len(raised) == 2
        assert all(one.startswith("fully_shard came after this AdamW had stepped") for one in raised)
        assert dtypes == ["torch.float32"]


def test_parameters_that_are_in_no_model_any_more_are_said(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O1")
    model[1] = torch.nn.Linear(2, 1)
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    amp.shutdown()
    said = [line for line in capsys.readouterr().err.splitlines() if "any more" in line]
    assert len(said) == 1
    assert said[0].startswith("amp: 2 parameters of this SGD are in no model any more, so that what it does")
