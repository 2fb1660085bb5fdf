"""Training beside stored weights (LoRA), and its refusal where stored weights would train."""

import copy
import sys
from pathlib import Path

import pytest
import torch

import narrowcast as nc
from child_processes import finished
from narrowcast.errors import UnsupportedError

BF16, FP32 = torch.bfloat16, torch.float32


class LoraLinear(torch.nn.Module):
    def __init__(self, d, rank=2):
        super().__init__()
        self.base = torch.nn.Linear(d, d).requires_grad_(False)
        self.down = torch.nn.Linear(d, rank, bias=False)
        self.up = torch.nn.Linear(rank, d, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Model(torch.nn.Module):
    """The second layer is used twice, so that PyTorch's cast of its adapters is too."""

    def __init__(self, d=16):
        super().__init__()
        self.norm = torch.nn.LayerNorm(d)
        self.first = LoraLinear(d)
        self.second = LoraLinear(d)

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.second(self.first(self.norm(x)))))


def batches(steps):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, 16, generator=generator) for _ in range(steps)]


def after_a_first_call(*models):
    """Calls in which formats are found keep no casts while other threads run, as of tests before."""
    for model in models:
        model(batches(1)[0].requires_grad_())


def trained(model, steps=4):
    """Losses, gradients of each step, and the parameters that train."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-2)
    found = []
    for x in batches(steps):
        x.requires_grad_()
        loss = model(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), x.grad]
        found += [one.grad.clone() for one in model.parameters() if one.requires_grad]
        optimizer.step()
        optimizer.zero_grad()
    return found + [one.detach().clone() for one in model.parameters() if one.requires_grad]


def differing(ours, theirs):
    """Which of what ``trained`` found differs, and by how much."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return {at: (a - b).abs().max().item() for at, (a, b) in pairs if not torch.equal(a, b)}


@pytest.mark.parametrize("by_a_rule", [False, True])
@pytest.mark.parametrize("keep_fp32", [True, False])
def test_adapters_train_to_the_bit_as_under_apply(by_a_rule, keep_fp32):
    policy = nc.Policy.preset("bf16")
    if by_a_rule:
        policy = policy.with_rules(nc.rule.op("linear", compute="bf16"))
    model = Model()
    reference = copy.deepcopy(model)
    applied = nc.apply(reference, policy)
    handle = nc.bake(model, policy, frozen_only=True, keep_fp32=keep_fp32)
    after_a_first_call(model, reference)
    ours, theirs = trained(model), trained(reference)
    assert len(ours) == len(theirs)
    assert not differing(ours, theirs)
    assert set(handle.formats) == {
        f"{layer}.base.{one}" for layer in ("first", "second") for one in ("weight", "bias")
    }
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {FP32}
    applied.remove()
    if keep_fp32:
        handle.restore()
        assert torch.equal(model.first.base.weight, reference.first.base.weight)
    else:
        with pytest.warns(UserWarning, match="widened 4 weights"):
            handle.restore()


@pytest.mark.parametrize("others", [False, True])
def test_a_first_call_beside_other_threads_casts_a_weight_at_each_use(others):
    """In a process of its own, where nothing else has left threads behind."""
    code = f"""
import copy, sys, threading
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]}
import torch, narrowcast as nc
from {Path(__file__).stem} import Model, differing, trained
torch.manual_seed(0)
ended = threading.Event()
if {others}:
    threading.Thread(target=ended.wait).start()
model = Model()
reference = copy.deepcopy(model)
nc.apply(reference, "bf16")
nc.bake(model, "bf16", frozen_only=True)
ours, theirs = trained(model, 1), trained(reference, 1)
ended.set()
print(sorted(set(differing(ours, theirs)) & set(range(8))))
"""
    done = finished([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    # The gradients of the adapters that are used twice, added up in fp32 and not in bf16.
    assert done.stdout == ("[6, 7]\n" if others else "[]\n")


def test_adapters_train_with_a_stepper():
    model = Model()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1, 0.9)
    handle = nc.bake(model, "bf16", frozen_only=True)
    stepper = nc.Stepper(model, optimizer, policy="bf16", accumulate=2)
    first = model.first.up.weight.detach().clone()
    for x in batches(4):
        with stepper.autocast():
            loss = model(x).float().square().mean()
        stepper.step(loss)
    assert not torch.equal(model.first.up.weight, first)
    assert model.first.base.weight.dtype == BF16
    handle.restore()


def test_a_weight_that_is_unfrozen_cannot_train_in_the_low_format():
    model = Model()
    handle = nc.bake(model, "bf16", frozen_only=True)
    x = batches(1)[0]
    model(x).sum().backward()
    model.first.base.weight.requires_grad_(True)
    before = model.first.base.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.no_grad():
        model(x)  # to compute with it is no mistake
    with pytest.raises(UnsupportedError) as caught:
        model(x).sum().backward()
    assert str(caught.value) == (
        "backward reached 'first.base.weight', which nc.bake stores in bfloat16 for inference, where small "
        "updates are lost: call restore() on its handle before training; with frozen_only=True only weights "
        "that do not require gradients are stored so, and the others train"
    )
    assert model.first.base.weight.grad is None
    optimizer.step()
    assert torch.equal(model.first.base.weight, before)
    handle.restore()
    model(x).sum().backward()
    assert model.first.base.weight.grad.dtype == FP32
    # Baked again, it is one that trains.
    with nc.bake(model, "bf16", frozen_only=True) as again:
        model(x).sum().backward()
        assert "first.base.weight" not in again.formats


def test_backward_through_a_baked_model_is_refused_and_restored_it_trains():
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    reference = copy.deepcopy(model)
    handle = nc.bake(model, "bf16")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x = batches(1)[0].requires_grad_()
    for _ in range(2):  # the first call finds the formats
        with pytest.raises(UnsupportedError, match="backward reached '1"):
            model(x).sum().backward()
        assert all(one.grad is None for one in model[1].parameters())
    handle.restore()
    optimizer.zero_grad()
    for one in (model, reference):
        nc.apply(one, "bf16")
        one(x).float().sum().backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )
    optimizer.step()


def test_gradients_of_inputs_and_of_fp32_weights_are_those_of_apply():
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    reference = copy.deepcopy(model)
    nc.apply(reference, "bf16")
    x = batches(1)[0].requires_grad_()
    with nc.bake(model, "bf16"):
        for _ in range(2):
            ours = torch.autograd.grad(model(x).float().square().sum(), [x, *model[0].parameters()])
            theirs = torch.autograd.grad(reference(x).float().square().sum(), [x, *reference[0].parameters()])
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_step_on_gradients_from_before_is_refused():
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = batches(1)[0]
    model(x).sum().backward()
    gradient = model.weight.grad.clone()
    handle = nc.bake(model, "bf16")
    with torch.no_grad():
        model(x)
    before = model.weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"SGD.step\(\) would update 'weight', which nc.bake stores"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    handle.restore()
    assert torch.equal(model.weight.grad, gradient)
    optimizer.step()


def test_other_optimizers_step_meanwhile():
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with nc.bake(model, "bf16"):
        model(torch.ones(1, 4))
        other(torch.ones(1, 4)).sum().backward()
        before = other.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(other.weight, before)


def test_optimizers_are_watched_only_while_something_is_stored():
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    assert not hooks
    model = torch.nn.Linear(4, 4)
    handle = nc.bake(model, "bf16")
    assert not hooks
    model(torch.ones(1, 4))
    assert len(hooks) == 1
    twin = copy.deepcopy(model)
    handle.restore()
    assert len(hooks) == 1
    del twin
    assert not hooks
    model = torch.nn.Linear(4, 4)
    nc.bake(model, "bf16")
    model(torch.ones(1, 4))
    assert len(hooks) == 1
    del model  # freed with its last reference, and with it what is stored
    assert not hooks


def test_a_frozen_weight_under_a_checkpoint():
    class Checkpointed(torch.nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.inner = Model()
            self.reentrant = reentrant

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)

    for reentrant in (False, True):
        model = Checkpointed(reentrant)
        reference = copy.deepcopy(model)
        nc.apply(reference, "bf16")
        with nc.bake(model, "bf16", frozen_only=True) as handle:
            after_a_first_call(model, reference)
            ours, theirs = trained(model), trained(reference)
            assert not differing(ours, theirs)
            assert len(handle.formats) == 4
