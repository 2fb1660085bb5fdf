"""Two models that a host trains at once, as a GAN: the loss scale of both, and rules for one of them."""

import math

import lightning
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning_runs import QUIET, loader
from torch import nn

import narrowcast as nc
from narrowcast.errors import OrderError, PolicyError
from narrowcast.integrations.accelerate import prepare
from narrowcast.integrations.lightning import FabricPrecision, NarrowcastPrecision

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
MICRO_BATCHES = 8
ACCUMULATE = 2


@pytest.fixture(autouse=True)
def _no_accelerator_remains():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, noise):
        return self.net(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU())
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.body(x))


def made():
    """Return a generator, a discriminator, and an optimizer of each."""
    torch.manual_seed(0)
    models = Generator(), Discriminator()
    return *models, *(torch.optim.SGD(model.parameters(), 0.05) for model in models)


def micro_batches(bad):
    generator = torch.Generator().manual_seed(1)
    for number in range(MICRO_BATCHES):
        noise, real = torch.randn(16, 4, generator=generator), torch.randn(16, 8, generator=generator)
        if number == bad:
            real[0] = math.inf
        yield number, noise, real


def loss_of_discriminator(generator, discriminator, noise, real):
    fake = generator(noise).detach()
    return F.softplus(discriminator(fake)).mean() + F.softplus(-discriminator(real)).mean()


def loss_of_generator(generator, discriminator, noise):
    return F.softplus(-discriminator(generator(noise))).mean()


def by_hand(bad):
    """The norms of the generator's gradients in fp32, without the steps whose gradients are not finite."""
    generator, discriminator, step_generator, step_discriminator = made()
    norms = []
    for number, noise, real in micro_batches(bad):
        is_last = number % ACCUMULATE == ACCUMULATE - 1
        (loss_of_discriminator(generator, discriminator, noise, real) / ACCUMULATE).backward()
        if is_last:
            if nn.utils.clip_grad_norm_(discriminator.parameters(), 1.0).isfinite():
                step_discriminator.step()
            step_discriminator.zero_grad()
        kept = [None if p.grad is None else p.grad.clone() for p in discriminator.parameters()]
        (loss_of_generator(generator, discriminator, noise) / ACCUMULATE).backward()
        for parameter, gradient in zip(discriminator.parameters(), kept, strict=True):
            parameter.grad = gradient  # only its own loss trains it
        if is_last:
            norms.append(nn.utils.clip_grad_norm_(generator.parameters(), 1.0).item())
            step_generator.step()
            step_generator.zero_grad()
    return norms


def by_accelerate(policy, bad, scaler=None):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    models = prepare(accelerator, *made(), policy=policy, scaler=scaler)
    generator, discriminator, step_generator, step_discriminator = models
    norms = []
    for _, noise, real in micro_batches(bad):
        with accelerator.accumulate(generator, discriminator):
            accelerator.backward(loss_of_discriminator(generator, discriminator, noise, real))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(discriminator.parameters(), 1.0)
            step_discriminator.step()
            step_discriminator.zero_grad()
            discriminator.requires_grad_(False)
            accelerator.backward(loss_of_generator(generator, discriminator, noise))
            discriminator.requires_grad_(True)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(generator.parameters(), 1.0).item())
            step_generator.step()
            step_generator.zero_grad()
    assert step_discriminator.skipped_steps == (bad is not None)
    assert step_generator.skipped_steps == 0
    return norms


def by_fabric(policy, bad, scaler=None):
    plugin = FabricPrecision(policy, scaler=scaler)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    generator, discriminator, step_generator, step_discriminator = made()
    generator, step_generator = fabric.setup(generator, step_generator)
    discriminator, step_discriminator = fabric.setup(discriminator, step_discriminator)

    def clip(model, optimizer):
        return fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).item()

    norms = []
    for number, noise, real in micro_batches(bad):
        is_last = number % ACCUMULATE == ACCUMULATE - 1
        fabric.backward(loss_of_discriminator(generator, discriminator, noise, real) / ACCUMULATE)
        if is_last:
            clip(discriminator, step_discriminator)
            step_discriminator.step()
            step_discriminator.zero_grad()
        discriminator.requires_grad_(False)
        fabric.backward(loss_of_generator(generator, discriminator, noise) / ACCUMULATE)
        discriminator.requires_grad_(True)
        if is_last:
            norms.append(clip(generator, step_generator))
            step_generator.step()
            step_generator.zero_grad()
    return norms


class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator, *self.own_optimizers = made()
        self.automatic_optimization = False
        self.norms = []

    def configure_optimizers(self):
        return self.own_optimizers

    def training_step(self, batch, index):
        number, noise, real = batch
        is_last = number % ACCUMULATE == ACCUMULATE - 1
        step_generator, step_discriminator = self.optimizers()
        self.manual_backward(
            loss_of_discriminator(self.generator, self.discriminator, noise, real) / ACCUMULATE
        )
        if is_last:
            self.clip_gradients(step_discriminator, 1.0, "norm")
            step_discriminator.step()
            step_discriminator.zero_grad()
        self.discriminator.requires_grad_(False)
        self.manual_backward(loss_of_generator(self.generator, self.discriminator, noise) / ACCUMULATE)
        self.discriminator.requires_grad_(True)
        if is_last:
            self.clip_gradients(step_generator, 1.0, "norm")
            # The norm is below the limit of 1.
            gradients = [parameter.grad for parameter in self.generator.parameters()]
            self.norms.append(nn.utils.get_total_norm(gradients).item())
            step_generator.step()
            step_generator.zero_grad()


def by_lightning(policy, bad, scaler=None):
    if scaler is None and policy == "fp16":
        # The loss is computed in fp16 here, whose gradient is the scale.
        scaler = nc.GradScaler(init_scale=2.0**10)
    model, plugin = Gan(), NarrowcastPrecision(policy, scaler=scaler)
    lightning.Trainer(**QUIET, max_epochs=1, plugins=[plugin]).fit(model, loader(list(micro_batches(bad))))
    assert plugin.skipped_steps == (bad is not None)
    return model.norms


@pytest.mark.parametrize("train", [by_accelerate, by_fabric, by_lightning])
@pytest.mark.parametrize("bad", [None, 3])
def test_what_one_optimizer_accumulates_follows_the_scale_that_anothers_step_moves(train, bad):
    """An infinity in the second micro-batch of the discriminator halves the scale of the generator's sum."""
    expected = by_hand(bad)
    for policy in ("bf16", "fp16"):
        norms = train(policy, bad)
        assert len(norms) == len(expected) == MICRO_BATCHES // ACCUMULATE
        assert norms == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("train", [by_accelerate, by_fabric, by_lightning])
def test_the_scale_may_grow_while_one_optimizer_accumulates(train):
    scaler = nc.GradScaler(init_scale=2.0**4, growth_interval=1)
    assert train("fp16", None, scaler) == pytest.approx(by_hand(None), rel=0.02)
    assert scaler.get_scale() > 2.0**4


def test_weights_that_two_models_share_follow_once():
    body, scaler = nn.Linear(4, 4), nc.GradScaler(init_scale=32.0, growth_interval=1)
    actor, critic = (nn.Sequential(body, nn.Linear(4, 1)) for _ in range(2))
    accelerator = Accelerator(cpu=True)
    optimizers = [torch.optim.SGD(actor.parameters(), 0.1), torch.optim.SGD(critic[1].parameters(), 0.1)]
    actor, critic, _, step_critic = prepare(
        accelerator, actor, critic, *optimizers, policy="fp16", scaler=scaler
    )
    accelerator.backward(actor(torch.ones(2, 4)).sum())
    before = [parameter.grad.clone() for parameter in actor.parameters()]
    body.requires_grad_(False)
    for _ in range(2):
        accelerator.backward(critic(torch.ones(2, 4)).sum())
        step_critic.step()
        step_critic.zero_grad()
    for gradient, parameter in zip(before, actor.parameters(), strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)


# ---- rules


def ruled(*rules):
    return nc.Policy.preset("bf16").with_rules(*rules)


RULES = [
    nc.rule.module("head", compute="fp32"),
    nc.rule.module_type(Generator, compute="fp32"),
    nc.rule.module("net.2", compute="fp32"),
]


@pytest.mark.parametrize("policy", [ruled(rule) for rule in RULES], ids=lambda policy: str(policy.rules[0]))
def test_a_rule_may_be_for_one_of_two_models(policy):
    by_accelerate(policy, None)
    by_fabric(policy, None)


def test_a_rule_that_no_model_has_is_refused_with_the_modules_of_each():
    policy = ruled(nc.rule.module("haed", compute="fp32"))
    with pytest.raises(
        PolicyError, match=r'this Generator has no modules "haed".*; this Discriminator .*"head"'
    ):
        prepare(Accelerator(cpu=True), *made(), policy=policy)
    with pytest.raises(
        PolicyError, match=r'this Generator has no modules "haed".*; this Discriminator .*"head"'
    ):
        by_fabric(policy, None)


def test_gradients_that_were_unscaled_too_early_are_refused():
    accelerator = Accelerator(cpu=True)
    generator, discriminator, step_generator, step_discriminator = prepare(
        accelerator, *made(), policy="fp16"
    )
    noise, real = torch.randn(4, 4), torch.randn(4, 8)
    accelerator.backward(loss_of_generator(generator, discriminator, noise))
    accelerator.unscale_gradients()
    step_discriminator.step()
    with pytest.raises(OrderError, match="right before the step that uses them, got those of SGD unscaled"):
        accelerator.backward(loss_of_discriminator(generator, discriminator, noise, real))
    step_generator.zero_grad()
    accelerator.backward(loss_of_generator(generator, discriminator, noise))
    step_generator.step()
