"""``python -m narrowcast.apex script.py args...``: run a script that imports apex, unchanged."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from narrowcast.apex._stand_in import OFFERED, install
from narrowcast.errors import NarrowcastError

_WRONG_USE = 2
_USAGE = "python -m narrowcast.apex [-m] SCRIPT [ARGS...]"
_HELP = f"""usage: {_USAGE}

Run an unmodified script that says `from apex import amp`. In its process, and
in processes that it spawns, narrowcast provides these modules:
  {", ".join(OFFERED)}
If an apex with its own amp is installed, that one runs. If the installed apex
has no amp, its other modules are used and narrowcast provides the rest.

  -m          SCRIPT is the name of a module, as in python -m
  -h, --help  show this text

Everything after SCRIPT belongs to the script. It ends as under plain Python,
with its own exit code.
"""


def main(words: Sequence[str]) -> int:
    """Run the script that the command line ``words`` names.

    Return 2 for wrong use. Exceptions of the script are not caught.
    """
    rest = list(words)
    if rest[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_HELP)
        return 0
    is_module = rest[:1] == ["-m"]
    if is_module:
        del rest[0]
    if not rest:
        return _wrong_use(f"expected a script: {_USAGE}")
    if rest[0].startswith("-"):
        return _wrong_use(f"unknown option {rest[0]}: {_USAGE}")

    try:
        # Imported here, so that --help works without torch.
        from narrowcast.machine import require_torch
        from narrowcast.scripts import Script, run_script

        require_torch()
        make_script = Script.from_module if is_module else Script.from_path
        script = make_script(rest[0], rest[1:])
    except NarrowcastError as error:
        return _wrong_use(str(error))
    install(announces=True)
    run_script(script)
    return 0


def _wrong_use(text: str) -> int:
    sys.stderr.write(f"narrowcast: {text}\n")
    return _WRONG_USE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
