"""What scripts do that a scale could break: guards, shared parameters, early schedulers, pickles, tracing."""

import copy
import math
import pickle

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from scenarios import data, network, notes_of, regression
from test_overflow import backward
from torch import nn

from narrowcast.attach import Attachment
from narrowcast.errors import UnsupportedError
from narrowcast.scaling import Dynamic, Static
from narrowcast.weights import hold


def zeroed_by_hand(model, optimizer):
    for p in model.parameters():
        p.grad = None


@pytest.mark.parametrize("zero", [
    lambda _, optimizer: optimizer.zero_grad(set_to_none=False), lambda model, _: model.zero_grad(),
    lambda model, _: model.zero_grad(set_to_none=False), zeroed_by_hand,
], ids=["optimizer", "model", "model in place", "by hand"])  # fmt: skip
def test_a_script_that_guards_its_own_step_gets_a_lower_scale(zero):
    """``if not isfinite(norm): continue`` throws the overflow away before any step could be skipped."""
    model, optimizer, *_ = regression(1e-6)
    told = []
    with Attachment("fp16", Dynamic(scale=2.0**16), tell=told.append) as attached:
        # The first pass stays finite: before any step an overflow would run again at a lower scale.
        for number in range(40):
            zero(model, optimizer)
            backward(model, 1e3 if number else 1e-3)
            if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
                optimizer.step()
    assert attached.facts["steps"] > 25
    assert attached.facts["skipped_steps"] == 0  # an overflow that was thrown away skips nothing
    assert attached.facts["final_scale"] < 2.0**16
    told = [note for note in told if "were not finite, and no optimizer used them" in note]
    assert len(told) == 1  # though several passes overflowed
    assert "harmless where nothing reads them" in told[0]
    assert "of the backward pass at" in told[0]
    assert "test_overflow.py:" in told[0]  # where ``backward`` calls it


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_a_step_that_a_scheduler_wrapped_before_is_refused_in_fp16(policy):
    model, optimizer, *_ = regression(0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = model[0].weight.detach().clone()
    with Attachment(policy):
        backward(model)
        if policy == "bf16":
            optimizer.step()
            assert not torch.equal(model[0].weight, before)
            return
        for closure in ([], [lambda: None]):
            with pytest.raises(UnsupportedError, match="make the optimizer and its scheduler inside"):
                optimizer.step(*closure)
        assert torch.equal(model[0].weight, before)


def test_an_overflow_applied_by_hand_is_an_error_also_later():
    """After an optimizer has stepped, updates by hand are fine until one of them used an overflow."""
    model, optimizer, *_ = regression(0.1)

    def by_hand(factor):
        model.zero_grad()
        backward(model, factor)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(1e-3 * p.grad)

    with Attachment("fp16", Dynamic(scale=2.0**8)):
        backward(model)
        optimizer.step()
        by_hand(1.0)
        by_hand(1e6)
        with pytest.raises(UnsupportedError, match="updated by hand"):
            by_hand(1.0)


@pytest.mark.parametrize("passes", [1, 2])
def test_weights_that_were_nan_are_no_update_by_hand(passes):
    """Several passes with NaN losses may come before the gradients are dropped."""
    model = network()
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        for _ in range(passes):
            backward(model)
        torch.optim.SGD(model.parameters(), 0.1).zero_grad()
    assert any("no optimizer used them" in note for note in attached.notes)


def test_a_trained_mask_of_infinities_is_no_update_by_hand():
    model = nn.Linear(4, 4)
    model.mask = nn.Parameter(torch.full((4, 4), -torch.inf).triu(1))

    def attention(x):
        scores = model.weight @ x
        return (scores + model.mask.to(scores.dtype)).softmax(-1)

    model.forward = attention
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Attachment("fp16", Dynamic(scale=2.0**24)) as attached:
        # The first pass stays finite, as above.
        for number in range(12):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 4))[:, 0].square().sum()
            (loss if number else loss * 1e-6).backward()
            optimizer.step()
    assert attached.facts["skipped_steps"] > 0
    assert attached.facts["steps"] > 0


def test_embedding_max_norm_is_no_update_by_hand():
    table = nn.Embedding(20, 12, max_norm=1.0)
    head, (_, y) = network(), data()
    words = torch.arange(64) % 20
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], 0.1)
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        for _ in range(3):
            F.mse_loss(head(table(words)), y).backward()
        optimizer.step()
    assert attached.facts["steps"] == 1


class Normalized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient.norm() + 1e-3)


def test_a_function_that_sees_scaled_gradients_is_named_once():
    model, (x, y) = network(), data()
    with Attachment("fp16", Static(scale=2.0**8)) as attached:
        for _ in range(2):
            F.mse_loss(Normalized.apply(model(x)), y).backward()
    said = "the backward of Normalized sees gradients times"
    assert sum(said in note for note in attached.recorder.notes) == 1
    with Attachment("bf16") as attached:
        F.mse_loss(Normalized.apply(model(x)), y).backward()
    assert not any(said in note for note in attached.recorder.notes)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_torch_func_is_not_scaled_and_fp16_is_told(policy):
    model, (x, y) = network(), data()
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(values, a, b):
        return F.mse_loss(torch.func.functional_call(model, values, (a,)), b)

    def per_sample():
        derive = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        return derive(parameters, x[:, None], y[:, None])

    expected = per_sample()
    with Attachment(policy) as attached:
        found = per_sample()
    # bf16 rounds by up to 2**-9 at each of the roundings on the way.
    for key in expected:
        assert (found[key] - expected[key]).norm() / expected[key].norm() < 7 * 2.0**-8
    said = [n for n in attached.recorder.notes if "torch.func differentiates without the loss scale" in n]
    assert len(said) == (policy == "fp16")


# At the top of the module, since a model with this hook is pickled.
_seen = []


def _hook(module, grad_input, grad_output):
    _seen.append(float(grad_output[0].float().norm()))


def test_hooks_of_copied_and_pickled_models_see_true_gradients():
    model, (x, _) = network(), data()
    with Attachment("fp16"):
        model[2].register_full_backward_hook(_hook)
        pickled = pickle.dumps(model)
        for one in (model, copy.deepcopy(model), pickle.loads(pickled)):
            one(x).square().mean().backward()
    pickle.loads(pickled)(x).square().mean().backward()  # in fp32
    assert _seen[0] == _seen[1] == _seen[2] < 1  # not times the loss scale
    assert _seen[3] == pytest.approx(_seen[0], rel=0.01)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_module_keeps_no_casts():
    model, (x, _) = network(), data()
    with Attachment("bf16"):
        traced = torch.jit.trace(model, x, check_trace=False)
    assert torch.equal(traced(x), model(x))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("compiled", "policy"), [("step", "bf16"), ("step", "fp16"), ("optimizer", "bf16")])
def test_a_compiled_training_step_lowers_the_loss(compiled, policy):
    torch._dynamo.reset()
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def whole_step():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    start = float(F.mse_loss(model(x), y).detach())
    with Attachment(policy, Dynamic(scale=2.0**8) if policy == "fp16" else None) as attached:
        if compiled == "step":
            run = torch.compile(whole_step, backend="eager")
        else:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
            run = whole_step
        for _ in range(4):
            loss = run()
    assert float(loss.detach()) < start
    assert not any("by hand" in note for note in attached.recorder.notes)
    torch._dynamo.reset()


def test_a_script_that_uses_autocast_later_is_noted():
    model, optimizer, *_ = regression(0.1)
    with Attachment("bf16") as attached:
        for _ in range(2):
            backward(model)
            optimizer.step()
        with torch.autocast("cpu", torch.bfloat16):
            model(data()[0])
    said = "the script or its trainer uses autocast itself, so narrowcast added nothing from step 3 on"
    assert notes_of(attached) == [said]


def reloaded(model, optimizer, x):
    """A trial run before training, as tools that look for a batch size or a learning rate make."""
    start = copy.deepcopy(model.state_dict())
    backward(model)
    optimizer.zero_grad()
    model.load_state_dict({name: value.flip(0) for name, value in start.items()})
    backward(model)


def made_anew(model, optimizer, x):
    backward(model)
    model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    optimizer.zero_grad()
    backward(model)


def a_buffer_of_inputs(model, optimizer, x):
    """A leaf that gets each batch: its data is replaced, then written in place."""
    held = torch.zeros_like(x).requires_grad_()
    for number in range(4):
        held.data = torch.empty_like(x)
        with torch.no_grad():
            held.copy_(x.roll(number, 0))
        held.grad = None
        optimizer.zero_grad()
        model(held).square().mean().backward()
        optimizer.step()


def divergence(model, optimizer, x):
    optimizer.param_groups[0]["lr"] = 1e38
    for _ in range(4):
        optimizer.zero_grad()
        backward(model, 10.0)
        optimizer.step()


def adversarial_inputs(model, optimizer, x):
    """As in adversarial training: the perturbation climbs its gradient, and lives through the batches."""
    delta = torch.zeros_like(x).requires_grad_()
    for _ in range(4):
        optimizer.zero_grad()
        model(x + delta).square().mean().backward()
        delta.data = (delta.data + 1e-2 * delta.grad.sign()).clamp(-0.1, 0.1)
        delta.grad.zero_()
        optimizer.step()


def sharpness_aware(model, optimizer, x):
    """Each step moves the weights up by hand, and moves them back before the optimizer steps."""
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            moves = [1e-2 * p.grad for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()


def a_frozen_part(model, optimizer, x):
    """All but the head is frozen: no optimizer that steps has it, and its gradients are dropped."""
    of_head = torch.optim.SGD(model[4].parameters(), 0.1)
    for _ in range(4):
        model.zero_grad()
        model(x).square().mean().backward()
        of_head.step()


TRAININGS = [
    reloaded, made_anew, a_buffer_of_inputs, divergence, adversarial_inputs, sharpness_aware, a_frozen_part,
]  # fmt: skip


@pytest.mark.parametrize("train", TRAININGS)
def test_what_looks_like_an_update_by_hand_is_not_refused(train):
    model, optimizer, _, x, _ = regression(0.1)
    with Attachment("fp16", Dynamic(scale=2.0**8)):
        train(model, optimizer, x)


def test_weights_are_loaded_between_a_trial_run_and_the_first_optimizer():
    model, (x, _) = network(), data()
    start = copy.deepcopy(model.state_dict())
    with Attachment("fp16", Dynamic(scale=2.0**8)) as attached:
        model(x).square().mean().backward()
        model.zero_grad()
        model.load_state_dict({name: value.flip(0) for name, value in start.items()})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(x).square().mean().backward()
        optimizer.step()
    assert attached.facts["steps"] == 1


@pytest.mark.parametrize(("dtype", "policy"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_low_weights_without_masters_are_told_before_the_first_step(dtype, policy):
    model, (x, _) = network().to(dtype), data()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    told, told_before_step = [], []
    optimizer.register_step_pre_hook(lambda *_: told_before_step.extend(told))
    with Attachment(policy, tell=told.append):
        model(x.to(dtype)).square().mean().backward()
        optimizer.step()
    (note,) = [note for note in told_before_step if "SGD trains weights that are stored in" in note]
    assert f"stored in {policy}" in note
    assert "nc.weights.UpdateMeter" in note


@pytest.mark.parametrize("wanted", [None, torch.float16])
def test_a_leaf_may_want_its_gradient_in_another_format(wanted):
    found = []
    for policy in ("fp32", "fp16"):
        model, (x, _) = network(), data()
        model[0].weight.grad_dtype = wanted
        with Attachment(policy, Dynamic(scale=2.0**8) if policy == "fp16" else None):
            model(x).square().mean().backward()
        found.append(model[0].weight.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-4)


def test_held_weights_have_masters_and_fp64_has_no_region():
    held, double, (x, _) = network().bfloat16(), network().double(), data()
    optimizer = torch.optim.SGD(held.parameters(), 1e-3)
    with Attachment("bf16") as attached:
        hold(optimizer)
        held(x.bfloat16()).sum().backward()
        optimizer.step()
        assert double(x.double()).dtype == torch.float64
    # No note that SGD trains weights stored in bf16: they have masters.
    assert notes_of(attached) == ["Sequential computes in fp64, as its weights are: no region was opened"]


@pytest.mark.parametrize("policy", ["fp16", "bf16"])
def test_a_backward_pass_may_be_called_under_no_grad(policy):
    model = network()
    x, _ = data()
    alone = nn.Parameter(torch.tensor(2.0))
    with Attachment(policy):
        loss = model(x).square().mean()
        with torch.no_grad():
            loss.backward()
            alone.backward()
    assert alone.grad == 1.0
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("of_all", [False, True])
def test_a_legacy_hook_of_modules_sees_true_gradients(of_all, monkeypatch):
    # torch remembers for ever which of the two kinds was registered first.
    monkeypatch.setattr(nn.modules.module, "_global_is_full_backward_hook", None)
    seen = []

    def see(module, _inputs, outputs):
        if isinstance(module, nn.Linear):
            seen.append(outputs[0].clone())

    model = nn.Linear(4, 1)
    with Attachment("fp16", Static(scale=1024.0)):
        if of_all:
            handle = nn.modules.module.register_module_backward_hook(see)
        else:
            handle = model.register_backward_hook(see)
        model(torch.ones(2, 4)).sum().backward()
        handle.remove()
    (gradient,) = seen
    assert torch.equal(gradient.float(), torch.ones(2, 1))
