"""SimCLR; the features are not normalised and the temperature is small."""

import torch
from torch import nn


class NTXent(nn.Module):
    def __init__(self, temperature=0.005):
        super().__init__()
        self.temperature = temperature

    def forward(self, z):
        sim = z @ z.t()
        eye = torch.eye(len(z), dtype=torch.bool)
        sim = sim.masked_fill(eye, float("-inf"))
        return sim / self.temperature


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32))
        self.projector = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128))
        self.contrast = NTXent()

    def forward(self, x1, x2):
        return self.contrast(self.projector(self.encoder(torch.cat([x1, x2]))))


def build():
    torch.manual_seed(0)
    model = SimCLR()
    with torch.no_grad():
        model.projector[1].weight.mul_(6)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def loss_of(model, i):
    g = torch.Generator().manual_seed(i)
    x = torch.randn(6, 12, generator=g)
    logits = model(x + 0.1 * torch.randn(6, 12, generator=g), x + 0.1 * torch.randn(6, 12, generator=g))
    return nn.functional.cross_entropy(logits.float(), (torch.arange(12) + 6) % 12)
