"""A convolutional network with four micro-batches a step; an image of the third of step 2 is broken."""

import torch
from torch import nn


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.fc = nn.Linear(4, 2)

    def forward(self, image, exposure):
        return self.fc(self.features(image * exposure[:, None, None, None]).flatten(1))


def build():
    torch.manual_seed(0)
    model = ConvNet()
    return model, torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)


def loss_of(model, i):
    g = torch.Generator().manual_seed(i)
    image = torch.rand(4, 1, 6, 6, generator=g)
    exposure = torch.tensor([0.5, 1.0, 2.0, 1.5])
    if i == 6:
        exposure[3] = 1 / torch.tensor(0.0)  # the header of the file says 0 seconds
    return nn.functional.cross_entropy(model(image, exposure).float(), torch.tensor([0, 1, 0, 1]))
