"""Save and load everything that a run needs to continue bit for bit."""

from narrowcast.training.checkpoint._checkpoint import Checkpoint, load_checkpoint, save_checkpoint

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]
