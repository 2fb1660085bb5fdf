"""``narrowcast explain``: what a script ran in which format, by which rule, and what it cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowcast.cli._output import CHECK_FAILED, show_result, shown_progress, talk
from narrowcast.cli.run import (
    FOR_SCRIPTS,
    JsonOption,
    ModuleOption,
    RestArgument,
    RunDirOption,
    ScriptArgument,
    check_policy,
    find_script,
    tell,
    tell_outputs,
)
from narrowcast.errors import PolicyError

if TYPE_CHECKING:
    from narrowcast.report import Lock

_SCHEMA = 1
_RANGES_PAGE = "ranges.html"

_PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        "-p",
        envvar="NARROWCAST_POLICY",
        metavar="NAME|FILE",
        help=f"One of {', '.join(FOR_SCRIPTS)}, or a TOML file with rules. Default: auto; with "
        "--check that of the lock.",
        show_default=False,
    ),
]
_AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="NAME|FILE",
        help="Another policy: show where the two decide otherwise.",
        show_default=False,
    ),
]
_LockOption = Annotated[
    Path | None,
    typer.Option("--lock", metavar="FILE", help="Write every decision to FILE.", show_default=False),
]
_CheckOption = Annotated[
    Path | None,
    typer.Option(
        "--check",
        metavar="FILE",
        help="Compare with FILE, which --lock wrote; exit code 1 where a decision differs.",
        show_default=False,
    ),
]


def explain(
    script: ScriptArgument,
    arguments: RestArgument = None,
    policy: _PolicyOption = None,
    module: ModuleOption = False,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
    whole: Annotated[
        bool, typer.Option("--table", help="Show all rows, in the order of calls, not only the most costly.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Show each call site alone, not repeated layers as one.")
    ] = False,
    ranges: Annotated[
        bool,
        typer.Option("--ranges", help="Show how large numbers are in FP32, and what each format loses."),
    ] = False,
    against: _AgainstOption = None,
    lock: _LockOption = None,
    check: _CheckOption = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="How many steps to count, after the first.")
    ] = 2,
) -> int:
    """Show what ran in which format: per module and operator, the rule that decided, casts and time.

    The five rows that cost most; --table shows all. Watches a few steps of the script in mixed precision,
    then stops it.
    """
    exclusive = (ranges, against is not None, lock is not None, check is not None)
    if sum(exclusive) > 1:
        hint = "'--ranges', '--against', '--lock' or '--check'"
        raise typer.BadParameter("one of them at a time", param_hint=hint)

    from narrowcast.capture import make_run_folder
    from narrowcast.machine import require_torch
    from narrowcast.report import read_lock
    from narrowcast.scripts import restore_killed

    locked = None if check is None else read_lock(check)
    if policy is None:
        policy = "auto" if locked is None else _policy_of(locked, check)
    check_policy(policy)
    if against is not None:
        check_policy(against)
    require_torch()
    restore_killed(tell)
    name = find_script(script, arguments, module=module).name
    folder = make_run_folder(f"explain-{name}", asked=run_dir, tell=tell)
    if ranges:
        _show_ranges((script, *(arguments or [])), folder, module=module, steps=steps, as_json=as_json)
        return 0
    watch = partial(_watch, (script, *(arguments or [])), module=module, steps=steps)

    code = 0
    found = watch(policy, folder)
    pages = [found.get("report")]
    if against is not None:
        second = watch(against, folder / "against")
        pages.append(second.get("report"))
        _show_differences(found, second, as_json=as_json, every=every)
    elif locked is not None:
        code = _check(found, locked, str(check), as_json=as_json, every=every)
    elif lock is not None:
        if _keep(found, lock):
            _show(found, as_json=as_json, whole=whole, every=every)
        else:
            code = CHECK_FAILED  # ``_keep`` has printed why it wrote nothing
    else:
        _show(found, as_json=as_json, whole=whole, every=every)
    for page in filter(None, pages):
        talk(f"report: {page}")
    return code


def _watch(target: tuple[str, ...], policy: str, folder: Path, *, module: bool, steps: int) -> dict[str, Any]:
    """Run the script for a few steps; return what it ran in which format, with the path of its page."""
    from narrowcast.report import find_capture, save_page
    from narrowcast.verify import ScriptSettings, explain_script

    settings = ScriptSettings(target=target, is_module=module, policy=policy, folder=folder)
    with shown_progress() as progress:
        found = explain_script(settings, steps=steps, progress=progress)
    tell_outputs(folder)
    if found["problem"] is None:
        found["report"] = str(save_page(find_capture(folder)))
    return found


def _show_ranges(target: tuple[str, ...], folder: Path, *, module: bool, steps: int, as_json: bool) -> None:
    """Show how large the numbers of a few steps are."""
    from narrowcast.report import ranges_page, ranges_text, write_page
    from narrowcast.verify import ScriptSettings, ranges_of_script

    settings = ScriptSettings(target=target, is_module=module, policy="fp32", folder=folder)
    with shown_progress() as progress:
        found = ranges_of_script(settings, steps=steps, progress=progress)
    tell_outputs(folder)
    page = None
    if found["problem"] is None:
        page = write_page(ranges_page(found), folder / _RANGES_PAGE)
    color = sys.stdout.isatty()
    show_result(found, lambda: ranges_text(found, color=color), as_json=as_json)
    if page is not None:
        talk(f"report: {page}")


def _policy_of(locked: Lock, path: Path | None) -> str:
    """Return the policy that a lock file names; if there is no such policy, the error names the lock file."""
    try:
        check_policy(locked.policy)
    except PolicyError as error:
        made_with = f"the lock file {path} was written with it; --policy names another"
        raise PolicyError(f"{error} ({made_with})") from error
    return locked.policy


def _show(found: Mapping[str, Any], *, as_json: bool, whole: bool = False, every: bool = False) -> None:
    from narrowcast.report import explain_text

    color = sys.stdout.isatty()
    show_result(found, lambda: explain_text(found, whole=whole, every=every, color=color), as_json=as_json)


def _show_differences(
    first: Mapping[str, Any], second: Mapping[str, Any], *, as_json: bool, every: bool
) -> None:
    """Show where two policies decide differently."""
    from narrowcast.report import decided_sites, differences, policies_text

    problem = first["problem"] or second["problem"]
    found = differences(decided_sites(first), decided_sites(second))
    if problem is not None and not as_json:
        _show(first if first["problem"] else second, as_json=False)
        return
    answer = {
        "schema": _SCHEMA,
        "target": first["target"],
        "problem": problem,
        "policy": first["policy"],
        "against": second["policy"],
        "differences": [difference.to_dict() for difference in found],
        "totals": {"policy": first["totals"], "against": second["totals"]},
        "report": {"policy": first.get("report"), "against": second.get("report")},
    }
    show_result(answer, lambda: policies_text(first, second, found, every=every), as_json=as_json)


def _keep(found: Mapping[str, Any], path: Path) -> bool:
    """Write the lock file, and return whether there was anything to write."""
    from narrowcast.report import lock_of, write_lock

    problem = found["problem"]
    if problem is None:
        lock = lock_of(found)
        if lock.sites:
            write_lock(lock, path)
            talk(f"{len(lock.sites)} decisions are in {path}")
            return True
        problem = "no operator was called in a region"
    talk(f"{problem}; no lock file was written")
    return False


def _check(found: Mapping[str, Any], locked: Lock, path: str, *, as_json: bool, every: bool) -> int:
    """Compare the decisions with those of a lock file."""
    from narrowcast.report import check_text, differences, facts_changed, lock_of

    if found["problem"] is not None:
        _show(found, as_json=as_json)
        return CHECK_FAILED
    now = lock_of(found)
    changed = differences(locked.sites, now.sites)
    answer = {
        "schema": _SCHEMA,
        "target": found["target"],
        "lock": path,
        "equal": not changed,
        "around": facts_changed(locked, now),
        "differences": [difference.to_dict() for difference in changed],
        "report": found["report"],
    }
    show_result(answer, lambda: check_text(locked, now, changed, path, every=every), as_json=as_json)
    return CHECK_FAILED if changed else 0
