"""Start the scripts of the tests of checkpoints in processes, and compare what they saved."""

import json
import os
import sys
from pathlib import Path

import torch
from torch.utils._pytree import tree_flatten

from child_processes import finished

SCRIPTS = Path(__file__).parent / "scripts"


def launched(script, *arguments, processes=None):
    """The lines that a script prints.

    Args:
        processes: under torchrun, so many.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, "-W", "error"]
    if processes:
        command = [sys.executable, *torchrun]
    done = finished([*command, SCRIPTS / script, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"{script} {arguments} ended with {done.returncode}:\n{done.stderr[-6000:]}"
    return done.stdout.splitlines()


def facts_of(script, *arguments, processes=None):
    """The JSON that a script prints, a value a line."""
    lines = launched(script, *arguments, processes=processes)
    return [json.loads(line) for line in lines if line.startswith("{")]


def same(one, other):
    """Alike to the bit: types, signs of zero, tensors with their dtypes and order of dimensions."""
    (values, form), (others, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(map(same_value, values, others))


def same_value(one, other):
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and repr(one) == repr(other)
    alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return alike and torch.equal(bytes_of(one), bytes_of(other))


def bytes_of(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


class Bomb:
    """Would create the file ``path`` if a pickle of it were loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")
