"""Kernels of ours where no rule is in force: everything is as PyTorch's own autocast does it.

A policy gives every operator a kernel, by rules for a module that nobody calls. Then nothing may differ: in a
region of that policy, and in one of torch.autocast beside it.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, FP16, rules
from op_lists import check_cpu_entry, cpu_entries, same
from torch import nn

import narrowcast as nc
from child_processes import finished
from narrowcast.casting import region_in
from narrowcast.policy import base_of, native_table

# Of torch, once: a bf16 LSTM without projections has no kernel of oneDNN on some CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def policies():
    """Kernels on what PyTorch casts and on composites; the long test puts one on every operator."""
    ops = sorted({base_of(op) for op in native_table("cpu")} | set(RULED))
    given = [nc.rule.module("elsewhere", op=op, compute="fp32", output="fp32") for op in ops]
    made = {BF16: rules(*given), FP16: rules(*given, compute="fp16")}
    for dtype, policy in made.items():
        region_in(policy, "cpu", dtype)
    return made


def ways(policy, region):
    """Our kernels with a policy that decides nothing here, and without any policy in this thread."""
    return [lambda: region_in(policy, "cpu", region), lambda: torch.autocast("cpu", region)]


@pytest.mark.parametrize("region", [BF16, FP16])
@pytest.mark.parametrize(("name", "position"), cpu_entries())
def test_every_op_of_torchs_lists(policies, name, position, region):
    check_cpu_entry(name, position, region, ways(policies[region], region))


@pytest.mark.long
def test_every_sample_of_every_operator():
    """In a process of its own, since torch's test tools change more than ours may."""
    script = [sys.executable, str(SCRIPTS / "every_sample.py"), "bf16", "fp16"]
    done = finished(script, limit_s=600)
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout).values():
        assert found["operators"] > 500
        assert found["compared"] > 3000
        assert found["differing"] == {}


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


def seeded(function):
    torch.manual_seed(1)
    return function()


@pytest.fixture(scope="module")
def natively():
    """The composites under torch.autocast before there is any kernel of ours."""
    with torch.autocast("cpu", BF16, cache_enabled=False):
        return {name: seeded(function).detach() for name, function in composites().items()}


@pytest.fixture(scope="module")
def beside(natively, policies):
    """Those, and a policy by which each of their operators has a kernel."""
    return natively, policies[BF16]


@pytest.mark.parametrize("name", composites())
def test_composites(beside, name):
    natively, policy = beside
    for region in ways(policy, BF16):
        with region():
            assert same(seeded(composites()[name]).detach(), natively[name])


RULED = (
    *("einsum", "lstm", "gru", "linear", "matmul", "mm", "addmm", "bmm", "softmax", "log_softmax"),
    *("layer_norm", "native_layer_norm", "instance_norm", "batch_norm", "cross_entropy_loss"),
    *("cosine_similarity", "scaled_dot_product_attention", "pairwise_distance", "bilinear", "tensordot"),
)
