"""Ctrl-C at random instants of a training under nc.attached."""

import contextlib

import pytest
import torch
from torch import nn

import narrowcast as nc
from interrupts import Alarm, Training, autocast_state, changed, clean_up, random_instants, same
from narrowcast import rule
from narrowcast.scaling import Dynamic

RULES = nc.Policy(compute="bf16").with_rules(rule.module_type(nn.LayerNorm, compute="fp32", output="bf16"))
INSTANTS = 100
# An interrupt between ``open`` and ``with`` leaves the file to the garbage collector.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def attached(policy):
    """Return a new attachment; without rules the loss is scaled."""
    return nc.attached(policy, Dynamic(scale=2.0**10) if policy == "bf16" else None)


@pytest.fixture
def training():
    layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4)]
    return Training(nn.Sequential(*layers), torch.randn(4, 8))


def expected_of(training, policy):
    """Return what an undisturbed training gives, and how long it takes."""
    with attached(policy):
        training.run()  # the first one prepares what the others find ready
        expected = training.run()
        return expected, min(training.seconds() for _ in range(5))


@pytest.mark.parametrize("policy", [RULES, "bf16"], ids=["rules", "scaled"])
def test_an_interrupt_that_is_caught_inside_leaves_no_trace(training, policy):
    expected, longest_s = expected_of(training, policy)
    before = autocast_state()
    alarm = Alarm()
    delivered = 0
    for instant in random_instants(INSTANTS, longest_s):
        with attached(policy):
            with contextlib.suppress(KeyboardInterrupt), alarm.after(instant):
                training.run()
            found = changed(before)
            clean_up(before)
            after = training.run()
        assert found == {}, alarm.where
        assert same(after, expected), alarm.where
        delivered += alarm.where is not None
    assert delivered > INSTANTS / 2


@pytest.mark.parametrize("policy", [RULES, "bf16"], ids=["rules", "scaled"])
def test_an_interrupt_that_ends_the_block_leaves_no_trace(training, policy):
    expected, longest_s = expected_of(training, policy)
    before = autocast_state()
    call = nn.Module.__call__
    alarm = Alarm()
    delivered = 0
    for instant in random_instants(INSTANTS, longest_s):
        with contextlib.suppress(KeyboardInterrupt), attached(policy), alarm.after(instant):
            training.run()
        found = changed(before)
        clean_up(before)
        assert found == {}, alarm.where
        assert nn.Module.__call__ is call, alarm.where
        with attached(policy):
            assert same(training.run(), expected), alarm.where
        delivered += alarm.where is not None
    assert delivered > INSTANTS / 2
