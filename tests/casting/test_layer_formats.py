"""The formats that layers are expected to compute in are those of PyTorch's table and of the rules."""

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.casting import layer_formats

BF16, FP32 = torch.bfloat16, torch.float32
KEEPS = nc.Policy.preset("bf16").with_rules(nc.rule.module("1", compute="fp32"))


def layers():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.ConvTranspose3d(1, 1, 1))


@pytest.mark.parametrize(
    ("device", "policy", "expected"),
    [
        ("cpu", nc.Policy.preset("bf16"), [BF16, BF16, BF16]),
        ("cpu", KEEPS, [BF16, FP32, BF16]),
        # The table of MPS has this layer in fp32.
        ("mps", nc.Policy.preset("bf16"), [BF16, BF16, FP32]),
        ("mps", KEEPS, [BF16, FP32, FP32]),
    ],
    ids=["cpu", "cpu, a rule", "mps", "mps, a rule"],
)
def test_layers_have_the_formats_of_the_table_and_the_rules(device, policy, expected):
    assert list(layer_formats(layers(), policy, {device: BF16}).values()) == expected
