"""DTensors and FSDP2 in a group of one process: the part of a rank is held as a plain tensor is."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from narrowcast.errors import UnsupportedError
from narrowcast.weights import UpdateMeter, hold, lower
from narrowcast.weights._torch_internals import is_dtensor, local


@pytest.fixture
def mesh(one_process):
    return init_device_mesh("cpu", (1,))


def test_fsdp2_is_held_as_a_plain_model_is(mesh, dtype, updates):
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    lower(plain, dtype)
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, sharded)]
    handles = [hold(optimizer, updates) for optimizer in optimizers]
    with UpdateMeter(optimizers[1]) as meter:
        for _ in range(3):
            inputs = torch.randn(4, 6).to(dtype)
            for model, optimizer, handle in zip((plain, sharded), optimizers, handles, strict=True):
                model(inputs).float().square().sum().backward()
                handle.take_gradients()
                optimizer.step()
                optimizer.zero_grad()
    assert meter.read()[0].intended_elements > 0
    full = get_model_state_dict(sharded)
    for (name, p), (low, _) in zip(plain.named_parameters(), handles[1].parameters, strict=True):
        assert isinstance(low, DTensor)
        assert torch.equal(low.to_local(), p), name
        assert torch.equal(full[name].to_local(), p), name
        assert torch.equal(handles[1].full_values()[low].to_local(), handles[0].full_values()[p]), name
    saved = handles[1].state_dict()
    handles[1].load_state_dict(copy.deepcopy(saved))
    with torch.no_grad():
        next(sharded.parameters()).mul_(2.0)
    optimizers[1].step()
    assert torch.equal(next(sharded.parameters()).to_local(), 2 * next(plain.parameters()))
    handles[1].remove()
    assert all(p.dtype == dtype for group in optimizers[1].param_groups for p in group["params"])


def test_bare_dtensors_are_measured(mesh):
    model = torch.nn.Linear(6, 8).bfloat16()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    with UpdateMeter(optimizer) as meter:
        model(torch.randn(4, 6).bfloat16()).float().square().sum().backward()
        optimizer.step()
    assert meter.read()[0].swallowed_share > 0.9


def test_the_local_part_is_the_one_that_the_dtensor_uses(mesh):
    whole = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    local(whole).data = torch.full((4,), 3.0)
    assert is_dtensor(whole)
    assert not is_dtensor(local(whole))
    assert (whole + 1).to_local().tolist() == [4.0] * 4


def test_a_sharded_model_is_lowered_before_it_is_sharded(mesh):
    model = torch.nn.Linear(6, 8)
    fully_shard(model, mesh=mesh)
    with pytest.raises(UnsupportedError) as error:
        lower(model, torch.bfloat16)
    assert str(error.value) == (
        "a tensor of shape (8, 6) is a DTensor, which cannot change its format in place: lower the model "
        "before it is sharded or quantized"
    )
