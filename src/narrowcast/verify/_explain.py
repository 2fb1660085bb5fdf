"""``explain SCRIPT``: what ran in which format, from a few watched steps of the script."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.attach import NAMED_NOTHING
from narrowcast.errors import FileError
from narrowcast.observe.capture import EXPLANATION, RUN, discard_captures, make_run_folder, read_capture
from narrowcast.observe.explanation import explained, read_explanation
from narrowcast.verify.compare._runs import EXPLAIN, ScriptSettings, run_process

_NOTHING = "the script called no module with parameters: nothing to explain"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainSettings(ScriptSettings):
    """What to explain.

    Attributes:
        steps: how many are counted, after a first one that is not; times are their mean.
    """

    steps: int = 2


def explain_script(
    settings: ExplainSettings, *, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Watch a few steps of the script in mixed precision, in a fresh process.

    Args:
        settings: what to run, and how.
        progress: told now and then, in a few words, what is going on.

    Returns:
        What ``observe.explained`` says of the capture in ``settings.folder``; with a ``problem`` and nothing
        else where nothing could be seen.

    Raises:
        ScriptError: the script failed.
        FileError: the folder cannot be written.
    """
    folder = make_run_folder("explain", asked=settings.folder)
    discard_captures(folder)
    progress(f"watching it in {settings.policy}")
    run = settings.whole_run(EXPLAIN, folder, settings.policy, earlier={}, watched_steps=settings.steps)
    run_process(
        "the run that is watched", run, settings.target, lambda line: progress(f"watching it: {line}")
    )
    if (folder / EXPLANATION).is_file():
        _add_notes(folder)
        return explained(read_explanation(folder / EXPLANATION))
    return _empty(settings) | {"problem": _why_nothing(folder)}


def _add_notes(folder: Path) -> None:
    """What the run had to say at its end, as of layers that are left out of fp8, belongs to what was seen.

    That a rule names no module is among the rules that no call reached.
    """
    with suppress(FileError, OSError), (folder / EXPLANATION).open("a", encoding="utf-8") as file:
        notes = read_capture(folder / RUN).of("note")
        file.writelines(f"{json.dumps(note)}\n" for note in notes if NAMED_NOTHING not in note["text"])


def _why_nothing(folder: Path) -> str:
    try:
        capture = read_capture(folder / RUN)
        aside = capture.totals()["aside"]
        notes = [event["text"] for event in capture.of("note")]
    except FileError:
        return "the run left no record of itself"
    if aside is not None:
        return f"{aside}, so it was left to it: watch its model with nc.explain(model, policy, batch)"
    if any("started processes" in text for text in notes):
        return "the script computes in processes that it starts itself, which are not watched"
    return _NOTHING


def _empty(settings: ExplainSettings) -> dict[str, Any]:
    lists = ("rules", "sites", "round_trips", "odd_shapes", "unreached", "notes")
    nothing = ("device", "format", "unit", "steps", "complete", "totals")
    return {
        "schema": 1,
        "target": list(settings.target),
        "policy": settings.policy,
        **dict.fromkeys(nothing),
        **{name: [] for name in lists},
        "reasons": dict.fromkeys(nothing, _NOTHING),
        "versions": {},
    }
