"""Composites that torch does not list, compiled and exported, under rules for other ops: as in eager code.

The oracle is native torch.autocast where no rule concerns what runs, nc.autocast where one does.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.casting import cast_exported

BF16, FP16 = torch.bfloat16, torch.float16
OTHERS = (
    nc.rule.op("gelu", compute="fp32"),
    nc.rule.op("cumsum", compute="fp32", output="lower"),
    nc.rule.op("celu", compute="promote"),
)


class Of(nn.Module):
    """A module of one function and the weights that it takes after its input."""

    def __init__(self, function, *weights):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(weights)

    def forward(self, x):
        return self.function(x, *self.weights)


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def attention(x, w, b, out):
    return F.multi_head_attention_forward(
        x, x, x, 8, 2, w, b, None, None, False, 0.0, out, None, training=True, need_weights=True
    )


COMPOSITES = {
    "einsum": (lambda x, w: torch.einsum("bij,kj->bik", x, w), [(5, 8)]),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 1), [(8, 5)]),
    "layer_norm after linear": (lambda x, w, n: F.layer_norm(F.linear(x, w), (8,), n), [(8, 8), (8,)]),
    "cross_entropy": (
        lambda x, w: F.cross_entropy(F.linear(x, w).flatten(0, 1), torch.arange(6) % 5, reduction="none"),
        [(5, 8)],
    ),
    "log_softmax": (lambda x, w: F.log_softmax(x @ w, -1), [(8, 8)]),
    "attention": (attention, [(24, 8), (24,), (8, 8)]),
    "sdpa": (
        lambda x, w: F.scaled_dot_product_attention((x @ w)[None], x[None], x[None], is_causal=True),
        [(8, 8)],
    ),
    "chain_matmul": (lambda x, w, v: torch.linalg.multi_dot([x[0], w, v]), [(8, 8), (8, 2)]),
    "inner and outer": (lambda x, w: torch.inner(x, w) + torch.outer(x[0, 0, :3], w[0, :3])[0], [(3, 8)]),
    "kron": (lambda x, w: torch.kron(x[0], w) @ w.mT.repeat(8, 2), [(2, 4)]),
    "norm": (lambda x, w: torch.norm(x @ w, dim=-1), [(8, 8)]),
    "cosine_similarity": (lambda x, w: F.cosine_similarity(x @ w, x, dim=-1), [(8, 8)]),
    "cdist": (lambda x, w: torch.cdist(x @ w, x), [(8, 8)]),
    "cat": (lambda x, w: torch.cat([x, x @ w]), [(8, 8)]),
    "unfold and fold": (lambda x, w: F.unfold(x[:, None] @ w, 2).transpose(1, 2), [(8, 8)]),
    "conv with padding": (lambda x, w: F.conv1d(x, w, padding="same"), [(4, 3, 3)]),
    "interpolate": (lambda x, w: F.interpolate(x @ w, scale_factor=2, mode="linear"), [(8, 8)]),
    "matrix_power": (lambda x, w: torch.linalg.matrix_power(w / 8, 3) + x[0, :1], [(8, 8)]),
    "lstm": (
        lambda x, *w: torch.lstm(
            x, (x.new_zeros(1, 3, 8), x.new_zeros(1, 3, 8)), list(w), True, 1, 0.0, True, False, False
        )[0],
        [(32, 8), (32, 8), (32,), (32,)],
    ),
    "gru_cell": (lambda x, *w: torch.gru_cell(x[0], x[1], *w), [(24, 8), (24, 8), (24,), (24,)]),
    "weight_norm": (lambda x, g, v: F.linear(x, torch._weight_norm(v, g, 0)), [(5, 1), (5, 8)]),
    "dropout": (lambda x, w: F.dropout(x @ w, 0.5), [(8, 8)]),
    "gelu": (lambda x, w: F.gelu(x @ w), [(8, 8)]),
    "cumsum": (lambda x, w: (x @ w).cumsum(0), [(8, 8)]),
}


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value or () for one in flat(part)]


def run(module, x):
    """Outputs and gradients, from one state of the random numbers."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(0)
    outputs = flat(module(x))
    sum(one.float().square().sum() for one in outputs).backward()
    return [one.detach() for one in outputs], [x.grad, *(p.grad.clone() for p in module.parameters())]


def eager(module, x, policy):
    with nc.apply(module, policy):
        return run(module, x)


def native(module, x, dtype):
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            with torch.autocast("cpu", dtype):
                return self.inner(x)

    return run(Region(), x)


def close(a, b):
    # A compiler makes an LSTM of products and sums in bf16, oneDNN one kernel: each rounds where the other
    # does not, to 8 bits, a few times in the two steps.
    return a.dtype == b.dtype and (a - b).abs().max() <= 4 * 2**-8 * b.abs().max()


def equal(first, second, name=""):
    same = close if name == "lstm" else lambda a, b: a.dtype == b.dtype and torch.equal(a, b)
    return all(
        same(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=COMPOSITES)
def module(request):
    function, shapes = COMPOSITES[request.param]
    return request.param, Of(function, *(nn.Parameter(randn(*shape)) for shape in shapes))


X = randn(2, 3, 8)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_compiled(module, dtype):
    name, module = module
    if name == "lstm" and dtype == FP16:
        return  # oneDNN has no such LSTM, in eager code either
    compute = "bf16" if dtype == BF16 else "fp16"
    policy = nc.Policy(compute=compute, rules=OTHERS)
    expected = eager(module, X, policy)
    if name not in ("gelu", "cumsum"):
        assert equal(expected, native(module, X, dtype))
    assert equal(run(nc.compile(module, policy, backend="aot_eager", fullgraph=True), X), expected, name)


def test_compiled_by_the_table_of_cuda(module):
    name, module = module
    policy = nc.Policy(compute="bf16", tables="cuda")
    expected = eager(module, X, policy)
    assert equal(run(nc.compile(module, policy, backend="aot_eager", fullgraph=True), X), expected, name)


def test_exported(module):
    name, module = module
    policy = nc.Policy(compute="bf16", rules=OTHERS)
    with torch.no_grad():
        torch.manual_seed(0)
        with nc.apply(module, policy):
            expected = flat(module(X))
        program = cast_exported(torch.export.export(module, (X,)), policy)
        torch.manual_seed(0)
        found = flat(program.module()(X))
    assert equal([found], [expected], name)


def test_what_calls_others_inside_a_kernel_of_its_own_is_one_operator_as_for_torchs_compiler():
    # Eager autocast casts the products inside bilinear's kernel, which is no composite; no tracer sees them.
    module = Of(lambda x, w: F.bilinear(x, x, w), nn.Parameter(randn(3, 8, 8)))
    ours = nc.compile(module, "bf16", backend="aot_eager")
    theirs = torch.compile(module, backend="aot_eager")
    assert equal(run(ours, X), native(theirs, X, BF16))
