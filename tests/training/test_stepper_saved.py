"""Saved and resumed to the bit; O2: weights in a low format, fp32 masters in the state."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten

import narrowcast as nc
from narrowcast import weights
from narrowcast.scaling import Dynamic

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
O2_IN = {name: nc.Policy(compute=name, master_weights=True) for name in LOW}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


def make(policy):
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    scaler = Dynamic(scale=2.0**9, growth_interval=3)
    stepper = nc.Stepper(
        model, optimizer, policy, accumulate=2, max_norm=1.0, scheduler=scheduler, scaler=scaler
    )
    return model, optimizer, stepper


def train(model, stepper, steps, *, seed, overflow_at=()):
    generator = torch.Generator().manual_seed(seed)
    for number in range(steps * 2):
        x = torch.randn(4, 1, 8, 8, generator=generator)
        y = torch.randint(0, 3, (4,), generator=generator)
        if number in overflow_at:
            x = x * torch.inf
        with stepper.autocast():
            loss = F.cross_entropy(model(x), y)
        stepper.step(loss)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(mine, theirs):
    (mine, form), (theirs, other_form) = tree_flatten(mine), tree_flatten(theirs)
    assert form == other_form
    for one, other in zip(mine, theirs, strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "O2 in bf16", "O2 in fp16"])
def test_resuming_is_bit_exact(policy):
    policy = O2_IN[policy.rpartition(" ")[2]] if policy.startswith("O2") else policy
    model, _, stepper = make(policy)
    train(model, stepper, 4, seed=1, overflow_at=(2,))
    saved = through_a_file({"model": model.state_dict(), "stepper": stepper.state_dict()})
    train(model, stepper, 4, seed=2, overflow_at=(5,))

    again, _, resumed = make(policy)
    train(again, resumed, 1, seed=9)  # whatever it did before
    with resumed.autocast():
        loss = again(torch.ones(4, 1, 8, 8)).square().mean()
    assert not resumed.step(loss).complete, "loading discards it"
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["stepper"])
    assert resumed.steps == 4
    train(again, resumed, 4, seed=2, overflow_at=(5,))
    assert_same(again.state_dict(), model.state_dict())
    assert_same(resumed.state_dict(), stepper.state_dict())


@pytest.mark.parametrize(("saved", "into"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_a_state_of_another_format_leaves_the_scale_alone(saved, into):
    """A state without a loss scale must not turn scaling off."""
    models = [nn.Linear(4, 1) for _ in range(2)]
    steppers = [
        nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy)
        for model, policy in zip(models, (saved, into), strict=True)
    ]
    state = steppers[0].state_dict()
    with pytest.warns(UserWarning, match="the saved state is of a run with (a|no) loss scale"):
        steppers[1].load_state_dict(state)
    assert steppers[1].scaler.get_scale() == (2.0**16 if into == "fp16" else 1.0)


# ---- O2


@pytest.mark.parametrize("dtype", LOW)
def test_o2_keeps_batch_norms_and_masters_in_fp32(dtype):
    torch.manual_seed(0)
    model = Small()
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stepper = nc.Stepper(model, optimizer, O2_IN[dtype])
    assert stepper.formats == {"cpu": LOW[dtype]}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "norm" in name else LOW[dtype]), name
    masters = dict(weights.held_by(optimizer).parameters)
    for name, parameter in model.named_parameters():
        if parameter in masters:
            assert torch.equal(masters[parameter], full[name]), "every bit of the fp32 values"
            assert torch.equal(parameter, full[name].to(LOW[dtype]))
    assert all(p.dtype == torch.float32 for group in optimizer.param_groups for p in group["params"])


def test_o2_keeps_the_format_of_a_low_model():
    for dtype in LOW.values():
        model = nn.Linear(4, 1).to(dtype)
        stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "O2")
        assert stepper.formats == {"cpu": dtype}
        assert model.weight.dtype == dtype


@pytest.mark.parametrize("dtype", LOW)
def test_micro_batches_are_added_in_fp32(dtype):
    """1 + 7 * 2**-12 in steps: in either format each small one would be lost."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    stepper = nc.Stepper(model, optimizer, O2_IN[dtype], accumulate=8, scaler=Dynamic(scale=1.0))
    for number in range(8):
        with stepper.autocast():
            loss = model(torch.full((1, 1), 8.0 if number == 0 else 2.0**-9)).float().sum()
        stepper.step(loss)
    ((_, master),) = weights.held_by(optimizer).parameters
    assert master.item() == 1.0 - (8.0 + 7 * 2.0**-9) / 8


def test_o2_on_a_machine_without_a_low_format_is_plain_fp32(monkeypatch):
    from narrowcast.machine import Choice

    monkeypatch.setattr("narrowcast.machine.best_format", lambda _: Choice(format="fp32", because="said so"))
    model, optimizer, stepper = make("O2")
    assert stepper.formats == {"cpu": torch.float32}
    assert weights.held_by(optimizer) is None
    train(model, stepper, 1, seed=1)
