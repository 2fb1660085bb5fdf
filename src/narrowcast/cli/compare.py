"""``narrowcast compare``: FP32 and mixed precision side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowcast.cli.run import (
    CacheDirOption,
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
    check_policy(policy)
    check_seed(seed)
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


def _compare(settings: ComparisonSettings, *, as_json: bool) -> int:
    from rich.console import Console
    from rich.text import Text

    from narrowcast.errors import ScriptError
    from narrowcast.report import comparison_table, printable
    from narrowcast.verify import compare as run_both

    console = Console(stderr=True)
    try:
        with console.status("starting the FP32 run") as status:
            result = run_both(
                settings, progress=lambda text: status.update(Text(printable(text)[: console.width - 4]))
            ).to_dict()
    except ScriptError as error:
        _talk(str(error))
        return SCRIPT_FAILED
    if as_json:
        print(json.dumps(result, indent=2))  # noqa: T201
        return 0
    _show(comparison_table(result, color=sys.stdout.isatty()))
    _talk(f"captures and output of both runs: {settings.folder}")
    return 0


def _show(table: str) -> None:
    """Print ``table``; with hyphens for lines, and a sign for all else, that stdout's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        table.encode(encoding)
    except UnicodeEncodeError:
        table = table.replace("\u2500", "-").encode(encoding, errors="replace").decode(encoding)
    print(table)  # noqa: T201


def _talk(text: str) -> None:
    print(f"narrowcast: {text}", file=sys.stderr)  # noqa: T201
