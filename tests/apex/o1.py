"""The two formats of half, and O1 for calls outside of models."""

import pytest
import torch

from narrowcast.apex import amp

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
halves = pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)


def initialize(model, half=torch.float16):
    return amp.initialize(model, opt_level="O1", verbosity=0, half_type=half)


def begin(half=torch.float16):
    """Have this thread cast by the lists until ``end_apex``."""
    initialize(torch.nn.Linear(1, 1), half)
