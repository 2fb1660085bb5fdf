"""A process that saves over and over to one path is killed, again and again, at random moments.

    python checkpoint_kills.py FOLDER ROUNDS SEED file|folder

Prints one line of JSON a round: what was found at the path, which saves were complete, and what the killed
process left behind; then one of what is left after another save.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from narrowcast.training import load_checkpoint, save_checkpoint

ELEMENTS = 2**19  # 2 MiB in fp32, and as much in two more tensors


def filled(number):
    model = torch.nn.Module()
    for name in ("a", "b", "c"):
        model.register_parameter(name, torch.nn.Parameter(torch.full((ELEMENTS,), float(number))))
    return model


def save_for_ever(path, first, told):
    model = filled(first)
    for number in range(first, first + 1_000_000):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(number))
        save_checkpoint(path, model, position=number)
        os.write(told, b"%d\n" % number)


def stray(path):
    """What a complete checkpoint has not: parts of files, and folders of data beside the one in use."""
    beside = [one.name for one in path.parent.iterdir() if one != path]
    inside = [one.name for one in path.iterdir()] if path.is_dir() else []
    return beside + inside[2:] if len(inside) > 2 else beside


def main(folder, rounds, seed, kind):
    torch.set_num_threads(1)
    path = Path(folder) / "last.ckpt"
    if kind == "folder":
        path.mkdir()
    moments = random.Random(seed)
    save_checkpoint(path, filled(0), position=0)
    last = 0
    for _ in range(rounds):
        heard, told = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(path, last + 1, told)
            finally:
                os._exit(1)
        os.close(told)
        time.sleep(moments.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(heard) as complete:
            saved = [last, *map(int, complete.read().split())]
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
