"""Hidden features are standardised over the batch with eps=1e-8; one unit is dead."""

import torch
from torch import nn


class Standardize(nn.Module):
    def __init__(self, eps=1e-8):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        mean, std = x.mean(0), x.std(0)
        return (x - mean) / (std + self.eps)


class Stage(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.fc = nn.Linear(a, b)
        self.norm = Standardize()

    def forward(self, x):
        return self.norm(torch.relu(self.fc(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(Stage(8, 16), Stage(16, 16))
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.stages(x))


def build():
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.stages[1].fc.bias[5] = -50.0
        model.stages[0].fc.bias.fill_(0.5)
    return model, torch.optim.SGD(model.parameters(), 1e-3)


def loss_of(model, i):
    g = torch.Generator().manual_seed(i)
    x = torch.randn(32, 8, generator=g)
    return nn.functional.cross_entropy(model(x).float(), x[:, :3].argmax(1))
