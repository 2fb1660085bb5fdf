"""Training by Accelerate with a policy, beside Accelerate's own bf16, a Stepper, and a loop of torch.amp."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs, GradScalerKwargs, TorchDynamoPlugin
from example_runs import run, succeeded
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import OrderError, PolicyError, SettingError
from narrowcast.integrations.accelerate import prepare

BATCHES = 6
FORMATS = ["bf16", "fp16"]


def forget_accelerators():
    """Let the next one have settings of its own."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _no_accelerator_remains():
    yield
    forget_accelerators()


class Net(nn.Module):
    """A small network, with dropout, that returns its outputs in a dict, and the loss if it gets targets."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.norm = nn.LayerNorm(32)
        self.down = nn.Linear(32, 1)
        self.checkpoints = False

    def body(self, x):
        return self.down(F.dropout(self.norm(F.gelu(self.up(x))), 0.1, self.training))

    def forward(self, x, targets=None):
        outputs = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        loss = None if targets is None else 0.1 * F.mse_loss(outputs.float(), targets)
        return {"outputs": outputs, "loss": loss}


class Trained(NamedTuple):
    weights: torch.Tensor
    rate: float
    skipped: list[int]


def make_net():
    torch.manual_seed(0)
    return Net()


def optimizer_of(model, fused=False):
    return torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def batches(bad=None):
    generator = torch.Generator().manual_seed(1)
    for number in range(BATCHES):
        x = torch.randn(16, 8, generator=generator)
        targets = x[:, :1].sin()
        if number == bad:
            targets[3] = math.inf
        yield x, targets


def loss_of(model, x, targets, inside):
    if inside:
        return model(x, targets)["loss"]
    return 0.1 * F.mse_loss(model(x)["outputs"], targets)


def state_of(model, scheduler, skipped=()):
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return Trained(weights, scheduler.get_last_lr()[0], list(skipped))


def by_accelerate(
    policy,
    *,
    host=False,
    inside=False,
    bad=None,
    clip=None,
    fused=False,
    accumulate=1,
    net=None,
    evaluates=False,
):
    """Train by Accelerate, with its own mixed precision (``host``) or with the policy."""
    forget_accelerators()
    accelerator = Accelerator(
        cpu=True, mixed_precision=policy if host else "no", gradient_accumulation_steps=accumulate
    )
    model = net or make_net()
    optimizer = optimizer_of(model, fused)
    objects = model, optimizer, scheduler_of(optimizer)
    if host:
        model, optimizer, scheduler = accelerator.prepare(*objects)
    else:
        model, optimizer, scheduler = prepare(accelerator, *objects, policy=policy)

    torch.manual_seed(2)
    skipped = []
    for number, (x, targets) in enumerate(batches(bad)):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, targets, inside))
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and accelerator.optimizer_step_was_skipped:
            skipped.append(number)
        if evaluates:
            evaluate(model, x)
    return state_of(model, scheduler, skipped)


def evaluate(model, x):
    model.eval()
    with torch.no_grad():
        outputs = model(x)["outputs"]
    model.train()
    return outputs


def by_stepper(policy, *, bad=None, accumulate=1):
    model = make_net()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    stepper = nc.Stepper(model, optimizer, policy=policy, scheduler=scheduler, accumulate=accumulate)
    torch.manual_seed(2)
    skipped = []
    for number, (x, targets) in enumerate(batches(bad)):
        with stepper.autocast():
            outputs = model(x)["outputs"]
        if stepper.step(0.1 * F.mse_loss(outputs.float(), targets)).skipped:
            skipped.append(number)
    return state_of(model, scheduler, skipped)


def by_torch(clip, fused):
    """Train in fp16 by torch.amp, which unscales, clips and steps."""
    model = make_net()
    optimizer = optimizer_of(model, fused)
    scheduler = scheduler_of(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    torch.manual_seed(2)
    for x, targets in batches():
        with torch.autocast("cpu", torch.float16):
            outputs = model(x)["outputs"]
        scaler.scale(0.1 * F.mse_loss(outputs.float(), targets)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    return state_of(model, scheduler)


def assert_same(one, other):
    assert torch.equal(one.weights, other.weights)
    assert one[1:] == other[1:]


def prepared(policy="bf16", model=None, **settings):
    """An accelerator, and a model and its optimizer that were prepared."""
    accelerator = Accelerator(cpu=True)
    model = model or make_net()
    return accelerator, *prepare(accelerator, model, optimizer_of(model), policy=policy, **settings)


def train(accelerator, model, optimizer, steps=2):
    for x, targets in list(batches())[:steps]:
        accelerator.backward(loss_of(model, x, targets, inside=False))
        optimizer.step()
        optimizer.zero_grad()


# ---- the same numbers


@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
def test_bf16_ends_as_accelerates_own_to_the_bit(inside):
    assert_same(by_accelerate("bf16", inside=inside), by_accelerate("bf16", inside=inside, host=True))


@pytest.mark.parametrize("policy", FORMATS)
def test_it_ends_as_a_stepper_to_the_bit(policy):
    assert_same(by_accelerate(policy), by_stepper(policy))


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_clipping_unscales_first(fused):
    assert_same(
        by_accelerate("bf16", clip=0.1, fused=fused), by_accelerate("bf16", clip=0.1, fused=fused, host=True)
    )
    assert_same(by_accelerate("fp16", clip=0.1, fused=fused), by_torch(0.1, fused))


def test_gradient_checkpointing_changes_nothing():
    net = make_net()
    net.checkpoints = True
    assert_same(by_accelerate("fp16", net=net), by_accelerate("fp16"))


def test_evaluating_in_between_changes_nothing():
    assert_same(by_accelerate("fp16", evaluates=True), by_accelerate("fp16"))


# Dynamo's own, of isinstance in the cast of outputs, here and in Accelerate's.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("before", [True, False], ids=["compiled before", "compiled by Accelerate"])
def test_a_compiled_model_ends_the_same(before):
    torch._dynamo.reset()
    plugin = None if before else TorchDynamoPlugin(backend="eager", fullgraph=True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model = make_net().eval()
    if before:
        model = torch.compile(model, backend="eager", fullgraph=True)
    model, optimizer = prepare(accelerator, model, optimizer_of(model), policy="bf16")
    train(accelerator, model, optimizer, steps=1)
    counts = torch._dynamo.utils.counters["stats"]
    graphs_before = counts["unique_graphs"]
    train(accelerator, model, optimizer, steps=1)
    # The hooks of the proof stay, so that the model is not compiled again after its first step.
    assert counts["unique_graphs"] == graphs_before

    plain = prepared(model=make_net().eval())
    for _ in range(2):
        train(*plain, steps=1)
    for parameter, expected in zip(model.parameters(), plain[1].parameters(), strict=True):
        assert torch.equal(parameter, expected)
    torch._dynamo.reset()


def test_a_rule_for_a_module_holds():
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("down", compute="fp32"))
    accelerator, model, optimizer = prepared(policy, fp32_outputs=False)
    train(accelerator, model, optimizer)
    outputs = model(torch.ones(2, 8))["outputs"]
    assert outputs.dtype == torch.float32


def test_outputs_are_fp32_unless_asked_otherwise():
    _, model, _ = prepared()
    assert evaluate(model, torch.ones(2, 8)).dtype == torch.float32
    _, model, _ = prepared(fp32_outputs=False)
    assert evaluate(model, torch.ones(2, 8)).dtype == torch.bfloat16


def test_autocast_of_the_accelerator_opens_the_region():
    accelerator, model, _ = prepared()
    with accelerator.autocast():
        assert model.up(torch.ones(2, 8)).dtype == torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert model.up(torch.ones(2, 8)).dtype == torch.float32
    assert model.up(torch.ones(2, 8)).dtype == torch.float32


# ---- skipped steps


@pytest.mark.parametrize("policy", FORMATS)
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_an_infinity_skips_one_step_and_its_scheduler(policy, fused):
    trained = by_accelerate(policy, bad=2, fused=fused)
    assert trained.skipped == [2]
    assert trained.rate == pytest.approx(1e-2 * 0.9 ** (BATCHES - 1), rel=1e-12)
    if not fused:
        assert_same(trained, by_stepper(policy, bad=2))


@pytest.mark.parametrize("policy", FORMATS)
@pytest.mark.parametrize("bad", [2, 3], ids=["first", "second"])
def test_an_infinity_in_either_micro_batch_skips_the_step(policy, bad):
    trained = by_accelerate(policy, bad=bad, accumulate=2)
    assert trained.skipped == [3]
    assert_same(trained, by_stepper(policy, bad=bad, accumulate=2))


def test_the_result_of_a_step_names_the_parameters():
    accelerator, model, optimizer = prepared("fp16")
    model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    train(accelerator, model, optimizer, steps=1)
    assert optimizer.result.skipped
    assert optimizer.result.nonfinite == ("norm.weight",)
    assert accelerator.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("policy", FORMATS)
def test_it_resumes_to_the_bit_after_a_skip(policy, tmp_path):
    def parts():
        accelerator = Accelerator(cpu=True)
        model = make_net().eval()
        optimizer = optimizer_of(model)
        return accelerator, *prepare(accelerator, model, optimizer, scheduler_of(optimizer), policy=policy)

    def train_on(parts, batches):
        accelerator, model, optimizer, scheduler = parts
        for x, targets in batches:
            accelerator.backward(loss_of(model, x, targets, inside=False))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    whole, first, second = parts(), parts(), parts()
    data = list(batches(bad=1))
    train_on(whole, data)
    train_on(first, data[:3])
    first[0].save_state(tmp_path)
    second[0].load_state(tmp_path)
    assert second[0].scaler.get_scale() == (2.0**15 if policy == "fp16" else 1.0)
    train_on(second, data[3:])
    assert_same(state_of(second[1], second[3]), state_of(whole[1], whole[3]))


def test_optimizers_of_one_loss_step_by_one_scale(tmp_path):
    model = make_net().eval()
    up, down = ([*model.up.parameters()], [*model.norm.parameters(), *model.down.parameters()])
    accelerator = Accelerator(cpu=True)
    model, first, second = prepare(
        accelerator, model, torch.optim.AdamW(up, 1e-2), torch.optim.AdamW(down, 1e-2), policy="fp16"
    )
    for x, targets in batches():
        accelerator.backward(loss_of(model, x, targets, inside=False))
        accelerator.clip_grad_norm_(up, 1e9)
        accelerator.clip_grad_norm_(down, 1e9)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    # The scale moves before it is saved.
    accelerator.save_state(tmp_path)
    assert torch.load(tmp_path / "scaler.pt")["_growth_tracker"] == BATCHES

    one = prepared("fp16", make_net().eval())
    train(*one, steps=BATCHES)
    for parameter, expected in zip(model.parameters(), one[1].parameters(), strict=True):
        assert torch.equal(parameter, expected)


# ---- misuse


def test_the_switch_of_the_host_is_refused_by_name():
    with pytest.raises(SettingError, match=r'expected Accelerator\(mixed_precision="no"\).* got "bf16"'):
        prepare(Accelerator(cpu=True, mixed_precision="bf16"), make_net(), policy="bf16")


@pytest.mark.parametrize("handler", [GradScalerKwargs(), AutocastKwargs()])
def test_handlers_without_effect_are_refused(handler):
    with pytest.raises(SettingError, match=type(handler).__name__):
        prepare(Accelerator(cpu=True, kwargs_handlers=[handler]), make_net(), policy="bf16")


def test_preparing_twice_is_refused():
    accelerator, model, optimizer = prepared()
    with pytest.raises(OrderError, match="prepared already"):
        prepare(accelerator, model, optimizer, policy="bf16")


def test_preparing_after_training_began_is_refused():
    accelerator = Accelerator(cpu=True)
    model = make_net()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    train(accelerator, model, optimizer)
    with pytest.raises(OrderError, match=r"replace accelerator\.prepare"):
        prepare(accelerator, model, optimizer, policy="bf16")


def test_an_optimizer_of_another_accelerator_is_refused():
    _, model, optimizer = prepared()
    with pytest.raises(OrderError, match="another Accelerator has prepared"):
        prepare(Accelerator(cpu=True), model, optimizer, policy="bf16")


def test_another_scaler_is_refused():
    with pytest.raises(SettingError, match=r"expected an nc\.GradScaler"):
        prepared(scaler=torch.amp.GradScaler("cpu"))
    accelerator, model, optimizer = prepared("fp16")
    accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(OrderError, match=r"accelerator\.scaler"):
        train(accelerator, model, optimizer)


def test_a_scaler_that_is_given_is_used():
    accelerator, model, optimizer = prepared("fp16", scaler=nc.GradScaler(init_scale=4.0))
    train(accelerator, model, optimizer)
    assert optimizer.result.scale == 4.0


class InFp32(Net):
    def body(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().body(x)


def wrap_forward(model):
    model.forward = torch.autocast("cpu", torch.float16)(model.forward)


def cast_weights(model):
    model.bfloat16()


@pytest.mark.parametrize(
    ("net", "change", "reason"),
    [
        (InFp32, None, "autocast was off around it"),
        (Net, wrap_forward, r"a torch\.autocast in fp16 is open"),
        (Net, cast_weights, "'up.weight' in bf16"),
    ],
    ids=["autocast off inside", "wrapped forward", "weights cast"],
)
def test_a_policy_without_effect_raises_before_weights_change(net, change, reason):
    accelerator, model, optimizer = prepared(model=net())
    if change is not None:
        change(model)
    before = state_of(model, scheduler_of(torch.optim.SGD(model.parameters(), 0.1)))
    with pytest.raises(PolicyError, match=reason):
        train(accelerator, model, optimizer)
    after = state_of(model, scheduler_of(torch.optim.SGD(model.parameters(), 0.1)))
    assert_same(before, after)


def test_weights_in_bf16_are_refused():
    with pytest.raises(PolicyError, match=r"expected trainable weights in fp32.* 'up.weight' in bf16"):
        prepared(model=make_net().bfloat16())
    frozen = make_net().bfloat16().requires_grad_(False)
    frozen.down = nn.Linear(32, 1)
    train(*prepared(model=frozen))


def test_a_model_that_was_not_prepared_is_refused():
    accelerator, _, _ = prepared()
    other = make_net()
    optimizer = accelerator.prepare(optimizer_of(other))
    with pytest.raises(PolicyError, match="of other parameters"):
        train(accelerator, other, optimizer)


def test_a_module_that_is_replaced_follows_the_policy():
    accelerator, model, optimizer = prepared(fp32_outputs=False)
    model.down = nn.Linear(32, 1)
    for x, targets in batches():
        # In fp32: mse_loss of two formats has no backward pass in torch 2.11.
        accelerator.backward(F.mse_loss(model(x)["outputs"].float(), targets))
        optimizer.step()
        optimizer.zero_grad()
    assert model(torch.ones(2, 8))["outputs"].dtype == torch.bfloat16


def test_backward_without_the_accelerator_is_refused():
    _, model, optimizer = prepared()
    model(torch.ones(2, 8))["outputs"].sum().backward()
    with pytest.raises(OrderError, match=r"accelerator\.backward\(loss\)"):
        optimizer.step()


def test_clipping_before_the_last_micro_batch_is_refused_in_fp16():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_net()
    model, _ = prepare(accelerator, model, optimizer_of(model), policy="fp16")
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 8))["outputs"].sum())
        with pytest.raises(OrderError, match=r"accelerator\.sync_gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.scaler.abandon()


def test_accelerate_keeps_its_optimizers_where_they_are_looked_for():
    accelerator, model, optimizer = prepared()
    assert accelerator._optimizers == [optimizer]
    accelerator.free_memory()
    assert accelerator._optimizers == []
    # As transformers does, for each training.
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer)
    assert optimizer.result is not None


def test_the_example_learns(tmp_path):
    line = succeeded(run("hosts/accelerate_digits.py", folder=tmp_path))[-1]
    # Seeds reach 0.99; a tenth would be guessing.
    assert float(line.split()[1].rstrip(",")) > 0.95


def test_a_closure_clips_unscaled_gradients_at_each_evaluation():
    """LBFGS evaluates the loss several times a step; fp32 with a scale of 2**10 is exact."""
    results = []
    for scale in (1.0, 2.0**10):
        forget_accelerators()
        accelerator = Accelerator(cpu=True)
        model = make_net().eval()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        scaler = nc.GradScaler(loss_scale=nc.scaling.Static(scale=scale))
        model, optimizer = prepare(accelerator, model, optimizer, policy="fp32", scaler=scaler)
        inputs, targets = next(iter(batches()))

        def closure(accelerator=accelerator, model=model, optimizer=optimizer, x=inputs, y=targets):
            optimizer.zero_grad()
            loss = loss_of(model, x, y, inside=False)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.01)
            return loss

        optimizer.step(closure)
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*results)


def test_a_closure_after_the_step_of_another_optimizer():
    accelerator = Accelerator(cpu=True)
    model = make_net()
    optimizers = torch.optim.SGD(model.up.parameters(), 0.1), torch.optim.SGD(model.down.parameters(), 0.1)
    model, first, second = prepare(accelerator, model, *optimizers, policy="bf16")

    def closure():
        second.zero_grad()
        loss = model(torch.ones(2, 8))["outputs"].sum()
        accelerator.backward(loss)
        return loss

    for _ in range(2):
        closure()
        first.step()
        second.step(closure)
        assert not second.result.skipped


def test_a_model_that_is_only_evaluated_may_have_low_weights():
    accelerator = Accelerator(cpu=True)
    prepare(accelerator, make_net(), policy="bf16")
    model = make_net().bfloat16()
    with torch.no_grad():
        outputs = accelerator.prepare_model(model, evaluation_mode=True)(torch.ones(2, 8))["outputs"]
    assert outputs.dtype == torch.float32


def test_a_rule_for_a_layer_whose_weight_other_code_reads_is_told():
    class Fused(Net):
        def body(self, x):
            return F.linear(self.norm(F.gelu(self.up(x))), self.down.weight, self.down.bias)

    policy = nc.Policy.preset("bf16").with_rules(nc.rule.module("down", compute="fp32"))
    with pytest.warns(
        UserWarning, match="the rule for down did nothing in the first step, which did not call it"
    ):
        train(*prepared(policy, model=Fused()))


def test_a_policy_among_the_objects_is_refused():
    model = make_net()
    with pytest.raises(SettingError, match="write policy='bf16'"):
        prepare(Accelerator(cpu=True), model, optimizer_of(model), "bf16")


def test_training_goes_on_after_a_second_optimizers_step_ran_out_of_memory():
    class OutOfMemory(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise torch.OutOfMemoryError
            return super().step(closure)

    accelerator = Accelerator(cpu=True)
    model = make_net()
    optimizers = torch.optim.SGD(model.up.parameters(), 0.1), OutOfMemory(model.down.parameters(), 0.1)
    scaler = nc.GradScaler("cpu", init_scale=4.0)
    model, first, second = prepare(accelerator, model, *optimizers, policy="fp16", scaler=scaler)

    def step():
        accelerator.backward(model(torch.ones(2, 8))["outputs"].sum())
        first.step()
        second.step()

    with pytest.raises(torch.OutOfMemoryError):
        step()
    OutOfMemory.fails = False
    step()
    assert not second.result.skipped


def test_another_policy_is_refused_with_advice_that_can_be_followed():
    model = make_net()
    prepare(Accelerator(cpu=True), model, policy="bf16")
    forget_accelerators()
    with pytest.raises(PolicyError, match="make another model: this one keeps the policy"):
        prepare(Accelerator(cpu=True), model, policy="fp16")
