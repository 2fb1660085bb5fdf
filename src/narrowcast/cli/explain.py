"""``narrowcast explain``: what a script ran in which format, by which rule, and what it cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowcast.cli._output import NOT_WRITTEN, show, shown_progress, talk
from narrowcast.cli.run import (
    FOR_SCRIPTS,
    CacheDirOption,
    JsonOption,
    ModuleOption,
    RestArgument,
    RunDirOption,
    ScriptArgument,
    check_policy,
)
from narrowcast.errors import PolicyError

if TYPE_CHECKING:
    from narrowcast.report import Lock

DIFFERENT = 1
SCRIPT_FAILED = 3
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

    A few steps of the script are watched in mixed precision, then it is ended.
    """
    if sum(option is not None for option in (against, lock, check)) > 1:
        raise typer.BadParameter("one of them at a time", param_hint="'--against', '--lock' or '--check'")

    from narrowcast.attach import Script
    from narrowcast.machine import require_torch
    from narrowcast.observe.capture import make_run_folder
    from narrowcast.report import read_lock

    locked = None if check is None else read_lock(check)
    if policy is None and locked is not None:
        policy = _policy_of(locked, check)
    policy = policy or "auto"
    for wanted in (policy, against):
        if wanted is not None:
            check_policy(wanted)
    require_torch()
    found_script = (Script.from_module if module else Script.from_path)(script, arguments or [])
    folder = make_run_folder(f"explain-{found_script.name}", asked=run_dir, cache=cache_dir)
    asked = _Asked(target=(script, *(arguments or [])), is_module=module, steps=steps, folder=folder)

    from narrowcast.errors import ScriptError

    try:
        if against is not None:
            return _compare_policies(asked, policy, against, as_json=as_json, every=every)
        found = asked.watch(policy)
    except ScriptError as error:
        talk(str(error))
        return SCRIPT_FAILED
    if locked is not None and check is not None:
        return _check(found, locked, check, as_json=as_json, every=every)
    if lock is not None and (found["problem"] is not None or not _keep(found, lock)):
        talk(f"{found['problem'] or 'no operator was called in a region'}; no lock file was written")
        return DIFFERENT
    return _show_one(found, as_json=as_json, every=every)


def _policy_of(locked: Lock, path: Path | None) -> str:
    """The policy that a lock file is of; an error says that it came from there."""
    try:
        check_policy(locked.policy)
    except PolicyError as error:
        raise PolicyError(f"{error} (the lock file {path} is of it; --policy names another)") from error
    return locked.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is to be watched, whatever the policy."""

    target: tuple[str, ...]
    is_module: bool
    steps: int
    folder: Path

    def watch(self, policy: str, *, name: str | None = None) -> dict[str, Any]:
        """What ``verify.explain_script`` finds; ``name``: of a folder in ours for it."""
        from narrowcast.verify import ExplainSettings, explain_script

        settings = ExplainSettings(
            target=self.target,
            is_module=self.is_module,
            policy=policy,
            steps=self.steps,
            folder=self.folder if name is None else self.folder / name,
        )
        with shown_progress() as progress:
            return explain_script(settings, progress=progress)


def _show_one(found: Mapping[str, Any], *, as_json: bool, every: bool) -> int:
    from narrowcast.report import explain_text

    text = _json(found) if as_json else explain_text(found, every=every, color=sys.stdout.isatty())
    return 0 if show(text) else NOT_WRITTEN


def _compare_policies(asked: _Asked, policy: str, against: str, *, as_json: bool, every: bool) -> int:
    """Watch the script under both policies, and show where they decide otherwise."""
    from narrowcast.report import decided_sites, differences, policies_text

    first, second = asked.watch(policy), asked.watch(against, name="against")
    problem = first["problem"] or second["problem"]
    found = differences(decided_sites(first), decided_sites(second))
    if as_json:
        answer = {
            "schema": _SCHEMA,
            "target": list(asked.target),
            "problem": problem,
            "policy": policy,
            "against": against,
            "differences": [one.to_dict() for one in found],
            "totals": {"policy": first["totals"], "against": second["totals"]},
        }
        return 0 if show(_json(answer)) else NOT_WRITTEN
    if problem is not None:
        return _show_one(first if first["problem"] else second, as_json=False, every=every)
    return 0 if show(policies_text(first, second, found, every=every)) else NOT_WRITTEN


def _keep(found: Mapping[str, Any], path: Path) -> bool:
    """Write the lock file; returns whether there was anything to write."""
    from narrowcast.report import lock_of, write_lock

    made = lock_of(found)
    if not made.sites:
        return False
    write_lock(made, path)
    talk(f"{len(made.sites)} decisions are in {path}")
    return True


def _check(found: Mapping[str, Any], locked: Lock, path: Path, *, as_json: bool, every: bool) -> int:
    from narrowcast.report import check_text, differences, facts_changed, lock_of

    if found["problem"] is not None:
        return DIFFERENT if _show_one(found, as_json=as_json, every=every) == 0 else NOT_WRITTEN
    now = lock_of(found)
    changed = differences(locked.sites, now.sites)
    if as_json:
        text = _json(
            {
                "schema": _SCHEMA,
                "target": found["target"],
                "lock": str(path),
                "equal": not changed,
                "around": facts_changed(locked, now),
                "differences": [one.to_dict() for one in changed],
            }
        )
    else:
        text = check_text(locked, now, changed, str(path), every=every)
    if not show(text):
        return NOT_WRITTEN
    return DIFFERENT if changed else 0


def _json(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=2, allow_nan=False)
