"""``narrowcast compare``: FP32 and mixed precision side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from narrowcast.cli.run import (
    CacheDirOption,
    LossScaleOption,
    ModuleOption,
    PolicyOption,
    RestArgument,
    RunDirOption,
    ScriptArgument,
)
from narrowcast.policy import as_policy
from narrowcast.scaling import parse

SCRIPT_FAILED = 3


def compare(
    script: ScriptArgument,
    arguments: RestArgument = None,
    policy: PolicyOption = "auto",
    loss_scale: LossScaleOption = None,
    module: ModuleOption = False,
    run_dir: RunDirOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Both runs start with it.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of the table.")] = False,
    cache_dir: CacheDirOption = None,
) -> int:
    """Run a script in FP32 and in mixed precision and show both side by side."""
    as_policy(policy)
    if loss_scale is not None:
        parse(loss_scale)

    from narrowcast.attach import Script
    from narrowcast.machine import require_torch
    from narrowcast.observe import make_run_folder
    from narrowcast.verify import ComparisonSettings, stays_in_fp32

    require_torch()
    found = (Script.from_module if module else Script.from_path)(script, arguments or [])
    why = stays_in_fp32(policy)
    if why:
        _talk(f"nothing to compare: mixed precision stays in fp32 here, since {why}")
        if as_json:
            print(json.dumps({"fp32": None, "mixed": None, "reason": why}))  # noqa: T201
        return 0
    folder = make_run_folder(f"compare-{found.name}", asked=run_dir, cache=cache_dir)
    words = (*(["-m"] if module else []), script, *(arguments or []))
    return _compare(
        ComparisonSettings(
            target=words, policy=policy, loss_scale=loss_scale, seed=seed, folder=Path(folder)
        ),
        as_json=as_json,
    )


def _compare(settings: "ComparisonSettings", *, as_json: bool) -> int:  # type: ignore[name-defined] # noqa: F821, UP037
    from rich.console import Console

    from narrowcast.errors import ScriptError
    from narrowcast.report import comparison_table
    from narrowcast.verify import compare as run_both

    console = Console(stderr=True)
    try:
        with console.status("starting the FP32 run") as status:
            result = run_both(
                settings, progress=lambda text: status.update(text[: console.width - 4])
            ).to_dict()
    except ScriptError as error:
        _talk(str(error))
        return SCRIPT_FAILED
    if as_json:
        print(json.dumps(result, indent=2))  # noqa: T201
        return 0
    print(comparison_table(result, color=sys.stdout.isatty()))  # noqa: T201
    _talk(f"captures and output of both runs: {settings.folder}")
    return 0


def _talk(text: str) -> None:
    print(f"narrowcast: {text}", file=sys.stderr)  # noqa: T201
