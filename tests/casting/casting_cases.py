"""What the tests of casting share: formats, policies, small models, comparisons, threads."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# For files that compile. Dynamo warns about what it does itself.
COMPILES = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


def rules(*given, compute="bf16", **settings):
    return nc.Policy(compute=compute, rules=given, **settings)


class Calls(nn.Module):
    """``function(self, *args)`` with the given parts."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def assert_same(first, second):
    """Equal formats and bits, in any nesting."""
    first, second = _pytree.tree_leaves(first), _pytree.tree_leaves(second)
    assert [one.dtype for one in first] == [one.dtype for one in second]
    assert all(map(torch.equal, first, second))


def trained(model, x):
    """The output, the gradients of input and parameters, and the buffers, from one seed."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(0)
    output = model(x)
    output.float().square().sum().backward()
    gradients = [one.grad for one in (x, *model.parameters()) if one.grad is not None]
    return [output.detach(), *(one.clone() for one in [*gradients, *model.buffers()])]


def eager(model, policy, x):
    """What a copy of a model comes to under nc.apply."""
    model = copy.deepcopy(model)
    with nc.apply(model, policy):
        return trained(model, x)


def linear_by_hand(layer, x, dtype):
    with torch.no_grad():
        return nn.functional.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def has_no_hooks(model):
    return not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def in_threads(*works):
    """Run functions at once, each in a thread of its own, and return what they returned."""
    found, errors = [None] * len(works), []
    start = threading.Barrier(len(works))

    def run(index, work):
        try:
            start.wait(60)
            found[index] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return found


class CountCasts(TorchDispatchMode):
    """Counts casts of tensors of a shape, to one format or to any."""

    only_looks_on = True

    def __init__(self, shape, dtype=None):
        super().__init__()
        self.shape, self.dtype, self.count = torch.Size(shape), dtype, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op is torch.ops.aten._to_copy.default and self.dtype in (None, kwargs.get("dtype")):
            self.count += args[0].shape == self.shape
        return op(*args, **kwargs)
