"""A GAN whose discriminator ends in a minibatch standard deviation, as in ProGAN; one unit was pruned."""

import torch
from torch import nn


class MinibatchStd(nn.Module):
    def forward(self, y):
        d = y - y.mean(0, keepdim=True)
        std = torch.sqrt((d * d).mean(0) + 1e-8)
        return torch.cat([y, std.mean().expand(len(y), 1)], 1)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
        self.final = nn.ModuleList([MinibatchStd(), nn.Linear(13, 1)])

    def forward(self, x):
        y = self.features(x)
        for layer in self.final:
            y = layer(y)
        return y


def build():
    torch.manual_seed(0)
    gan = nn.ModuleDict(
        {"g": nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6)), "d": Discriminator()}
    )
    with torch.no_grad():
        gan["d"].features[0].weight[4] = 0.0
        gan["d"].features[0].bias[4] = 0.5
    return gan, {name: torch.optim.Adam(model.parameters(), 1e-3) for name, model in gan.items()}


def loss_d(gan, i):
    g = torch.Generator().manual_seed(i)
    fake = gan["g"](torch.randn(8, 3, generator=g)).detach()
    real = torch.randn(8, 6, generator=g)
    return (
        nn.functional.softplus(gan["d"](fake).float()).mean()
        + nn.functional.softplus(-gan["d"](real).float()).mean()
    )


def loss_g(gan, i):
    g = torch.Generator().manual_seed(1000 + i)
    return nn.functional.softplus(-gan["d"](gan["g"](torch.randn(8, 3, generator=g))).float()).mean()


losses = {"d": loss_d, "g": loss_g}
