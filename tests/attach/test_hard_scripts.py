"""What scripts do that a scale could break: guards, shared parameters, early schedulers, pickles, tracing."""

import copy
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
    with Attachment("fp16", Dynamic(scale=2.0**16)) as attached:
        for _ in range(40):
            zero(model, optimizer)
            backward(model, 1e3)
            if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
                optimizer.step()
    assert attached.facts["steps"] > 25
    assert attached.facts["skipped_steps"] == 0  # an overflow that was thrown away skips nothing
    assert attached.facts["final_scale"] < 2.0**16
    assert "the script dropped gradients that had overflowed; the loss scale was lowered" in (
        attached.recorder.notes
    )


def test_a_closure_of_a_step_wrapped_before_is_refused():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with Attachment("fp16"):
        backward(model)
        with pytest.raises(UnsupportedError, match="make the optimizer and its scheduler inside"):
            optimizer.step(lambda: None)


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
    for key in expected:
        assert (found[key] - expected[key]).norm() / expected[key].norm() < 7 * 2.0**-8
    said = [n for n in attached.recorder.notes if "torch.func differentiates without the loss scale" in n]
    assert len(said) == (policy == "fp16")


def _hook(module, grad_input, grad_output):
    return None


def test_a_model_is_pickled_and_copied_with_its_own_hooks():
    model = network()
    with Attachment("fp16"):
        model[0].register_full_backward_hook(_hook)
        pickled, copied = pickle.dumps(model), copy.deepcopy(model)
    for again in (pickle.loads(pickled), copied):
        assert list(again[0]._backward_hooks.values()) == [_hook]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_module_keeps_no_casts():
    model, (x, _) = network(), data()
    with Attachment("bf16"):
        traced = torch.jit.trace(model, x, check_trace=False)
    assert torch.equal(traced(x), model(x))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("compiled", ["step", "optimizer"])
def test_a_compiled_training_step(compiled, policy):
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_transformer_encoder_with_a_mask_in_evaluation(policy):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        with Attachment(policy):
            found = model(x, src_key_padding_mask=padding)
    kept = ~padding
    assert (found[kept] - expected[kept]).norm() / expected[kept].norm() < 2.0**-5
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_a_script_that_uses_autocast_later_is_noted():
    model, optimizer, *_ = regression(0.1)
    with Attachment("bf16") as attached:
        for _ in range(2):
            backward(model)
            optimizer.step()
        with torch.autocast("cpu", torch.bfloat16):
            model(data()[0])
    said = "the script uses autocast itself, so narrowcast added nothing from step 3 on"
    assert notes_of(attached) == [said]
