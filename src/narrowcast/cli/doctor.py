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
        # Torch may be missing, or a library that it needs. doctor reports that as a result, since it is the
        # verb to find out why torch does not work.
        talk(f"torch cannot be imported ({error}). To install it: pip install --upgrade torch")
        return CHECK_FAILED
    from narrowcast.machine import require_torch

    require_torch()
    check_policy(policy)
    name = ""
    if script is not None:
        from narrowcast.scripts import restore_killed

        restore_killed(tell)
        # Refuse a missing script before anything is measured.
        name = find_script(script, arguments, module=module).name

    began_s = time.monotonic()
    cache = cache_folder()
    examination = _examine(cache, fresh=fresh, budget_s=budget_s)
    if script is None:
        return _show_machine(examination, cache, as_json=as_json)
    measuring_s = time.monotonic() - began_s

    from narrowcast.capture import make_run_folder
    from narrowcast.verify import DiagnosisSettings

    settings = DiagnosisSettings(
        target=(script, *(arguments or [])),
        is_module=module,
        policy=_profiled_policy(policy),
        folder=make_run_folder(f"doctor-{name}", asked=run_dir, tell=tell),
        time_limit_s=time_limit,
    )
    return _diagnose(examination, settings, spent_s=measuring_s, as_json=as_json)


def _examine(cache: Path | None, *, fresh: bool, budget_s: float) -> dict[str, Any]:
    """Measure the machine, or read the rates that an earlier measurement kept."""
    from narrowcast.machine import Budget, examine

    with shown_progress() as progress:
        examination = examine(
            cache=cache,
            fresh=fresh,
            budget=Budget(device_s=budget_s),
            progress=lambda text: progress(f"measuring {text}"),
        )
    for note in examination["notes"]:
        talk(f"note: {note}")
    return examination


def _show_machine(examination: dict[str, Any], cache: Path | None, *, as_json: bool) -> int:
    from narrowcast.report import doctor_page, doctor_text

    page = None
    if cache is not None:
        page = _keep_page(doctor_page(examination), cache / "doctor.html")
    answer = examination | {"report": page}
    show_result(answer, lambda: doctor_text(examination, color=sys.stdout.isatty()), as_json=as_json)
    _tell_page(page)
    return CHECK_FAILED if _errors(examination) else 0


def _errors(examination: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the mismatches that keep torch from using a device."""
    return [mismatch for mismatch in examination["mismatches"] if mismatch["severity"] == "error"]


def _profiled_policy(policy: str) -> str:
    """Return the policy to profile: a low format where ``auto`` stays in fp32."""
    from narrowcast.verify.compare import compared_instead, stays_in_fp32

    instead = compared_instead(policy)
    if instead is None:
        return policy
    talk(f"auto computes in fp32 here, since {stays_in_fp32(policy)}; profiling {instead}")
    return instead


def _diagnose(
    examination: dict[str, Any], settings: DiagnosisSettings, *, spent_s: float, as_json: bool
) -> int:
    from narrowcast.capture import PAGE
    from narrowcast.report import conclusion, diagnosis_page, diagnosis_text
    from narrowcast.verify import diagnose
    from narrowcast.verify.compare import slow_here

    slow_formats = slow_here(settings.policy)
    for note in slow_formats:
        talk(f"note: {note}")
    for mismatch in _errors(examination):
        talk(f"{mismatch['device']}: {mismatch['text']} (more: narrowcast doctor)")

    with shown_progress() as progress:
        found = diagnose(settings, examination["rates"], spent_s=spent_s, progress=progress)
    tell_outputs(settings.folder)
    if found["mixed"] is not None:
        # Notes that were shown before the first run are not repeated.
        notes = [note for note in found["mixed"]["notes"] if note not in slow_formats]
        found["mixed"]["notes"] = notes

    page = _keep_page(diagnosis_page(found, examination), settings.folder / PAGE)
    answer = found | {"conclusion": conclusion(found), "machine": examination, "report": page}
    show_result(answer, lambda: diagnosis_text(found, color=sys.stdout.isatty()), as_json=as_json)
    _tell_page(page)
    return 0


def _keep_page(page: str, path: Path) -> str | None:
    """Write a page and return its path; None, with a note on stderr, if it cannot be written."""
    from narrowcast.report import write_page

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(write_page(page, path))
    except (OSError, FileError) as error:
        talk(f"note: there is no page: {error}")
        return None


def _tell_page(page: str | None) -> None:
    if page is not None:
        talk(f"report: {page}")
