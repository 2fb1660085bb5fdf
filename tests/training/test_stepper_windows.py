"""Accumulation: casts of weights are kept over a window and never stale, and a window ends in order."""

import gc
import sys
import threading

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.errors import OrderError


def model_of(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def nesting() -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


class CastsOfWeights(TorchDispatchMode):
    """Counts conversions to bf16 of tensors that are shaped like a weight."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.count += tuple(out.shape) == self.shape and out.dtype == torch.bfloat16
        return out


@pytest.mark.parametrize(("accumulate", "casts"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_each_weight_is_cast_once_a_window(accumulate, casts):
    model = nn.Linear(16, 24, bias=False)
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16", accumulate=accumulate)
    with CastsOfWeights((24, 16)) as counter:
        for _ in range(8):
            with stepper.autocast():
                loss = model(torch.randn(3, 16)).square().mean()
            stepper.step(loss)
    assert counter.count == casts
    assert nesting() == 0


def test_nothing_is_kept_of_sharded_weights(tmp_path, monkeypatch):
    """fully_shard gathers a layer's weights and frees them again; kept casts would hold the whole model."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a process group puts its own there
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Linear(16, 24, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16", accumulate=2)
        with stepper.autocast():
            loss = model(torch.randn(3, 16)).square().mean()
        assert not stepper.step(loss).complete
        assert nesting() == 0
        stepper.zero_grad()
    finally:
        torch.distributed.destroy_process_group()


def outputs_in_a_window(write):
    """What the model gives before and after ``write`` in the middle of a window, and what it should give."""
    model = model_of()
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16", accumulate=4)
    x = torch.randn(3, 16)
    with stepper.autocast():
        before = model(x)
    stepper.step(before.square().mean())
    write(model, stepper)
    with stepper.autocast():
        after = model(x)
    stepper.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        fresh = model(x)
    assert not torch.equal(before, fresh)
    return after, fresh


def write_in_place(model, _):
    with torch.no_grad():
        model[0].weight.mul_(2.0)


def load(model, _):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def step_another_optimizer(model, _):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), 1.0, fused=True).step()


def write_through_data(model, stepper):
    model[0].weight.data.mul_(2.0)
    stepper.drop_casts()


@pytest.mark.parametrize("write", [write_in_place, load, step_another_optimizer, write_through_data])
def test_a_weight_that_is_written_inside_a_window_is_cast_anew(write):
    after, fresh = outputs_in_a_window(write)
    assert torch.equal(after, fresh)


def test_a_write_through_data_is_the_documented_exception():
    """Kept as a test so that the documentation is changed when it becomes wrong."""
    after, fresh = outputs_in_a_window(lambda model, _: model[0].weight.data.mul_(2.0))
    assert not torch.equal(after, fresh)


def test_an_evaluation_inside_a_window_changes_no_gradient():
    def gradients(evaluating):
        model = model_of()
        stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16", accumulate=3)
        for number in range(2):
            if evaluating and number == 0:
                with stepper.evaluate():
                    assert not model(torch.ones(1, 16)).requires_grad
            torch.manual_seed(number)
            with stepper.autocast():
                loss = model(torch.randn(3, 16)).square().mean()
            stepper.step(loss)
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
def test_an_error_inside_a_window_leaves_no_casts_behind(where):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stepper = nc.Stepper(model, optimizer, "bf16", accumulate=2)

    def fail(*_):
        raise ZeroDivisionError

    def micro_batch(broken):
        with stepper.autocast():
            out = model(torch.randn(3, 16))
            if broken and where == "forward":
                fail()
        if broken and where == "backward":
            out.register_hook(fail)
        return stepper.step(out.square().mean())

    if where == "optimizer":
        handle = optimizer.register_step_pre_hook(fail)
    micro_batch(broken=False)
    with pytest.raises(ZeroDivisionError):
        micro_batch(broken=True)
    assert nesting() == 0
    assert not torch.is_autocast_enabled("cpu")
    if where == "optimizer":
        handle.remove()
    stepper.zero_grad()
    assert not micro_batch(broken=False).complete
    assert micro_batch(broken=False).complete
    assert nesting() == 0


def test_a_deleted_stepper_leaves_no_casts_behind():
    model = model_of()
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16", accumulate=2)
    with stepper.autocast():
        loss = model(torch.randn(3, 16)).square().mean()
    stepper.step(loss)
    assert nesting() == 1
    del stepper
    gc.collect()
    assert nesting() == 0


def test_a_window_stays_in_its_thread():
    model = model_of()
    stepper = nc.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), "bf16", accumulate=2)
    refused = []

    def micro_batch():
        with stepper.autocast():
            loss = model(torch.randn(3, 16)).square().mean()
        stepper.step(loss)

    def elsewhere():
        try:
            micro_batch()
        except OrderError as error:
            refused.append(str(error))

    micro_batch()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert refused[0].startswith("expected every micro-batch of a step in one thread")
    stepper.zero_grad()


def test_kept_casts_go_backward_early():
    """A kept cast is an old graph node, which autograd would run last: all weight gradients would wait."""
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


def test_the_private_names_of_torch():
    """Without them kept casts go backward late, which costs memory and no number."""
    parameter = nn.Parameter(torch.ones(1))
    node = parameter.to(torch.bfloat16).grad_fn
    assert node.name() == "ToCopyBackward0"
    node._set_sequence_nr(2**64 - 1)
    assert node._sequence_nr() == 2**64 - 1
    (below, _), *_ = node.next_functions
    assert below._sequence_nr() == 2**64 - 1, "as a leaf's own node"
