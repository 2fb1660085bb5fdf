"""What ``narrowcast explain`` found: read from a capture, and shown as a table. No torch is needed."""

from narrowcast.observe.explanation._explained import explained, read_explanation
from narrowcast.observe.explanation._rows import (
    Group,
    OpRow,
    grouped,
    has_several_models,
    place_name,
    rules_of,
)
from narrowcast.observe.explanation._text import (
    count_text,
    explained_lines,
    odd_shapes_in_words,
    percent,
    round_trips_in_words,
    size_text,
    wrapped,
)

__all__ = [
    "Group",
    "OpRow",
    "count_text",
    "explained",
    "explained_lines",
    "grouped",
    "has_several_models",
    "odd_shapes_in_words",
    "percent",
    "place_name",
    "read_explanation",
    "round_trips_in_words",
    "rules_of",
    "size_text",
    "wrapped",
]
