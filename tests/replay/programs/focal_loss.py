"""Focal loss with gamma = 0.5 inside of the model, in bf16."""

import torch
from torch import nn


class FocalLoss(nn.Module):
    def __init__(self, gamma=0.5):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, target):
        p = torch.sigmoid(logits)
        pt = torch.where(target > 0, p, 1 - p).clamp(min=1e-4)
        weight = (1 - pt) ** self.gamma
        return -(weight * torch.log(pt)).mean()


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.cls = nn.Linear(16, 4)
        self.losses = nn.ModuleDict({"cls": FocalLoss()})

    def forward(self, x, target):
        return self.losses["cls"](self.cls(self.backbone(x)), target)


def build():
    torch.manual_seed(0)
    model = Detector()
    with torch.no_grad():
        model.cls.bias.fill_(-8.0)  # the prior of rare objects, as RetinaNet has it, only stronger
    return model, torch.optim.SGD(model.parameters(), 1e-2)


def loss_of(model, i):
    g = torch.Generator().manual_seed(i)
    x = torch.randn(16, 8, generator=g)
    target = (torch.rand(16, 4, generator=g) > 0.9).float()
    return model(x, target)
