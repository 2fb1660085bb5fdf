"""A planted overflow: the step is skipped, the scale halves, and nothing stored is ever non-finite."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from scenarios import SignDescent, data, network, regression
from torch.utils.checkpoint import checkpoint

from narrowcast.attach import Attachment
from narrowcast.attach._leaves import PassGradients
from narrowcast.errors import ScaleCollapseError
from narrowcast.scaling import Dynamic

# test_sweeps.py in tests/training takes every optimizer of torch through overflows.
DENSE_OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
    "RAdam": torch.optim.RAdam,
    "Adafactor": torch.optim.Adafactor,
    "custom": lambda p: SignDescent(p, 0.01),
}


def tensors_of(optimizer):
    found = [p for group in optimizer.param_groups for p in group["params"]]
    for state in optimizer.state.values():
        for value in state.values():
            found += [
                t for t in (value if isinstance(value, list) else [value]) if isinstance(t, torch.Tensor)
            ]
    return found


def all_finite(optimizer):
    return all(bool(torch.isfinite(t).all()) for t in tensors_of(optimizer))


def copies_of(optimizer):
    return [t.detach().clone() for t in tensors_of(optimizer)]


def assert_same(before, after):
    assert len(before) == len(after)
    assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))


def backward(model, loss_factor=1.0):
    x, y = data()
    (F.mse_loss(model(x), y) * loss_factor).backward()


def closure_for(model, optimizer, factor=lambda: 1.0):
    x, y = data()

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x) * factor(), y)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize(
    ("name", "scheduled"),
    [(name, False) for name in DENSE_OPTIMIZERS] + [(name, True) for name in ("SGD", "AdamW fused", "RAdam")],
)
def test_a_skipped_step_changes_nothing(name, scheduled):
    model = network()
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        optimizer = DENSE_OPTIMIZERS[name](model.parameters())
        if scheduled:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step that the attachment has wrapped
        groups = [list(group["params"]) for group in optimizer.param_groups]
        backward(model)
        optimizer.step()
        before = copies_of(optimizer)
        optimizer.zero_grad()
        backward(model, loss_factor=1e6)  # 1e6 * 2**8 is beyond fp16
        assert any(not torch.isfinite(p.grad).all() for p in model.parameters())
        assert optimizer.step() is None
        after = copies_of(optimizer)
        assert_same(before, after)
        assert attached.scale.value.scale == 2.0**7
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    assert all(p is q for group, old in zip(optimizer.param_groups, groups, strict=True)
               for p, q in zip(group["params"], old, strict=True))  # fmt: skip
    assert not all(torch.equal(a, b) for a, b in zip(after, copies_of(optimizer), strict=False))
    assert all_finite(optimizer)
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (2, 1)


@pytest.mark.parametrize("hide", ["clamp", "checkpoint", "nan_to_num", "clip_grad_value_", "clip_grad_norm_"])
def test_an_overflow_that_is_clamped_away_is_still_skipped(hide):
    model, optimizer, _, x, y = regression(0.1)
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        if hide == "checkpoint":
            out = checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)
            (F.mse_loss(out, y) * 1e6).backward()
        else:
            backward(model, 1e6)
        before = copies_of(optimizer)
        parameters = list(model.parameters())
        match hide:
            case "clamp" | "checkpoint":
                for p in parameters:
                    p.grad.nan_to_num_(0.0).clamp_(-1, 1)
            case "nan_to_num":
                for p in parameters:
                    p.grad.data = torch.nan_to_num(p.grad.data, 0.0, 0.0, 0.0)
            case "clip_grad_value_":
                torch.nn.utils.clip_grad_value_(parameters, 0.1)
            case "clip_grad_norm_":
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        assert_same(before, copies_of(optimizer))
    assert attached.facts["skipped_steps"] == 1


@pytest.mark.parametrize(("factors", "steps", "scale"), [
    ((1e6, 1.0), (1, 1), 2.0**7), ((1e6, 1e6), (0, 2), 2.0**7), ((1.0, 1.0), (2, 0), 2.0**9),
], ids=["one", "both", "none"])  # fmt: skip
def test_two_optimizers_move_the_scale_once_a_backward(factors, steps, scale):
    """A joint backward overflows in one branch, in both, or in none; each optimizer steps by itself."""
    models = [network(seed=3), network(seed=4)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    x, y = data()
    with Attachment("fp16", Dynamic(scale=2.0**8, growth_interval=1)) as attached:
        sum(F.mse_loss(m(x), y) * factor for m, factor in zip(models, factors, strict=True)).backward()
        for optimizer, factor in zip(optimizers, factors, strict=True):
            before = copies_of(optimizer)
            optimizer.step()
            changed = [not torch.equal(b, a) for b, a in zip(before, copies_of(optimizer), strict=True)]
            assert all(changed) if factor == 1.0 else not any(changed)
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == steps
    assert attached.facts["final_scale"] == scale


@pytest.mark.parametrize("read_later", [False, True])
def test_an_overflow_of_a_workers_gradients_is_skipped(read_later, monkeypatch):
    """As in A3C: the parameters of the optimizer get the very gradients of a copy."""
    model, optimizer, *_ = regression(0.1)
    worker, before = copy.deepcopy(model), copies_of(optimizer)
    if read_later:
        monkeypatch.setattr(PassGradients, "are_finite", lambda _: None)
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        backward(worker, 1e6)
        for shared, own in zip(model.parameters(), worker.parameters(), strict=True):
            shared.grad = own.grad
        optimizer.step()
    assert_same(before, copies_of(optimizer))
    assert attached.facts["skipped_steps"] == 1


@pytest.mark.parametrize("hooked", [False, True], ids=["together", "one by one"])
@pytest.mark.parametrize("clamped", [False, True])
def test_a_check_that_stays_on_the_device_is_read_at_the_step(clamped, hooked, monkeypatch):
    """Of two branches one overflows. Gradients that were changed since count as overflowed, if one did."""
    monkeypatch.setattr(PassGradients, "are_finite", lambda _: None)  # as on a GPU
    models = [network(seed=3), network(seed=4)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    x, y = data()
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        if hooked:
            models[0][4].register_full_backward_hook(lambda *_: None)
        sum(F.mse_loss(m(x), y) * f for m, f in zip(models, (1e6, 1.0), strict=True)).backward()
        if clamped:
            torch.nn.utils.clip_grad_value_(models[0].parameters(), 0.1)
            for p in models[0].parameters():
                p.grad.nan_to_num_(0.0)
        for number, optimizer in enumerate(optimizers):
            before = copies_of(optimizer)
            optimizer.step()
            changed = [not torch.equal(b, a) for b, a in zip(before, copies_of(optimizer), strict=True)]
            assert all(changed) if number else not any(changed)
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(models[0])
        optimizers[0].step()
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (2, 1)
    assert attached.facts["final_scale"] == 2.0**7


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_an_overflowing_closure_of_lbfgs_is_evaluated_again(search):
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn=search)
    closure, losses = closure_for(model, optimizer), []
    with Attachment("fp16", Dynamic(scale=2.0**24)) as attached:
        for _ in range(4):
            losses.append(float(optimizer.step(closure).detach()))
            assert all_finite(optimizer)
    assert attached.facts["skipped_steps"] == 0
    assert attached.facts["final_scale"] < 2.0**20
    assert losses[-1] < losses[0]


def test_a_scheduler_after_a_skip_raises_no_warning():
    model, optimizer, *_ = regression(0.1)
    with Attachment("fp16", Dynamic(scale=2.0**8)), warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        backward(model, 1e6)
        optimizer.step()
        scheduler.step()


def test_too_many_skips_name_the_parameters():
    model, optimizer, *_ = regression(0.1)

    def hopeless():
        for _ in range(100):
            optimizer.zero_grad()
            backward(model, math.nan)
            optimizer.step()

    named = r"25 steps of SGD in a row were skipped, since step 2: .*Sequential\.0\.weight, .* and 1 more"
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        backward(model)
        optimizer.step()
        with pytest.raises(ScaleCollapseError, match=f"{named}.*compare --policy bf16"):
            hopeless()
    assert attached.facts["skipped_steps"] == 25
    assert all_finite(optimizer)


def test_gradients_made_infinite_by_the_script_are_skipped():
    model, optimizer, *_ = regression(0.1)
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        backward(model)
        model[0].weight.grad.mul_(math.inf)
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.full_like(p, math.nan)
        optimizer.step()
    assert attached.facts["skipped_steps"] == 2
    assert all_finite(optimizer)


@pytest.mark.parametrize(("make", "after"), [
    (lambda p: torch.optim.LBFGS(p, max_iter=6), 3),
    (lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe"), 3),
    (lambda p: torch.optim.Adam(p, 1e-3), 1),
], ids=["LBFGS", "LBFGS strong_wolfe", "Adam"])  # fmt: skip
def test_a_closure_whose_forward_overflows_is_undone(make, after):
    """LBFGS has moved the parameters and filled its history when its third evaluation overflows."""
    model = network()
    optimizer = make(model.parameters())
    blow_up_at, factors = None, []

    def factor():
        factors.append(math.inf if len(factors) + 1 == blow_up_at else 1.0)
        return factors[-1]

    closure = closure_for(model, optimizer, factor)
    with Attachment("fp16", Dynamic(scale=2.0**6)) as attached:
        optimizer.step(closure)
        before = copies_of(optimizer)
        blow_up_at = len(factors) + after
        optimizer.step(closure)
        assert len(factors) == blow_up_at
        assert_same(before, copies_of(optimizer))
        optimizer.step(closure)
        assert all_finite(optimizer)
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (2, 1)
    assert attached.facts["final_scale"] == 2.0**5


def test_frozen_parameters_in_an_optimizer_may_thaw():
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        for number in range(4):
            model[0].weight.requires_grad_(number >= 2)
            optimizer.zero_grad()
            backward(model, 1e6 if number == 3 else 1.0)
            optimizer.step()
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (3, 1)


def test_an_overflow_long_before_the_step_is_remembered():
    model, optimizer, *_ = regression(0.01)
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        for number in range(150):
            backward(model, 1e6 if number == 0 else 1.0)
            if number == 0:
                torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
                for p in model.parameters():
                    p.grad.nan_to_num_(0.0)
        assert len(attached._backward.leaves._unread) < 100
        optimizer.step()
    assert attached.facts["skipped_steps"] == 1


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_a_model_may_be_called_first_in_a_closure(search):
    """The format is known only once a model was called, and the first evaluation overflows at 2**16."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn=search)
    closure = closure_for(model, optimizer, lambda: 100.0)
    with Attachment("fp16") as attached:
        losses = [float(optimizer.step(closure).detach()) for _ in range(3)]
    assert all_finite(optimizer)
    assert losses[-1] < losses[0]
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (3, 0)
    assert attached.facts["final_scale"] < 2.0**16
    assert not any("dropped" in note for note in attached.notes)


@pytest.mark.parametrize(("of_input", "of_loss", "said"), [
    (math.nan, lambda loss: loss, "was NaN or infinite itself; the step"),
    (1.0, lambda loss: loss * math.inf, "was NaN or infinite itself; the step"),
    (1.0, lambda loss: (loss * 0).sqrt(), None),
], ids=["input", "loss", "gradient"])  # fmt: skip
def test_a_loss_that_is_not_finite_is_told_from_an_overflow(of_input, of_loss, said):
    model, optimizer, _, x, y = regression(0.1)
    x, told = x * of_input, []
    with Attachment("fp16", Dynamic(scale=2.0**8), tell=told.append) as attached:
        for _ in range(2):
            optimizer.zero_grad()
            of_loss(F.mse_loss(model(x), y)).backward()
            optimizer.step()
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (0, 2)
    told = [note for note in told if "the loss at" in note]
    assert len(told) == (said is not None)
    assert all("test_overflow.py:" in note and said in note for note in told)
    assert "SGD took no step, so what it optimizes is untrained: all 2" in " ".join(attached.notes)


def test_a_sparse_input_beside_a_loss_that_is_not_finite():
    class Reads(torch.nn.Linear):
        def forward(self, edges, x):
            return super().forward(x)

    model, edges = Reads(2, 1), torch.eye(2).to_sparse()
    with Attachment("fp16") as attached:
        (model(edges, torch.ones(2, 2)).sum() * math.nan).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert any("was NaN or infinite itself; the step" in note for note in attached.notes)


def test_twenty_skips_in_a_row_are_told_at_once():
    models = [network(seed=3), network(seed=4)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in models]
    told = []
    with Attachment("fp16", Dynamic(scale=2.0**8), tell=told.append) as attached:
        for number in range(1, 23):
            for factor, model, optimizer in zip((1.0, math.nan), models, optimizers, strict=True):
                optimizer.zero_grad()
                backward(model, factor)
                optimizer.step()
            assert any("20 steps of SGD in a row were skipped" in note for note in told) == (number >= 20)
    assert any("SGD took no step" in note for note in attached.notes)  # though the other one took all
