"""Threads in regions of torch.autocast, in a process with a kernel for ``linear`` whose rule is for nobody.

Each region that ends clears PyTorch's cache of casts, and waits for Python's lock with that of the cache in
hand; so a kernel that waits for the cache's with Python's in hand stops all of them.
"""

import faulthandler
import sys
import threading

import torch

import narrowcast as nc
from narrowcast.casting import PolicyRegion

faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-6)
torch.set_num_threads(1)
policy = nc.Policy(compute="bf16").with_rules(nc.rule.module("elsewhere", op="linear", compute="fp32"))
region = PolicyRegion(policy, {"cpu": torch.bfloat16})  # from now on there is the kernel
left = []


def compute():
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    for _ in range(2000):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
    left.append(layer)


threads = [threading.Thread(target=compute) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(left) == len(threads)
