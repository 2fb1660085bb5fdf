"""``narrowcast explain``: what a script ran in which format, by which rule, and what it cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowcast.cli._output import CHECK_FAILED, show_result, shown_progress, talk
from narrowcast.cli.run import (
    FOR_SCRIPTS,
    CacheDirOption,
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
    against: _AgainstOption = None,
    lock: _LockOption = None,
    check: _CheckOption = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="How many steps to count, after the first.")
    ] = 2,
    cache_dir: CacheDirOption = None,
) -> int:
    """Show what ran in which format: per module and operator, the rule that decided, casts and time.

    The five rows that cost most; --table shows all. Watches a few steps of the script in mixed precision,
    then stops it.
    """
    if sum(option is not None for option in (against, lock, check)) > 1:
        raise typer.BadParameter("one of them at a time", param_hint="'--against', '--lock' or '--check'")

    from narrowcast.machine import require_torch
    from narrowcast.observe.capture import make_run_folder
    from narrowcast.report import find_capture, read_lock, save_page

    locked = None if check is None else read_lock(check)
    if policy is None and locked is not None:
        policy = _policy_of(locked, check)
    policy = policy or "auto"
    for wanted in (policy, policy if against is None else against):
        check_policy(wanted)
    require_torch()
    name = find_script(script, arguments, module=module).name
    folder = make_run_folder(f"explain-{name}", asked=run_dir, cache=cache_dir, tell=tell)
    pages = list[str]()

    def watch(policy: str, folder: Path = folder) -> dict[str, Any]:
        from narrowcast.verify import ScriptSettings, explain_script

        target = (script, *(arguments or []))
        settings = ScriptSettings(target=target, is_module=module, policy=policy, folder=folder)
        with shown_progress() as progress:
            found = explain_script(settings, steps=steps, progress=progress)
        tell_outputs(folder)
        if found["problem"] is None:
            pages.append(str(save_page(find_capture(folder))))
            found["report"] = pages[-1]
        return found

    found, code = watch(policy), 0
    if against is not None:
        _show_differences(found, watch(against, folder / "against"), as_json=as_json, every=every)
    elif locked is not None:
        code = _check(found, locked, str(check), as_json=as_json, every=every)
    elif lock is not None and not _keep(found, lock):
        code = CHECK_FAILED
    else:
        _show(found, as_json=as_json, whole=whole, every=every)
    for page in pages:
        talk(f"report: {page}")
    return code


def _policy_of(locked: Lock, path: Path | None) -> str:
    try:
        check_policy(locked.policy)
    except PolicyError as error:
        raise PolicyError(f"{error} (the lock file {path} is of it; --policy names another)") from error
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
        "differences": [one.to_dict() for one in found],
        "totals": {"policy": first["totals"], "against": second["totals"]},
        "report": {"policy": first.get("report"), "against": second.get("report")},
    }
    show_result(answer, lambda: policies_text(first, second, found, every=every), as_json=as_json)


def _keep(found: Mapping[str, Any], path: Path) -> bool:
    """Write the lock file, and return whether there was anything to write."""
    from narrowcast.report import lock_of, write_lock

    made = None if found["problem"] is not None else lock_of(found)
    if made is None or not made.sites:
        talk(f"{found['problem'] or 'no operator was called in a region'}; no lock file was written")
        return False
    write_lock(made, path)
    talk(f"{len(made.sites)} decisions are in {path}")
    return True


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
        "differences": [one.to_dict() for one in changed],
        "report": found["report"],
    }
    show_result(answer, lambda: check_text(locked, now, changed, path, every=every), as_json=as_json)
    return CHECK_FAILED if changed else 0
