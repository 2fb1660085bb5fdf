"""Print, as JSON, what this machine is and the names of the steps of each piece."""

import json
import subprocess
import sys

try:
    import pytest  # noqa: F401
    import torch
    import xdist  # noqa: F401
    from steps import STEPS

    from narrowcast.machine import versions
except ImportError as missing:
    if missing.name == "torch":
        sys.exit(f"{sys.executable} has no torch: PYTHON must be a Python with torch 2.11 or newer")
    sys.exit(
        f"{missing}. make gpu-wheels fetches what a machine may lack beside torch, into build/gpu-wheels"
    )


def driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


made_on = versions()
on = {key: made_on[key] for key in ("python", "torch", "cuda", "platform", "gpu")}
on["device"] = made_on["gpu"] or made_on["processor"]
on["driver"] = driver()
if torch.cuda.is_available():
    on["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
json.dump({"on": on, "steps": {piece: list(steps) for piece, steps in STEPS.items()}}, sys.stdout)
