"""What a watcher is told, and what it may ask: updates held back, FP32 from now on, another scale."""

import pytest
import torch
import torch.nn.functional as F
from scenarios import data, network, regression
from test_overflow import DENSE_OPTIMIZERS, all_finite, assert_same, backward, copies_of
from torch import nn

import narrowcast as nc
from narrowcast.attach import Attachment, Observer
from narrowcast.scaling import Dynamic, Static

POLICIES = ["fp32", "bf16", "fp16"]


class Noting(Observer):
    """Writes down what it is told; holds back from ``hold_from`` steps on."""

    def __init__(self, hold_from=10**9):
        self.hold_from = hold_from
        self.told = []
        self.steps = 0

    def attached(self, attachment):
        self.attachment = attachment

    def called(self, module, args, kwargs):
        self.told.append(("called", type(module).__name__, len(args), sorted(kwargs)))

    def returned(self, module, output):
        self.told.append(("returned", type(module).__name__, output.dtype))

    def holds_back(self, optimizer):
        return self.steps >= self.hold_from

    def held_back(self, optimizer):
        self.told.append(("held back", type(optimizer).__name__))

    def stepped(self, optimizer):
        self.steps += 1
        self.told.append(("stepped", type(optimizer).__name__))


@pytest.mark.parametrize("policy", POLICIES)
def test_each_outermost_call_is_told_of_once(policy):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x, *, twice):
            return self.inner(x) + self.inner(x) * twice

    class Without(nn.Module):
        def forward(self, x):
            return x

    watcher, model, (x, _) = Noting(), Outer(), data()
    with Attachment(policy, observer=watcher):
        model(x, twice=1.0)
        Without()(x)
        with torch.no_grad():
            model.inner(x)
    assert watcher.told == [
        ("called", "Outer", 1, ["twice"]),
        ("returned", "Outer", torch.float32),
        ("called", "Sequential", 1, []),
        ("returned", "Sequential", torch.float32),
    ]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_recomputed_call_is_not_told_again(policy, reentrant):
    watcher, model, (x, y) = Noting(), network(), data()
    with Attachment(policy, observer=watcher):
        middle = torch.utils.checkpoint.checkpoint(
            model[:2], x.clone().requires_grad_(), use_reentrant=reentrant
        )
        F.mse_loss(model[2:](middle), y).backward()
        with pytest.raises(RuntimeError):
            model(x[:, :3])
        model(x)
    once = ["called", "returned"]
    assert [what for what, *_ in watcher.told] == [*once, *once, "called", *once]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["SGD", "AdamW fused", "custom"])
def test_an_update_held_back_leaves_everything_as_it_was(name, policy):
    model, watcher = network(), Noting(hold_from=1)
    with Attachment(policy, None if policy != "fp16" else Static(scale=2.0**8), observer=watcher) as attached:
        optimizer = DENSE_OPTIMIZERS[name](model.parameters())
        hooked = []
        optimizer.register_step_pre_hook(lambda *_: hooked.append("before"))
        optimizer.register_step_post_hook(lambda *_: hooked.append("after"))
        backward(model)
        optimizer.step()
        assert hooked == ["before", "after"]
        before = copies_of(optimizer)
        keys = [sorted(s) for s in optimizer.state.values()]
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            gradient = model[0].weight.grad.clone()
            assert optimizer.step() is None
            assert torch.equal(model[0].weight.grad, gradient)
        assert_same(before, copies_of(optimizer))
        assert [sorted(s) for s in optimizer.state.values()] == keys
        assert hooked == ["before", "after"]
        watcher.hold_from = 10**9
        optimizer.step()
        assert not any(torch.equal(b, a) for b, a in zip(before[:2], copies_of(optimizer)[:2], strict=True))
    kind = type(optimizer).__name__
    told = [words for words in watcher.told if words[0] in ("held back", "stepped")]
    assert told == [("stepped", kind), *[("held back", kind), ("stepped", kind)] * 2, ("stepped", kind)]
    assert attached.facts["steps"] == 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [
    lambda p: torch.optim.LBFGS(p, max_iter=6), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
], ids=["LBFGS", "SGD"])  # fmt: skip
def test_a_closure_is_evaluated_once_with_gradients_enabled(make, policy):
    model, watcher, (x, y) = network(), Noting(hold_from=0), data()
    optimizer = make(model.parameters())
    evaluated = []

    def closure():
        evaluated.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    before = [p.detach().clone() for p in model.parameters()]
    with Attachment(policy, observer=watcher), torch.no_grad():
        loss = optimizer.step(closure)
    assert evaluated == [True]
    assert float(loss.detach()) > 0
    assert not optimizer.state
    assert all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
    assert all(p.grad is not None for p in model.parameters())


def test_an_overflow_held_back_lowers_the_scale():
    model, watcher = network(), Noting(hold_from=1)
    optimizer = torch.optim.Adam(model.parameters())
    scales = []
    watcher.held_back = lambda optimizer: scales.append(watcher.attachment.scale_of_gradients)
    with Attachment("fp16", Dynamic(scale=2.0**20), observer=watcher) as attached:
        backward(model, 1e-6)
        optimizer.step()  # until then an overflow would be run again
        for _ in range(30):
            optimizer.zero_grad()
            backward(model, 100.0)
            optimizer.step()
            if all(bool(torch.isfinite(p.grad).all()) for p in model.parameters()):
                break
        final = watcher.attachment.loss_scale
    skipped = attached.facts["skipped_steps"]
    assert skipped > 0
    assert attached.facts["steps"] == 2
    assert scales == [2.0 ** (20 - n) for n in range(skipped + 1)]
    assert final == scales[-1]
    assert all_finite(optimizer)


@pytest.mark.parametrize("where", ["attached", "called", "stepped"])
def test_fp32_from_now_on_is_fp32_to_the_bit(where):
    """Bit for bit what FP32 gives, with nothing scaled: from inside a call on for that call too."""

    watcher = Noting()
    noted = getattr(watcher, where)

    def noted_and_changed(*event):
        noted(*event)
        watcher.attachment.continue_in_fp32()

    setattr(watcher, where, noted_and_changed)
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Attachment("fp16", observer=watcher) as attached:
        first = model(x)
        F.mse_loss(first, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        found = model(x)
        F.mse_loss(found, y).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        assert attached.loss_scale is None
    assert not any("no module" in note for note in attached.recorder.notes)
    optimizer.zero_grad()
    expected = model(x)
    F.mse_loss(expected, y).backward()
    assert torch.equal(found, expected)
    assert torch.equal(first, expected) == (where != "stepped")
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))


def test_by_the_policy_again_after_fp32():
    """Regions, rules for modules and the loss scale are as before."""
    policy = nc.Policy(compute="fp16").with_rules(nc.rule.module("2", compute="fp32"))
    formats = []
    model, (x, y) = network(), data()
    for part in (model[0], model[2]):
        part.register_forward_hook(lambda part, args, output: formats.append(output.dtype))
    with Attachment(policy) as attached:
        F.mse_loss(model(x), y).backward()
        scale = attached.scale.value
        attached.continue_in_fp32()
        F.mse_loss(model(x), y).backward()
        attached.continue_by_policy(scale)
        F.mse_loss(model(x), y).backward()
        assert attached.loss_scale == scale.scale
    mixed = [torch.float16, torch.float32]
    assert formats == [*mixed, torch.float32, torch.float32, *mixed]


def test_another_scale_keeps_its_rule():
    model, optimizer, *_ = regression(1e-6)
    with Attachment("fp16", Dynamic(scale=2.0**4, growth_interval=2)) as attached:
        attached.continue_at_scale(2.0**7)
        assert attached.loss_scale == 2.0**7
        for _ in range(2):
            backward(model)
            optimizer.step()
        assert attached.loss_scale == 2.0**8
    with Attachment("fp16", Static(scale=2.0**4)) as attached:
        attached.continue_at_scale(2.0**7)
        assert attached.loss_scale == 2.0**4


def test_parameter_names_are_unique_when_modules_are_gone():
    class Linear(nn.Linear):
        """Another class of that name."""

    x = torch.ones(1, 2)
    with Attachment("bf16") as attached:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        first(x), second(x), first(x)
        names = attached.parameter_names()
        assert names[id(first.weight)] == "Linear.weight"
        assert names[id(second.weight)] == "Linear-2.weight"
        del first, names
        third = Linear(2, 2)
        third(x)
        names = attached.parameter_names()
        assert {names[id(p)] for p in (second.bias, third.bias)} == {"Linear-2.bias", "Linear-3.bias"}
        both = nn.Sequential(third, second)
        both(x)
        assert attached.parameter_names()[id(third.weight)] == "Linear-3.weight"


def test_a_watcher_may_end_the_script():
    model, watcher = network(), Noting()
    watcher.called = lambda *_: watcher.attachment.stop()
    with Attachment("bf16", observer=watcher) as attached:
        with pytest.raises(SystemExit) as ended:
            model(data()[0])
        assert ended.value.code == 0
        assert not torch.is_autocast_enabled("cpu")
    assert attached.facts["stopped"]
