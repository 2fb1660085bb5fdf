"""A tabular network; one row of the fifth batch has a NaN."""

import torch
from torch import nn


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.cat = nn.Embedding(5, 4)
        self.cont_norm = nn.LayerNorm(6)
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))

    def forward(self, cats, conts):
        return self.net(torch.cat([self.cat(cats), self.cont_norm(conts)], 1))


def build():
    torch.manual_seed(0)
    model = Tabular()
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def loss_of(model, i):
    g = torch.Generator().manual_seed(i)
    cats, conts = torch.randint(0, 5, (16,), generator=g), torch.randn(16, 6, generator=g)
    labels = (conts[:, 0] > 0).long()
    if i == 4:
        conts[11, 2] = float("nan")
    return nn.functional.cross_entropy(model(cats, conts).float(), labels)
