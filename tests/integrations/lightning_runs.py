"""Small models and loops for the tests of Lightning, on either of its packages."""

import functools

import torch
from torch import nn
from torch.utils.data import DataLoader

import narrowcast as nc

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.LayerNorm(32),
        nn.Linear(32, 16),
        nn.GELU(),
        nn.Linear(16, 1),
    )


def batches(count=6, bad=()):
    """Return batches of inputs and targets; those at the places ``bad`` hold infinities."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for place in range(count):
        inputs = torch.randn(16, 8, generator=generator)
        if place in bad:
            inputs[0] = torch.inf
        made.append((inputs, torch.randn(16, 1, generator=generator)))
    return made


def loader(data):
    # A generator of its own, so that dropout draws the same numbers as in a plain loop.
    return DataLoader(data, batch_size=None, generator=torch.Generator())


def make_optimizer(parameters, **settings):
    return torch.optim.AdamW(parameters, 1e-2, **settings)


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)


def weights(model):
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


@functools.cache
def module_class(package):
    """Return a module for the ``Trainer`` of a package: regression in automatic optimization."""

    class Regression(package.LightningModule):
        def __init__(self, interval="step", frequency=1, **settings):
            super().__init__()
            self.net = make_net()
            self.interval, self.frequency, self.settings = interval, frequency, settings
            self.validated = []

        def on_train_start(self):
            torch.manual_seed(2)

        def loss(self, batch):
            inputs, targets = batch
            return nn.functional.mse_loss(self.net(inputs).float(), targets)

        def training_step(self, batch, index):
            return self.loss(batch)

        def validation_step(self, batch, index):
            self.validated.append(self.net(batch[0]).dtype)

        test_step = validation_step

        def predict_step(self, batch, index):
            return self.net(batch[0])

        def configure_optimizers(self):
            optimizer = make_optimizer(self.parameters(), **self.settings)
            scheduler = {
                "scheduler": make_scheduler(optimizer),
                "interval": self.interval,
                "frequency": self.frequency,
            }
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    return Regression


def fit(package, model, data, plugin=None, *, ckpt_path=None, max_epochs=1, **settings):
    """Train ``model`` and return the trainer."""
    if plugin is not None:
        settings["plugins"] = [plugin]
    trainer = package.Trainer(**QUIET, max_epochs=max_epochs, **settings)
    # Checkpoints of tests hold more than tensors.
    trainer.fit(model, loader(data), ckpt_path=ckpt_path)
    return trainer


def with_stepper(policy, data, *, epochs=1, accumulate=1, max_norm=None, scaler=None, **settings):
    """Train the same network in a loop with a Stepper; return the network, the Stepper and the scheduler."""
    net = make_net()
    optimizer = make_optimizer(net.parameters(), **settings)
    scheduler = make_scheduler(optimizer)
    stepper = nc.Stepper(
        net, optimizer, policy, accumulate=accumulate, max_norm=max_norm, scheduler=scheduler, scaler=scaler
    )
    torch.manual_seed(2)
    for inputs, targets in data * epochs:
        with stepper.autocast():
            loss = nn.functional.mse_loss(net(inputs).float(), targets)
        stepper.step(loss)
    return net, stepper, scheduler


def with_fabric(fabric, data, plugin=None, *, epochs=1, accumulate=1, max_norm=None, **settings):
    """Train the same network in a loop with Fabric; return it and the scheduler."""
    net = make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net.parameters(), **settings))
    scheduler = make_scheduler(optimizer)
    torch.manual_seed(2)
    for place, (inputs, targets) in enumerate(data * epochs, 1):
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        fabric.backward(loss / accumulate)
        if place % accumulate:
            continue
        if max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        if plugin is None or not plugin.last_result.skipped:
            scheduler.step()
    return net, scheduler
