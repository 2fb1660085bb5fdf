"""``narrowcast doctor``: what this machine has and computes fast, and where the time of a script goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowcast.cli._output import NOT_WRITTEN, show, shown_progress, talk
from narrowcast.cli.run import (
    CacheDirOption,
    JsonOption,
    ModuleOption,
    PolicyOption,
    RestArgument,
    RunDirOption,
    check_policy,
)

UNUSABLE = 1
SCRIPT_FAILED = 3


def doctor(
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCRIPT]",
            help="A script to profile, or with -m a module; without one the machine alone.",
            show_default=False,
        ),
    ] = None,
    arguments: RestArgument = None,
    policy: PolicyOption = "auto",
    module: ModuleOption = False,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again, even if rates are kept from an earlier time.")
    ] = False,
    budget_s: Annotated[float, typer.Option("--budget-s", hidden=True)] = 15.0,
    cache_dir: CacheDirOption = None,
) -> int:
    """Say what this machine computes fast, by measuring it, and what does not fit together.

    About ten seconds; rates are kept for the next time. Exit code 1: a device that torch cannot use.

    With a SCRIPT: why it is or is not faster in mixed precision, from a few of its steps in both formats.
    """
    if script is None and (module or run_dir is not None):
        raise typer.BadParameter("it is about a script: name one", param_hint="'--module' or '--run-dir'")
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        # The one verb that is for this: a library that torch needs may be missing, or torch itself.
        talk(f"torch cannot be imported ({error}). To install it: pip install --upgrade torch")
        return UNUSABLE
    from narrowcast.attach import Script
    from narrowcast.machine import Budget, examine, require_torch

    require_torch()
    check_policy(policy)
    if script is not None:
        # Refuses one that is missing before anything is measured.
        (Script.from_module if module else Script.from_path)(script, arguments or [])
    cache, budget = _cache_folder(cache_dir), Budget(device_s=budget_s)
    with shown_progress() as progress:
        found = examine(
            cache=cache, fresh=fresh, budget=budget, progress=lambda text: progress(f"measuring {text}")
        )
    for note in found["notes"]:
        talk(f"note: {note}")
    if script is not None:
        asked = {"target": (script, *(arguments or [])), "is_module": module, "policy": policy}
        return _diagnose(found, asked, run_dir=run_dir, cache_dir=cache_dir, as_json=as_json)
    if as_json:
        text = json.dumps(found, indent=2, allow_nan=False)
    else:
        from narrowcast.report import doctor_text

        text = doctor_text(found, color=sys.stdout.isatty())
    if not show(text):
        return NOT_WRITTEN
    return UNUSABLE if any(wrong["severity"] == "error" for wrong in found["mismatches"]) else 0


def _diagnose(
    examined: dict[str, Any],
    asked: dict[str, Any],
    *,
    run_dir: Path | None,
    cache_dir: Path | None,
    as_json: bool,
) -> int:
    from narrowcast.errors import ScriptError
    from narrowcast.observe.capture import make_run_folder
    from narrowcast.report import conclusion, diagnosis_text
    from narrowcast.verify import ScriptSettings, diagnose

    for wrong in examined["mismatches"]:
        if wrong["severity"] == "error":
            talk(f"{wrong['device']}: {wrong['text']} (narrowcast doctor says more)")
    name = f"doctor-{Path(asked['target'][0]).stem}"
    folder = make_run_folder(name, asked=run_dir, cache=cache_dir)
    try:
        with shown_progress() as progress:
            found = diagnose(ScriptSettings(**asked, folder=folder), examined["rates"], progress=progress)
    except ScriptError as error:
        talk(str(error))
        return SCRIPT_FAILED
    if as_json:
        whole = found | {"conclusion": conclusion(found), "machine": examined}
        text = json.dumps(whole, indent=2, allow_nan=False)
    else:
        text = diagnosis_text(found, color=sys.stdout.isatty())
    return 0 if show(text) else NOT_WRITTEN


def _cache_folder(asked: Path | None) -> Path | None:
    if asked is not None:
        return asked
    try:
        return Path.home() / ".cache" / "narrowcast"
    except RuntimeError:
        return None
