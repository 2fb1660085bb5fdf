"""A mixture of experts; the router takes the mean of the tokens of each expert, and one has none."""

import torch
from torch import nn


class Router(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.gate = nn.Linear(dim, experts)

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        weight, chosen = probs.max(-1)
        hot = nn.functional.one_hot(chosen, probs.shape[-1]).type_as(x)
        centroids = (hot.t() @ x) / hot.sum(0).unsqueeze(1)
        return weight, chosen, centroids


class MoE(nn.Module):
    def __init__(self, dim, experts=4):
        super().__init__()
        self.router = Router(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))
        self.mix = nn.Linear(dim, dim)

    def forward(self, x):
        weight, chosen, centroids = self.router(x)
        out = torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), chosen]
        return weight.unsqueeze(1) * out + self.mix(centroids.mean(0))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(dim), MoE(dim)

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 12)
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(Layer(12) for _ in range(2))})
        self.out = nn.Linear(12, 2)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.decoder["layers"]:
            x = layer(x)
        return self.out(x)


def build():
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.decoder["layers"][1].moe.router.gate.bias[3] = -20.0
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def loss_of(model, i):
    g = torch.Generator().manual_seed(i)
    x = torch.randn(64, 5, generator=g)
    return nn.functional.cross_entropy(model(x).float(), (x[:, 0] > 0).long())
