"""Regression with a Laplace likelihood; the predicted scale is small, and its gradient passes fp16."""

import torch
from torch import nn


class LaplaceHead(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.params = nn.Linear(dim, 2)

    def forward(self, h, y):
        mu, raw = self.params(h).unbind(-1)
        b = torch.sigmoid(raw)
        z = (y.type_as(mu) - mu) / b
        return z.abs() + torch.log(2 * b)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 16), nn.SiLU())
        self.likelihood = LaplaceHead(16)

    def forward(self, x, y):
        return self.likelihood(self.net(x), y)


def build():
    torch.manual_seed(0)
    model = Regressor()
    with torch.no_grad():
        model.likelihood.params.bias[1] = -8.0
    return model, torch.optim.Adam(model.parameters(), 1e-3)


def loss_of(model, i):
    g = torch.Generator().manual_seed(i)
    x = torch.randn(16, 5, generator=g)
    return model(x, x.sum(1)).float().mean()
