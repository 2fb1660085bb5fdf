"""A training step in two lines, and checkpoints from which a run continues bit for bit."""

from narrowcast.replay import random_states as random_states
from narrowcast.replay import set_random_states as set_random_states
from narrowcast.training._optimizer_group import check_loss as check_loss
from narrowcast.training._stepper import Stepper
from narrowcast.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

__all__ = ["Checkpoint", "Stepper", "load_checkpoint", "save_checkpoint"]
