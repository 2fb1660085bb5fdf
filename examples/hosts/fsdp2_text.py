"""A network learns to guess the next byte of a text, sharded by FSDP2 and trained by nc.Stepper.

Run `torchrun --nproc-per-node 2 examples/hosts/fsdp2_text.py`. The loss falls from that of guessing, 5.5.
"""

import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import narrowcast as nc
from narrowcast.integrations.fsdp2 import shard


def train(device: str) -> None:
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))  # also begins the process group
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256))
    model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), mlp).to(device)
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("2.2", compute="fp32", output="lower"))
    shard(model, mesh, policy)
    stepper = nc.Stepper(model, torch.optim.AdamW(model.parameters(), 3e-3), policy, max_norm=1.0)
    text = torch.tensor(list(nn.MultiheadAttention.__doc__.encode()), device=device)
    torch.manual_seed(dist.get_rank())  # each rank draws rows of its own
    for _ in range(200):
        places = torch.randint(len(text) - 8, (64, 1), device=device) + torch.arange(9, device=device)
        with stepper.autocast():
            loss = nn.functional.cross_entropy(model(text[places[:, :8]]), text[places[:, 8]])
        result = stepper.step(loss)
    if dist.get_rank() == 0:
        print(f"{stepper.steps} steps on {dist.get_world_size()} ranks, loss {loss.item():.2f}, {result}")


train("cuda" if torch.cuda.is_available() else "cpu")
gc.collect()  # the model ends before its group
dist.destroy_process_group()
