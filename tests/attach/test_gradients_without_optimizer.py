"""Gradients that a script reads before any step of an optimizer: a pass that overflows is run again."""

import gc
import math

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from scenarios import data, network, notes_of
from test_overflow import all_finite
from test_scenarios import relative_error
from torch import nn

from narrowcast.attach import Attachment
from narrowcast.scaling import Dynamic, Static

SCALE = Dynamic(scale=2.0**24)  # every pass at this scale overflows
TOLERANCE = 0.01  # fp16 has 11 bits; relative to the norm of all gradients


def loss_of(model, factor=1.0):
    x, y = data()
    return F.mse_loss(model(x), y) * factor


def gradients(model):
    return [p.grad.detach().clone() for p in model.parameters()]


def fisher(model):
    """Squares of single gradients, as for elastic weight consolidation."""
    x, y = data(8)
    total = [0.0] * len(list(model.parameters()))
    for one_x, one_y in zip(x, y, strict=True):
        model.zero_grad()
        F.mse_loss(model(one_x), one_y).backward()
        total = [t + p.grad.square() for t, p in zip(total, model.parameters(), strict=True)]
    return total


def saliency(model):
    """The gradient of inputs and of a tensor in the middle."""
    x = data(8)[0].requires_grad_()
    middle = model[:2](x)
    middle.retain_grad()
    model[2:](middle).sum().backward()
    return [x.grad, middle.grad]


def accumulated(model):
    """In place, on what an earlier pass left, which stays the same tensor."""
    loss_of(model).backward()
    first = model[0].weight.grad
    loss_of(model, 3.0).backward()
    assert model[0].weight.grad is first
    return gradients(model)


def accumulated_on_zeros(model):
    loss_of(model).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model).backward()
    return gradients(model)


def of_named_inputs(model):
    middle = model[:2](data(8)[0])
    model[2:](middle).sum().backward(inputs=[middle, model[2].weight])
    assert model[0].weight.grad is None
    return [middle.grad, model[2].weight.grad]


def twice_through_one_graph(model):
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def of_a_penalty(model):
    """Second derivatives, through gradients that the first pass accumulated with a graph."""
    loss_of(model).backward(create_graph=True)
    slopes = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    sum(slope.square().sum() for slope in slopes).backward()
    return gradients(model)


def seen_by_a_hook(model):
    seen = []
    out = model(data(8)[0])
    out.register_hook(seen.append)
    out.square().sum().backward()
    return [seen[-1], *gradients(model)]


def several_roots(model):
    out = model(data(8)[0])
    torch.autograd.backward([out, out.square().sum()], [torch.ones_like(out), None])
    return gradients(model)


def of_a_table(_):
    torch.manual_seed(0)
    table = nn.Embedding(9, 4, sparse=True)
    model = nn.Sequential(table, nn.Linear(4, 1))
    words = torch.tensor([[1, 2, 2], [3, 1, 8]])
    for _ in range(2):
        model(words).square().sum().backward()
    return [table.weight.grad.to_dense()]


def of_a_tied_table(_):
    """A dense gradient is added to a sparse one of the same weight."""
    torch.manual_seed(0)
    table = nn.Embedding(9, 4, sparse=True)
    head = nn.Linear(4, 4)
    words = torch.tensor([[1, 2, 2], [3, 1, 8]])
    head(table(words)).square().sum().backward()
    (head(torch.ones(2, 4)) @ table.weight.T).square().sum().backward()
    return [table.weight.grad]


WAYS = [fisher, saliency, accumulated, accumulated_on_zeros, of_named_inputs, twice_through_one_graph,
        of_a_penalty, seen_by_a_hook, several_roots, of_a_table, of_a_tied_table]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_are_those_of_fp32(way):
    expected = way(network())
    with Attachment("fp16", SCALE) as attached:
        found = way(network())
    assert all(bool(g.isfinite().all()) for g in found)
    assert relative_error(found, expected) < TOLERANCE * (10 if way is of_a_penalty else 1)
    assert attached.facts["final_scale"] < SCALE.scale
    assert not any("not finite" in note for note in notes_of(attached))


def test_a_first_step_that_would_overflow_is_taken():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Attachment("fp16", SCALE) as attached:
        loss_of(model).backward()
        optimizer.step()
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (1, 0)
    assert all_finite(optimizer)


def test_gradients_that_are_infinite_in_fp32_stay_infinite_and_the_scale_falls_once():
    model = network()
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        for number in range(1, 4):
            model.zero_grad()
            out = model(data(8)[0])
            (out * 0.0).sqrt().sum().backward()
            assert not any(bool(p.grad.isfinite().all()) for p in model.parameters())
            assert attached.scale.value.scale == 2.0 ** (8 - number)
    assert any("gradients of the backward pass at" in note for note in attached.notes)


def test_after_a_step_only_a_retained_graph_runs_again():
    """Then optimizers skip what overflows; a script that retains the graph may read ``p.grad`` itself."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        loss_of(model).backward()
        optimizer.step()
        attached.continue_at_scale(2.0**24)
        optimizer.zero_grad()
        loss_of(model).backward(retain_graph=True)
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
        assert attached.scale.value.scale < 2.0**24
        attached.continue_at_scale(2.0**24)
        optimizer.zero_grad()
        loss_of(model).backward()
        assert not all(bool(p.grad.isfinite().all()) for p in model.parameters())
        assert attached.scale.value.scale == 2.0**23  # at the end of the pass, not at the next step
    assert any("gradients of the backward pass at" in note for note in attached.notes)


@pytest.mark.parametrize("kind", ["function", "module hook", "checkpoint", "post hook", "fixed scale"])
def test_what_may_not_run_twice_runs_once_and_is_said(kind):
    """As in a Function that frees what it holds, or that writes to gradients that it has saved."""
    calls = []

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            calls.append(1)
            return gradient

    model, x = network(), data(8)[0].requires_grad_()
    told = []
    scale = Static(scale=2.0**24) if kind == "fixed scale" else SCALE
    if kind == "module hook":
        model[0].register_full_backward_hook(lambda *_: calls.append(1))
    with Attachment("fp16", scale, tell=told.append) as attached:
        if kind == "post hook":
            model[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
        out = (
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            if kind == "checkpoint"
            else model(x)
        )
        if kind == "function":
            out = Once.apply(out)
        out.square().sum().backward()
        assert not bool(model[0].weight.grad.isfinite().all())
        model.zero_grad()  # only now is it certain, and noted, that no optimizer uses these gradients
    assert len(calls) <= 1
    assert attached.facts["final_scale"] == (scale.scale if kind == "fixed scale" else 2.0**23)
    assert any("gradients of the backward pass at" in note for note in told)


@pytest.mark.parametrize("overflows", [False, True])
def test_the_graph_is_freed_as_in_fp32(overflows):
    """Saved tensors go when the pass ends, though the script still holds the loss."""
    saved = []

    class Keeps(nn.Module):
        def forward(self, x):
            out = x.exp().square()
            saved[:] = [out.grad_fn]
            return out

    model = nn.Sequential(nn.Linear(12, 4), Keeps())
    with Attachment("fp16", SCALE if overflows else Dynamic(scale=1.0)):
        loss = model(data(8)[0]).sum()
        loss.backward()
        gc.collect()
        with pytest.raises(RuntimeError, match="after they have already been freed"):
            _ = saved[0]._saved_self
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_an_error_in_a_pass_keeps_what_the_leaves_held():
    model = network()
    with Attachment("fp16", Dynamic(scale=2.0**8)):
        loss_of(model).backward()
        before = gradients(model)
        loss = loss_of(model)
        loss.backward()
        doubled = gradients(model)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert all(torch.equal(d, 2 * b) for d, b in zip(doubled, before, strict=True))
    assert all(torch.equal(p.grad, d) for p, d in zip(model.parameters(), doubled, strict=True))


@pytest.mark.parametrize("first_bad", [0, 1, 2])
def test_micro_batches_that_overflow_lower_the_scale_once_for_each_scale(first_bad, monkeypatch):
    """As on a GPU, where all flags are read at the step: passes that ran at one scale lower it once."""
    # What it returns on a GPU, where reading a flag would wait.
    monkeypatch.setattr("narrowcast.attach._leaves.PassGradients.are_finite", lambda _: None)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        for number in range(3):
            loss_of(model, 1e6 if number >= first_bad else 1.0).backward()
        optimizer.step()
    assert attached.facts["final_scale"] == 2.0**7
    assert attached.facts["skipped_steps"] == 1


def test_a_loss_that_is_not_finite_does_not_lower_the_scale_of_every_micro_batch():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(6):
            loss_of(model, math.nan).backward()
        optimizer.step()
    assert attached.facts["final_scale"] == 2.0**7
