"""The private names of torch that gradients/ uses: this fails loudly when one moves or changes meaning."""

import inspect
import math

import pytest
import torch

import narrowcast as nc
from narrowcast.gradients import _torch_internals as internals


def test_the_node_that_accumulates_knows_its_leaf():
    leaf = torch.ones(1, requires_grad=True)
    node = (leaf * 2).grad_fn.next_functions[0][0]
    assert type(node) is internals.ACCUMULATE_GRAD
    assert node.variable is leaf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1.0])
def test_multiplying_checks_what_was_there_before(dtype, bad):
    tensors = [torch.tensor([2.0, 4.0], dtype=dtype), torch.tensor([bad], dtype=dtype)]
    found = torch.zeros(())
    internals.multiply_and_check(tensors, found, torch.tensor(0.25))
    assert tensors[0].tolist() == [0.5, 1.0]
    assert found.item() == (0.0 if bad == 1.0 else 1.0)
    large = [torch.tensor([3e38])]
    found.zero_()
    internals.multiply_and_check(large, found, torch.tensor(4.0))
    assert large[0].isinf()
    assert found.item() == 0.0  # so that below a scale of 1 it must be asked again


def test_foreach_norms_products_and_clamps():
    half = [torch.full((4,), 30000.0).half(), torch.tensor([3.0, 4.0]).half()]
    norms = internals.norms(half, 2.0)
    assert [norm.dtype for norm in norms] == [torch.float32] * 2  # 60000 is near the largest of fp16
    assert [norm.item() for norm in norms] == [60000.0 - 30000.0 % 16 * 2, 5.0]
    assert [norm.item() for norm in internals.norms(half, math.inf)] == [half[0][0].item(), 4.0]
    assert internals.norms([torch.ones(4).double()], 2.0)[0].dtype == torch.float64
    assert internals.norms([torch.full((4,), 1e30)], 2.0, wide=True)[0].item() == pytest.approx(2e30)
    assert [n.item() for n in internals.norms([torch.ones(0), torch.ones(1)], math.inf)] == [0.0, 1.0]
    tensors = [torch.tensor([1.0, -2.0]), torch.tensor([math.nan, 5.0])]
    internals.multiply(tensors, torch.tensor(2.0))
    assert tensors[0].tolist() == [2.0, -4.0]
    internals.clamp(tensors, -3.0, 3.0)
    assert tensors[0].tolist() == [2.0, -3.0]
    assert math.isnan(tensors[1][0])
    assert tensors[1][1] == 3.0
    assert internals.flattened([torch.ones(2, 1), torch.zeros(1)]).tolist() == [1.0, 1.0, 0.0]


def test_tensors_are_sorted_by_format_with_their_positions():
    tensors = [torch.ones(1), torch.ones(2).double(), torch.ones(3)]
    groups = {dtype: (device, list(at), members) for device, dtype, at, members in (
        internals.by_device_and_dtype(tensors)
    )}  # fmt: skip
    assert groups[torch.float32][:2] == (torch.device("cpu"), [0, 2])
    assert groups[torch.float64][:2] == (torch.device("cpu"), [1])
    assert all(a is b for a, b in zip(groups[torch.float32][2], tensors[::2], strict=True))
    ((device, dtype, at, members),) = internals.by_device_and_dtype(tensors[::2])
    assert (device, dtype, list(at), len(members)) == (torch.device("cpu"), torch.float32, [0, 1], 2)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers_divide_and_skip_by_two_attributes(kind):
    for found in (0.0, 1.0):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = kind([weight], lr=0.5, fused=True)
        assert internals.takes_grad_scale(optimizer)
        assert not internals.takes_grad_scale(kind([weight], lr=0.5))
        assert not internals.wants_the_scaler(optimizer)
        weight.grad = torch.tensor([8.0, 8.0])
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found)
        optimizer.step()
        assert weight.grad.tolist() == ([1.0, 1.0] if found == 0.0 else [8.0, 8.0])
        assert bool((weight == 1.0).all()) == (found == 1.0)


def test_what_other_libraries_read_of_torchs_scaler():
    """The signatures of torch's own, and the attributes that ours answers in their place."""
    theirs, ours = torch.amp.GradScaler("cpu"), nc.GradScaler("cpu")
    for name, method in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction):
        if name.startswith("_"):
            continue
        expected = list(inspect.signature(method).parameters)
        assert list(inspect.signature(getattr(nc.GradScaler, name)).parameters)[: len(expected)] == expected
    for scaler in (theirs, ours):
        assert scaler._scale is scaler._growth_tracker is None
        scaler.scale(torch.ones(()))
        assert scaler._scale.item() == 2.0**16
        assert scaler._get_scale_async() is scaler._scale
        assert scaler._growth_tracker.item() == scaler._get_growth_tracker() == 0
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight])
        scaler.scale(weight.sum() * math.inf).backward()
        scaler._check_inf_per_device(optimizer)
        assert [flag.item() for flag in scaler._found_inf_per_device(optimizer).values()] == [1.0]
        assert scaler._per_optimizer_states[id(optimizer)]["stage"] is internals.OptState.READY


def test_a_scaler_asks_an_optimizer_before_it_steps():
    class Asked:
        def __bool__(self):
            raise KeyError

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    setattr(optimizer, internals.ASKED_BY_SCALERS, Asked())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
    with pytest.raises(KeyError):
        scaler.step(optimizer)
