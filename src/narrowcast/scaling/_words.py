"""A loss scale from the words of a command line."""

from __future__ import annotations

from narrowcast.errors import ScaleError
from narrowcast.scaling._dynamic import Dynamic
from narrowcast.scaling._fixed import LossScale, Off, Static


def parse(text: str) -> LossScale:
    """A loss scale from the words of a command line: ``dynamic``, ``off``, or a number for a fixed one.

    Raises:
        ScaleError: for any other word, and for a number that cannot scale a loss.
    """
    word = text.strip().lower()
    if word == "dynamic":
        return Dynamic()
    if word == "off":
        return Off()
    try:
        scale = float(word)
    except ValueError:
        raise ScaleError(
            f"expected a loss scale of 'dynamic', 'off' or a positive number such as 1024, got {text!r}"
        ) from None
    return Static(scale=scale)
