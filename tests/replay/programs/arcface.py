"""ArcFace; one embedding lies exactly on its class centre."""

import torch
import torch.nn.functional as F
from torch import nn


class ArcMargin(nn.Module):
    def __init__(self, dim, classes, s=8.0, m=0.3):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(classes, dim))  # centres: one axis per class
        self.s, self.m = s, m

    def forward(self, x, labels):
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        theta = torch.acos(cosine.clamp(-1, 1))
        hot = F.one_hot(labels, len(self.weight)).bool()
        return self.s * torch.cos(torch.where(hot, theta + self.m, theta))


class FaceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU())
        self.head = nn.ModuleDict({"margin": ArcMargin(6, 4)})

    def forward(self, x, labels):
        return self.head["margin"](self.body(x), labels)


def build():
    torch.manual_seed(0)
    model = FaceNet()
    nn.init.eye_(model.body[0].weight)
    return model, torch.optim.SGD(model.parameters(), 1e-2)


def loss_of(model, i):
    g = torch.Generator().manual_seed(i)
    x = torch.rand(8, 6, generator=g) + 0.1
    x[3] = torch.tensor([0.0, 2.0, 0, 0, 0, 0])
    labels = torch.tensor([0, 1, 2, 1, 3, 2, 1, 0])
    return F.cross_entropy(model(x, labels).float(), labels)
