"""``narrowcast compare``: FP32 and mixed precision side by side, with proof."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowcast.cli._output import NOT_WRITTEN, show, talk
from narrowcast.cli._signals import ended_by_signals
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
)
from narrowcast.scaling import parse

if TYPE_CHECKING:
    from narrowcast.verify import ComparisonSettings

CHECK_FAILED = 1
SCRIPT_FAILED = 3
_TERMINATED = 143
_PAGE = "report.html"
_SEEDS_THAT_JUDGE = 3
_CHECKED = {"certificate": "gradients", "output": "outputs", "loss": "losses"}


_StepsOption = Annotated[
    int,
    typer.Option(
        "--steps", metavar="N", min=0, help="End each run after N optimizer steps; 0: run it whole."
    ),
]
_RepeatsOption = Annotated[
    int,
    typer.Option("--repeats", metavar="N", min=1, help="Seeds to run both formats with; 3 judge the loss."),
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
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Both formats start with it.")] = 0,
    strict: Annotated[
        bool,
        typer.Option("--strict", help='Exit with 1 on "cannot tell" too; for losses from --repeats 3 on.'),
    ] = False,
    as_json: JsonOption = False,
    cache_dir: CacheDirOption = None,
) -> int:
    """Run a script in FP32 and in mixed precision, by turns, and show whether it is right and worth it.

    Time, memory, losses, and the error of the gradients in units of minibatch noise; a page with plots.
    The script is run nine times or so, and writes each time what it writes: let it not write over a file
    that you need.
    """
    check_policy(policy)
    check_seed(seed)
    check_seed(seed + repeats - 1)
    if loss_scale is not None:
        parse(loss_scale)

    from narrowcast.attach import Script
    from narrowcast.machine import require_torch
    from narrowcast.observe.capture import make_run_folder
    from narrowcast.verify import ComparisonSettings, stays_in_fp32

    require_torch()
    found = (Script.from_module if module else Script.from_path)(script, arguments or [])
    why = stays_in_fp32(policy)
    if why:
        return _say_nothing_to_compare(why, as_json=as_json)
    folder = make_run_folder(f"compare-{found.name}", asked=run_dir, cache=cache_dir)
    settings = ComparisonSettings(
        target=(script, *(arguments or [])),
        is_module=module,
        policy=policy,
        loss_scale=loss_scale,
        seed=seed,
        steps=steps,
        repeats=repeats,
        at_step=at_step,
        options=_words(policy, loss_scale, steps, repeats, at_step, seed, module=module),
        folder=Path(folder),
    )
    return _compare(settings, as_json=as_json, strict=strict)


def _say_nothing_to_compare(why: str, *, as_json: bool) -> int:
    from narrowcast.report import empty_summary

    talk(f"nothing to compare: mixed precision stays in fp32 here, since {why}")
    if not as_json:
        return 0
    nothing = empty_summary(f"mixed precision stays in fp32 here, since {why}")
    return 0 if show(_json(nothing)) else NOT_WRITTEN


_DEFAULTS = {
    "--policy": "auto",
    "--loss-scale": None,
    "--steps": 200,
    "--repeats": 1,
    "--at-step": 0,
    "--seed": 0,
}


def _words(*given: str | int | None, module: bool) -> tuple[str, ...]:
    """The options that differ from what is there without them, as they are typed."""
    asked = [
        (name, value) for (name, usual), value in zip(_DEFAULTS.items(), given, strict=True) if value != usual
    ]
    words = [word for name, value in asked for word in (name, str(value))]
    return (*words, *(["-m"] if module else []))


def _compare(settings: ComparisonSettings, *, as_json: bool, strict: bool) -> int:
    from narrowcast.errors import ScriptError
    from narrowcast.report import comparison_table, summary, write_page
    from narrowcast.verify import compare as run_both

    _discard_page(settings.folder)
    try:
        with _progress() as tell, ended_by_signals():
            comparison = run_both(settings, progress=tell)
    except ScriptError as error:
        talk(str(error))
        return SCRIPT_FAILED
    except (KeyboardInterrupt, SystemExit):
        talk(f"what there is so far: narrowcast report {settings.folder}")
        raise
    page = write_page(settings.folder)
    result = summary(comparison, report=str(page))
    text = _json(result) if as_json else comparison_table(result, color=sys.stdout.isatty())
    written = show(text)
    talk(f"the page of this comparison: {page}")
    code = _exit_code(result, strict=strict, losses_too=settings.repeats >= _SEEDS_THAT_JUDGE)
    return code if written else NOT_WRITTEN


def _json(result: dict[str, Any]) -> str:
    return json.dumps(result, indent=2, allow_nan=False)


def _discard_page(folder: Path) -> None:
    """The page of an earlier comparison there would pass for one of this, should this not come to its end."""
    from narrowcast.errors import FileError

    page = folder / _PAGE
    try:
        page.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"cannot delete what an earlier comparison left, {page}: {error.strerror}") from error


def _exit_code(result: dict[str, Any], *, strict: bool, losses_too: bool) -> int:
    """1 for a check that failed, and with ``strict`` for one that nobody can tell; each said in a line.

    Losses that too few seeds were run for, as nobody asked about them, are said and not held against it.
    """
    untold = [name for name in _CHECKED if result[name] and result[name]["verdict"] == "cannot tell"]
    for name in untold:
        talk(f"warning: cannot tell from the {_CHECKED[name]}: {result[name]['reason']}")
    missed = [name for name in untold if name != "loss" or losses_too]
    failed = [result[name] for name in _CHECKED if result[name] and result[name]["verdict"] == "fail"]
    if failed and "fp16" in (result["mixed"]["format"] or ""):
        talk("what to try: --loss-scale dynamic (what is there without the option), or --policy bf16")
    return CHECK_FAILED if result["verdict"] == "fail" or (strict and missed) else 0


@contextmanager
def _progress() -> Iterator[Any]:
    """What tells a person on a terminal what is going on, and is silent elsewhere."""
    from rich.console import Console
    from rich.text import Text

    from narrowcast.report import printable

    console = Console(stderr=True)
    with console.status("starting") as status:
        yield lambda text: status.update(Text(printable(text)[: console.width - 4]))
