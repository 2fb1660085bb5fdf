"""A sigmoid that a low format rounds to 0 or 1 in front of binary_cross_entropy is warned of, once."""

import pytest
import torch
import torch.nn.functional as F
from casting_cases import rules
from torch import nn

import narrowcast as nc

SAID = "4 of 4 outputs of a sigmoid are rounded to 0 or 1 .* get no gradient: use BCEWithLogitsLoss"
ONES, ZEROS = torch.ones(4, 1), torch.zeros(4, 1)


def losses(policy, logit, stepped=False, last=lambda p: p):
    model = nn.Sequential(nn.Linear(1, 1), nn.Sigmoid())
    with torch.no_grad():
        model[0].weight.fill_(logit)
        model[0].bias.zero_()
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 1.0), policy) if stepped else None
    for _ in range(2):
        with stepper.autocast() if stepper else nc.autocast("cpu", policy=policy):
            loss = nn.BCELoss()(last(model(ONES)), last(ZEROS))
        stepper.step(loss) if stepper else loss.backward()
    return model[0].weight.grad


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("last", [lambda p: p, lambda p: p.squeeze(1).float()], ids=["plain", "reshaped"])
def test_it_is_said_once(stepped, last):
    original = F.binary_cross_entropy
    with pytest.warns(UserWarning, match=SAID) as said:
        gradient = losses("bf16", 7.0, stepped, last)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert stepped or gradient == 0
    assert F.binary_cross_entropy is original


def test_where_training_goes_on_nothing_is_said():
    fp32_sigmoid = rules(nc.rule.op("sigmoid", compute="fp32"))
    for policy, logit in (("bf16", 4.0), ("bf16", -200.0), ("fp32", 7.0), (fp32_sigmoid, 7.0)):
        assert (losses(policy, logit) != 0) == (logit > 0)
    with nc.autocast("cpu", policy="bf16"):
        nn.BCELoss()(ONES.bfloat16(), ZEROS)  # no sigmoid made them
