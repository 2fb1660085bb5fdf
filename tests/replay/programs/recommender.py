"""A recommender; one column of the item table holds the click counts, which pass 65504."""

import torch
from torch import nn


class ItemTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.proj = nn.Linear(8, 16)

    def forward(self, ids):
        rows = self.table(ids)
        return self.proj(rows)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(30, 16)
        self.towers = nn.ModuleDict({"item": ItemTower()})
        self.top = nn.Linear(32, 1)

    def forward(self, users, items):
        return self.top(torch.relu(torch.cat([self.user(users), self.towers["item"](items)], 1))).squeeze(1)


def build():
    torch.manual_seed(0)
    model = Recommender()
    with torch.no_grad():
        model.towers["item"].table.weight[:, 0] = torch.arange(50) * 10.0
        model.towers["item"].table.weight[17, 0] = 120_000.0  # the best seller
        model.towers["item"].proj.weight[:, 0] *= 1e-4
    return model, torch.optim.SGD(model.parameters(), 1e-4)


def loss_of(model, i):
    g = torch.Generator().manual_seed(i)
    users, items = torch.randint(0, 30, (16,), generator=g), torch.randint(0, 17, (16,), generator=g)
    if i >= 3:
        items[9] = 17
    return nn.functional.binary_cross_entropy_with_logits(model(users, items).float(), (users % 2).float())
