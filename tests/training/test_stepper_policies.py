"""A Stepper under rules and under the levels O0 to O3: each step as by hand."""

import gc

import pytest
import torch
from stepper_runs import made, micro_batch, mlp, stepped
from torch import nn

import narrowcast as nc
from narrowcast import weights
from narrowcast.errors import PolicyError

rule = nc.rule
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDE_HEAD = nc.Policy(compute="bf16").with_rules(rule.module("2", compute="fp32"))
FP16_HEAD = nc.Policy(compute="bf16").with_rules(rule.module("2", compute="fp16", output="fp32"))
FP16_LINEAR = nc.Policy(compute="bf16").with_rules(rule.op("linear", compute="fp16"))
LOW = {"bf16": BF16, "fp16": FP16}
O2_IN = {name: nc.Policy(compute=name, master_weights=True) for name in LOW}


def batches(count: int, width: int = 16) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(8, width, generator=made) for _ in range(count)]


def by_hand(model: nn.Module, formats: tuple[torch.dtype, torch.dtype], x: torch.Tensor) -> torch.Tensor:
    """The two linear layers in ``formats``, casts written out."""
    first, _, last = model
    hidden = nn.functional.linear(x.to(formats[0]), first.weight.to(formats[0]), first.bias.to(formats[0]))
    hidden = hidden.tanh().to(formats[1])
    return nn.functional.linear(hidden, last.weight.to(formats[1]), last.bias.to(formats[1]))


@pytest.mark.parametrize(
    ("policy", "formats"),
    [(WIDE_HEAD, (BF16, FP32)), (FP16_HEAD, (BF16, FP16)), (FP16_LINEAR, (FP16, FP16))],
    ids=["module in fp32", "module in fp16", "op in fp16"],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_are_those_of_casts_by_hand(policy, formats, accumulate):
    ruled, plain = mlp(), mlp()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (ruled, plain)]
    stepper = nc.Stepper(ruled, optimizers[0], policy, accumulate=accumulate, scaler=nc.scaling.Off())
    for number, x in enumerate(batches(6), 1):
        with stepper.autocast():
            out = ruled(x)
            loss = out.float().square().mean()
        stepper.step(loss)
        (by_hand(plain, formats, x).float().square().mean() / accumulate).backward()
        if number % accumulate == 0:
            optimizers[1].step()
            optimizers[1].zero_grad()
        for ours, theirs in zip(ruled.parameters(), plain.parameters(), strict=True):
            # The order in which micro-batches add up is the same, and so is every cast.
            assert torch.equal(ours, theirs)


def test_module_rules_hold_only_in_the_steppers_region():
    model, _, stepper = made(WIDE_HEAD, mlp())
    x = batches(1)[0]
    plain = mlp()(x)
    assert torch.equal(model(x), plain)
    with stepper.autocast():
        assert model(x).dtype == FP32
    del stepper
    gc.collect()
    assert not model[2]._forward_pre_hooks


def test_a_rule_for_a_module_that_is_not_there_is_refused():
    policy = nc.Policy(compute="bf16").with_rules(rule.module("hed", compute="fp32"))
    with pytest.raises(PolicyError, match='this Sequential has no modules "hed"'):
        made(policy, mlp())


def test_two_steppers_of_one_model_take_one_policy():
    model = mlp()
    first = nc.Stepper(model, torch.optim.SGD(model[0].parameters(), 0.1), WIDE_HEAD)
    second = nc.Stepper(model, torch.optim.SGD(model[2].parameters(), 0.1), WIDE_HEAD)
    to_do = "already: delete the nc.Stepper that holds the model first"
    with pytest.raises(PolicyError, match=f"has another policy {to_do}, or give that policy"):
        nc.Stepper(model, torch.optim.SGD(model[2].parameters(), 0.1), FP16_HEAD)
    with pytest.raises(PolicyError, match=f"has a policy {to_do}"):
        nc.apply(model, "bf16")
    for stepper in (first, second):
        with stepper.autocast():
            assert model(batches(1)[0]).dtype == FP32
    del stepper, first, second
    gc.collect()
    with nc.apply(model, "bf16"):
        model(batches(1)[0])


def norm_first() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize(
    ("level", "weight", "norm"),
    [("O0", FP32, FP32), ("O1", FP32, FP32), ("O2", BF16, FP32), ("O3", BF16, BF16)],
)
def test_the_levels_of_apex(level, weight, norm):
    """What apex's table of levels says of weights, batch norms and masters; bf16 where a CPU chooses."""
    policy = nc.Policy.preset(level)
    if policy.compute == "auto":
        fields = {f: getattr(policy, f) for f in ("rules", "tables", "master_weights", "low_weights")}
        policy = nc.Policy(compute="bf16", **fields)
    model = norm_first()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    stepper = nc.Stepper(model, optimizer, policy)
    losses = []
    x, y = torch.randn(64, 16), torch.randint(0, 4, (64,))
    for _ in range(30):
        with stepper.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        stepper.step(loss)
        losses.append(float(loss.detach()))
    assert (model[1].weight.dtype, model[2].weight.dtype) == (weight, norm)
    assert model[2].running_mean.dtype == norm
    masters = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    assert masters == ({BF16} if level == "O3" else {FP32})
    assert losses[-1] < 0.7 * losses[0]
    assert stepper.scaler.get_scale() == 1.0


def test_o3_in_fp16_has_a_static_scale_of_one():
    model, _, stepper = made(nc.Policy(compute="fp16", low_weights=True), norm_first(), lr=0.05)
    for _ in range(3):
        result = micro_batch(model, stepper, torch.randn(64, 16))
        assert not result.skipped
    assert result.scale == 1.0
    assert {p.dtype for p in model.parameters()} == {FP16}


def test_an_eps_that_fp16_does_not_hold_is_named():
    model, policy = norm_first(), nc.Policy(compute="fp16", low_weights=True)
    with pytest.warns(UserWarning, match=r"eps of 1e-08 is 0 and weights become NaN: give it eps=1e-4"):
        nc.Stepper(model, torch.optim.AdamW(model.parameters(), 1e-3), policy)


def test_repr_names_the_policy(tmp_path):
    path = tmp_path / "ours.toml"
    WIDE_HEAD.save(path)
    names = [(str(path), f" by {path}"), (nc.Policy.load(path), f" by {path}"), ("bf16", "")]
    for policy, by in [*names, (WIDE_HEAD, " by bf16 with 1 rule")]:
        _, _, stepper = made(policy, mlp())
        assert repr(stepper) == f"Stepper(Sequential, SGD, bf16 on cpu{by}, steps=0)"


# ---- O2: weights in a low format, fp32 masters in the optimizer


@pytest.mark.parametrize("dtype", LOW)
def test_o2_keeps_batch_norms_and_masters_in_fp32(dtype):
    model = norm_first()
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, optimizer, stepper = made(O2_IN[dtype], model)
    assert stepper.formats == {"cpu": LOW[dtype]}
    masters = dict(weights.held_by(optimizer).parameters)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (FP32 if name.startswith("2.") else LOW[dtype]), name
        assert torch.equal(parameter, full[name].to(parameter.dtype))
        assert torch.equal(masters.get(parameter, parameter), full[name]), "every bit of the fp32 values"
    assert all(p.dtype == FP32 for group in optimizer.param_groups for p in group["params"])


def test_o2_keeps_the_format_of_a_low_model():
    for dtype in LOW.values():
        model, _, stepper = made("O2", nn.Linear(4, 1).to(dtype))
        assert stepper.formats == {"cpu": dtype}
        assert model.weight.dtype == dtype


@pytest.mark.parametrize("dtype", LOW)
def test_micro_batches_are_added_in_fp32(dtype):
    """1 + 7 * 2**-12 in steps: in either format each small one would be lost."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    scaler = nc.scaling.Dynamic(scale=1.0)
    _, optimizer, stepper = made(O2_IN[dtype], model, lr=1.0, accumulate=8, scaler=scaler)
    for number in range(8):
        x = torch.full((1, 1), 8.0 if number == 0 else 2.0**-9)
        stepped(stepper, lambda x: model(x).float().sum(), x)
    ((_, master),) = weights.held_by(optimizer).parameters
    assert master.item() == 1.0 - (8.0 + 7 * 2.0**-9) / 8


def test_o2_on_a_machine_without_a_low_format_is_plain_fp32(monkeypatch):
    from narrowcast.machine import Choice

    monkeypatch.setattr("narrowcast.machine.best_format", lambda _: Choice(format="fp32", because="said so"))
    model, optimizer, stepper = made("O2")
    assert stepper.formats == {"cpu": FP32}
    assert weights.held_by(optimizer) is None
    assert micro_batch(model, stepper).complete
