"""What the tests of casting share: formats, policies, small models, comparisons, threads."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.casting.models._module_calls import calls_on

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# For files that compile. Dynamo warns about what it does itself.
COMPILES = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
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
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    return not hooked and not any(calls_on(part) for part in model.modules())


def composites():
    """Operators that torch does not list and that call others, and what the fastest kernels take over."""
    torch.manual_seed(0)
    x, y = torch.randn(3, 4, 8), torch.randn(8, 8)
    w = torch.randn(8, 8, requires_grad=True)
    image = torch.randn(2, 3, 8, 8)
    lstm, gru, rnn = nn.LSTM(8, 8, 2, bidirectional=True, proj_size=4), nn.GRU(8, 8), nn.RNN(8, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    layer, quick = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
    quick.eval()
    return {
        "a weight in fp8": lambda: F.linear(x, y.to(torch.float8_e4m3fn)),
        "two formats of fp8": lambda: torch.mm(y.to(torch.float8_e5m2), y.to(torch.float8_e4m3fn)),
        "einsum": lambda: torch.einsum("bij,jk->bik", x, y),
        "lstm": lambda: lstm(x)[0],
        "gru": lambda: gru(x)[0],
        "rnn": lambda: rnn(x)[0],
        "lstm, packed": lambda: lstm(nn.utils.rnn.pack_padded_sequence(x, [3, 2, 1, 1]))[0].data,
        "lstm_cell": lambda: nn.LSTMCell(8, 8)(x[0])[0],
        "tensordot": lambda: torch.tensordot(x, y, 1),
        "layer_norm": lambda: F.layer_norm(x @ y, (8,)),
        "cross_entropy": lambda: F.cross_entropy(y @ y, torch.arange(8)),
        "cosine_similarity": lambda: F.cosine_similarity(x @ y, x),
        "multi_head_attention_forward": lambda: attention(x, x, x)[0],
        "attention without weights": lambda: attention(x, x, x, need_weights=False)[0],
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(image, image, image),
        "instance_norm": lambda: F.instance_norm(image),
        "batch_norm": lambda: nn.BatchNorm1d(4)(x),
        "embedding_bag": lambda: F.embedding_bag(torch.arange(8).view(2, 4), y),
        "pairwise_distance": lambda: F.pairwise_distance(x @ y, x),
        "chain_matmul": lambda: torch.linalg.multi_dot([y, y, y]),
        "bilinear": lambda: F.bilinear(y, y, torch.randn(3, 8, 8)),
        "interpolate": lambda: F.interpolate(image, scale_factor=2.0, mode="bilinear"),
        "circular padding": lambda: F.pad(image, (1, 1, 1, 1), mode="circular"),
        "transformer": lambda: layer(x),
        "transformer, quick": lambda: quick(x),
        "sparse": lambda: torch.sparse.mm(y.to_sparse(), y),
        "take_along_dim": lambda: torch.take_along_dim(y, y.argsort(0), 0),
        "gumbel_softmax": lambda: F.gumbel_softmax(y @ y),
        "gradients": lambda: torch.autograd.grad((x @ w).softmax(-1).float().pow(2).sum(), w)[0],
        "complex": lambda: y.to(torch.complex64) @ y.to(torch.complex64),
        "float64": lambda: y.double() @ y.double(),
        "integers": lambda: torch.arange(4).view(2, 2) @ torch.arange(4).view(2, 2),
        "empty": lambda: torch.zeros(0, 8) @ y,
        "no dimension": lambda: torch.tensor(2.0).exp() + 1,
        "a number": lambda: 1 + (y @ y) * 0.1,
    }


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
