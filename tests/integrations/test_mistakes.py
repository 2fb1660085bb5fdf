"""Mistakes that people make who add a policy to a script of a host, and what they are told."""

import gc
import logging
import math
import warnings
import weakref

import lightning
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning_runs import QUIET, batches, fit, loader, make_net, make_optimizer, module_class
from torch import nn

import narrowcast as nc
from narrowcast.errors import OrderError, PolicyError, ScaleCollapseError, SettingError
from narrowcast.integrations.accelerate import prepare
from narrowcast.integrations.lightning import FabricPrecision, NarrowcastPrecision

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
Regression = module_class(lightning)


@pytest.fixture(autouse=True)
def _no_accelerator_remains():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def prepared(policy="bf16", net=None, **settings):
    accelerator = Accelerator(cpu=True)
    net = net or make_net()
    optimizer = make_optimizer(net.parameters())
    return accelerator, *prepare(accelerator, net, optimizer, policy=policy, **settings)


def prepared_without_optimizer(policy):
    """Return an accelerator, a network, what it prepared of it, and an optimizer that it does not know."""
    accelerator = Accelerator(cpu=True)
    net = make_net()
    return accelerator, net, prepare(accelerator, net, policy=policy), make_optimizer(net.parameters())


def set_up(policy="bf16", net=None):
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[FabricPrecision(policy)])
    net = net or make_net()
    return fabric, *fabric.setup(net, make_optimizer(net.parameters()))


def loss_of(model):
    inputs, targets = batches(1)[0]
    return F.mse_loss(model(inputs).float(), targets)


class Manual(Regression):
    """Manual optimization with a mistake in its step."""

    def __init__(self, mistake):
        super().__init__()
        self.automatic_optimization = False
        self.mistake = mistake

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        if self.mistake == "backward":
            with torch.autocast("cpu", enabled=False):
                loss.backward()
        else:
            self.manual_backward(loss)
        if self.mistake == "clip":
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        if self.mistake == "step":
            optimizer = optimizer.optimizer
        optimizer.step()


# ---- steps, backward passes and clipping that go round the host


def test_an_optimizer_that_was_not_prepared_is_refused():
    accelerator, net, model, optimizer = prepared_without_optimizer("fp16")
    accelerator.backward(loss_of(model))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(OrderError, match="got a step by hand: pass the optimizer to prepare too"):
        optimizer.step()
    assert all(map(torch.equal, before, net.parameters()))


def test_a_raw_step_in_manual_optimization_is_refused():
    with pytest.raises(OrderError, match=r"got a step by hand: step what self.optimizers\(\) returns"):
        fit(lightning, Manual("step"), batches(1), NarrowcastPrecision("fp16"))


def test_a_raw_step_beside_fabric_is_refused():
    fabric, model, optimizer = set_up("fp16")
    fabric.backward(loss_of(model))
    with pytest.raises(OrderError, match=r"step the optimizer that fabric\.setup returned"):
        optimizer.optimizer.step()


def test_other_optimizers_step_as_they_like():
    accelerator, model, optimizer = prepared()
    other = nn.Linear(2, 1)
    sgd = torch.optim.SGD(other.parameters(), 0.1)
    for _ in range(2):
        other(torch.ones(1, 2)).sum().backward()
        sgd.step()
        accelerator.backward(loss_of(model))
        optimizer.step()


def test_backward_by_hand_in_manual_optimization_names_the_hosts():
    with pytest.raises(OrderError, match=r"write self\.manual_backward\(loss\) in place of loss\.backward"):
        fit(lightning, Manual("backward"), batches(1), NarrowcastPrecision("fp16"))


@pytest.mark.parametrize("clips", [True, False])
def test_backward_by_hand_for_one_of_two_optimizers_is_refused(clips):
    accelerator = Accelerator(cpu=True)
    nets = make_net(), make_net()
    optimizers = [make_optimizer(net.parameters()) for net in nets]
    first, second, step_first, step_second = prepare(accelerator, *nets, *optimizers, policy="fp16")
    accelerator.backward(loss_of(first))
    step_first.step()
    loss_of(second).backward()
    with pytest.raises(OrderError, match=r"write accelerator\.backward\(loss\) in place of loss\.backward"):
        accelerator.clip_grad_norm_(second.parameters(), 1.0) if clips else step_second.step()


def test_clipping_after_a_backward_by_hand_names_the_hosts():
    accelerator, model, _ = prepared("fp16")
    loss_of(model).backward()
    with pytest.raises(OrderError, match=r"expected accelerator\.backward\(loss\)"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_fabric_clips_for_an_optimizer_that_it_does_not_step():
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[FabricPrecision("fp16")])
    net = make_net()
    model, optimizer = fabric.setup(net), make_optimizer(net.parameters())
    fabric.backward(loss_of(model))
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    with pytest.raises(OrderError, match=r"step the optimizer that fabric\.setup returned"):
        optimizer.step()


def by_accelerate():
    accelerator, model, optimizer = prepared("fp16")
    accelerator.backward(loss_of(model))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def by_fabric():
    fabric, model, optimizer = set_up("fp16")
    fabric.backward(loss_of(model))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def by_lightning():
    fit(lightning, Manual("clip"), batches(1), NarrowcastPrecision("fp16"))


@pytest.mark.parametrize(
    ("train", "advice"),
    [
        (by_accelerate, r"write accelerator\.clip_grad_norm_"),
        (by_fabric, r"write fabric\.clip_gradients"),
        (by_lightning, r"write self\.clip_gradients"),
    ],
)
def test_clipping_of_scaled_gradients_is_told(train, advice):
    with pytest.warns(
        UserWarning, match=rf"were changed by .* while they had the loss scale of 65536.* {advice}"
    ):
        train()


def test_the_hosts_own_clipping_warns_of_nothing():
    accelerator, model, optimizer = prepared("fp16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            accelerator.backward(loss_of(model))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


# ---- objects in the wrong place


def test_what_prepare_cannot_prepare_is_refused():
    net = make_net()
    optimizer = make_optimizer(net.parameters())
    with pytest.raises(SettingError, match="expected an Accelerator first, got a Sequential"):
        prepare(net, optimizer, policy="bf16")
    with pytest.raises(SettingError, match=r"one by one, got a list.*prepare\(accelerator, \*objects"):
        prepare(Accelerator(cpu=True), [net, optimizer], policy="bf16")


def test_the_plugin_of_the_trainer_in_fabric_is_named():
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[NarrowcastPrecision("bf16")])
    with pytest.raises(OrderError, match="in Fabric write FabricPrecision"):
        fabric.setup(make_net(), make_optimizer(make_net().parameters()))


# ---- rules


class Looped(nn.Module):
    """Layers in a container, which is not called itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.memory = nn.GRU(8, 4)
        self.unused = nn.GRU(8, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(self.memory(x)[0])


def one_step_with(rule):
    fabric, model, optimizer = set_up(nc.Policy.preset("bf16").with_rules(rule), Looped())
    fabric.backward(loss_of(model))
    optimizer.step()


def test_a_rule_for_a_container_whose_layers_are_called_in_a_loop_is_named():
    message = r"'layers' holds in calls of that module, and 'layers\.0' was called outside.*\"layers\.\*\""
    with pytest.raises(PolicyError, match=message):
        one_step_with(nc.rule.module("layers", compute="fp32"))
    one_step_with(nc.rule.module("layers.*", compute="fp32"))


def test_a_rule_for_a_module_that_is_not_called_is_told():
    with pytest.warns(UserWarning, match="the rule for unused did nothing in the first step"):
        one_step_with(nc.rule.module("unused", compute="fp32"))


# ---- what is told of a training


def test_what_the_first_step_computed_in_is_logged_once(caplog):
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("6", compute="fp32"))
    accelerator, model, optimizer = prepared(policy)
    with caplog.at_level(logging.INFO, logger="narrowcast"):
        for _ in range(2):
            accelerator.backward(loss_of(model))
            optimizer.step()
    (record,) = caplog.records
    assert record.getMessage().endswith("linear and convolution layers: 2 in bf16, 1 in fp32")


def steps(accelerator, model, optimizer, bad, scheduler=None):
    """Make four steps; the losses at ``bad`` are infinite."""
    for number in range(4):
        accelerator.backward(loss_of(model) * (math.inf if number in bad else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def test_a_collapse_names_what_this_host_offers():
    training = prepared(scaler=nc.GradScaler(patience=2))
    with pytest.raises(ScaleCollapseError, match=r"explain_skips=True .*scaler=nc\.GradScaler\(patience"):
        steps(*training, bad=(1, 2))


def test_a_scheduler_that_was_not_prepared_is_named():
    accelerator, model, optimizer = prepared("fp16")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)
    with pytest.warns(UserWarning, match="pass the scheduler to prepare too"):
        steps(accelerator, model, optimizer, bad=(1,), scheduler=scheduler)


def test_accelerate_counts_its_skips():
    training = prepared("fp16")
    steps(*training, bad=(1,))
    assert training[-1].skipped_steps == 1


# ---- several hosts, models that come and go


def test_a_model_that_waits_in_one_host_is_trained_by_another():
    """As where a cell of a notebook runs twice."""
    net = make_net()
    for _ in range(2):
        accelerator, model, optimizer = prepared("fp16", net)
    accelerator.backward(loss_of(model))
    optimizer.step()
    assert not optimizer.result.skipped


def test_a_rule_that_was_refused_leaves_the_model_as_it_was():
    net = make_net()
    optimizer = make_optimizer(net.parameters())
    with pytest.raises(PolicyError, match="no modules"):
        prepare(Accelerator(cpu=True), net, optimizer, policy=policy_with("nine"))
    prepare(Accelerator(cpu=True), net, optimizer, policy=policy_with("6"))
    with pytest.raises(PolicyError, match="no modules"):
        one_step(*set_up(policy_with("nine")))
    one_step(*set_up(policy_with("6")))


def policy_with(path):
    return nc.Policy.preset("bf16").with_rules(nc.rule.module(path, compute="fp32"))


def one_step(fabric, model, optimizer):
    fabric.backward(loss_of(model))
    optimizer.step()


def test_a_step_by_hand_without_a_loss_scale_is_told_and_made():
    """As the first half of a step of SAM, or a step inside of a backward pass."""
    accelerator, net, model, optimizer = prepared_without_optimizer("bf16")
    before = [parameter.detach().clone() for parameter in net.parameters()]
    accelerator.backward(loss_of(model))
    with pytest.warns(UserWarning, match="AdamW was stepped by hand .* neither its gradients nor"):
        optimizer.step()
    assert not any(map(torch.equal, before, net.parameters()))


class Calibrated(Regression):
    """Steps in a test, where the host has no optimizer."""

    def on_test_start(self):
        self.temperature = nn.Parameter(torch.ones(()))

    def test_step(self, batch, index):
        optimizer = torch.optim.SGD([self.temperature], 0.1)
        with torch.enable_grad():
            loss = self.net(batch[0]).float().mean() * self.temperature
        with torch.autocast("cpu", enabled=False):
            loss.backward()
        optimizer.step()


def test_a_step_in_a_test_of_the_trainer_is_the_modules_own():
    trainer = lightning.Trainer(**QUIET, plugins=[NarrowcastPrecision("fp16")], inference_mode=False)
    trainer.test(Calibrated(), loader(batches(1)), verbose=False)


def test_models_that_are_gone_are_not_kept():
    plugin = FabricPrecision("fp16")
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    gone = []
    for _ in range(3):
        net = make_net()
        gone.append(weakref.ref(net))
        model, optimizer = fabric.setup(net, make_optimizer(net.parameters()))
        one_step(fabric, model, optimizer)
    del net, model, optimizer
    gc.collect()
    assert all(reference() is None for reference in gone)


def test_a_step_that_the_loop_leaves_out_holds_nothing_up():
    """As for a norm that is not finite, after which gradients are zeroed."""
    for policy in ("bf16", "fp16"):
        accelerator, model, optimizer = prepared(policy)
        for bad in (True, False):
            accelerator.backward(loss_of(model) * (math.inf if bad else 1.0))
            if accelerator.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.step()
            optimizer.zero_grad()
        assert optimizer.result is not None


def test_another_model_trains_after_an_error_between_clipping_and_step():
    accelerator, model, optimizer = prepared("fp16")
    accelerator.backward(loss_of(model))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    model, optimizer = accelerator.free_memory(model, optimizer)
    net = make_net()
    model, optimizer = accelerator.prepare(net, make_optimizer(net.parameters()))
    for _ in range(3):
        accelerator.backward(loss_of(model))
        optimizer.step()
    assert not optimizer.result.skipped


def test_a_model_may_be_one_layer():
    accelerator, model, optimizer = prepared("fp16", nn.Linear(8, 1))
    accelerator.backward(loss_of(model))
    optimizer.step()
    assert model(torch.ones(1, 8)).dtype == torch.float32
