"""Ctrl-C at random instants of a training under nc.apply with rules for modules and for an operator."""

import contextlib

import pytest
import torch
from torch import nn

import narrowcast as nc
from interrupts import Alarm, Training, autocast_state, changed, clean_up, random_instants, same
from narrowcast import rule


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).softmax(-1))


POLICY = nc.Policy(compute="bf16").with_rules(
    rule.module_type(nn.LayerNorm, compute="fp32", output="bf16"),
    rule.module("1", compute="fp16"),
    rule.module("*.down", compute="fp32"),
    rule.op("softmax", compute="fp16"),
)


@pytest.mark.long
def test_an_interrupt_under_module_rules_leaves_no_trace():
    training = Training(nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 4)), torch.randn(4, 8))
    alarm = Alarm()
    delivered = 0
    with nc.apply(training.model, POLICY):
        training.run()  # the first one prepares what the others find ready
        expected = training.run()
        longest_s = min(training.seconds() for _ in range(5))
        before = autocast_state()
        for instant in random_instants(1000, longest_s):
            with contextlib.suppress(KeyboardInterrupt), alarm.after(instant):
                training.run()
            found = changed(before)
            clean_up(before)
            assert found == {}, alarm.where
            assert same(training.run(), expected), alarm.where
            delivered += alarm.where is not None
    assert delivered > 500
