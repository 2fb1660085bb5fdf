"""A model cast down in place: what changes, what stays, and the values handed out."""

import pytest
import torch
from torch import nn

from narrowcast.errors import SettingError, UnsupportedError
from narrowcast.weights import is_batch_or_instance_norm, lower


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.plain_norm = nn.InstanceNorm2d(4)
        self.tied = nn.Linear(4, 4)
        self.tie = nn.Linear(4, 4)
        self.tie.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("indices", torch.arange(4))
        self.register_buffer("phases", torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        x = self.plain_norm(self.norm(self.first(x))).mean((2, 3))
        return self.tie(self.tied(x)) + self.frozen * self.table


def test_parameters_and_buffers_are_cast_and_batch_norms_stay(dtype):
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    objects = dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers())
    originals = lower(net, dtype)
    after = dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers())
    assert all(after[name] is objects[name] for name in objects)
    assert net.tie.weight is net.tied.weight
    kept = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    for name, tensor in after.items():
        if name in kept:
            assert tensor.dtype == torch.float32, name
        elif name in ("indices", "norm.num_batches_tracked", "phases"):
            assert tensor.dtype in (torch.int64, torch.complex64), name
        else:
            assert tensor.dtype == dtype, name
    assert not net.frozen.requires_grad
    assert len(originals) == len(before) - 2
    for name, parameter in net.named_parameters():
        if name not in kept:
            assert torch.equal(originals[parameter], before[name])
            assert torch.equal(parameter, before[name].to(dtype))


def test_keep_fp32_decides_what_stays(dtype):
    net = Net()
    lower(net, dtype, keep_fp32=None)
    assert net.norm.weight.dtype == net.norm.running_mean.dtype == dtype
    net = Net()
    lower(net, dtype, keep_fp32=lambda module: module is net.tie)
    assert net.tied.weight.dtype == torch.float32, "a tensor that a kept layer shares is kept"
    assert net.tied.bias.dtype == dtype


def test_batch_and_instance_norms_with_values_are_kept():
    assert is_batch_or_instance_norm(nn.BatchNorm1d(3))
    assert is_batch_or_instance_norm(nn.SyncBatchNorm(3))
    assert is_batch_or_instance_norm(nn.BatchNorm1d(3, affine=False))
    assert is_batch_or_instance_norm(nn.InstanceNorm2d(3, affine=True))
    assert not is_batch_or_instance_norm(nn.BatchNorm2d(3, affine=False, track_running_stats=False))
    assert not is_batch_or_instance_norm(nn.InstanceNorm2d(3))
    assert not is_batch_or_instance_norm(nn.LayerNorm(3))
    assert not is_batch_or_instance_norm(nn.Linear(3, 3))


def test_gradients_there_before_are_cast_too(dtype):
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    lower(layer, dtype)
    assert layer.weight.grad.dtype == dtype
    assert layer.weight.grad.tolist() == [[1.0, 1.0]] * 2
    layer(torch.ones(1, 2, dtype=dtype)).sum().backward()
    assert layer.weight.grad.tolist() == [[2.0, 2.0]] * 2


def test_weights_in_other_formats_are_cast_too(dtype):
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    layer = nn.Linear(2, 2)
    layer.weight.data = layer.weight.data.to(other)
    layer.bias.data = layer.bias.data.double()
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    originals = lower(layer, dtype)
    assert set(originals) == {layer.bias}
    assert torch.equal(originals[layer.bias], bias.float())
    assert torch.equal(layer.weight, weight.to(dtype))
    assert lower(layer, dtype) == {}


def test_nan_infinity_and_subnormals_are_rounded_as_torch_does(dtype):
    layer = nn.Linear(1, 1)
    layer.weight.data = torch.tensor([[float("nan")], [1e39], [-0.0], [2.0**-24], [1e5]])
    lower(layer, dtype)
    weight = layer.weight.float().flatten()
    assert weight[0].isnan()
    assert weight[1] == float("inf")
    assert weight[2].signbit()
    assert weight[3] == 2.0**-24
    assert weight[4] == (float("inf") if dtype == torch.float16 else 99840.0)


def test_a_lowered_lstm_runs(dtype):
    layer = nn.LSTM(3, 4, num_layers=2)
    lower(layer, dtype)
    assert layer(torch.randn(5, 1, 3).to(dtype))[0].dtype == dtype


def test_what_cannot_be_lowered_is_refused():
    with pytest.raises(SettingError, match=r"not to torch\.float32"):
        lower(nn.Linear(2, 2), torch.float32)
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(UnsupportedError, match="call the model once on an example, then lower it"):
        lower(model, torch.bfloat16)
    assert model[0].weight.dtype == torch.float32
