"""GELU by its tanh approximation, written by hand."""

import math

import torch
from torch import nn


class NewGELU(nn.Module):
    def forward(self, x):
        cube = x * x * x
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * cube)
        return 0.5 * x * (1 + torch.tanh(inner))


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, 4 * dim)
        self.act = NewGELU()
        self.proj = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.proj(self.act(self.fc(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.h = nn.ModuleList(nn.ModuleDict({"ln": nn.LayerNorm(16), "mlp": MLP(16)}) for _ in range(2))
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.h:
            x = x + block["mlp"](block["ln"](x))
        return self.out(x)


def build():
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.h[1]["mlp"].fc.weight[:4] *= 1000
        model.h[1]["mlp"].proj.weight[:, :4] /= 1000
    return model, torch.optim.Adam(model.parameters(), 1e-4)


def loss_of(model, i):
    g = torch.Generator().manual_seed(i)
    x = torch.randn(16, 8, generator=g)
    return nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
