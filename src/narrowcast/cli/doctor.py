"""``narrowcast doctor``: what this machine has and computes fast, and where the time of a script goes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowcast._files import cache_folder
from narrowcast.cli._output import CHECK_FAILED, show_result, shown_progress, talk
from narrowcast.cli.run import (
    CacheDirOption,
    JsonOption,
    ModuleOption,
    PolicyOption,
    RestArgument,
    RunDirOption,
    TimeLimitOption,
    check_policy,
    find_script,
    tell,
    tell_outputs,
)
from narrowcast.errors import FileError

if TYPE_CHECKING:
    from narrowcast.verify import DiagnosisSettings


def doctor(
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT",
            help="A script to profile, or with -m a module; without one the machine alone.",
            show_default=False,
        ),
    ] = None,
    arguments: RestArgument = None,
    policy: PolicyOption = "auto",
    module: ModuleOption = False,
    run_dir: RunDirOption = None,
    time_limit: TimeLimitOption = None,
    as_json: JsonOption = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again, even if rates are kept from an earlier time.")
    ] = False,
    budget_s: Annotated[float, typer.Option("--budget-s", hidden=True)] = 15.0,
    cache_dir: CacheDirOption = None,
) -> int:
    """Measure what this machine computes fast, and show what does not fit together.

    Takes about 15 seconds for each device; rates are kept for later. Exit code 1: torch cannot use a device.

    With a SCRIPT: whether mixed precision is worth it, timed as in narrowcast compare, and where the time of
    a step goes in both formats.
    """
    if script is None and (module or run_dir is not None or time_limit is not None):
        raise typer.BadParameter("expected a SCRIPT", param_hint="'--module', '--run-dir' or '--time-limit'")
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        # doctor is the verb for this: torch may be missing, or a library that it needs.
        talk(f"torch cannot be imported ({error}). To install it: pip install --upgrade torch")
        return CHECK_FAILED
    from narrowcast.machine import Budget, examine, require_torch

    require_torch()
    check_policy(policy)
    if script is not None:
        # Refuse a missing script before anything is measured.
        find_script(script, arguments, module=module)
    cache, budget = cache_dir or cache_folder(), Budget(device_s=budget_s)
    began = time.monotonic()
    with shown_progress() as progress:
        found = examine(
            cache=cache, fresh=fresh, budget=budget, progress=lambda text: progress(f"measuring {text}")
        )
    measuring_s = time.monotonic() - began
    for note in found["notes"]:
        talk(f"note: {note}")
    if script is not None:
        from narrowcast.observe.capture import make_run_folder
        from narrowcast.verify import DiagnosisSettings
        from narrowcast.verify.compare import compared_instead, slow_here, stays_in_fp32

        instead = compared_instead(policy)
        if instead is not None:
            talk(f"auto computes in fp32 here, since {stays_in_fp32(policy)}; profiling {instead}")
            policy = instead
        folder = make_run_folder(f"doctor-{Path(script).stem}", asked=run_dir, cache=cache_dir, tell=tell)
        target = (script, *(arguments or []))
        settings = DiagnosisSettings(
            target=target, is_module=module, policy=policy, folder=folder, time_limit_s=time_limit
        )
        told = slow_here(policy)
        for slow in told:
            talk(f"note: {slow}")
        return _diagnose(found, settings, told, spent_s=measuring_s, as_json=as_json)
    from narrowcast.report import doctor_page, doctor_text

    report = None if cache is None else _keep_page(doctor_page(found), cache / "doctor.html")
    whole = found | {"report": report}
    show_result(whole, lambda: doctor_text(found, color=sys.stdout.isatty()), as_json=as_json)
    if report is not None:
        talk(f"report: {report}")
    return CHECK_FAILED if any(wrong["severity"] == "error" for wrong in found["mismatches"]) else 0


def _diagnose(
    examined: dict[str, Any],
    settings: DiagnosisSettings,
    told: list[str],
    *,
    spent_s: float,
    as_json: bool,
) -> int:
    from narrowcast.observe.capture import PAGE
    from narrowcast.report import conclusion, diagnosis_page, diagnosis_text
    from narrowcast.verify import diagnose

    for wrong in examined["mismatches"]:
        if wrong["severity"] == "error":
            talk(f"{wrong['device']}: {wrong['text']} (more: narrowcast doctor)")
    with shown_progress() as progress:
        found = diagnose(settings, examined["rates"], spent_s=spent_s, progress=progress)
    tell_outputs(settings.folder)
    if found["mixed"] is not None:
        found["mixed"]["notes"] = [note for note in found["mixed"]["notes"] if note not in told]
    report = _keep_page(diagnosis_page(found, examined), settings.folder / PAGE)
    whole = found | {"conclusion": conclusion(found), "machine": examined, "report": report}
    show_result(whole, lambda: diagnosis_text(found, color=sys.stdout.isatty()), as_json=as_json)
    if report is not None:
        talk(f"report: {report}")
    return 0


def _keep_page(page: str, path: Path) -> str | None:
    """Write a page; the result is shown even if that fails."""
    from narrowcast.report import write_page

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(write_page(page, path))
    except (OSError, FileError) as error:
        talk(f"note: there is no page: {error}")
        return None
