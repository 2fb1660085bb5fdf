"""Models of Hugging Face transformers as they are: they learn, in mixed precision too, and fetch nothing."""

import json
import os
import re
import sys

import pytest
from example_runs import EXAMPLES, run

from child_processes import finished

pytest.importorskip("transformers")

SMALL = {
    "transformers_text.py": "--steps 12 --hidden 64 --layers 1 --length 32 --batch-size 8 --device cpu",
    "transformers_digits.py": "--epochs 1 --hidden 32 --layers 2 --batch-size 64 --device cpu",
}
LAST_LINE = {
    "transformers_text.py": r"held-out loss (\d\.\d{3}) bits a byte",
    "transformers_digits.py": r"test accuracy ([01]\.\d{4})",
}
COMPARE = (sys.executable, "-m", "narrowcast", "compare", "--json", "--policy", "bf16", "--steps", "0")
# In every process of a comparison: Python imports it at its start.
NO_NETWORK = """
import os, socket

def refused(self, address):
    if self.family != socket.AF_UNIX:
        with open(os.environ["TRIED"], "a") as file:
            file.write(f"{address}\\n")
        raise OSError(f"a connection to {address}")

socket.socket.connect = socket.socket.connect_ex = refused
"""


@pytest.fixture
def offline(tmp_path):
    """Environment of a process that notes down each connection that it tries, and makes none."""
    (tmp_path / "at_start").mkdir()
    (tmp_path / "at_start" / "sitecustomize.py").write_text(NO_NETWORK)
    return {
        "HF_HUB_OFFLINE": "1",
        "NARROWCAST_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(tmp_path / "at_start"),
        "TRIED": str(tmp_path / "tried"),
    }


@pytest.mark.long
@pytest.mark.parametrize("script", SMALL)
def test_trains_under_run_and_passes_the_certificate_of_compare(script, tmp_path, offline):
    done = finished(
        [*COMPARE, str(EXAMPLES / script), *SMALL[script].split()],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("NARROWCAST_")} | offline,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "tried").exists(), (tmp_path / "tried").read_text()
    found = json.loads(done.stdout)
    assert found["verdict"]["right"] == "yes"
    certificate = found["certificate"]
    assert certificate["verdict"] == "pass"
    assert 0 < certificate["error_over_noise"] < 0.05
    for side in ("fp32", "mixed"):
        ran = found[side]
        assert ran["steps"] > 10
        assert ran["skipped_steps"] == 0
        assert re.fullmatch(LAST_LINE[script], ran["last_line"])


# Bounds of the number in the last line. Guessing comes to 8 bits and to an accuracy of 0.1, the bytes'
# frequencies to 4.6 bits; seeds 0 to 2 come to 3.6 to 3.7 bits, and to 0.84 to 0.87.
LEARNS = {
    "transformers_text.py": ("--steps 120 --hidden 64 --layers 1 --length 64 --batch-size 16", 0, 4.2),
    "transformers_digits.py": ("--epochs 6 --hidden 48 --layers 2", 0.6, 1),
}


@pytest.mark.long
@pytest.mark.parametrize("script", LEARNS)
def test_it_learns(script, tmp_path, offline):
    options, least, most = LEARNS[script]
    done = run(script, *options.split(), "--device", "cpu", folder=tmp_path, **offline)
    assert done.returncode == 0, done.stderr
    last = re.fullmatch(LAST_LINE[script], done.stdout.splitlines()[-1])
    assert least < float(last[1]) < most
    assert list(tmp_path.glob("*.*")) == []


@pytest.mark.long
@pytest.mark.parametrize("script", SMALL)
def test_says_in_one_line_that_transformers_is_missing(script, tmp_path):
    without = (
        f"import sys, runpy; sys.modules['transformers'] = None; runpy.run_path({str(EXAMPLES / script)!r})"
    )
    done = finished([sys.executable, "-c", without], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "this example needs transformers: pip install transformers\n"
