"""narrowcast in Lightning's Trainer and in Fabric, against their own mixed precision and a Stepper loop."""

import functools
import inspect
import pickle
import types

import lightning
import pytest
import torch
from example_runs import EXAMPLES, run, succeeded
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning_runs import (
    QUIET,
    batches,
    fit,
    loader,
    make_net,
    make_optimizer,
    module_class,
    weights,
    with_fabric,
    with_stepper,
)
from torch import nn

import narrowcast as nc
from narrowcast.errors import OrderError, PolicyError, SettingError, UnsupportedError
from narrowcast.integrations.lightning import FabricPrecision, NarrowcastPrecision

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
Regression = module_class(lightning)


# ---- automatic optimization


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}])
def test_bf16_equals_the_hosts_own_to_the_bit(settings):
    host, ours = Regression(), Regression()
    fit(lightning, host, batches(), precision="bf16-mixed", **settings)
    fit(lightning, ours, batches(), NarrowcastPrecision("bf16"), **settings)
    assert torch.equal(weights(ours), weights(host))
    assert not torch.equal(weights(ours), weights(Regression()))


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}])
def test_fp16_equals_the_hosts_own_to_the_bit(settings):
    host, ours = Regression(), Regression()
    # On a CPU the host's ``precision="16-mixed"`` becomes bf16, but not its plugin.
    fit(lightning, host, batches(), MixedPrecision("16-mixed", "cpu"), **settings)
    fit(lightning, ours, batches(), NarrowcastPrecision("fp16"), **settings)
    assert torch.equal(weights(ours), weights(host))


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bad", [(), (0,), (3,), (5,)])
def test_equals_a_loop_with_a_stepper_also_after_a_skip(policy, bad):
    data = batches(bad=bad)
    net, stepper, scheduler = with_stepper(policy, data)
    model, plugin = Regression(), NarrowcastPrecision(policy)
    trainer = fit(lightning, model, data, plugin)

    assert torch.equal(weights(model), weights(net))
    assert plugin.scaler.state_dict() == stepper.scaler.state_dict()
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == scheduler.last_epoch == 6 - len(bad)
    assert plugin.last_result.skipped == (bad == (5,))
    assert plugin.skipped_steps == len(bad)


def test_skips_of_two_fits_are_counted_together():
    plugin = NarrowcastPrecision("bf16")
    for _ in range(2):
        fit(lightning, Regression(), batches(bad=(3,)), plugin)
    assert plugin.skipped_steps == 2


def test_the_result_names_the_parameters():
    plugin = NarrowcastPrecision("fp16")
    fit(lightning, Regression(), batches(1, bad=(0,)), plugin)
    assert "net.0.weight" in plugin.last_result.nonfinite


@pytest.mark.parametrize(
    ("interval", "frequency", "moves"), [("step", 1, 5), ("step", 2, 3), ("epoch", 1, 1)]
)
def test_a_skip_holds_the_schedulers_of_each_step(interval, frequency, moves):
    model = Regression(interval, frequency)
    trainer = fit(lightning, model, batches(bad=(3,)), NarrowcastPrecision("bf16"))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == moves


def test_a_held_scheduler_saves_what_it_saved_before():
    trainers = []
    for plugin in (None, NarrowcastPrecision("bf16")):
        trainers.append(fit(lightning, Regression(), batches(), plugin))
    host, ours = (trainer.lr_scheduler_configs[0].scheduler for trainer in trainers)
    assert ours.state_dict() == host.state_dict()
    assert isinstance(ours, type(host))


class CalledTwice(Regression):
    """Calls its network twice in a step, as a GAN its discriminator: the weights have two gradients."""

    def loss(self, batch):
        inputs, targets = batch
        return super().loss(batch) + super().loss((-inputs, targets))


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_gradients_of_two_calls_are_summed_in_fp32_as_by_the_host(policy):
    """With torch's cache of casts they would be summed in the low format."""
    host, ours = CalledTwice(), CalledTwice()
    precision = MixedPrecision("bf16-mixed" if policy == "bf16" else "16-mixed", "cpu")
    fit(lightning, host, batches(), precision)
    fit(lightning, ours, batches(), NarrowcastPrecision(policy))
    assert torch.equal(weights(ours), weights(host))


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_in_either_micro_batch_skips_both(policy, bad):
    data = batches(bad=(2 + bad,))
    net, stepper, scheduler = with_stepper(policy, data, accumulate=2)
    model, plugin = Regression(), NarrowcastPrecision(policy)
    trainer = fit(lightning, model, data, plugin, accumulate_grad_batches=2)

    assert torch.equal(weights(model), weights(net))
    assert plugin.scaler.state_dict() == stepper.scaler.state_dict()
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == scheduler.last_epoch == 2


class Watching(Regression):
    """Remembers the gradients that its hooks get."""

    def on_train_start(self):
        super().on_train_start()
        self.losses, self.gradients = [], []

    def on_before_backward(self, loss):
        self.losses.append(loss.item())

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]))


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_get_an_unscaled_loss_and_gradients(fused):
    models = [Watching(fused=fused), Watching(fused=fused)]
    fit(lightning, models[0], batches(2), NarrowcastPrecision("fp32"))
    fit(lightning, models[1], batches(2), NarrowcastPrecision("fp16"))
    torch.testing.assert_close(models[1].losses, models[0].losses, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(models[1].gradients, models[0].gradients, rtol=0.1, atol=1e-2)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_fused_optimizers_clip(policy):
    data = batches(bad=(2,))
    net, _, _ = with_stepper(policy, data, max_norm=0.1, fused=True)
    model = Regression(fused=True)
    fit(lightning, model, data, NarrowcastPrecision(policy), gradient_clip_val=0.1)
    # A Stepper clips in the pass that unscales, which rounds otherwise.
    torch.testing.assert_close(weights(model), weights(net), rtol=1e-4, atol=1e-6)


def test_the_host_refuses_to_clip_fused_optimizers():
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(
            lightning,
            Regression(fused=True),
            batches(),
            MixedPrecision("16-mixed", "cpu"),
            gradient_clip_val=0.1,
        )


class Leaving(Regression):
    def training_step(self, batch, index):
        return None if index == 1 else self.loss(batch)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_batch_that_the_module_leaves_out_moves_nothing():
    host, ours = Leaving(), Leaving()
    fit(lightning, host, batches(), MixedPrecision("16-mixed", "cpu"))
    fit(lightning, ours, batches(), NarrowcastPrecision("fp16"))
    assert torch.equal(weights(ours), weights(host))


class Closing(Regression):
    """Evaluates the loss several times a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_optimizers_that_evaluate_the_loss_again():
    host, ours, fp16 = Closing(), Closing(), Closing()
    fit(lightning, host, batches(), precision="bf16-mixed")
    fit(lightning, ours, batches(), NarrowcastPrecision("bf16"))
    assert torch.equal(weights(ours), weights(host))
    fit(lightning, fp16, batches(bad=(2,)), NarrowcastPrecision("fp16"))
    assert weights(fp16).isfinite().all()


class Frozen(Regression):
    """Calls the network without gradients in the same region first."""

    def training_step(self, batch, index):
        with torch.no_grad():
            self.net(batch[0])
        return self.loss(batch)


def test_a_call_without_gradients_costs_no_gradients():
    host, ours = Frozen(), Frozen()
    fit(lightning, host, batches(), precision="bf16-mixed")
    fit(lightning, ours, batches(), NarrowcastPrecision("bf16"))
    assert torch.equal(weights(ours), weights(host))


class Checkpointing(Regression):
    def loss(self, batch):
        inputs, targets = batch
        inputs = inputs.requires_grad_()
        outputs = torch.utils.checkpoint.checkpoint(self.net, inputs, use_reentrant=self.reentrant)
        return nn.functional.mse_loss(outputs.float(), targets)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(policy, reentrant):
    plain, ours = Regression(), Checkpointing()
    ours.reentrant = reentrant
    fit(lightning, plain, batches(), NarrowcastPrecision(policy))
    fit(lightning, ours, batches(), NarrowcastPrecision(policy))
    assert torch.equal(weights(ours), weights(plain))


def test_evaluation_is_in_the_region_and_changes_no_training():
    plain, ours = Regression(), Regression()
    fit(lightning, plain, batches(), NarrowcastPrecision("bf16"))
    trainer = lightning.Trainer(
        **QUIET, max_epochs=1, val_check_interval=2, plugins=[NarrowcastPrecision("bf16")]
    )
    data = loader(batches(2))
    trainer.fit(ours, loader(batches()), data)
    assert torch.equal(weights(ours), weights(plain))
    assert ours.validated == [torch.bfloat16] * 6

    ours.validated.clear()
    trainer.validate(ours, data, verbose=False)
    trainer.test(ours, data, verbose=False)
    assert ours.validated == [torch.bfloat16] * 4
    assert trainer.predict(ours, data)[0].dtype == torch.bfloat16


# ---- rules


class Formats(Regression):
    """Remembers the formats of its linear layers."""

    def __init__(self):
        super().__init__()
        self.formats = []
        for place in (0, 4):
            self.net[place].register_forward_hook(lambda _m, _i, output: self.formats.append(output.dtype))


def test_rules_for_modules_hold_and_end_with_the_fit():
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("net.4", compute="fp32"))
    model = Formats()
    trainer = fit(lightning, model, batches(1), NarrowcastPrecision(policy))
    assert model.formats == [torch.bfloat16, torch.float32]
    assert model.net(torch.ones(1, 8)).dtype == torch.float32

    # The same plugin serves another fit.
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(batches(1)))
    assert model.formats[-2:] == [torch.bfloat16, torch.float32]


def test_a_rule_that_names_no_module_is_refused():
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("0", compute="fp32"))
    with pytest.raises(PolicyError, match=r"net.0"):
        fit(lightning, Regression(), batches(1), NarrowcastPrecision(policy))


# ---- saving


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_run_resumes_to_the_bit_after_a_skip(policy, tmp_path):
    data = batches(3, bad=(2,))
    whole, begun, resumed = Regression(), Regression(), Regression()
    for model in (whole, begun, resumed):
        model.net[2].p = 0.0  # a checkpoint holds no random numbers
    plugin, again = NarrowcastPrecision(policy), NarrowcastPrecision(policy)
    fit(lightning, whole, data, plugin, max_epochs=2)
    fit(lightning, begun, data, NarrowcastPrecision(policy)).save_checkpoint(tmp_path / "last.ckpt")
    trainer = fit(lightning, resumed, data, again, max_epochs=2, ckpt_path=tmp_path / "last.ckpt")

    assert torch.equal(weights(resumed), weights(whole))
    assert again.scaler.state_dict() == plugin.scaler.state_dict()
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4


class Saving(Regression):
    def on_train_batch_end(self, outputs, batch, index):
        if index == 2:
            self.trainer.save_checkpoint(self.path)


def test_a_checkpoint_in_the_loop_has_the_scale_after_the_skip(tmp_path):
    model, plugin = Saving(), NarrowcastPrecision("fp16")
    model.path = tmp_path / "last.ckpt"
    fit(lightning, model, batches(bad=(2,)), plugin)
    saved = torch.load(model.path, weights_only=True)["NarrowcastPrecision"]
    assert saved["scale"] == 2.0**15
    assert plugin.scaler.get_scale() == 2.0**15


def test_a_checkpoint_of_the_hosts_own_continues(tmp_path):
    def host():
        return MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        )

    whole, begun, resumed, bf16 = (Regression() for _ in range(4))
    for model in (whole, begun, resumed, bf16):
        model.net[2].p = 0.0
    whole_scaler = fit(lightning, whole, batches(3), host(), max_epochs=2).scaler
    fit(lightning, begun, batches(3), host()).save_checkpoint(tmp_path / "last.ckpt")
    plugin = NarrowcastPrecision("fp16")
    fit(lightning, resumed, batches(3), plugin, max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(weights(resumed), weights(whole))
    assert plugin.scaler.get_scale() == whole_scaler.get_scale() == 16.0
    # In bf16 there is no scale to continue with.
    fit(
        lightning,
        bf16,
        batches(3),
        NarrowcastPrecision("bf16"),
        max_epochs=2,
        ckpt_path=tmp_path / "last.ckpt",
    )


# ---- refused, and found at the first step


def test_the_host_refuses_a_second_precision():
    with pytest.raises(ValueError, match=r"precision=bf16-mixed. and .plugins=NarrowcastPrecision\('fp16'\)"):
        fit(lightning, Regression(), [], NarrowcastPrecision("fp16"), precision="bf16-mixed")
    with pytest.raises(lightning.pytorch.utilities.exceptions.MisconfigurationException, match="Precision"):
        lightning.Trainer(**QUIET, plugins=[NarrowcastPrecision("fp16"), MixedPrecision("16-mixed", "cpu")])
    strategy = lightning.pytorch.strategies.SingleDeviceStrategy(precision_plugin=Precision())
    with pytest.raises(
        lightning.pytorch.utilities.exceptions.MisconfigurationException, match="precision set"
    ):
        lightning.Trainer(**QUIET, strategy=strategy, plugins=[NarrowcastPrecision("fp16")])


def test_strategies_that_shard_are_refused():
    with pytest.raises(TypeError, match=r"FSDPPrecision. plugin, found NarrowcastPrecision\('bf16'\)"):
        lightning.pytorch.strategies.FSDPStrategy(precision_plugin=NarrowcastPrecision("bf16"))
    plugin = NarrowcastPrecision("bf16")
    model = Regression()
    model.trainer = lightning.Trainer(**QUIET)
    model.trainer.strategy.__class__ = lightning.pytorch.strategies.ModelParallelStrategy
    with pytest.raises(
        UnsupportedError, match=r"SingleDeviceStrategy or DDPStrategy .* got ModelParallelStrategy"
    ):
        plugin.convert_module(model)


def test_a_scaler_of_torch_is_refused():
    with pytest.raises(SettingError, match="GradScaler"):
        fit(
            lightning,
            Regression(),
            batches(1),
            NarrowcastPrecision("fp16", scaler=torch.amp.GradScaler("cpu")),
        )


def test_a_plugin_is_sent_to_other_processes():
    plugin = pickle.loads(pickle.dumps(NarrowcastPrecision("fp16", scaler=nc.GradScaler(init_scale=8.0))))
    fit(lightning, Regression(), batches(1), plugin)
    assert plugin.scaler.get_scale() == 8.0


def test_weights_in_a_low_format_are_refused_by_policy():
    with pytest.raises(PolicyError, match="O2"):
        NarrowcastPrecision("O2")


class Late(Regression):
    def on_train_start(self):
        self.trainer.strategy.precision_plugin = NarrowcastPrecision("bf16")


def test_a_plugin_that_comes_too_late_is_refused():
    with pytest.raises(OrderError, match=r"Trainer\(plugins="):
        fit(lightning, Late(), batches(1))


class Inner(Regression):
    def loss(self, batch):
        with torch.autocast("cpu", enabled=False):
            return super().loss(batch)


class Wrapped(Regression):
    def __init__(self):
        super().__init__()
        self.net[0].forward = torch.autocast("cpu", dtype=torch.float16)(self.net[0].forward)


class Low(Regression):
    def __init__(self):
        super().__init__()
        self.net.bfloat16()

    def loss(self, batch):
        return super().loss((batch[0].bfloat16(), batch[1]))


class Replaced(Regression):
    def on_train_start(self):
        self.net[0] = nn.Linear(8, 32)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Inner, "autocast was off around it"),
        (Wrapped, "'net.0' .* got fp16: delete torch.autocast"),
        (Low, "got 'net.0.weight' in bf16"),
    ],
)
def test_what_keeps_the_policy_off_is_named_before_the_first_step(kind, message):
    model = kind()
    before = weights(model)
    with pytest.raises(PolicyError, match=message):
        fit(lightning, model, batches(1), NarrowcastPrecision("bf16"))
    assert torch.equal(weights(model), before)
    assert not model.net[0]._forward_hooks


def test_a_module_that_was_replaced_after_the_setup_follows_the_policy_or_is_named():
    fit(lightning, Replaced(), batches(1), NarrowcastPrecision("bf16"))
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("net.0", compute="fp32"))
    with pytest.raises(PolicyError, match=r"net.0"):
        fit(lightning, Replaced(), batches(1), NarrowcastPrecision(policy))


def test_a_compiled_module_computes_by_the_policy():
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("net.4", compute="fp32"))
    plain, ours = Regression(), Regression()
    fit(lightning, plain, batches(2), NarrowcastPrecision(policy))
    fit(lightning, torch.compile(ours, backend="eager"), batches(2), NarrowcastPrecision(policy))
    assert torch.equal(weights(ours), weights(plain))


# ---- manual optimization


class Manual(Regression):
    """One optimizer, stepped by hand; clips if it is told to."""

    max_norm = None

    def __init__(self, **settings):
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.max_norm is not None:
            self.clip_gradients(optimizer, self.max_norm, "norm")
        optimizer.step()
        scheduler.step()


def test_manual_optimization_equals_the_hosts_own_to_the_bit():
    host, ours = Manual(), Manual()
    fit(lightning, host, batches(), precision="bf16-mixed")
    fit(lightning, ours, batches(), NarrowcastPrecision("bf16"))
    assert torch.equal(weights(ours), weights(host))


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("fused", [False, True])
def test_manual_optimization_equals_automatic(policy, fused):
    data = batches(bad=(2,))
    automatic, manual = Regression(fused=fused), Manual(fused=fused)
    manual.max_norm = 0.1
    fit(lightning, automatic, data, NarrowcastPrecision(policy), gradient_clip_val=0.1)
    trainer = fit(lightning, manual, data, NarrowcastPrecision(policy))
    assert torch.equal(weights(manual), weights(automatic))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 5


class ByClosure(Manual):
    def training_step(self, batch, index):
        optimizer = self.optimizers()

        def closure():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        loss = optimizer.step(closure)
        assert loss.requires_grad
        self.lr_schedulers().step()


def test_manual_optimization_takes_a_closure():
    data = batches(bad=(2,))
    automatic, manual = Regression(), ByClosure()
    fit(lightning, automatic, data, NarrowcastPrecision("fp16"))
    fit(lightning, manual, data, NarrowcastPrecision("fp16"))
    assert torch.equal(weights(manual), weights(automatic))


class ManualCheckpointing(Checkpointing, Manual):
    reentrant = False


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_manual_optimization_follows_rules_where_it_computes_again(policy):
    ruled = nc.Policy.preset(policy).with_rules(nc.rule.module("net.4", compute="fp32"))
    automatic, manual = Regression(), ManualCheckpointing()
    fit(lightning, automatic, batches(), NarrowcastPrecision(ruled))
    fit(lightning, manual, batches(), NarrowcastPrecision(ruled))
    assert torch.equal(weights(manual), weights(automatic))


class TwoOptimizers(lightning.LightningModule):
    """Two networks; both backward passes come before both steps, or each before its own."""

    def __init__(self, order, bad=()):
        super().__init__()
        self.automatic_optimization = False
        self.nets = nn.ModuleList([make_net(), make_net()])
        self.order, self.bad = order, bad

    def on_train_start(self):
        torch.manual_seed(2)

    def losses(self, batch, index):
        inputs, targets = batch
        for place, net in enumerate(self.nets):
            factor = torch.inf if (index, place) in self.bad else 1.0
            yield nn.functional.mse_loss(net(inputs).float(), (1 + place) * targets) * factor

    def training_step(self, batch, index):
        optimizers, losses = self.optimizers(), self.losses(batch, index)
        for optimizer in optimizers:
            optimizer.zero_grad()
        if self.order == "each":
            for optimizer, loss in zip(optimizers, losses, strict=True):
                self.manual_backward(loss)
                optimizer.step()
            return
        for loss in losses:
            self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self):
        return [make_optimizer(net.parameters()) for net in self.nets]


@pytest.mark.parametrize("order", ["each", "both"])
def test_two_optimizers_equal_the_hosts_own_to_the_bit(order):
    host, ours = TwoOptimizers(order), TwoOptimizers(order)
    fit(lightning, host, batches(), precision="bf16-mixed")
    fit(lightning, ours, batches(), NarrowcastPrecision("bf16"))
    assert torch.equal(weights(ours), weights(host))


@pytest.mark.parametrize("order", ["each", "both"])
@pytest.mark.parametrize("bad", [(1, 0), (1, 1)])
def test_two_optimizers_skip_by_themselves_and_share_the_scale(order, bad):
    data = batches(4)
    model, plugin = TwoOptimizers(order, [bad]), NarrowcastPrecision("fp16")
    fit(lightning, model, data, plugin)

    # The same by hand; a scale is that of both backward passes, until both optimizers have stepped.
    other = TwoOptimizers(order, [bad])
    optimizers, scaler = other.configure_optimizers(), nc.GradScaler("cpu")
    torch.manual_seed(2)
    skips = []
    for index, batch in enumerate(data):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with nc.autocast("cpu", torch.float16):
            losses = list(other.losses(batch, index))
        for loss in losses:
            scaler.scale(loss).backward()
        for place, optimizer in enumerate(optimizers):
            if scaler.step(optimizer).skipped:
                skips.append((index, place))
        scaler.update()
    assert skips == [bad]
    assert torch.equal(weights(model), weights(other))
    assert plugin.scaler.get_scale() == scaler.get_scale() == 2.0**15


# ---- Fabric


def fabric_with(plugin=None, **settings):
    if plugin is not None:
        settings["plugins"] = [plugin]
    return lightning.Fabric(accelerator="cpu", devices=1, **settings)


@pytest.mark.parametrize("settings", [{}, {"max_norm": 0.1}, {"accumulate": 2}])
def test_fabric_equals_its_own_to_the_bit(settings):
    for host, policy in (
        ({"precision": "bf16-mixed"}, "bf16"),
        ({"plugins": [FabricMixedPrecision("16-mixed", "cpu")]}, "fp16"),
    ):
        plugin = FabricPrecision(policy)
        net, _ = with_fabric(fabric_with(**host), batches(), **settings)
        ours, _ = with_fabric(fabric_with(plugin), batches(), plugin, **settings)
        assert torch.equal(weights(ours), weights(net))


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bad", [(), (0,), (3,)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fabric_equals_a_loop_with_a_stepper_also_after_a_skip(policy, bad, accumulate):
    data = batches(bad=bad)
    net, stepper, scheduler = with_stepper(policy, data, accumulate=accumulate)
    plugin = FabricPrecision(policy)
    ours, own_scheduler = with_fabric(fabric_with(plugin), data, plugin, accumulate=accumulate)
    assert torch.equal(weights(ours), weights(net))
    assert own_scheduler.last_epoch == scheduler.last_epoch == 6 // accumulate - len(bad)
    assert plugin.state_dict() == stepper.scaler.state_dict()


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_fabric_clips_fused_optimizers(policy):
    data, plugin = batches(bad=(2,)), FabricPrecision(policy)
    net, _, _ = with_stepper(policy, data, max_norm=0.1, fused=True)
    ours, _ = with_fabric(fabric_with(plugin), data, plugin, max_norm=0.1, fused=True)
    torch.testing.assert_close(weights(ours), weights(net), rtol=1e-4, atol=1e-6)
    with pytest.raises(NotImplementedError, match="clipping is not implemented"):
        with_fabric(fabric_with(FabricMixedPrecision("16-mixed", "cpu")), data, max_norm=0.1, fused=True)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_run_with_fabric_resumes_to_the_bit_after_a_skip(policy, tmp_path):
    def train(epochs, plugin, load=None, save=None):
        fabric = fabric_with(plugin)
        net = make_net()
        net[2].p = 0.0
        model, optimizer = fabric.setup(net, make_optimizer(net.parameters()))
        state = {"model": model, "optimizer": optimizer, "precision": plugin}
        if load is not None:
            fabric.load(load, state)
        for inputs, targets in batches(3, bad=(2,)) * epochs:
            fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if save is not None:
            fabric.save(save, state)
        return weights(net)

    path, whole, resumed = tmp_path / "last.ckpt", FabricPrecision(policy), FabricPrecision(policy)
    expected = train(2, whole)
    train(1, FabricPrecision(policy), save=path)
    assert torch.equal(train(1, resumed, load=path), expected)
    assert resumed.state_dict() == whole.state_dict()


def test_outputs_of_fabric_are_fp32_unless_they_are_wanted_as_computed():
    formats = []
    for fp32_outputs in (True, False):
        fabric = fabric_with(FabricPrecision("bf16", fp32_outputs=fp32_outputs))
        model = fabric.setup(nn.Linear(8, 4))
        formats.append(model(torch.ones(2, 8)).dtype)
        with fabric.autocast():
            formats.append(torch.nn.functional.linear(torch.ones(2, 8), torch.ones(4, 8)).dtype)
    assert formats == [torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]


def two_models(fabric):
    """Train a generator and a discriminator, each with its optimizer."""
    nets = [make_net(), make_net()]
    nets[0].append(nn.Linear(1, 8))
    generator, for_generator = fabric.setup(nets[0], make_optimizer(nets[0].parameters()))
    discriminator, for_discriminator = fabric.setup(nets[1], make_optimizer(nets[1].parameters()))
    torch.manual_seed(2)
    for inputs, targets in batches(4):
        for_generator.zero_grad()
        fabric.backward(nn.functional.mse_loss(discriminator(generator(inputs)), targets))
        for_generator.step()
        for_discriminator.zero_grad()
        fabric.backward(nn.functional.mse_loss(discriminator(generator(inputs).detach()), -targets))
        for_discriminator.step()
    return torch.cat([weights(net) for net in nets])


def test_two_models_of_fabric_equal_its_own_to_the_bit():
    ours = two_models(fabric_with(FabricPrecision("bf16")))
    assert torch.equal(ours, two_models(fabric_with(precision="bf16-mixed")))


def one_step(fabric, model, optimizer):
    inputs, targets = batches(1)[0]
    fabric.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()


def test_each_model_of_fabric_has_its_paths_and_its_first_step():
    """Two that are set up together, a loss that is a module, and one that is set up after training began."""
    rule = nc.rule.module("0", compute="fp32")
    fabric = fabric_with(FabricPrecision(nc.Policy.preset("bf16").with_rules(rule)))
    nets = [make_net(), make_net(), make_net()]
    first, second = (fabric.setup(net, make_optimizer(net.parameters())) for net in nets[:2])
    fabric.setup_module(nn.MSELoss())
    one_step(fabric, *first)
    one_step(fabric, *second)
    late = fabric.setup(nets[2], make_optimizer(nets[2].parameters()))
    one_step(fabric, *first)
    one_step(fabric, *late)


def test_a_scale_that_is_loaded_after_a_skip_stays():
    plugin = FabricPrecision("fp16")
    fabric, net = fabric_with(plugin), make_net()
    model, optimizer = fabric.setup(net, make_optimizer(net.parameters()))
    one_step(fabric, model, optimizer)
    state = plugin.state_dict()
    inputs, targets = batches(1, bad=[0])[0]
    fabric.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    assert plugin.last_result.skipped
    plugin.load_state_dict(state)
    optimizer.zero_grad()
    one_step(fabric, model, optimizer)
    assert plugin.scaler.get_scale() == state["scale"]


class RunsOut(torch.optim.SGD):
    """Its first step runs out of memory."""

    ran_out = False

    def step(self, closure=None):
        if not self.ran_out:
            self.ran_out = True
            raise torch.OutOfMemoryError("no memory is left")
        return super().step(closure)


def test_training_goes_on_after_a_step_that_ran_out_of_memory():
    fabric, net = fabric_with(FabricPrecision("bf16")), make_net()
    model, optimizer = fabric.setup(net, RunsOut(net.parameters(), lr=0.1))
    before = weights(net)
    with pytest.raises(torch.OutOfMemoryError):
        one_step(fabric, model, optimizer)
    optimizer.zero_grad()
    one_step(fabric, model, optimizer)
    assert not torch.equal(weights(net), before)


def test_a_strategy_of_deepspeed_is_refused():
    """It is a subclass of DDP's, and steps by its own engine."""
    strategy = type("DeepSpeedStrategy", (DDPStrategy,), {})()
    module = types.SimpleNamespace(trainer=types.SimpleNamespace(strategy=strategy))
    with pytest.raises(UnsupportedError, match="got DeepSpeedStrategy, which casts and steps by itself"):
        NarrowcastPrecision("bf16").convert_module(module)


def test_rules_for_modules_hold_in_fabric_and_in_compiled_models():
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("0", compute="fp32"))
    results = []
    for compiles in (False, True):
        fabric, net = fabric_with(FabricPrecision(policy)), make_net()
        formats = []
        net[0].register_forward_hook(lambda _m, _i, output, kept=formats: kept.append(output.dtype))
        module = torch.compile(net, backend="eager") if compiles else net
        model, optimizer = fabric.setup(module, make_optimizer(net.parameters()))
        torch.manual_seed(2)
        for inputs, targets in batches(2):
            fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        assert set(formats) == {torch.float32}
        results.append(weights(net))
    assert torch.equal(*results)


def test_optimizers_of_fabric_take_a_closure():
    def train(fabric, kind):
        net = make_net()
        model, optimizer = fabric.setup(net, kind(net.parameters(), lr=1e-3))
        torch.manual_seed(2)

        def closure(batch):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            fabric.backward(loss)
            return loss

        for batch in batches(3):
            assert optimizer.step(functools.partial(closure, batch)).isfinite()
        return weights(net)

    for kind in (torch.optim.SGD, torch.optim.LBFGS):
        ours = train(fabric_with(FabricPrecision("bf16")), kind)
        assert torch.equal(ours, train(fabric_with(precision="bf16-mixed"), kind))
        assert train(fabric_with(FabricPrecision("fp16")), kind).isfinite().all()


def test_fabric_refuses_a_second_precision_and_fsdp():
    plugin = FabricPrecision("fp16")
    with pytest.raises(ValueError, match=r"precision=16-mixed. and .plugins=FabricPrecision\('fp16'\)"):
        fabric_with(plugin, precision="16-mixed")
    with pytest.raises(TypeError, match=r"FSDPPrecision. plugin, found FabricPrecision\('fp16'\)"):
        lightning.fabric.strategies.FSDPStrategy(precision=plugin)


def test_a_model_that_fabric_did_not_set_up_is_named_at_the_first_step():
    inputs, targets = batches(1)[0]
    fabric = fabric_with(FabricPrecision("bf16"))
    net = make_net()
    optimizer = fabric.setup_optimizers(make_optimizer(net.parameters()))
    with pytest.raises(OrderError, match=r"fabric.setup"):
        fabric.backward(nn.functional.mse_loss(net(inputs), targets))

    # Set up, and the bare module is called.
    model = fabric.setup_module(net)
    before = weights(net)
    fabric.backward(nn.functional.mse_loss(net(inputs), targets))
    with pytest.raises(PolicyError, match=r"in the region of .* call what fabric.setup returned"):
        optimizer.step()
    with fabric.autocast():
        pass
    fabric.backward(nn.functional.mse_loss(net(inputs), targets))
    with pytest.raises(PolicyError, match=r"'0' .* got fp32: autocast was off .* call what fabric.setup"):
        optimizer.step()
    assert torch.equal(weights(net), before)

    # Fabric itself refuses a backward pass without it.
    with pytest.raises(RuntimeError, match=r"fabric.backward"):
        model(inputs).sum().backward()


# ---- examples and names


@pytest.mark.parametrize("name", ["lightning_digits.py", "fabric_digits.py"])
def test_the_example_learns_its_digits(name, tmp_path):
    assert len((EXAMPLES / "hosts" / name).read_text().splitlines()) <= 40
    lines = succeeded(run(f"hosts/{name}", folder=tmp_path))
    assert float(lines[-1].removeprefix("test accuracy ")) > 0.9
    assert list(tmp_path.iterdir()) == []


def test_the_private_name_of_the_host_is_there():
    """Runs the hooks before the step and clips; there is no public name for it."""
    assert list(inspect.signature(Precision._after_closure).parameters) == ["self", "model", "optimizer"]
