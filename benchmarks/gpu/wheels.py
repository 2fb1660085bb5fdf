"""Wheels for a machine that has torch and no network: fetched by `make gpu-wheels`, found by `make gpu`.

`make gpu` installs nothing. It unpacks those whose package is missing, or older than pyproject.toml asks for.
"""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What the package and its GPU tests import, but for torch and what torch brings; pip adds what these need.
# Not scikit-learn and matplotlib: they are large, and usually there.
NAMES = [
    *("typer", "rich", "msgspec", "torchao"),
    *("pytest", "pytest-xdist", "hypothesis", "numpy", "psutil", "safetensors"),
]
MOST_BYTES = 60_000_000


def fetch(folder: Path) -> None:
    """Download the wheels for CPython 3.12 on x86-64 Linux, in the versions that constraints.txt names."""
    fetched = folder.with_name(f"{folder.name}-fetching")
    shutil.rmtree(fetched, ignore_errors=True)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)] + ["manylinux2014_x86_64"]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"),
        *(word for platform in platforms for word in ("--platform", platform)),
        *("-c", str(ROOT / "constraints.txt"), "-d", str(fetched), *NAMES),
    ]
    if subprocess.run(command, check=False).returncode:
        sys.exit("pip could not fetch the wheels; what was fetched before is kept")
    shutil.rmtree(folder, ignore_errors=True)
    fetched.rename(folder)
    sizes = [wheel.stat().st_size for wheel in folder.iterdir()]
    print(f"{len(sizes)} wheels, {sum(sizes) / 1e6:.1f} MB, in {folder}")
    if sum(sizes) > MOST_BYTES:
        sys.exit(f"that is more than {MOST_BYTES / 1e6:.0f} MB")


def unpacked(wheels: Path, site: Path) -> str | None:
    """Unpack what this Python lacks into ``site``, and return that folder; None where there are no wheels."""
    if not wheels.is_dir():
        return None
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    oldest = _oldest()
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0].lower().replace("_", "-")
        if _is_missing(name, oldest.get(name, ())):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(site)
    return str(site)


def _is_missing(name: str, oldest: tuple[int, ...]) -> bool:
    try:
        return _numbers(version(name)) < oldest
    except PackageNotFoundError:
        return True


def _oldest() -> dict[str, tuple[int, ...]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(one for group in project["optional-dependencies"].values() for one in group),
    ]
    found = (re.match(r"([\w-]+)>=([\d.]+)", one) for one in wanted)
    return {match[1].lower().replace("_", "-"): _numbers(match[2]) for match in found if match}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


if __name__ == "__main__":
    fetch(ROOT / "build" / "gpu-wheels")
