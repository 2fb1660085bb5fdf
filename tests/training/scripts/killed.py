"""One rank is killed in the middle of training; the other writes down how it ended.

torchrun --nproc-per-node 2 killed.py ddp FOLDER
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive
from ranks_common import Tiny, batches, make_optimizer, part
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc

KILLED_AT = 3


def main(kind, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = Tiny()
    run = DistributedDataParallel(model) if kind == "ddp" else model
    group = None if kind == "ddp" else dist.group.WORLD
    optimizer = make_optimizer("SGD", model.parameters())
    stepper = nc.Stepper(run, optimizer, "bf16", process_group=group)
    if dist.get_rank() == 0:
        # torchrun asks the others to end too; this one shall do so by itself.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    data = batches(1000)
    for number, (x, y) in enumerate(data):
        if number == KILLED_AT and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            with stepper.autocast():
                loss = mse_loss(run(part(x)), part(y))
            stepper.step(loss)
        except RuntimeError as error:
            facts = {"step": number, "steps": stepper.steps, "error": str(error)}
            (folder / "survivor.json").write_text(json.dumps(facts))
            raise
    (folder / "survivor.json").write_text(
        json.dumps({"step": len(data), "steps": stepper.steps, "error": ""})
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
