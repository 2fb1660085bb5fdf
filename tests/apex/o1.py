"""O1 for calls outside of models."""

import torch

from narrowcast.apex import amp


def begin(half=torch.float16):
    """Have this thread cast by the lists until ``amp.shutdown``."""
    amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", half_type=half, verbosity=0)
