"""Skipped steps are explained in Accelerate, the Trainer of transformers, Lightning and Fabric."""

from __future__ import annotations

import logging

import lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning_runs import QUIET, loader
from test_transformers_trainer import PolicyTrainer, llama
from torch import nn
from transformers import TrainingArguments

import narrowcast as nc
from narrowcast.integrations.accelerate import prepare
from narrowcast.integrations.lightning import FabricPrecision, NarrowcastPrecision
from narrowcast.scaling import Static

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
STEPS = 6
BAD = (2, 4)


class Square(nn.Module):
    def forward(self, x):
        return x * x  # overflows fp16 above 256


class Net(nn.Module):
    """Dropout, and a square that overflows fp16 in some batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), Square())
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            self.body[0].weight.copy_(torch.eye(8))

    def forward(self, x):
        return self.head(self.body(x))


def batches():
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(STEPS):
        x = torch.rand(4, 8, generator=generator)
        made.append(x * 600 if number in BAD else x)
    return made


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def fixed_scaler():
    return nc.GradScaler("cpu", loss_scale=Static(scale=8.0))


def with_accelerate(explain_skips):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepare(
        accelerator, model, optimizer, policy="fp16", scaler=fixed_scaler(), explain_skips=explain_skips
    )
    torch.manual_seed(2)
    for x in batches():
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return weights(model)


def with_fabric(explain_skips):
    plugin = FabricPrecision("fp16", scaler=fixed_scaler(), explain_skips=explain_skips)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 1e-3))
    torch.manual_seed(2)
    for x in batches():
        fabric.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


class Automatic(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def on_train_start(self):
        torch.manual_seed(2)

    def training_step(self, batch, index):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class Manual(Automatic):
    """It steps inside of the region."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).mean())
        optimizer.step()


def with_lightning(module_type, explain_skips):
    plugin = NarrowcastPrecision("fp16", scaler=fixed_scaler(), explain_skips=explain_skips)
    model = module_type()
    trainer = lightning.Trainer(**QUIET, max_epochs=1, plugins=[plugin])
    trainer.fit(model, loader(batches()))
    return weights(model)


HOSTS = {
    "accelerate": (with_accelerate, "body.2"),
    "fabric": (with_fabric, "body.2"),
    "lightning, automatic": (lambda explain: with_lightning(Automatic, explain), "net.body.2"),
    "lightning, manual": (lambda explain: with_lightning(Manual, explain), "net.body.2"),
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_skipped_step_is_explained_and_changes_no_bit(host, caplog):
    train, path = HOSTS[host]
    plain = train(False)
    with caplog.at_level(logging.WARNING, "narrowcast"):
        explained = train(True)
    assert torch.equal(explained, plain)
    (story,) = [message for message in caplog.messages if "narrowcast repeated it" in message]
    assert "step 3 was skipped at a loss scale of 8." in story
    assert f"where    forward pass of {path} (Square)" in story
    assert "return x * x  # overflows fp16 above 256" in story
    assert "verdict  precision: in fp32 the forward pass is finite" in story
    assert f'try      nc.rule.module("{path}", compute="fp32")' in story


def test_the_policy_of_accelerate_holds_after_a_replay():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepare(accelerator, model, optimizer, policy="fp16", explain_skips=True)
    for x in batches():
        accelerator.backward(model(x).mean())
        optimizer.step()
    formats = []
    model.body[0].register_forward_hook(lambda _module, _inputs, output: formats.append(output.dtype))
    model(batches()[0])
    assert formats == [torch.float16]


def test_the_trainer_names_the_layer_of_a_transformer(tmp_path, caplog):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1e7)
    data = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 8
    settings = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "max_steps": 2}
    arguments = TrainingArguments(tmp_path, per_device_train_batch_size=4, **settings)
    trainer = PolicyTrainer(
        model, arguments, train_dataset=data, policy="fp16", scaler=fixed_scaler(), explain_skips=True
    )
    with caplog.at_level(logging.WARNING, "narrowcast"):
        trainer.train()
    (story,) = [message for message in caplog.messages if "narrowcast repeated it" in message]
    assert "forward pass of model.layers.1.mlp.up_proj (Linear)" in story
    assert "verdict  precision" in story
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
