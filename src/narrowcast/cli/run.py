"""``narrowcast run``: an unmodified script in mixed precision."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowcast.cli._output import talk
from narrowcast.errors import NarrowcastError, PolicyError
from narrowcast.policy import PRESET_TABLE, with_fp32_weights
from narrowcast.scaling import parse

if TYPE_CHECKING:
    from narrowcast.capture import CaptureWriter
    from narrowcast.scripts import Script

# What NumPy's seed takes; torch and Python take more.
_LARGEST_SEED = 2**32 - 1

FOR_SCRIPTS = [name for name, preset in PRESET_TABLE.items() if preset.for_scripts]

PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        "-p",
        envvar="NARROWCAST_POLICY",
        metavar="NAME|FILE",
        help=f"One of {', '.join(FOR_SCRIPTS)}, or a TOML file with rules.",
    ),
]
LossScaleOption = Annotated[
    str | None,
    typer.Option(
        "--loss-scale",
        metavar="dynamic|off|N",
        help="How the loss is scaled. Default: dynamic in fp16, else off. N is a fixed scale.",
        show_default=False,
    ),
]
RunDirOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        metavar="DIR",
        help="Folder of the capture; the script finds it in NARROWCAST_RUN_DIR. "
        "Default: a new folder under NARROWCAST_CACHE_DIR or ~/.cache/narrowcast.",
        show_default=False,
    ),
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="S",
        min=0,
        help="Time as many pairs of runs as fit into S seconds (default: 25, or 1.42 times the first "
        "pair), 8 at most; 0: no limit.",
    ),
]
ModuleOption = Annotated[
    bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module, as in python -m.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of the text.")]
ScriptArgument = Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module.")]
RestArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Everything after SCRIPT belongs to it.", show_default=False),
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
            "--seed",
            metavar="N",
            help="Seed Python, NumPy and torch before the script starts.",
            show_default=False,
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            "--tensorboard",
            metavar="DIR",
            help="Write losses, loss scale, skipped steps, gradient norms and notes to DIR, for TensorBoard.",
            show_default=False,
        ),
    ] = None,
    no_replay: Annotated[
        bool,
        typer.Option(
            "--no-replay",
            help="Do not run a skipped step again to say where its first infinity or NaN arose.",
        ),
    ] = False,
) -> Callable[[], None]:
    """Run an unmodified FP32 script in mixed precision.

    It ends as under plain Python, with its own exit code; a few lines on stderr then summarize the run.
    """
    check_policy(policy)
    check_seed(seed)
    scale = None if loss_scale is None else parse(loss_scale)

    from narrowcast.attach import Attachment, TensorBoard, run_attached
    from narrowcast.capture import (
        COMPARISON,
        RUN,
        CaptureWriter,
        discard_captures,
        make_run_folder,
        start_event,
    )
    from narrowcast.machine import require_torch
    from narrowcast.scripts import restore_killed

    require_torch()
    restore_killed(tell)  # before the script is looked for, which may be one of the files put back
    found = find_script(script, arguments, module=module)
    rank = rank_here()
    name = found.name
    capture = RUN
    if rank > 0:
        name = f"{found.name}-rank{rank}"
        # Ranks share only a folder that was asked for; each has a new folder of its own otherwise.
        if run_dir is not None:
            capture = f"capture-rank{rank}.jsonl"
    board = None
    if tensorboard is not None:
        board_folder = tensorboard
        if rank > 0:
            board_folder = tensorboard / f"rank{rank}"
        board = TensorBoard(board_folder)
        board.make_folder()
    folder = make_run_folder(name, asked=run_dir, tell=tell)
    if rank == 0:
        if (folder / RUN).is_file() or (folder / COMPARISON).is_file():
            tell(f"the capture of the earlier run in {folder} is replaced")
        discard_captures(folder, from_rank=number_from_launcher("WORLD_SIZE", 1))

    writer = CaptureWriter(folder / capture)
    rules = len(with_fp32_weights(policy).rules)
    writer.write(start_event(found.argv, policy, rules=rules, loss_scale=loss_scale, rank=rank, seed=seed))
    os.environ["NARROWCAST_RUN_DIR"] = str(folder)
    attach = partial(Attachment, policy, scale, writer=writer, board=board, explains_skips=not no_replay)
    # ``main`` calls the function that is returned, so that typer is not on the script's stack.
    if rank > 0:
        # Rank 0 speaks for all, but only this rank knows what its own part of the batch did.
        attachment = attach(tell=lambda _: None, tell_story=lambda story: tell(f"rank {rank}: {story}"))
        return partial(run_attached, found, attachment, seed=seed, at_end=lambda: None)
    attachment = attach(tell=tell)
    again = _command_of_ranks(policy, loss_scale, folder, seed, tensorboard, no_replay=no_replay)
    return partial(run_attached, found, attachment, seed=seed, at_end=_ending(writer), again=again)


def tell(text: str) -> None:
    """Print a note on stderr, if there is a stderr: a script may run without one, or close it."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"narrowcast: note: {text}\n")


def check_policy(policy: str) -> None:
    """Refuse a policy that does not exist; the message says so if its name came from the environment."""
    try:
        with_fp32_weights(policy)
    except PolicyError as error:
        if policy == os.environ.get("NARROWCAST_POLICY"):
            raise PolicyError(f"{error} (from NARROWCAST_POLICY)") from None
        raise


def find_script(script: str, arguments: list[str] | None, *, module: bool) -> Script:
    """Return the script to run; refuse a missing one."""
    from narrowcast.scripts import Script

    if module:
        return Script.from_module(script, arguments or [])
    return Script.from_path(script, arguments or [])


def tell_outputs(folder: Path) -> None:
    """Say in which folders the files are that the script wrote in its runs."""
    from narrowcast.scripts import OUTPUTS

    of_one = folder / OUTPUTS
    of_several = sorted(folder.glob(f"*/{OUTPUTS}"))
    if of_several:
        where = f"what each run of the script wrote is in its folder, as {of_several[0]}"
    elif of_one.is_dir():
        where = f"what the script wrote is in {of_one}"
    else:
        return
    talk(f"note: files are as before (but for those of other programs and native code), and {where}")


def check_seed(seed: int | None) -> None:
    """Refuse a seed that NumPy would refuse later."""
    if seed is not None and not 0 <= seed <= _LARGEST_SEED:
        raise typer.BadParameter(
            f"expected a whole number from 0 to {_LARGEST_SEED}, got {seed}", param_hint="'--seed'"
        )


def _ending(writer: CaptureWriter) -> Callable[[], None]:
    """Return a function that prints the summary of a run when the script and its threads have ended."""
    # Imported now: the script may have a module beside it with the name of one that the report needs.
    from narrowcast.capture import read_capture
    from narrowcast.report import run_block

    def end() -> None:
        try:
            text = run_block(read_capture(writer.path), capture_path=str(writer.path), with_told=False)
        except NarrowcastError as error:
            text = f"narrowcast: {error}"
        except Exception as error:  # an error of narrowcast's, which must not look like one of the script's
            text = f"narrowcast: {error!r}"
        if writer.error is not None:
            text += f"\n  the capture {writer.path} is incomplete: {writer.error.strerror}"
        # Either stream may be closed: by the script, or at the other end of a pipe.
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    return end


def _command_of_ranks(
    policy: str,
    loss_scale: str | None,
    folder: Path,
    seed: int | None,
    tensorboard: Path | None,
    *,
    no_replay: bool,
) -> list[str]:
    """Return the words of the command before the script, for ranks that the script starts by itself."""
    if Path(policy).is_file() and policy not in PRESET_TABLE:
        policy = str(Path(policy).resolve())  # ranks may be started in another folder
    words = [sys.executable, "-m", "narrowcast", "run", f"--policy={policy}", f"--run-dir={folder.resolve()}"]
    if loss_scale is not None:
        words.append(f"--loss-scale={loss_scale}")
    if seed is not None:
        words.append(f"--seed={seed}")
    if tensorboard is not None:
        words.append(f"--tensorboard={tensorboard.resolve()}")
    if no_replay:
        words.append("--no-replay")
    return words


def rank_here() -> int:
    """Return the rank of this process. Lightning's launcher sets only LOCAL_RANK, that on its machine."""
    return number_from_launcher("RANK", number_from_launcher("LOCAL_RANK", 0))


def number_from_launcher(name: str, otherwise: int) -> int:
    """Return the number that a launcher such as ``torchrun`` sets in the environment, or ``otherwise``."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise
