"""Place deliberate breakages (breakages.toml) in a copy of the package and check that the tests fail.

python tests/breakages.py            # all of them, each against the tests of its package
python tests/breakages.py --fast     # against the whole of `make test`, until the first failure
python tests/breakages.py H01 D22    # some of them
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BREAKAGES = {
    one["id"]: one for one in tomllib.loads((ROOT / "tests" / "breakages.toml").read_text())["breakage"]
}


def place(breakage: dict, source: Path) -> None:
    path = source / "narrowcast" / breakage["file"]
    text = path.read_text(encoding="utf-8")
    if text.count(breakage["old"]) != 1:
        raise SystemExit(
            f"{breakage['id']}: its old text stands {text.count(breakage['old'])} times in {path}"
        )
    path.write_text(text.replace(breakage["old"], breakage["new"]), encoding="utf-8")


def failure(breakage: dict, *, fast: bool) -> str | None:
    """The first test that fails; None if the breakage is not noticed."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(shutil.copytree(ROOT / "src", Path(folder) / "src"))
        place(breakage, source)
        tests = ["tests"] if fast else [f"tests/{name}" for name in breakage["tests"]]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long", "-n", "auto", *tests]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            check=False,
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return None if done.returncode == 0 else (failed or [done.stdout[-200:]])[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID", help="which; all by default")
    parser.add_argument("--fast", action="store_true", help="run all fast tests instead of the package's")
    given = parser.parse_args()
    missed = 0
    for one in [BREAKAGES[name] for name in given.ids] or BREAKAGES.values():
        found = failure(one, fast=given.fast)
        missed += found is None
        print(f"{one['id']} {one['behaviour']}: {found or 'NOT NOTICED'}"[:160], flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
