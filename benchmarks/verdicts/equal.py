"""Ten small programs that train as well in bf16 as in fp32.

``python equal.py NAME`` trains one; with ``--bf16`` under ``torch.autocast``, by hand. It prints the mean
loss of the last twenty steps.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

STEPS = 120
Losses = Callable[[], torch.Tensor]


def mlp() -> tuple[nn.Module, Losses]:
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))

    def loss() -> torch.Tensor:
        x = torch.randn(128, 32)
        return functional.mse_loss(model(x), x[:, :1].sin() + x[:, 1:2] * x[:, 2:3])

    return model, loss


def convolutions() -> tuple[nn.Module, Losses]:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )

    def loss() -> torch.Tensor:
        labels = torch.randint(4, (32,))
        images = torch.randn(32, 1, 16, 16)
        for image, label in zip(images, labels.tolist(), strict=True):
            image[0, 4 * label : 4 * label + 4] += 1.0
        return functional.cross_entropy(model(images), labels)

    return model, loss


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0][:, -1])


def recurrent() -> tuple[nn.Module, Losses]:
    model = Recurrent()

    def loss() -> torch.Tensor:
        x = torch.randn(64, 12, 4)
        return functional.mse_loss(model(x), x[:, :, :1].mean(1))

    return model, loss


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)))


def transformer() -> tuple[nn.Module, Losses]:
    model = Attending()

    def loss() -> torch.Tensor:
        tokens = torch.randint(16, (32, 12))
        target = (tokens + tokens[:, :1]) % 16
        return functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten())

    return model, loss


def autoencoder() -> tuple[nn.Module, Losses]:
    encoder = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
    decoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 64))
    model = nn.Sequential(encoder, decoder)
    mixing = torch.randn(8, 64)

    def loss() -> torch.Tensor:
        x = torch.tanh(torch.randn(128, 8) @ mixing)
        return functional.mse_loss(model(x), x)

    return model, loss


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(200, 16), nn.Embedding(300, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.head(self.users(users) * self.items(items)).flatten()


def factors() -> tuple[nn.Module, Losses]:
    model = Factors()
    true_users, true_items = torch.randn(200, 4), torch.randn(300, 4)

    def loss() -> torch.Tensor:
        users, items = torch.randint(200, (256,)), torch.randint(300, (256,))
        return functional.mse_loss(model(users, items), (true_users[users] * true_items[items]).sum(1))

    return model, loss


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(sample), mean, log_variance


def variational() -> tuple[nn.Module, Losses]:
    model = Variational()
    mixing = torch.randn(4, 32)

    def loss() -> torch.Tensor:
        x = torch.randn(128, 4) @ mixing
        found, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return functional.mse_loss(found, x) + 0.01 * divergence

    return model, loss


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + torch.relu(norm(block(x)))
        return self.head(x.mean((2, 3)))


def residual() -> tuple[nn.Module, Losses]:
    model = Residual()

    def loss() -> torch.Tensor:
        labels = torch.randint(2, (16,))
        images = torch.randn(16, 3, 12, 12)
        images[:, 0] += (labels * 2.0 - 1.0)[:, None, None] * 0.3
        return functional.cross_entropy(model(images), labels)

    return model, loss


def policy_gradient() -> tuple[nn.Module, Losses]:
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))

    def loss() -> torch.Tensor:
        state = torch.randn(256, 8)
        choice = torch.distributions.Categorical(logits=model(state).float())
        action = choice.sample()
        reward = (action == state[:, :4].argmax(1)).float()
        return -(choice.log_prob(action) * (reward - reward.mean())).mean()

    return model, loss


def contrastive() -> tuple[nn.Module, Losses]:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def loss() -> torch.Tensor:
        x = torch.randn(64, 16)
        one = functional.normalize(model(x), dim=1)
        other = functional.normalize(model(x + 0.3 * torch.randn_like(x)), dim=1)
        return functional.cross_entropy(one @ other.T / 0.2, torch.arange(64))

    return model, loss


PROGRAMS = {
    program.__name__: program
    for program in (
        mlp,
        convolutions,
        recurrent,
        transformer,
        autoencoder,
        factors,
        variational,
        residual,
        policy_gradient,
        contrastive,
    )
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model, loss_of_batch = PROGRAMS[options.program]()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    last: list[float] = []
    for step in range(STEPS):
        region = torch.autocast("cpu", torch.bfloat16) if options.bf16 else contextlib.nullcontext()
        with region:
            loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= STEPS - 20:
            last.append(loss.item())
    print(f"loss {sum(last) / len(last):.6f}")
