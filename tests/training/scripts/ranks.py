"""Every scenario of several ranks in one launch; rank 0 prints a JSON line each, with all ranks' facts.

torchrun --nproc-per-node 2 ranks.py
"""

import json
import os
import sys
import warnings
from datetime import timedelta

import checkpoint_ranks
import ranks_agreement
import ranks_sharded
import ranks_skips
import ranks_training
import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive

SCENARIOS = {
    **ranks_skips.SCENARIOS,
    **ranks_training.SCENARIOS,
    **ranks_sharded.SCENARIOS,
    **ranks_agreement.SCENARIOS,
    **checkpoint_ranks.SCENARIOS,
}


def main():
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["NARROWCAST_CACHE_DIR"] += f"/rank {os.environ['RANK']}"
    # A rank that waits for one that has gone another way ends here, before the launch's own limit.
    scenarios = SCENARIOS
    if sys.argv[1:] == ["cuda"]:
        torch.cuda.set_device(0)
        scenarios = ranks_skips.ON_CUDA
    dist.init_process_group("gloo" if scenarios is SCENARIOS else "nccl", timeout=timedelta(seconds=60))
    wanted = sys.argv[1:] if scenarios is SCENARIOS and sys.argv[1:] else list(scenarios)
    for name in wanted:
        print(f"rank {dist.get_rank()}: {name}", file=sys.stderr, flush=True)
        facts = scenarios[name]()
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, facts)
        if dist.get_rank() == 0:
            print(json.dumps({"scenario": name, "ranks": every}), flush=True)
    dist.barrier()
    sys.stderr.flush()
    # gloo's threads of meshes that were never destroyed may abort an interpreter that shuts down.
    os._exit(0)


if __name__ == "__main__":
    main()
