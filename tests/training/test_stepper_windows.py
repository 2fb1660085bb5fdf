"""Accumulation: weight casts are kept over the micro-batches of a step, are never stale, and are dropped."""

import gc
import threading
from collections import Counter

import pytest
import torch
from stepper_runs import made, micro_batch, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.errors import OrderError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP16_LINEAR = nc.Policy(compute="bf16").with_rules(nc.rule.op("linear", compute="fp16"))
FP16_HEAD = nc.Policy(compute="bf16").with_rules(nc.rule.module("2", compute="fp16", output="fp32"))


def nesting() -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


class Casts(TorchDispatchMode):
    """Counts casts of tensors of one shape, by the format that they are cast to."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.to = shape, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and tuple(out.shape) == self.shape:
            self.to[out.dtype] += 1
        return out


@pytest.mark.parametrize("policy", ["bf16", FP16_LINEAR], ids=["bf16", "rule"])
@pytest.mark.parametrize(("accumulate", "casts"), [(1, 8), (4, 2), (8, 1)])
def test_each_weight_is_cast_once_a_step(policy, accumulate, casts):
    model, _, stepper = made(policy, nn.Linear(16, 24, bias=False), accumulate=accumulate)
    with Casts((24, 16)) as counter:
        for _ in range(8):
            micro_batch(model, stepper, torch.randn(3, 16))
    low = torch.bfloat16 if policy == "bf16" else torch.float16
    assert counter.to == {low: casts, torch.float32: 8}  # and a gradient a micro-batch
    assert nesting() == 0


@pytest.mark.usefixtures("one_process")
def test_nothing_is_kept_of_sharded_weights():
    """fully_shard gathers a layer's weights and frees them again; kept casts would hold the whole model."""
    model = nn.Linear(16, 24, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model, _, stepper = made("bf16", model, accumulate=2)
    assert not micro_batch(model, stepper, torch.randn(3, 16)).complete
    assert nesting() == 0
    stepper.zero_grad()


def overwrite(model):
    with torch.no_grad():
        model[0].weight.copy_(torch.full_like(model[0].weight, 0.5))


def step_of_another_optimizer(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), 0.3, fused=True).step()
    model.zero_grad()


def write_through_data(model):
    model[0].weight.data.mul_(2.0)


WRITES = [overwrite, step_of_another_optimizer, write_through_data]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", [FP16_HEAD, FP16_LINEAR, "bf16"], ids=["module", "op", "bf16"])
def test_a_weight_written_in_an_accumulation_is_cast_anew(policy, write):
    """A write through ``.data`` leaves no trace: it takes ``drop_casts``, as the documentation says."""
    model, _, stepper = made(policy, mlp(), accumulate=4)
    x = torch.randn(3, 16)

    def output():
        with stepper.autocast():
            return model(x).detach()

    micro_batch(model, stepper, x)
    before = output()
    write(model)
    if write is write_through_data:
        assert torch.equal(output(), before)
        stepper.drop_casts()
    after = output()
    stepper.zero_grad()
    assert not torch.equal(after, before)
    assert torch.equal(after, output()), "as without an accumulation"


def test_an_evaluation_inside_a_window_changes_no_gradient():
    def gradients(evaluating):
        model, _, stepper = made("bf16", mlp(), accumulate=3)
        for number in range(2):
            if evaluating and number == 0:
                with stepper.evaluate():
                    assert not model(torch.ones(1, 16)).requires_grad
            torch.manual_seed(number)
            micro_batch(model, stepper, torch.randn(3, 16))
            if evaluating:
                with torch.inference_mode(), stepper.autocast():
                    model(torch.ones(1, 16))
        found = [parameter.grad.clone() for parameter in model.parameters()]
        stepper.zero_grad()
        return found

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_evaluate_gives_modes_and_gradients_back():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model[0].eval()  # frozen on purpose
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16")

    def evaluate_and_fail():
        with stepper.evaluate():
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            assert model(torch.ones(2, 4)).dtype == torch.bfloat16
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate_and_fail()
    assert [module.training for module in model.modules()] == [True, False, True, True]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_an_error_inside_a_window_starts_a_new_one(where):
    model, optimizer, stepper = made("bf16", mlp(), accumulate=2)

    def fail(*_):
        raise KeyboardInterrupt

    def run(broken):
        with stepper.autocast():
            out = model(torch.randn(3, 16))
            if broken and where == "forward":
                fail()
        if broken and where == "backward":
            out.register_hook(fail)
        return stepper.step(out.square().mean())

    if where == "optimizer":
        handle = optimizer.register_step_pre_hook(fail)
    run(broken=False)
    with pytest.raises(KeyboardInterrupt):
        run(broken=True)
    assert nesting() == 0
    assert where == "forward" or all(parameter.grad is None for parameter in model.parameters())
    assert not torch.is_autocast_enabled("cpu")
    if where == "optimizer":
        handle.remove()
    stepper.zero_grad()
    assert not run(broken=False).complete
    assert run(broken=False).complete
    assert nesting() == 0


def test_a_deleted_stepper_leaves_no_casts_and_no_scaled_gradients():
    model, optimizer, stepper = made("fp16", mlp(), accumulate=2)
    micro_batch(model, stepper)
    assert nesting() == 1
    assert model[2].weight.grad.abs().max() > 100
    other_model, _, other = made("bf16", mlp())
    with other.autocast():  # whose casts are kept
        before = {*other_model[0](torch.randn(3, 16)).grad_fn.next_functions} - {(None, 0)}
        del stepper
        gc.collect()
        assert before & {*other_model[0](torch.randn(3, 16)).grad_fn.next_functions}
    other.zero_grad()
    assert nesting() == 0
    assert model[2].weight.grad is None
    optimizer.step()


def test_a_window_stays_in_its_thread():
    model, _, stepper = made("bf16", mlp(), accumulate=2)
    refused = []

    def elsewhere():
        try:
            micro_batch(model, stepper)
        except OrderError as error:
            refused.append(str(error))

    micro_batch(model, stepper)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert refused[0].startswith("expected every micro-batch of a step in one thread")
    stepper.zero_grad()


def test_kept_casts_go_backward_early():
    """A kept cast is an old graph node, which autograd would run last: all weight gradients would wait.

    This fails if torch moves the private names of training/_torch_internals.py.
    """
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16", accumulate=3)
    for _ in range(3):
        events = []
        for index, layer in enumerate(model):
            layer.weight.register_post_accumulate_grad_hook(
                lambda _, index=index, events=events: events.append(f"weight {index}")
            )
        with stepper.autocast():
            hidden = model[0](torch.randn(2, 8))
            hidden.register_hook(lambda _, events=events: events.append("back at the first layer"))
            loss = model[1:](hidden).square().mean()
        stepper.step(loss)
        assert events[:4] == ["weight 3", "weight 2", "weight 1", "back at the first layer"]
