"""Gradients as numbers: which of them are not finite."""

from narrowcast.gradients._finite import NonfiniteFlags, nonfinite_flags

__all__ = ["NonfiniteFlags", "nonfinite_flags"]
