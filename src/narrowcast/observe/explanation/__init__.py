"""What ``narrowcast explain`` found: read from a capture, and shown as a table. No torch is needed."""

from narrowcast.observe.explanation._table import (
    LAYER_NUMBER,
    bytes_text,
    count_text,
    explained,
    explained_lines,
    grouped,
    has_several_models,
    percent,
    place_name,
    read_explanation,
    round_trips_in_words,
    rules_of,
    wrapped,
)

__all__ = [
    "LAYER_NUMBER",
    "bytes_text",
    "count_text",
    "explained",
    "explained_lines",
    "grouped",
    "has_several_models",
    "percent",
    "place_name",
    "read_explanation",
    "round_trips_in_words",
    "rules_of",
    "wrapped",
]
