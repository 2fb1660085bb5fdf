"""Small models, and one micro-batch of a Stepper, for the tests of Stepper."""

import torch
from torch import nn

import narrowcast as nc


def mlp(width=16, out=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out or width))


def made(policy="bf16", model=None, *, lr=0.1, **settings):
    """A model (by default one linear layer), SGD, and a Stepper of both."""
    model = nn.Linear(4, 1) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return model, optimizer, nc.Stepper(model, optimizer, policy, **settings)


def stepped(stepper, function, *arguments, name=None):
    """One micro-batch: the loss that ``function`` computes in the region."""
    with stepper.autocast():
        loss = function(*arguments)
    return stepper.step(loss, name=name)


def loss_of(model, stepper, x=None):
    """The mean square of the output, computed in the region, for ``x`` or ones."""
    x = torch.ones(2, model[0].in_features if isinstance(model, nn.Sequential) else 4) if x is None else x
    with stepper.autocast():
        return model(x).float().square().mean()


def micro_batch(model, stepper, x=None):
    return stepper.step(loss_of(model, stepper, x))


def train(model, stepper, steps):
    for _ in range(steps):
        micro_batch(model, stepper)
