"""Plain FP32 training with FSDP2 (fully_shard) on gloo."""

import json

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its functions' defaults would keep alive
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x = torch.randn(32, 12)
    y = x[:, :1].tanh()
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(json.dumps({"loss": losses}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
