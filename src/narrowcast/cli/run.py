"""``narrowcast run``: an unmodified script in mixed precision."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowcast.policy import PRESETS, as_policy
from narrowcast.scaling import LossScale, parse

PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy", "-p", envvar="NARROWCAST_POLICY", metavar="NAME", help=f"One of {', '.join(PRESETS)}."
    ),
]
LossScaleOption = Annotated[
    str | None,
    typer.Option(
        "--loss-scale",
        metavar="dynamic|off|N",
        help="Default: dynamic in fp16, off otherwise. A number is a fixed scale.",
        show_default=False,
    ),
]
RunDirOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        metavar="DIR",
        help="Where the capture goes, and what the script wants shown. "
        "Default: a new folder under NARROWCAST_CACHE_DIR or ~/.cache/narrowcast.",
        show_default=False,
    ),
]
CacheDirOption = Annotated[
    Path | None, typer.Option("--cache-dir", envvar="NARROWCAST_CACHE_DIR", hidden=True)
]
ModuleOption = Annotated[
    bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module, as in python -m.")
]
ScriptArgument = Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module.")]
RestArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGS]...", help="Everything after it belongs to the script.")
]


def run(
    script: ScriptArgument,
    arguments: RestArgument = None,
    policy: PolicyOption = "auto",
    loss_scale: LossScaleOption = None,
    module: ModuleOption = False,
    run_dir: RunDirOption = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", help="Seed Python, NumPy and torch before the script starts.", show_default=False
        ),
    ] = None,
    cache_dir: CacheDirOption = None,
) -> Callable[[], int]:
    """Run an unmodified FP32 script in mixed precision."""
    as_policy(policy)
    scale = None if loss_scale is None else parse(loss_scale)

    from narrowcast.attach import Script
    from narrowcast.machine import require_torch

    require_torch()
    found = (Script.from_module if module else Script.from_path)(script, arguments or [])
    return lambda: _run(found, policy, scale, loss_scale, run_dir=run_dir, cache_dir=cache_dir, seed=seed)


def _run(
    script: Any,
    policy: str,
    scale: LossScale | None,
    scale_word: str | None,
    *,
    run_dir: Path | None,
    cache_dir: Path | None,
    seed: int | None,
) -> int:
    from narrowcast.attach import Attachment, run_script, seed_everything
    from narrowcast.observe import SCHEMA, CaptureWriter, make_run_folder, read_capture

    rank = int(os.environ.get("RANK", "0") or 0)
    name = script.name if rank == 0 else f"{script.name}-rank{rank}"
    folder = make_run_folder(name, asked=run_dir, cache=cache_dir)
    capture = folder / ("capture.jsonl" if rank == 0 else f"capture-rank{rank}.jsonl")
    writer = CaptureWriter(capture)
    writer.write(
        {
            "event": "start",
            "schema": SCHEMA,
            "argv": list(script.argv),
            "policy": policy,
            "loss_scale": scale_word,
            "rank": rank,
            "started": time.time(),
            "seed": seed,
        }
    )
    os.environ["NARROWCAST_RUN_DIR"] = str(folder)
    if seed is not None:
        seed_everything(seed)
    attachment = Attachment(policy, scale, writer=writer)
    try:
        with attachment:
            attachment.exit_code = 1
            try:
                run_script(script)
                _wait_for_threads()
                attachment.exit_code = 0
            except SystemExit as error:
                attachment.exit_code = _exit_code(error)
                raise
    finally:
        sys.stdout.flush()
        if rank == 0:
            _say(read_capture(capture), capture)
    return 0


def _say(capture: Any, path: Path) -> None:
    from narrowcast.report import run_block

    print(run_block(capture, capture_path=str(path)), file=sys.stderr)  # noqa: T201


def _wait_for_threads() -> None:
    """Python waits for a script's threads before it ends: until then they are part of the script."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1
