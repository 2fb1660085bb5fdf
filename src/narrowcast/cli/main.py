"""The command line. torch is imported only when a verb needs it."""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from narrowcast.cli._output import talk
from narrowcast.cli.compare import compare
from narrowcast.cli.doctor import doctor
from narrowcast.cli.explain import explain
from narrowcast.cli.migrate import migrate
from narrowcast.cli.report import report
from narrowcast.cli.run import FOR_SCRIPTS, rank_here, run, tell
from narrowcast.errors import NarrowcastError

COMMAND_FAILED = 2  # wrong use, any other error of narrowcast, or a full disk
INTERRUPTED = 130
# If one of these follows the script's name, a warning says that it goes to the script. They change the result
# of a run, and few scripts have options of the same names.
_WATCHED_OPTIONS = (
    "--policy", "--loss-scale", "--no-replay", "--against", "--lock", "--check", "--ranges", "--strict",
    "--repeats", "--min-speedup",
)  # fmt: skip
_SHORT_POLICY_OPTIONS = frozenset(("-p", preset) for preset in FOR_SCRIPTS)
# Everything after the script's name belongs to the script.
_SCRIPT_LAST = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="narrowcast",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from narrowcast import __version__

        print(__version__)  # noqa: T201
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Mixed-precision training for PyTorch that you can steer, trust and explain.

    Run in mixed precision, unmodified:  narrowcast run train.py --its --own args

    Compare with FP32: is it right, is it worth it:  narrowcast compare train.py --its --own args

    See what is fast on this machine:  narrowcast doctor

    See why a script is or is not faster:  narrowcast doctor train.py --its --own args

    See what ran in which format, and why:  narrowcast explain train.py --its --own args

    Make an HTML report of a capture:  narrowcast report FOLDER

    Rewrite apex and old names for torch.amp:  narrowcast migrate PATH
    """


def _paragraphs(verb: Callable[..., object]) -> str:
    """Join the lines of each paragraph of ``verb``'s docstring; typer joins those of the first only."""
    paragraphs = inspect.cleandoc(verb.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


class _Verb(TyperCommand):
    """A verb that warns if one of its options follows the script's name, since it then goes to the script."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # typer 0.29 writes {SCRIPT}
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the verb's options up to the script's name only; what follows is the script's."""
        return [] if ctx.params.get("script") else list(super().shell_complete(ctx, incomplete))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # a copy, since typer takes words from the list that it parses
        rest: list[str] = super().parse_args(ctx, args)
        of_script = list(ctx.params.get("arguments") or ())
        misplaced = self._own_options_in(of_script)
        # A "--" before the script's name shows that the user knows where these options go.
        script_index = len(words) - len(of_script) - 1
        is_meant = script_index > 0 and words[script_index - 1] == "--"
        rank = rank_here()
        if misplaced and not is_meant and not ctx.resilient_parsing and rank == 0:
            names, script = " and ".join(misplaced), ctx.params["script"]
            tell(f"{names} went to {script}; before the name of the script it would be for narrowcast")
        return rest

    def _own_options_in(self, of_script: list[str]) -> list[str]:
        """Return the verb's options that stand among the arguments of the script."""
        words = {word.partition("=")[0] for word in of_script}
        own_names: list[str] = []
        for option in self.params:
            own_names += option.opts
        found = [name for name in own_names if name in _WATCHED_OPTIONS and name in words]
        # Many scripts have a -p of their own, such as for a port. Only -p before a preset's name is ours.
        if "--policy" in own_names and _SHORT_POLICY_OPTIONS.intersection(pairwise(of_script)):
            found.append("-p")
        return found


for _verb in (run, compare, doctor, explain):
    app.command(help=_paragraphs(_verb), context_settings=_SCRIPT_LAST, cls=_Verb)(_verb)
for _plain in (report, migrate):
    app.command(help=_paragraphs(_plain), cls=_Verb)(_plain)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``argv`` (default: this process's) and return its exit code.

    Wrong use, any other error of narrowcast and a full disk print one message on stderr and return 2;
    Control-C returns 130. Exceptions of a script under ``run`` propagate unchanged.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    hook = sys.excepthook
    try:
        action = app(words, prog_name="narrowcast", standalone_mode=False)
    except TyperException as error:
        # Only some of typer's exceptions have ``format_message``. Without any words, the text is empty.
        format_message = getattr(error, "format_message", error.__str__)
        text = format_message() or "see narrowcast --help"
        text = text.replace("Value error, ", "")  # which typer puts before its message
        if words and Path(words[0]).is_file():
            # The user forgot the verb.
            text += f" To run a script: narrowcast run {words[0]}"
        talk(text)
        return int(getattr(error, "exit_code", COMMAND_FAILED))
    except typer.Abort:  # Control-C at a question, or an EOFError; at others typer itself exits with 130
        return INTERRUPTED
    except NarrowcastError as error:
        talk(str(error))
        return COMMAND_FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        why = f"{errno.errorcode[error.errno]}: {os.strerror(error.errno)}"
        talk(f"cannot write {error.filename or 'a file'} ({why})")
        return COMMAND_FAILED
    finally:
        sys.excepthook = hook  # typer installs its own, but the script must find Python's
    # ``run`` returns a function instead of running the script, so that typer is not on the script's stack.
    if callable(action):
        action = action()
    return int(action or 0)
