"""Steps with a closure, as Lightning calls every step: evaluated as often as in FP32, also at an overflow."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from scenarios import data, network, notes_of
from test_overflow import all_finite, assert_same, copies_of
from torch import nn

from narrowcast.attach import Attachment
from narrowcast.errors import UnsupportedError
from narrowcast.scaling import Dynamic

SCALE = Dynamic(scale=2.0**8)

# Each optimizer of torch but LBFGS evaluates its closure once, before it reads a gradient.
OF_TORCH = {
    kind.__name__: kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
ONCE = sorted(OF_TORCH.keys() - {"Optimizer", "LBFGS", "SparseAdam", "Muon"})


def with_batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Loop:
    """Two micro-batches a step, as Lightning accumulates: the second in the closure of the step."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.calls = 0
        self.losses, self.gradients = [], []

    def micro_batch(self, number, factor):
        x, y = data()
        if number == 0:
            self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x.chunk(2)[number]), y.chunk(2)[number]) * factor
        loss.backward()
        self.calls += 1
        return loss

    def step(self, factors=(1.0, 1.0)):
        self.micro_batch(0, factors[0])
        self.losses.append(self.optimizer.step(lambda: self.micro_batch(1, factors[1])))
        self.gradients.append([p.grad.clone() for p in self.model.parameters()])


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
@pytest.mark.parametrize("bad", [(1e38, 1.0), (1.0, 1e38), (1e38, 1e38)], ids=["first", "second", "both"])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_an_overflow_in_either_micro_batch_is_a_plain_skip(name, bad, policy):
    model = with_batch_norm()
    loop = Loop(model, OF_TORCH[name](model.parameters(), lr=0.01))
    bad = bad if policy == "fp16" else [math.inf if factor > 1 else 1.0 for factor in bad]
    with Attachment(policy, SCALE if policy == "fp16" else None) as attached:
        loop.step()
        before = copies_of(loop.optimizer)
        loop.step(bad)
        assert_same(before, copies_of(loop.optimizer))
        assert loop.calls == 4
        assert loop.losses[-1] is not None
        if policy == "fp16":
            assert attached.scale.value.scale < SCALE.scale
        loop.step()
    assert model[1].num_batches_tracked == loop.calls == 6
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (2, 1)
    assert all_finite(loop.optimizer)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_gradients_of_earlier_micro_batches_are_kept(name):
    """FP32's arithmetic, with a loss that is scaled by a power of two: FP32's bits."""
    trained = []
    for attached in (False, True):
        model = with_batch_norm()
        loop = Loop(model, OF_TORCH[name](model.parameters(), lr=0.01))
        if attached:
            with Attachment("fp32", Dynamic(scale=2.0**8)):
                loop.step()
                loop.step()
        else:
            loop.step()
            loop.step()
        trained.append([*loop.gradients[0], *loop.gradients[1], *model.state_dict().values()])
    assert_same(*trained)


@pytest.mark.parametrize("name", ONCE)
def test_each_optimizer_of_torch_evaluates_once_and_skips(name):
    model, calls = network(), []
    optimizer = OF_TORCH[name](model.parameters(), lr=1e-3)
    x, y = data()
    loss_factor = 1.0

    def closure():
        calls.append(loss_factor)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * loss_factor
        loss.backward()
        return loss

    with Attachment("fp16", SCALE) as attached:
        optimizer.step(closure)
        before = copies_of(optimizer)
        loss_factor = math.inf
        loss = optimizer.step(closure=closure)
        assert_same(before, copies_of(optimizer))
        assert not torch.isfinite(loss)
        loss_factor = 1.0
        optimizer.step(closure)
    assert len(calls) == 3
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (2, 1)
    assert all_finite(optimizer)


def test_a_closure_may_call_backward_on_a_loss_from_outside():
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Attachment("fp16", SCALE) as attached:
        for factor in (1.0, 1e6, 1.0):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * factor
            optimizer.step(loss.backward)
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (2, 1)


class Ascends(torch.optim.SGD):
    """As SAM: moves up along the gradients, evaluates its closure there, moves back and steps."""

    by_data = False

    @torch.no_grad()
    def step(self, closure):
        parameters = [p for group in self.param_groups for p in group["params"]]
        moved = [0.01 * p.grad for p in parameters]
        for p, by in zip(parameters, moved, strict=True):
            (p.data if self.by_data else p).add_(by)
        with torch.enable_grad():
            loss = closure()
        for p, by in zip(parameters, moved, strict=True):
            p.sub_(by)
        super().step()
        return loss


class AscendsWithDefault(Ascends):
    by_data = True

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [Ascends, AscendsWithDefault])
@pytest.mark.parametrize("bad_step", [0, 2])
@pytest.mark.parametrize("nested", [False, True], ids=["", "its step wraps one that is wrapped too"])
def test_an_optimizer_that_moves_before_its_closure_is_put_back(bad_step, kind, nested):
    model, (x, y) = network(), data()
    if nested:
        Ascends(network().parameters(), 0.01)  # from now on torch has wrapped the step of that class
    optimizer = kind(model.parameters(), 0.01)
    with Attachment("bf16") as attached:
        for number in range(4):
            F.mse_loss(model(x), y).backward()
            before = copies_of(optimizer)

            def closure(factor=math.inf if number == bad_step else 1.0):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y) * factor
                loss.backward()
                return loss

            optimizer.step(closure)
            if number == bad_step:
                assert_same(before, copies_of(optimizer))
            optimizer.zero_grad()
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (3, 1)


def test_a_step_that_moves_first_for_the_first_time_is_refused():
    class Sometimes(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"] if self.ascends else ():
                p.add_(0.01)
            with torch.enable_grad():
                loss = closure()
                if self.ascends:
                    closure()
            super().step()
            return loss

    model, (x, y) = network(), data()
    optimizer = Sometimes(model.parameters(), 0.01)
    losses = iter([1.0, 1.0, math.inf])

    def closure():
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * next(losses)).backward()

    with Attachment("bf16"):
        optimizer.ascends = False
        optimizer.step(closure)
        optimizer.ascends = True
        with pytest.raises(UnsupportedError, match="a step of Sometimes moved parameters before"):
            optimizer.step(closure)


def test_closures_say_nothing_where_nothing_overflows():
    model = with_batch_norm()
    loop = Loop(model, torch.optim.Adam(model.parameters()))
    with Attachment("fp16", SCALE) as attached:
        for _ in range(3):
            loop.step()
    assert not notes_of(attached)
    assert loop.calls == 6


def first_step_with_a_closure(name, in_context=nullcontext):
    """Return how often the closure was evaluated, and the gradients."""
    model, calls = network(), 0
    optimizer = OF_TORCH[name](model.parameters(), lr=1e-9)
    x, y = data()

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = 1e3 * F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with in_context() as context:
        optimizer.step(closure)
    return context, calls, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", ["SGD", "Adam", "LBFGS"])
def test_the_pass_of_the_first_closure_is_run_again_at_lower_scales(name):
    """As that of a loop without closures: training does not begin with skipped steps."""
    _, expected_calls, expected = first_step_with_a_closure(name)
    attached, calls, found = first_step_with_a_closure(
        name, lambda: Attachment("fp16", Dynamic(scale=2.0**20))
    )
    assert attached.facts["skipped_steps"] == 0
    assert attached.facts["final_scale"] < 2.0**20
    assert calls == expected_calls
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))
