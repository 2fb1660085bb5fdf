"""``narrowcast compare``: FP32 and mixed precision side by side, with proof."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowcast.cli._output import CHECK_FAILED, show_result, shown_progress, talk
from narrowcast.cli.run import (
    CacheDirOption,
    JsonOption,
    LossScaleOption,
    ModuleOption,
    PolicyOption,
    RestArgument,
    RunDirOption,
    ScriptArgument,
    check_policy,
    check_seed,
    find_script,
)
from narrowcast.scaling import parse

if TYPE_CHECKING:
    from narrowcast.verify.compare import ComparisonSettings

_ENOUGH_SEEDS = 3
_CHECKED = {"certificate": "gradients", "output": "outputs", "loss": "losses"}

_StepsOption = Annotated[
    int,
    typer.Option(
        "--steps", metavar="N", min=0, help="End each run after N optimizer steps; 0: run it whole."
    ),
]
_RepeatsOption = Annotated[
    int,
    typer.Option(
        "--repeats",
        metavar="N",
        min=1,
        help="Seeds to run both formats with; 3 judge the loss.",
    ),
]
_AtStepOption = Annotated[
    int,
    typer.Option("--at-step", metavar="N", min=0, help="Compare gradients after N steps of mixed training."),
]


def compare(
    script: ScriptArgument,
    arguments: RestArgument = None,
    policy: PolicyOption = "auto",
    loss_scale: LossScaleOption = None,
    steps: _StepsOption = 200,
    repeats: _RepeatsOption = 1,
    at_step: _AtStepOption = 0,
    module: ModuleOption = False,
    run_dir: RunDirOption = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the first repeat.")] = 0,
    strict: Annotated[
        bool,
        typer.Option("--strict", help='Exit with 1 on "cannot tell" too; for losses from --repeats 3 on.'),
    ] = False,
    as_json: JsonOption = False,
    cache_dir: CacheDirOption = None,
) -> int:
    """Run a script in FP32 and in mixed precision, and show whether mixed precision is right and worth it.

    Compares time, memory, losses, and gradients, whose error it measures in units of minibatch noise. Also
    writes a self-contained HTML report.

    The script runs about nine times and writes its files each time: make sure that it does not overwrite
    one that you need.
    """
    check_policy(policy)
    check_seed(seed)
    check_seed(seed + repeats - 1)
    if loss_scale is not None:
        parse(loss_scale)

    from narrowcast.machine import require_torch
    from narrowcast.observe.capture import make_run_folder
    from narrowcast.verify.compare import ComparisonSettings, stays_in_fp32

    require_torch()
    found = find_script(script, arguments, module=module)
    why = stays_in_fp32(policy)
    if why:
        from narrowcast.report import empty_summary

        reason = f"mixed precision stays in fp32 here, since {why}"
        talk(f"nothing to compare: {reason}")
        if as_json:
            show_result(empty_summary(reason), str, as_json=True)
        return 0
    given: dict[str, Any] = {
        "policy": policy,
        "loss_scale": loss_scale,
        "steps": steps,
        "repeats": repeats,
        "at_step": at_step,
        "seed": seed,
    }
    settings = ComparisonSettings(
        target=(script, *(arguments or [])),
        is_module=module,
        options=_words(given, module=module),
        folder=make_run_folder(f"compare-{found.name}", asked=run_dir, cache=cache_dir),
        **given,
    )
    return _compare(settings, as_json=as_json, strict=strict)


def _words(given: dict[str, Any], *, module: bool) -> tuple[str, ...]:
    """Return the options that differ from their defaults, as they are typed."""
    defaults = {"policy": "auto", "steps": 200, "repeats": 1}
    asked = {name: value for name, value in given.items() if value not in (None, defaults.get(name, 0))}
    words = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return (*words, *(["-m"] if module else []))


def _compare(settings: ComparisonSettings, *, as_json: bool, strict: bool) -> int:
    from narrowcast.report import comparison_table, summary, write_page
    from narrowcast.verify.compare import compare as run_both

    _delete_stale_page(settings.folder)
    try:
        with shown_progress() as progress:
            comparison = run_both(settings, progress=progress)
    except (KeyboardInterrupt, SystemExit):
        talk(f"to see the runs so far: narrowcast report {settings.folder}")
        raise
    page = write_page(settings.folder)
    result = summary(comparison, report=str(page))
    show_result(result, lambda: comparison_table(result, color=sys.stdout.isatty()), as_json=as_json)
    talk(f"report: {page}")
    return _exit_code(result, strict=strict, losses_too=settings.repeats >= _ENOUGH_SEEDS)


def _delete_stale_page(folder: Path) -> None:
    """Delete a stale report, so that an interrupted comparison is not mistaken for a finished one."""
    from narrowcast.errors import FileError
    from narrowcast.report import PAGE

    try:
        (folder / PAGE).unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"cannot delete the old report {folder / PAGE}: {error.strerror}") from error


def _exit_code(result: dict[str, Any], *, strict: bool, losses_too: bool) -> int:
    """Return 1 for a check that failed, and with ``strict`` for one that cannot tell; print a line for each.

    Losses of fewer seeds than it takes to judge them do not count.
    """
    unclear = [name for name in _CHECKED if result[name] and result[name]["verdict"] == "cannot tell"]
    for name in unclear:
        talk(f"warning: cannot tell from the {_CHECKED[name]}: {result[name]['reason']}")
    missed = [name for name in unclear if name != "loss" or losses_too]
    failed = [name for name in _CHECKED if result[name] and result[name]["verdict"] == "fail"]
    if failed and "fp16" in (result["mixed"]["format"] or ""):
        talk("what to try: --loss-scale dynamic (the default in fp16), or --policy bf16")
    return CHECK_FAILED if result["verdict"] == "fail" or (strict and missed) else 0
