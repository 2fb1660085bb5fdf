"""A process that saves over and over to one path is killed, again and again, at random moments.

    python checkpoint_kills.py FOLDER ROUNDS SEED file|folder

Prints a line of JSON a round: the last save that the process reported (saved), the one that was loaded
(found), the values in it, and what the killed process left beside it (stray); then what is left after another
save.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from narrowcast.training import load_checkpoint, save_checkpoint

ELEMENTS = 2**19  # of each of three tensors: 2 MiB in fp32


def filled(number):
    model = torch.nn.Module()
    for name in ("a", "b", "c"):
        model.register_parameter(name, torch.nn.Parameter(torch.full((ELEMENTS,), float(number))))
    return model


def save_for_ever(path, first, report_to):
    model = filled(first)
    for number in itertools.count(first):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(number))
        save_checkpoint(path, model, position=number)
        os.write(report_to, b"%d\n" % number)


def stray(path):
    """What a complete checkpoint has not: temporary files beside it, and data folders out of use."""
    beside = [one.name for one in path.parent.iterdir() if one != path]
    if not path.is_dir():
        return beside
    # A marker and one folder of data are in use. Which folder that is does not matter here.
    inside = sorted(one.name for one in path.iterdir())
    return beside + inside[2:]


def main(folder, rounds, seed, kind):
    torch.set_num_threads(1)
    path = Path(folder) / "last.ckpt"
    if kind == "folder":
        path.mkdir()
    moments = random.Random(seed)
    save_checkpoint(path, filled(0), position=0)
    last = 0
    for _ in range(rounds):
        reports, report_to = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(path, last + 1, report_to)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(report_to)
        time.sleep(moments.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the process that saves ended by itself"
        with os.fdopen(reports) as lines:
            saved = [last, *map(int, lines)]
        left = stray(path)
        model = filled(-1)
        found = load_checkpoint(path, model)
        values = {float(value) for one in model.parameters() for value in one.detach().unique()}
        print(
            json.dumps({"saved": saved[-1], "found": found.position, "values": sorted(values), "stray": left})
        )
        last = found.position
    save_checkpoint(path, filled(last), position=last)
    print(json.dumps({"left": stray(path)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
