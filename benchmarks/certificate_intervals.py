"""How often the intervals of `Certificate.at(k)` hold the true value, and how wide they are.

For an MLP and two CNNs on scikit-learn's digits the value of 256 minibatches stands for the true one. Draws
of four and of 16 other minibatches each give an interval. It is no part of `make bench`; it takes a minute:

    python benchmarks/certificate_intervals.py
"""

import statistics

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import narrowcast as nc

EFFECTIVE = (1, 32, 256)
SAMPLES = 32
DRAWS = 20


def convolutional(normalised: bool) -> nn.Module:
    def norm(width: int) -> nn.Module:
        return nn.BatchNorm2d(width) if normalised else nn.Identity()

    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        *(nn.Conv2d(1, 8, 3, padding=1), norm(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), norm(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


MODELS = {
    "MLP": mlp,
    "CNN": lambda: convolutional(False),
    "CNN with batch norm": lambda: convolutional(True),
}


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, digits = batch
    return F.cross_entropy(model(images), digits)


def main() -> None:
    torch.set_num_threads(1)
    images, digits = map(torch.as_tensor, load_digits(return_X_y=True))
    images = images.float().div(16).view(-1, 8, 8)

    def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        chosen = [torch.randint(len(images), (SAMPLES,)) for _ in range(count)]
        return [(images[rows], digits[rows]) for rows in chosen]

    print("model, k, batches: draws that hold the value of 256, high over low, draws within 20 %", flush=True)
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        true = nc.certify(model, loss_fn, batches(256), "bf16")
        for count in (4, 16):
            drawn = [nc.certify(model, loss_fn, batches(count), "bf16") for _ in range(DRAWS)]
            for k in EFFECTIVE:
                value, found = true.at(k).value, [one.at(k) for one in drawn]
                held = sum(low <= value <= high for _, low, high in found)
                apart = statistics.median(high / max(low, 1e-12) for _, low, high in found)
                near = sum(abs(one.value / value - 1) <= 0.2 for one in found)
                print(f"{name}, {k}, {count}: {held}/{DRAWS}, {apart:.2g}, {near}/{DRAWS}", flush=True)


if __name__ == "__main__":
    main()
