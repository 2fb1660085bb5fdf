"""A gradient that is not finite in bf16: the step is skipped and said at once, and training goes on."""

import math

import pytest
import torch
import torch.nn.functional as F
from scenarios import SCENARIOS, data, network, notes_of, regression
from test_overflow import DENSE_OPTIMIZERS, all_finite, assert_same, copies_of
from torch import nn

from narrowcast.attach import Attachment
from narrowcast.errors import ScaleCollapseError, UnsupportedError
from narrowcast.gradients import GradientCheck, check_gradients, known_to_be_finite


def backward(model, factor=1.0):
    x, y = data()
    (F.mse_loss(model(x), y) * factor).backward()


@pytest.mark.parametrize(
    ("name", "value"), [*((name, math.inf) for name in DENSE_OPTIMIZERS), ("SGD", math.nan)]
)
def test_a_step_in_bf16_is_skipped_whole_and_said_at_once(name, value):
    model, told = network(), []
    optimizer = DENSE_OPTIMIZERS[name](model.parameters())
    with Attachment("bf16", tell=told.append) as attached:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for factor in (1.0, value, 1.0):
            optimizer.zero_grad()
            backward(model)
            model[2].weight.grad[0, 0] *= factor
            before = copies_of(optimizer)
            optimizer.step()
            scheduler.step()
            if factor != 1.0:
                assert_same(before, copies_of(optimizer))
                assert any(note.startswith(f"step 2, of {type(optimizer).__name__}, was skipped: the "
                                           "gradients of Sequential.2.weight are not finite")
                           for note in told)  # fmt: skip
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (2, 1)
    assert all_finite(optimizer)


def test_the_first_skips_are_told_and_the_others_counted():
    model, told = network(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Attachment("bf16", tell=told.append) as attached:
        for number in range(20):
            optimizer.zero_grad()
            backward(model, math.nan if number % 2 else 1.0)
            optimizer.step()
    told = [note for note in told if "was skipped: the gradients" in note]
    assert [note.split(",")[0] for note in told] == [f"step {n}" for n in (2, 4, 6, 8, 10)]
    assert told[-1].endswith("further ones are only counted")
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (10, 10)


def test_25_skips_in_a_row_in_bf16_stop_the_run_with_what_is_known():
    model, told = network(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def hopeless():
        for _ in range(100):
            optimizer.zero_grad()
            backward(model, math.nan)
            optimizer.step()

    with Attachment("bf16", tell=told.append) as attached, pytest.raises(ScaleCollapseError) as error:
        hopeless()
    assert attached.facts["skipped_steps"] == 25
    said = " ".join([str(error.value), *notes_of(attached)])
    assert "25 steps of SGD in a row were skipped, since step 1: the gradients of Sequential.0.weight" in said
    for false_in_bf16 in ("scale", "policy bf16", "forward", "the loss"):
        assert false_in_bf16 not in said
    assert "run --policy fp32 SCRIPT shows" in str(error.value)


def test_a_gradient_that_only_bf16_makes_infinite():
    """As the angle of ArcFace: 0.9999 is 1 in bf16, where the slope of the root is infinite."""

    class Distance(nn.Linear):
        def forward(self, x):
            return (1 - super().forward(x)).sqrt()

    model, rows = Distance(4, 4), torch.eye(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with torch.no_grad():
        model.weight.copy_(0.9999 * rows)
        model.bias.zero_()
    model(rows).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    with Attachment("bf16") as attached:
        for step in range(4):
            optimizer.zero_grad()
            x = rows if step == 1 else torch.zeros_like(rows)
            model(x).sum().backward()
            optimizer.step()
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (3, 1)
    assert all_finite(optimizer)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_only_what_ran_in_a_low_format_is_checked(policy):
    """FP32 does what torch does, NaN included."""
    model, optimizer, *_ = regression(0.1)
    with Attachment(policy) as attached:
        backward(model, math.nan)
        optimizer.step()
    assert attached.facts["skipped_steps"] == (policy == "bf16")
    assert all_finite(optimizer) == (policy == "bf16")


@pytest.mark.parametrize("kind", ["sparse", "complex", "fp64", "expanded", "graph", "low", "none"])
@pytest.mark.parametrize("bad", [False, True])
def test_gradients_of_every_kind_are_checked_and_left_as_they_are(kind, bad):
    weights = torch.ones(3, dtype={"complex": torch.complex64, "fp64": torch.float64, "low": torch.bfloat16}
                         .get(kind, torch.float32))  # fmt: skip
    gradient = torch.ones_like(weights)
    if bad:
        gradient[1] = math.inf
    parameter, other = nn.Parameter(weights), nn.Parameter(weights.clone())
    match kind:
        case "sparse":
            gradient = gradient.to_sparse()
        case "expanded":
            gradient = gradient[1].expand(3)
        case "graph":
            gradient = (gradient * torch.ones(3, requires_grad=True)).square()
    if kind != "none":
        parameter.grad = gradient
    optimizer = torch.optim.SGD([other, parameter], 0.1)
    version = gradient._version
    finite = not bad or kind == "none"
    assert check_gradients(optimizer).overflowed is (not finite)
    if known_to_be_finite(optimizer):
        assert finite
    if kind == "graph":
        assert gradient._version == version
    assert parameter.grad is (None if kind == "none" else gradient)


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_step_skips_by_a_flag_read_later(fused, monkeypatch):
    """As on a GPU, where nothing waits: a fused step skips by its flag, and the next step reads it."""
    monkeypatch.setattr("narrowcast.attach._steps.known_to_be_finite", lambda _: False)
    monkeypatch.setattr("narrowcast.gradients._check.known_on_host", lambda _: None)
    model, told = network(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)

    def train(factor):
        optimizer.zero_grad()
        backward(model)
        model[2].weight.grad[0, 0] *= factor
        optimizer.step()

    with Attachment("bf16", tell=told.append, explains_skips=True) as attached:
        train(1.0)
        weights = [p.detach().clone() for p in model.parameters()]
        train(math.nan)
        assert not any("was skipped" in note for note in told)
        if not fused:
            with pytest.raises(UnsupportedError, match=r"step 2, of AdamW, used .*2\.weight .*fused=True"):
                train(1.0)
            return
        assert_same(weights, list(model.parameters()))
        train(1.0)
        assert any("step 2, of AdamW, was skipped: the gradients of Sequential.2.weight" in n for n in told)
        assert any("a skipped step is not run again here" in note for note in told)
        assert not hasattr(optimizer, "found_inf")
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (2, 1)
    assert all_finite(optimizer)


def test_25_unread_skips_in_a_row_stop_the_run_too(monkeypatch):
    monkeypatch.setattr("narrowcast.attach._steps.known_to_be_finite", lambda _: False)
    monkeypatch.setattr("narrowcast.gradients._check.known_on_host", lambda _: None)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def train(bad, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            backward(model, math.nan if bad else 1.0)
            optimizer.step()

    with Attachment("bf16") as attached:
        train(bad=True, steps=20)
        train(bad=False, steps=1)
        train(bad=True, steps=25)
        with pytest.raises(ScaleCollapseError, match="25 steps of Adam in a row were skipped, since step 22"):
            train(bad=False, steps=1)
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (1, 45)


def test_a_flag_of_the_last_step_is_read_at_the_end(monkeypatch):
    monkeypatch.setattr("narrowcast.attach._steps.known_to_be_finite", lambda _: False)
    monkeypatch.setattr("narrowcast.gradients._check.known_on_host", lambda _: None)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with Attachment("bf16") as attached:
        attached.recorder.shared = counted_by_parent = [0, 0]
        backward(model, math.inf)
        optimizer.step()
    assert (attached.facts["steps"], attached.facts["skipped_steps"]) == (0, 1)
    assert counted_by_parent == [0, 1]


@pytest.mark.parametrize("name", ["accumulation", "lbfgs", "sparse_embedding", "gradient_penalty"])
def test_the_check_changes_no_bit(name, monkeypatch):
    with Attachment("bf16"):
        checked = SCENARIOS[name]()
    monkeypatch.setattr("narrowcast.attach._steps.Steps._nonfinite", lambda *_: [])
    with Attachment("bf16"):
        unchecked = SCENARIOS[name]()
    assert_same(unchecked.parameters, checked.parameters)


def test_a_check_keeps_the_gradients_by_which_it_names_parameters():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([1.0, math.nan, 1.0])
    check = check_gradients(torch.optim.SGD([parameter], 0.1))
    assert isinstance(check, GradientCheck)
    assert check.nonfinite().read() == [True]
