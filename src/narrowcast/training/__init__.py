"""A training step in its one right order: region, backward, unscale, clip, step, scheduler, zero."""

from narrowcast.training._stepper import Stepper

__all__ = ["Stepper"]
