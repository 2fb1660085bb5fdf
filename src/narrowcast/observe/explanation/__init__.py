"""What ``narrowcast explain`` found: read from a capture, and shown as a table. No torch is needed."""

from narrowcast.observe.explanation._table import (
    LAYER_NUMBER,
    bytes_text,
    count_text,
    explained,
    explained_lines,
    has_several_models,
    percent,
    place_name,
    read_explanation,
    wrapped,
)

__all__ = [
    "LAYER_NUMBER",
    "bytes_text",
    "count_text",
    "explained",
    "explained_lines",
    "has_several_models",
    "percent",
    "place_name",
    "read_explanation",
    "wrapped",
]
