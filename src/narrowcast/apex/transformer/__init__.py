"""Of apex's transformer package: the gradient scaler."""

from narrowcast.apex.transformer import amp

__all__ = ["amp"]
