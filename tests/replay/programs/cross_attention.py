"""Cross attention over padded context; one sample of the batch has no context at all."""

import torch
from torch import nn


class CrossAttention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, context, padding):
        k, v = self.kv(context).chunk(2, -1)
        q, k, v = self.split(self.q(x)), self.split(k), self.split(v)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(padding[:, None, None, :], float("-inf"))
        probs = torch.softmax(scores, -1)
        return self.out((probs @ v).transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.cross = CrossAttention(dim)

    def forward(self, x, context, padding):
        return x + self.cross(self.norm(x), context, padding)


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(16) for _ in range(2))
        self.head = nn.Linear(16, 7)

    def forward(self, x, context, padding):
        for layer in self.layers:
            x = layer(x, context, padding)
        return self.head(x)


def build():
    torch.manual_seed(0)
    model = Captioner()
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def loss_of(model, i):
    g = torch.Generator().manual_seed(i)
    x, context = torch.randn(4, 5, 16, generator=g), torch.randn(4, 6, 16, generator=g)
    lengths = torch.tensor([6, 3, 0 if i == 2 else 2, 4])
    padding = torch.arange(6)[None] >= lengths[:, None]
    return nn.functional.cross_entropy(model(x, context, padding).flatten(0, 1).float(), torch.arange(20) % 7)
