"""Two runs whose steps take turns, in blocks, so that a machine that gets slower slows both alike."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from narrowcast.attach import changed_files
from narrowcast.errors import few
from narrowcast.verify.compare._runs import MEMORY, LiveRun, collapsed

_WARM_UP = 3
_BLOCK_S = 0.1
_BLOCKS = 30
_FIRST_BLOCK = 5
_MOST_MEMORY = 450  # thousandths
# A run that makes no progress for so long may wait for what the other one holds, as a lock or a port.
_PATIENCE_S = 10.0
_PATIENCE = 10
_TOO_SHORT = f"its own process took fewer than {_WARM_UP} steps"

Limit = Callable[[LiveRun, LiveRun], float]


def take_turns(
    formats: Sequence[str],
    begin: Callable[[str], LiveRun],
    ended: Callable[[LiveRun], None],
    *,
    steps: int,
    limit_s: Limit,
) -> str | None:
    """Make a run of each of two formats, their steps in turns; return why they did not take turns, if so.

    They pause at the end of a step, and all processes of a run stand still then. A run that changes files
    goes on to its end alone, before the other one could see them.

    Args:
        formats: that of the first run, and that of the second.
        begin: begins a run of a format.
        ended: called with each run after its end, when the user's files are restored.
        steps: that each will take; 0: not known.
        limit_s: of a run and of the pair's first one, after how long to end it.
    """
    with begin(formats[0]) as one:
        why = _why_not(one) if one.go(_WARM_UP) else _TOO_SHORT
        if why is None:
            with begin(formats[1]) as two:
                first, why = _alternate(one, two, steps, limit_s)
                for run in (first, one if first is two else two):
                    run.go(limit_s=limit_s(run, one))
                    run.close()
            failed = [run for run in (one, two) if run.code and not collapsed(run.folder)]
            if not failed:
                for run in sorted((one, two), key=lambda run: run.code or 0):
                    ended(run)
                return why
            why = f"{failed[0].name} failed beside the other run"
        else:
            one.go(limit_s=limit_s(one, one))
            one.close()
            ended(one)
            formats = formats[1:]
    for format_ in formats:
        with begin(format_) as run:
            run.go(limit_s=limit_s(run, one))
        ended(run)
    return why


def _alternate(one: LiveRun, two: LiveRun, steps: int, limit_s: Limit) -> tuple[LiveRun, str | None]:
    """Let two runs take turns; return which one has to go on to its end first, and why, unless it ended."""
    order, block = [two, one], 0
    while True:
        spent_s: list[float] = []
        for run, other in (order, order[::-1]):
            before_s, patience_s = run.active_s, max(_PATIENCE_S, _PATIENCE * (spent_s or [one.active_s])[0])
            # The second one warms up first, as the other has done.
            if block or run is two:
                paused = run.go(run.steps + block if block else _WARM_UP, patience_s=patience_s)
                spent_s.append(run.active_s - before_s)
                if (why := _why_not(run)) or run.code is not None:
                    return run, why
                if not paused:
                    return other, f"{run.name} took no step in {patience_s:.0f} s beside the other run"
                if run.stepping_s > limit_s(run, one):
                    return other, None
        most = max(_FIRST_BLOCK, steps // _BLOCKS) if steps else math.inf
        fitting = math.ceil(block * _BLOCK_S / max(min(spent_s), 1e-6))
        block = int(min(max(fitting, 1), most)) if block else _FIRST_BLOCK
        order.reverse()


def _why_not(run: LiveRun) -> str | None:
    """Return why another process of the script must not run beside this one."""
    if "RANK" in os.environ:
        return "it is one of the ranks of a job, which wait for each other"
    if run.numbers[MEMORY] > _MOST_MEMORY:
        return f"{run.name} takes {run.numbers[MEMORY] / 1000:.0%} of the memory"
    changed = {path: line["was"] for path, line in changed_files(run.folder).items() if path}
    kept = [Path(path).name for path, was in changed.items() if was != "folder" and os.path.lexists(path)]
    return f"the script changes files ({few(kept, 2)})" if kept else None
