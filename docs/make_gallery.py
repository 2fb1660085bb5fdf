"""Run every example at its full size for this machine, one after the other; pictures go to docs/gallery.

An example is a file under examples/ whose docstring says "Run it:"; the first command there is run. What else
it writes lies in build/examples.

    python docs/make_gallery.py
    python docs/make_gallery.py digits quantized_sine
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
WRITTEN = ROOT / "build" / "examples"


def commands() -> dict[str, list[str]]:
    """Name of each example, as ``"train_validate/main"`` -> the words of its first command."""
    found = {}
    for path in sorted((ROOT / "examples").rglob("*.py")):
        said = re.search(r"^Run it:\n\n    (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if said:
            found[path.relative_to(ROOT / "examples").with_suffix("").as_posix()] = shlex.split(said[1])
    return found


def run(name: str, command: list[str]) -> bool:
    folder = WRITTEN / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    program = [sys.executable, *command[1:]] if command[0] == "python" else command
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PATH": path, "PYTHONPATH": paths, "NARROWCAST_RUN_DIR": str(folder)}
    started = time.perf_counter()
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        done = subprocess.run(
            program, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    took_s = time.perf_counter() - started
    last = ((folder / "output.txt").read_text(encoding="utf-8").strip().splitlines() or [""])[-1]
    print(f"{name:<28} {took_s:6.1f} s  {'' if done.returncode == 0 else 'FAILED  '}{last}", flush=True)
    for picture in sorted(folder.rglob("*.png")):
        shutil.copy(picture, GALLERY / picture.name)
    return done.returncode == 0


def main(names: list[str]) -> int:
    every = commands()
    unknown = [name for name in names if name not in every]
    if unknown:
        print(f"no example is called {', '.join(unknown)}. Known: {', '.join(every)}", file=sys.stderr)
        return 2
    GALLERY.mkdir(exist_ok=True)
    failed = [name for name in names or every if not run(name, every[name])]
    if failed:
        print(f"what they wrote: {WRITTEN}/NAME/output.txt", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
