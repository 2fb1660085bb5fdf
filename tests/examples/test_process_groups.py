"""How ranks end: models in DDP before their group, and the threads of gloo with it.

A group that ends with a model waits for its threads with Python's lock held. One that lets go of a tensor
then wants the lock, and the rank hangs: on a machine with much to do, 1 in 14 did. A thread that is still at
work when Python ends may abort the process.
"""

import json
import os
import re
import sys

import pytest
from example_runs import EXAMPLES, run, succeeded

from child_processes import finished

# Python imports it as it starts. What it sees is written by each rank into a file of its own.
AT_START = """
import gc, json, os
from pathlib import Path

import torch.distributed
from torch.nn.parallel import DistributedDataParallel

destroy = torch.distributed.destroy_process_group


def watched(*group):
    models = sum(type(one) is DistributedDataParallel for one in gc.get_objects())
    destroy(*group)
    tasks = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    seen = {"models": models, "threads": [name for name in tasks if "gloo" in name]}
    Path(os.environ["SEEN"], str(os.getpid())).write_text(json.dumps(seen))


torch.distributed.destroy_process_group = watched
"""
OPTIONS = {
    "ddp.py": ("--steps", "3", "--overflow-at", "2"),
    "train_validate/main.py": (
        "--train-images", "16", "--validation-images", "8", "--size", "16", "--width", "4", "--epochs", "1",
    ),
    "segment_recurrence/main.py": (
        "--characters", "2000", "--width", "16", "--length", "8", "--memory", "12", "--batch-size", "16",
        "--steps", "2",
    ),
    "speech_style/main.py": (
        "--width", "16", "--bins", "8", "--utterances", "40", "--batch-size", "8", "--steps", "2",
    ),
}  # fmt: skip
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")


@pytest.fixture
def watched(tmp_path):
    """(environment, what each rank saw)"""
    start, seen = tmp_path / "at_start", tmp_path / "seen"
    start.mkdir()
    seen.mkdir()
    (start / "sitecustomize.py").write_text(AT_START)
    environment = {"PYTHONPATH": str(start), "SEEN": str(seen), "OMP_NUM_THREADS": "1"}
    return environment, lambda: [json.loads(one.read_text()) for one in seen.iterdir()]


ENDS_WELL = [{"models": 0, "threads": []}] * 2


@pytest.mark.long
@pytest.mark.parametrize("script", OPTIONS)
def test_examples_end_well(script, tmp_path, watched):
    environment, seen = watched
    succeeded(run(script, *OPTIONS[script], "--device", "cpu", folder=tmp_path, processes=2, **environment))
    assert seen() == ENDS_WELL


def test_every_example_of_several_ranks_is_here():
    scripts = [path for path in EXAMPLES.rglob("*.py") if "init_process_group" in path.read_text()]
    assert {path.relative_to(EXAMPLES).as_posix() for path in scripts} == set(OPTIONS)


@pytest.mark.long
def test_the_script_of_the_page_ends_well(tmp_path, watched):
    page = (EXAMPLES.parent / "docs" / "several-gpus.md").read_text(encoding="utf-8")
    (script,) = re.findall(r'```python title="train_ddp.py"\n(.*?)```', page, re.DOTALL)
    (tmp_path / "train_ddp.py").write_text(script)
    environment, seen = watched
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = finished([*command, "train_ddp.py"], cwd=tmp_path, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert seen() == ENDS_WELL
