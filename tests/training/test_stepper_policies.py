"""A Stepper under rules: each step as by hand, weights never stale, and the levels O0 to O3."""

import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.errors import PolicyError

rule = nc.rule
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDE_HEAD = nc.Policy(compute="bf16").with_rules(rule.module("2", compute="fp32"))
FP16_HEAD = nc.Policy(compute="bf16").with_rules(rule.module("2", compute="fp16", output="fp32"))
FP16_LINEAR = nc.Policy(compute="bf16").with_rules(rule.op("linear", compute="fp16"))


def model_of(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


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
    ruled, plain = model_of(), model_of()
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


class Casts(TorchDispatchMode):
    """Counts casts of tensors of one shape, by the format that they are cast to."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.to: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and tuple(out.shape) == self.shape:
            self.to[out.dtype] = self.to.get(out.dtype, 0) + 1
        return out


def test_the_casts_of_rules_are_kept_over_a_window_too():
    torch.manual_seed(0)
    model = nn.Linear(16, 24, bias=False)
    policy = nc.Policy(compute="bf16").with_rules(rule.op("linear", compute="fp16"))
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy, accumulate=4)
    with Casts((24, 16)) as casts:
        for x in batches(8):
            with stepper.autocast():
                loss = model(x).float().square().mean()
            stepper.step(loss)
    assert casts.to == {FP16: 2, FP32: 8}  # a cast a window; a gradient a micro-batch


def overwrite(weight):
    with torch.no_grad():
        weight.copy_(torch.full_like(weight, 0.5))


def swap_average(weight):
    with torch.no_grad():
        weight.lerp_(torch.full_like(weight, -0.25), 0.5)


def scale_for_each(weight):
    with torch.no_grad():
        torch._foreach_mul_([weight], 3.0)


def step_of_another_optimizer(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], 0.3, fused=True).step()
    weight.grad = None


def assign_by_data(weight):
    weight.data.mul_(2.0)


WRITES = [overwrite, swap_average, scale_for_each, step_of_another_optimizer, assign_by_data]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", [WIDE_HEAD, FP16_HEAD, FP16_LINEAR, "bf16"], ids=["1", "2", "3", "bf16"])
def test_a_weight_written_inside_a_window_is_cast_anew(policy, write):
    model, fresh = model_of(), model_of()
    x = batches(1)[0]
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy, accumulate=4)
    with stepper.autocast():
        before = model(x)
    with stepper.autocast():
        assert torch.equal(model(x), before)
    for layer in (0, 2):
        write(model[layer].weight)
        write(fresh[layer].weight)
    if write is assign_by_data:  # the one write that leaves no trace
        stepper.drop_casts()
    with stepper.autocast():
        after = model(x)
    other = nc.Stepper(fresh, torch.optim.SGD(fresh.parameters(), 0.1), policy)
    with other.autocast():
        expected = fresh(x)
    assert not torch.equal(after, before)
    assert torch.equal(after, expected)
    stepper.zero_grad()


def test_loaded_weights_are_cast_anew_inside_a_window():
    model = model_of()
    x = batches(1)[0]
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), FP16_HEAD, accumulate=4)
    with stepper.autocast():
        model(x)
    torch.manual_seed(7)
    other = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    model.load_state_dict(other.state_dict())
    with stepper.autocast():
        after = model(x)
    assert torch.equal(after, by_hand(other, (BF16, FP16), x).float())
    stepper.zero_grad()


def test_module_rules_hold_only_in_the_steppers_region():
    model = model_of()
    x = batches(1)[0]
    plain = model(x)
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), WIDE_HEAD)
    assert torch.equal(model(x), plain)
    with stepper.autocast():
        assert model(x).dtype == FP32
    del stepper
    gc.collect()
    assert not model[2]._forward_pre_hooks


def test_a_rule_for_a_module_that_is_not_there_is_refused():
    model = model_of()
    policy = nc.Policy(compute="bf16").with_rules(rule.module("hed", compute="fp32"))
    with pytest.raises(PolicyError, match='this Sequential has no modules "hed"'):
        nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy)


def test_two_steppers_of_one_model_take_one_policy():
    model = model_of()
    first = nc.Stepper(model, torch.optim.SGD(model[0].parameters(), 0.1), WIDE_HEAD)
    second = nc.Stepper(model, torch.optim.SGD(model[2].parameters(), 0.1), WIDE_HEAD)
    with pytest.raises(PolicyError, match="has another policy already"):
        nc.Stepper(model, torch.optim.SGD(model[2].parameters(), 0.1), FP16_HEAD)
    for stepper in (first, second):
        with stepper.autocast():
            assert model(batches(1)[0]).dtype == FP32


def norm_first() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize(
    ("level", "weights", "norm"),
    [("O0", FP32, FP32), ("O1", FP32, FP32), ("O2", BF16, FP32), ("O3", BF16, BF16)],
)
def test_the_levels_of_apex(level, weights, norm, monkeypatch):
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
    assert (model[1].weight.dtype, model[2].weight.dtype) == (weights, norm)
    assert model[2].running_mean.dtype == norm
    masters = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    assert masters == ({BF16} if level == "O3" else {FP32})
    assert losses[-1] < 0.7 * losses[0]
    assert stepper.scaler.get_scale() == 1.0


def test_o3_in_fp16_has_a_static_scale_of_one():
    model = norm_first()
    policy = nc.Policy(compute="fp16", low_weights=True)
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.05), policy)
    for _ in range(3):
        with stepper.autocast():
            loss = nn.functional.cross_entropy(model(torch.randn(64, 16)), torch.randint(0, 4, (64,)))
        result = stepper.step(loss)
        assert not result.skipped
    assert result.scale == 1.0
    assert {p.dtype for p in model.parameters()} == {FP16}


def test_an_eps_that_fp16_does_not_hold_is_named():
    model = norm_first()
    with pytest.warns(UserWarning, match=r"eps of 1e-08 is 0 and weights become NaN: give it eps=1e-4"):
        nc.Stepper(
            model, torch.optim.AdamW(model.parameters(), 1e-3), nc.Policy(compute="fp16", low_weights=True)
        )


def test_repr_names_the_policy(tmp_path):
    path = tmp_path / "ours.toml"
    WIDE_HEAD.save(path)
    for policy, by in ((str(path), f" by {path}"), (nc.Policy.load(path), f" by {path}"), ("bf16", "")):
        model = model_of()
        stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy)
        assert repr(stepper) == f"Stepper(Sequential, SGD, bf16 on cpu{by}, steps=0)"
    model = model_of()
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), WIDE_HEAD)
    assert repr(stepper) == "Stepper(Sequential, SGD, bf16 on cpu by bf16 with 1 rule, steps=0)"
