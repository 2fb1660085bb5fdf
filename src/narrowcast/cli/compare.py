"""``narrowcast compare``: FP32 and mixed precision side by side, with proof."""

from __future__ import annotations

import inspect
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowcast._files import cache_folder
from narrowcast.cli._output import CHECK_FAILED, show_result, shown_progress, talk
from narrowcast.cli.run import (
    JsonOption,
    LossScaleOption,
    ModuleOption,
    PolicyOption,
    RestArgument,
    RunDirOption,
    ScriptArgument,
    TimeLimitOption,
    check_policy,
    check_seed,
    find_script,
    tell,
)
from narrowcast.errors import SettingError
from narrowcast.scaling import parse as parse_loss_scale

if TYPE_CHECKING:
    from narrowcast.verify.compare import ComparisonSettings

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
        help="Seeds to run both formats with; from 3 on the losses are judged too.",
    ),
]
_AtStepOption = Annotated[
    int | None,
    typer.Option(
        "--at-step",
        metavar="N",
        min=0,
        help="Compare gradients once, after N steps of mixed training, not at the first and at later ones.",
    ),
]

_MinSpeedupOption = Annotated[
    float | None,
    typer.Option(
        "--min-speedup", metavar="X", help="Exit with 1 if the whole interval of the speedup is below X."
    ),
]


def compare(
    script: ScriptArgument,
    arguments: RestArgument = None,
    policy: PolicyOption = "auto",
    loss_scale: LossScaleOption = None,
    steps: _StepsOption = 200,
    repeats: _RepeatsOption = 1,
    at_step: _AtStepOption = None,
    module: ModuleOption = False,
    run_dir: RunDirOption = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the first repeat.")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help='Exit with 1 on the verdict "cannot tell" too.')
    ] = False,
    min_speedup: _MinSpeedupOption = None,
    time_limit: TimeLimitOption = None,
    as_json: JsonOption = False,
) -> int:
    """Run a script in FP32 and in mixed precision, and show whether mixed precision is right and worth it.

    Compares time, memory, losses, and gradients, whose error it measures in units of minibatch noise. Also
    writes a self-contained HTML report.

    The script runs ten to twenty times, as the time limit allows. Afterwards your files are as before, except
    those that other programs or native code wrote. What each run wrote is in its folder.
    """
    check_policy(policy)
    check_seed(seed)
    check_seed(seed + repeats - 1)
    if loss_scale is not None:
        parse_loss_scale(loss_scale)  # raises before anything runs
    if min_speedup is not None and not 0 < min_speedup < math.inf:
        raise SettingError(f"expected --min-speedup to be a number above 0, got {min_speedup:g}")
    from narrowcast.capture import make_run_folder
    from narrowcast.machine import require_torch
    from narrowcast.scripts import restore_killed
    from narrowcast.verify.compare import ComparisonSettings, compared_instead, stays_in_fp32

    require_torch()
    restore_killed(tell)
    found = find_script(script, arguments, module=module)
    _measure_auto(policy)

    # Where ``auto`` chooses fp32, a narrow format is compared instead, to show what it would give.
    fp32_because = stays_in_fp32(policy)
    narrow_format = compared_instead(policy)
    if narrow_format is not None:
        talk(f"auto computes in fp32 here, since {fp32_because}; comparing {narrow_format}")
    elif fp32_because:
        raise SettingError(
            f"FP32 is not compared with itself, since {fp32_because}: give another --policy, got {policy}"
        )

    # Each key is the name of an option, for the page, and also of a field of ``ComparisonSettings``.
    chosen: dict[str, Any] = {
        "policy": narrow_format or policy,
        "loss_scale": loss_scale,
        "steps": steps,
        "repeats": repeats,
        "at_step": at_step,
        "seed": seed,
        "min_speedup": min_speedup,
    }
    settings = ComparisonSettings(
        target=(script, *(arguments or [])),
        is_module=module,
        # The policy as typed: typed again, ``auto`` is compared in the same way.
        options=_as_typed({**chosen, "policy": policy, "time_limit": time_limit}, module=module),
        time_limit_s=time_limit,
        fp32_because=fp32_because,
        folder=make_run_folder(f"compare-{found.name}", asked=run_dir, tell=tell),
        **chosen,
    )
    return _compare(settings, as_json=as_json, strict=strict)


def _measure_auto(policy: str) -> None:
    """Measure what decides ``auto`` on a CPU. With an accelerator a fixed table decides."""
    import torch

    from narrowcast.machine import measure_auto
    from narrowcast.policy import as_policy

    if as_policy(policy).compute == "auto" and not torch.accelerator.is_available():
        with shown_progress() as progress:
            note = measure_auto("cpu", cache_folder(), progress=lambda text: progress(f"measuring {text}"))
        if note:
            talk(f"note: {note}")


def _as_typed(options: dict[str, Any], *, module: bool) -> tuple[str, ...]:
    """Return the options that differ from their defaults, as words of a command."""
    parameters = inspect.signature(compare).parameters
    words = []
    for name, value in options.items():
        if value != parameters[name].default:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    if module:
        words.append("-m")
    return tuple(words)


def _compare(settings: ComparisonSettings, *, as_json: bool, strict: bool) -> int:
    """Make the runs, show the result and where its page is, and return the exit code."""
    from narrowcast.report import comparison_table, save_page, summary
    from narrowcast.verify.compare import compare_script, slow_here

    slow_formats = slow_here(settings.policy)
    for note in slow_formats:
        talk(f"note: {note}")
    try:
        with shown_progress() as progress:
            comparison = compare_script(settings, progress=progress)
    except (KeyboardInterrupt, SystemExit):  # at SIGTERM ``shown_progress`` raises SystemExit
        talk(f"interrupted; narrowcast report {settings.folder} shows the runs so far")
        raise
    page = save_page(comparison)
    result = summary(comparison, report=str(page))
    # The text does not repeat the notes that were shown before the first run.
    notes = [note for note in result["notes"] if note not in slow_formats]
    shown = result | {"notes": notes}
    show_result(result, lambda: comparison_table(shown, color=sys.stdout.isatty()), as_json=as_json)
    talk(f"report: {page}")
    return _exit_code(result, strict=strict, with_speed=settings.min_speedup is not None)


def _exit_code(result: dict[str, Any], *, strict: bool, with_speed: bool) -> int:
    """Return 1 if the answer to "right" is no, or with ``with_speed`` that to "worth it".

    With ``strict`` "cannot tell" counts as no.
    """
    right = result["verdict"]["right"]
    worth_it = result["verdict"]["worth_it"]
    failing = ("no", "cannot tell") if strict else ("no",)
    if right.startswith(failing) or (with_speed and worth_it.startswith(failing)):
        return CHECK_FAILED
    return 0
