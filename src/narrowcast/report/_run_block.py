"""The block that ends a run."""

from __future__ import annotations

import textwrap

from narrowcast.observe import Capture

_WIDTH = 79


def run_block(capture: Capture, *, capture_path: str | None = None) -> str:
    """A few lines of at most 79 columns: format, steps, skipped steps, final scale, and what to know."""
    end = capture.end or {}
    devices = capture.of("device")
    places = [f"{d['format']} on {d['device_type']} ({d['because']})" for d in devices]
    lines = _wrapped(f"narrowcast: {'; '.join(places) or 'nothing ran in mixed precision'}", "  ")
    scale = end.get("final_scale")
    said = "loss scale off" if scale is None else f"final loss scale {scale:g}"
    skipped = end.get("skipped_steps", 0)
    steps = end.get("steps", 0)
    counts = f"{steps} optimizer step{'s' * (steps != 1)}, {skipped} skipped, {said}"
    lines.append(f"  {counts}, {end.get('wall_s', 0.0):.1f} s")
    for note in capture.of("note"):
        lines += _wrapped(f"  note: {note['text']}", "        ")
    if capture_path:
        lines.append(f"  capture: {capture_path}")
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
