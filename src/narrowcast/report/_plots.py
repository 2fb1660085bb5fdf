"""The figures of a page as plain data for plotly.js: every label escaped, every colour a name.

A colour such as ``--fp32`` is a variable of the page's style, which the page's script looks up, so that one
figure fits light, dark and paper.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

from narrowcast.observe.capture import TimedRun
from narrowcast.report._rows import shortened

NO_SEED = -1
"""The seed of a run that had none."""

NAMES = {"fp32": "FP32", "mixed": "mixed"}
MOST_POINTS = 2_000
"""Of one curve."""

MOST_RUNS = 24
"""That one figure shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One figure.

    Attributes:
        name: of the element that it is drawn into.
        title: a heading for it.
        said: what it shows, in sentences, for those who do not see it.
        traces: of plotly.js.
        layout: of plotly.js.
        may_be_log: whether the y axis can be logarithmic, so that a person may choose.
    """

    name: str
    title: str
    said: tuple[str, ...]
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    may_be_log: bool = False

    def drawn(self) -> dict[str, Any]:
        """What the page's script reads."""
        return {"name": self.name, "traces": self.traces, "layout": self.layout}


def label(text: str, longest: int = 60) -> str:
    """``text`` for plotly.js, which reads a few HTML tags in labels: shortened, control characters spelled
    out, markup escaped."""
    return html.escape(shortened(text, longest), quote=False)


def run_name(run: TimedRun) -> str:
    """What a person calls a run: its folder, which says format and number, and its seed where it had one."""
    return shortened(run.name, 24) + (f" (seed {run.seed})" if run.seed != NO_SEED else "")
