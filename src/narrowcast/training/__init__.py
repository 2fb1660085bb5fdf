"""A training step in its one right order, and checkpoints from which a run goes on bit for bit."""

from narrowcast.training._checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from narrowcast.training._stepper import Stepper

__all__ = ["Checkpoint", "Stepper", "load_checkpoint", "save_checkpoint"]
