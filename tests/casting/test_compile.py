"""nc.compile: as nc.apply in eager code, in training and inference, whatever is outside the graph.

Bit for bit, with "aot_eager", which compiles without fusing; a few through Inductor.
"""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, COMPILES, FP16, FP32, Calls, assert_same, eager, rules, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import PolicyError, UnsupportedError

pytestmark = COMPILES
rule = nc.rule
SOFTMAX = rules(rule.op("softmax", compute="fp16"))
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def compiled(model, policy, **settings):
    return nc.compile(model, policy, **{"backend": "aot_eager", "fullgraph": True, **settings})


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))).softmax(-1)


# ---- against eager code

POLICIES = {
    "bf16": rules(),
    "fp16": rules(compute="fp16"),
    "fp32": rules(compute="fp32"),
    "table of cuda": rules(tables="cuda"),
    "an op": SOFTMAX,
    "an op handed on": rules(rule.op("layer_norm", compute="fp32", output="lower")),
    "an unlisted op": rules(rule.op("gelu", compute="fp32")),
    "a module": rules(rule.module("*1.down", compute="fp32", output="bf16")),
    "a class": rules(rule.module_type(nn.LayerNorm, compute="fp32", output="bf16")),
    "an op in modules": rules(rule.module("0", op="linear", compute="fp16")),
    "a module inside another": rules(
        rule.module("1", compute="fp32", output="fp16"), rule.module("1.up", compute="lower")
    ),
    "a module as it is": rules(rule.module("0", compute="as-is")),
    "a module with the widest": rules(rule.module("1", compute="promote")),
    "safe": nc.Policy.preset("safe"),
    "O1": nc.Policy.preset("O1"),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_outputs_and_gradients_are_those_of_eager_code(policy):
    model = nn.Sequential(Block(), Block())
    assert_same(trained(compiled(model, policy), X), eager(model, policy, X))
    assert all(p.dtype == p.grad.dtype == FP32 for p in model.parameters())


def test_as_native_autocast():
    model = nn.Sequential(Block(), Block())
    ours = trained(compiled(copy.deepcopy(model), "bf16"), X)
    model.forward = torch.autocast("cpu", BF16)(model.forward)
    assert_same(ours, trained(model, X))


def test_batch_norm_dropout_and_modes():
    parts = {"conv": nn.Conv1d(1, 4, 3), "norm": nn.BatchNorm1d(4), "drop": nn.Dropout(0.5)}
    theirs = Calls(lambda self, x: self.drop(self.norm(self.conv(x[:, None]))).flatten(1), **parts)
    ours = compiled(copy.deepcopy(theirs), SOFTMAX)
    nc.apply(theirs, SOFTMAX)
    for training in (True, False, True):
        assert_same(trained(ours.train(training), X), trained(theirs.train(training), X))


def test_shapes_may_be_dynamic():
    def forward(self, x):
        scores = torch.einsum("ij,kj->ik", self.linear(x), x) * x.shape[0]
        return scores.softmax(-1).flatten() @ torch.ones(x.shape[0] ** 2, 2)

    model = Calls(forward, linear=nn.Linear(8, 8))
    ours = compiled(model, SOFTMAX, dynamic=True)
    for rows in (6, 5, 9):
        x = torch.randn(rows, 8)
        assert_same(trained(ours, x), eager(model, SOFTMAX, x))


@pytest.mark.parametrize("policy", ["bf16", "an op", "a module"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_gives_what_eager_code_gives(policy, reentrant):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    blocks, policy = nn.Sequential(Block(), Block()), POLICIES[policy]
    ours = compiled(Calls(forward, blocks=copy.deepcopy(blocks)), policy, fullgraph=not reentrant)
    assert_same(trained(ours, X), eager(blocks, policy, X))


def test_buffers_weights_used_twice_and_keyword_arguments():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.tied = self.linear
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x, *, scale=None):
            self.calls.add_(1)
            x = self.tied(self.linear(x))
            return x if scale is None else {"out": x * scale}["out"]

    inner = Model()
    for model in (inner, Calls(lambda self, x: self.inner(x, scale=torch.tensor(3.0)), inner=inner)):
        *ours, calls = trained(compiled(copy.deepcopy(model), "bf16"), X)
        # Each use of a weight has a cast of its own, whose gradients add up in fp32.
        assert_same(ours[:2], eager(model, "bf16", X)[:2])
        assert calls == 1


def test_a_function_is_compiled_too():
    weight = torch.randn(8, 8)
    ours = compiled(lambda x: F.linear(x, weight).softmax(-1), SOFTMAX)
    with torch.autocast("cpu", BF16):
        product = F.linear(X, weight)
    assert_same(ours(X), product.half().softmax(-1))


def test_a_custom_function_is_traced():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return (g.to(w.dtype) @ w.mT).to(x.dtype), x.mT @ g.to(x.dtype)

    model = Calls(lambda self, x: Product.apply(F.gelu(x), self.w), w=nn.Parameter(torch.randn(8, 8)))
    # Not as under nc.apply, which promotes and so runs backward in the region of forward.
    in_region = copy.deepcopy(model)
    in_region.forward = nc.autocast("cpu", policy="bf16")(in_region.forward)
    assert_same(trained(compiled(model, "bf16"), X), trained(in_region, X))


def test_regions_of_the_caller_change_nothing():
    model = Block()
    expected = eager(model, SOFTMAX, X)
    ours = compiled(model, SOFTMAX)
    for region in (
        torch.autocast("cpu", FP16),
        nc.autocast("cpu", policy="fp32"),
        nc.autocast("cpu", policy=rules(rule.op("gelu", compute="fp32"), compute="fp16")),
    ):
        x = X.clone().requires_grad_()
        with region:
            output = ours(x)
        assert_same(output, expected[0])
    assert not torch.is_autocast_enabled("cpu")


# ---- one model, several policies


def test_policies_take_turns_on_one_model():
    model = Block()
    policies = [POLICIES[name] for name in ("bf16", "fp16", "an op", "table of cuda")]
    expected = [eager(model, policy, X) for policy in policies]
    ours = [compiled(model, policy) for policy in policies]
    for _ in range(2):
        for one, result in zip(ours, expected, strict=True):
            assert_same(trained(one, X), result)
    plain = torch.compile(model, backend="aot_eager")
    assert_same(trained(plain, X), trained(copy.deepcopy(model), X))


@pytest.mark.long
def test_more_policies_than_dynamo_recompiles():
    model, graphs = nn.Linear(8, 8), []
    isolates = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # not in torch 2.11
    for count in range(12 if isolates else torch._dynamo.config.recompile_limit):
        ours = compiled(
            model,
            "bf16" if count % 2 else "fp16",
            backend=lambda graph, _inputs: graphs.append(graph) or graph.forward,
        )
        assert ours(X).dtype == (BF16 if count % 2 else FP16)
        assert len(graphs) == count + 1


def test_a_function_that_dynamo_gave_up_on_is_cast_all_the_same():
    model = Block()
    ours = compiled(model, SOFTMAX, fullgraph=False, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for rows in (6, 5, 4):
            x = torch.randn(rows, 8)
            assert_same(trained(ours, x), eager(model, SOFTMAX, x))


# ---- what torch.compile gives, and what is refused


def test_the_compiled_module_is_torchs():
    model = Block()
    ours, theirs = nc.compile(model, "bf16"), torch.compile(model)
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    assert ours
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.eval()
    assert not model.training
    ours.load_state_dict({name: torch.zeros_like(value) for name, value in ours.state_dict().items()})
    assert model.up.weight.count_nonzero() == 0


def test_what_cannot_be_compiled_is_refused_at_once():
    with pytest.raises(PolicyError, match='has no modules "upp"'):
        nc.compile(Block(), rules(rule.module("upp", compute="fp32")))
    with pytest.raises(PolicyError, match="expected a module or a function to compile, got int"):
        nc.compile(3, "bf16")
    for one in (rule.op("linear", compute="fp8_tensorwise"), rule.module("1", compute="fp32")):
        with pytest.raises(UnsupportedError, match="expected a module to compile with a rule for modules"):
            nc.compile(lambda x: x @ x.T, rules(one))


@pytest.mark.parametrize(
    "rule", [rule.op("gelu", compute="refuse"), rule.module("norm", compute="refuse")], ids=str
)
def test_what_a_rule_refuses(rule):
    ours = compiled(Block(), rules(rule))
    with pytest.raises(UnsupportedError, match=r"which a rule refuses|which is refused here"):
        ours(X)
    assert not torch.is_autocast_enabled("cpu")


def test_errors_of_the_backend_stay_what_they_are():
    def failing(graph_module, example_inputs):
        raise ZeroDivisionError("in the backend")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="in the backend"):
        nc.compile(Block(), "bf16", backend=failing)(X)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", ["bf16", "fp16", "an op", "a class"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_as_eager_code_on_a_gpu(policy, backend):
    layers = nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8), nn.Softmax(-1)
    model, x = nn.Sequential(*layers).cuda(), torch.randn(16, 32, device="cuda")
    expected = eager(model, POLICIES[policy], x)
    found = trained(nc.compile(model, POLICIES[policy], backend=backend), x)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        # Kernels sum in their own orders, and fused ones leave roundings of 8 bits out.
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-5, atol=2**-5 * b.abs().max().item())
