"""Runs scripts one after the other, each in a process forked from this one, which has imported torch once.

Reads jobs from stdin, as JSON: the words after ``python``, and the file that what it prints goes to.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch

from narrowcast.apex.__main__ import main as answer_for_apex


def run(words):
    """As ``python -m narrowcast.apex script`` where ``words`` begin with that, else as ``python script``."""
    if words[:2] == ["-m", "narrowcast.apex"]:
        return answer_for_apex(words[2:])
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
    return 0


def child(words, out):
    file = os.open(out, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 1
    try:
        code = run(words)
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The first step of the first optimizer imports torch's compiler.
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.Adam([parameter]).step()
    for job in json.load(sys.stdin):
        process = os.fork()
        if process == 0:
            child(job["words"], job["out"])
        _, status = os.waitpid(process, 0)
        if status:
            sys.exit(f"{' '.join(job['words'])} ended with {status}:\n{Path(job['out']).read_text()}")
