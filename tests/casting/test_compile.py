"""nc.compile: where casts are, in training and inference, and that nothing outside the graph changes them.

Bit for bit against nc.apply in eager code, with "aot_eager", which compiles without fusing; a few through
Inductor.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import PolicyError, UnsupportedError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BF16_RULES = nc.Policy(compute="bf16", rules=(nc.rule.op("softmax", compute="fp16"),))
pytestmark = [
    # Of Dynamo, about what it does itself.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, policy, **settings):
    return nc.compile(model, policy, **{"backend": "aot_eager", "fullgraph": True, **settings})


def run(model, x=X):
    """Outputs, gradients and buffers, from one state of the random numbers."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(0)
    output = model(x)
    output.float().square().sum().backward()
    found = [output.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
    return [one.clone() for one in found]


def eager(model, policy, x=X):
    model = copy.deepcopy(model)
    with nc.apply(model, policy):
        return run(model, x)


def assert_same(first, second):
    assert [one.dtype for one in first] == [one.dtype for one in second]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))).softmax(-1)


class Graphs:
    """A backend that keeps the graphs that it is given."""

    def __init__(self):
        self.kept = []

    def __call__(self, graph_module, example_inputs):
        self.kept.append(graph_module)
        return torch._dynamo.lookup_backend("aot_eager")(graph_module, example_inputs)


# ---- against eager code

POLICIES = {
    "bf16": nc.Policy(compute="bf16"),
    "fp16": nc.Policy(compute="fp16"),
    "table of cuda": nc.Policy(compute="bf16", tables="cuda"),
    "an op": BF16_RULES,
    "an op handed on": nc.Policy(
        compute="bf16", rules=(nc.rule.op("layer_norm", compute="fp32", output="lower"),)
    ),
    "an unlisted op": nc.Policy(compute="bf16", rules=(nc.rule.op("gelu", compute="fp32"),)),
    "a module": nc.Policy(compute="bf16", rules=(nc.rule.module("1.down", compute="fp32", output="bf16"),)),
    "a class": nc.Policy(
        compute="bf16", rules=(nc.rule.module_type(nn.LayerNorm, compute="fp32", output="bf16"),)
    ),
    "an op in modules": nc.Policy(compute="bf16", rules=(nc.rule.module("0", op="linear", compute="fp16"),)),
    "a module inside another": nc.Policy(
        compute="bf16",
        rules=(nc.rule.module("1", compute="fp32", output="fp16"), nc.rule.module("1.up", compute="lower")),
    ),
    "a module as it is": nc.Policy(compute="bf16", rules=(nc.rule.module("0", compute="as-is"),)),
    "a module with the widest": nc.Policy(compute="bf16", rules=(nc.rule.module("1", compute="promote"),)),
    "safe": nc.Policy.preset("safe"),
    "O1": nc.Policy.preset("O1"),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_outputs_and_gradients_are_those_of_eager_code(policy):
    model = nn.Sequential(Block(), Block())
    assert_same(run(compiled(model, policy)), eager(model, policy))
    assert all(p.dtype == p.grad.dtype == FP32 for p in model.parameters())


def test_as_native_autocast():
    model = nn.Sequential(Block(), Block())
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", BF16):
        output = model(x)
    output.float().square().sum().backward()
    ours = run(compiled(copy.deepcopy(model), "bf16"))
    assert_same(ours, [output.detach(), x.grad, *(p.grad for p in model.parameters())])


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.conv(x[:, None]))).flatten(1)


def test_batch_norm_dropout_and_modes():
    model = Convolutional()
    ours, theirs = compiled(copy.deepcopy(model), BF16_RULES), model
    nc.apply(theirs, BF16_RULES)
    for training in (True, False, True):
        ours.train(training)
        theirs.train(training)
        assert_same(run(ours), run(theirs))


def test_inference():
    model = Block()
    expected = eager(model, "bf16")[0]
    ours = compiled(model, "bf16")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same([ours(X)], [expected])


def test_shapes_may_be_dynamic():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            scores = torch.einsum("ij,kj->ik", self.linear(x), x) * x.shape[0]
            return scores.softmax(-1).flatten() @ torch.ones(x.shape[0] ** 2, 2)

    model = Model()
    ours = compiled(model, BF16_RULES, dynamic=True)
    for rows in (6, 5, 9):
        x = torch.randn(rows, 8)
        assert_same(run(ours, x), eager(model, BF16_RULES, x))


@pytest.mark.parametrize("policy", [nc.Policy(compute="bf16"), BF16_RULES, POLICIES["a module"]])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(policy, reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for block in self:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = nn.Sequential(Block(), Block())
    inside = Checkpointed(*model)
    ours = compiled(copy.deepcopy(inside), policy, fullgraph=not reentrant)
    assert_same(run(ours), eager(model, policy))


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

    class WithScale(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x, scale=torch.tensor(3.0))

    model = Model()
    ours = compiled(copy.deepcopy(model), "bf16")
    assert_same(run(ours)[:2], eager(model, "bf16")[:2])  # each use of a weight has a cast of its own
    assert ours(X).shape == ours(X, scale=torch.tensor(2.0)).shape
    wrapped = WithScale(model)
    assert_same(run(compiled(copy.deepcopy(wrapped), "bf16"))[:2], eager(wrapped, "bf16")[:2])


def test_functions_too():
    weight = torch.randn(8, 8)
    ours = compiled(lambda x: F.linear(x, weight).softmax(-1), BF16_RULES)
    assert ours(X).dtype == FP16
    with torch.autocast("cpu", BF16):
        product = F.linear(X, weight)
    assert_same([ours(X)], [product.half().softmax(-1)])


def test_custom_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return (g.to(w.dtype) @ w.mT).to(x.dtype), x.mT @ g.to(x.dtype)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return Double.apply(F.gelu(x), self.w)

    model = Model()
    assert_same(run(compiled(model, "bf16")), eager(model, "bf16"))


def test_transforms_of_torch_func():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return torch.func.vmap(lambda row: self.w @ row)(x)

    model = Model()
    assert_same(run(compiled(model, "bf16")), eager(model, "bf16"))


# ---- regions, and code that asks for formats


class AsksForFormats(nn.Module):
    """As attention does that masks with the least number of its scores' format."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        scores = self.linear(x)
        least = torch.finfo(scores.dtype).min
        masked = scores.masked_fill(torch.ones(6, 8, dtype=torch.bool).triu(1), least)
        return masked.float().clamp(min=-1e30).to(scores.dtype)


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32"])
def test_code_that_reads_formats_reads_those_of_the_policy(policy):
    model = AsksForFormats()
    ours = run(compiled(model, policy))
    assert_same(ours, eager(model, policy))
    assert ours[0].isfinite().all()


class WithRegions(nn.Module):
    def __init__(self, **region):
        super().__init__()
        self.before, self.inside, self.after = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.region = region

    def forward(self, x):
        x = self.before(x)
        with torch.autocast("cpu", **self.region):
            y = self.inside(x.float())
        return y + self.after(y)


@pytest.mark.long
@pytest.mark.parametrize("region", [{"enabled": False}, {"dtype": FP16}, {}])
@pytest.mark.parametrize("policy", [nc.Policy(compute="bf16"), BF16_RULES])
def test_regions_inside_the_model(region, policy):
    model = WithRegions(**region)
    assert_same(run(compiled(model, policy)), eager(model, policy))


def test_regions_of_the_caller_change_nothing():
    model = Block()
    expected = eager(model, BF16_RULES)
    ours = compiled(model, BF16_RULES)
    for region in (
        torch.autocast("cpu", FP16),
        nc.autocast("cpu", policy="fp32"),
        nc.autocast("cpu", policy=nc.Policy(compute="fp16", rules=(nc.rule.op("gelu", compute="fp32"),))),
    ):
        x = X.clone().requires_grad_()
        with region:
            output = ours(x)
        assert_same([output.detach()], expected[:1])
    assert not torch.is_autocast_enabled("cpu")


# ---- graph breaks


class Broken(nn.Module):
    """Two pieces, and between them code that Dynamo leaves to Python."""

    def __init__(self):
        super().__init__()
        self.first, self.between, self.last = Block(), nn.Linear(8, 8), Block()

    def forward(self, x):
        x = self.first(x)
        x = self.untraced(x)
        return self.last(x)

    @torch.compiler.disable
    def untraced(self, x):
        assert torch.is_autocast_enabled("cpu")
        return self.between(x).softmax(-1)


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [
        nc.Policy(compute="bf16"),
        BF16_RULES,
        nc.Policy(compute="bf16", rules=(nc.rule.module("last", compute="fp32", output="bf16"),)),
        nc.Policy(compute="bf16", rules=(nc.rule.module("last.*", compute="fp32", output="bf16"),)),
    ],
)
def test_pieces_between_graph_breaks(policy):
    model = Broken()
    graphs = Graphs()
    ours = run(compiled(model, policy, backend=graphs, fullgraph=False))
    assert len(graphs.kept) > 1
    assert_same(ours, eager(model, policy))


# ---- the graph


@pytest.mark.parametrize("policy", ["fp32", nc.Policy(compute="fp32", tables="cuda")])
def test_in_fp32_nothing_is_cast(policy):
    model = Block()
    assert_same(run(compiled(model, policy)), run(copy.deepcopy(model)))


# ---- one model, several policies


def test_policies_take_turns_on_one_model():
    model = Block()
    policies = [nc.Policy(compute="bf16"), nc.Policy(compute="fp16"), BF16_RULES, POLICIES["table of cuda"]]
    expected = [eager(model, policy) for policy in policies]
    ours = [compiled(model, policy) for policy in policies]
    for _ in range(2):
        for one, result in zip(ours, expected, strict=True):
            assert_same(run(one), result)
    plain = torch.compile(model, backend="aot_eager")
    assert_same(run(plain), run(copy.deepcopy(model)))


@pytest.mark.long
def test_more_policies_than_dynamo_recompiles():
    model = nn.Linear(8, 8)
    for count in range(12):
        graphs = Graphs()
        ours = compiled(model, "bf16" if count % 2 else "fp16", backend=graphs)
        assert ours(X).dtype == (BF16 if count % 2 else FP16)
        assert len(graphs.kept) == 1


def test_a_function_that_dynamo_gave_up_on_is_cast_all_the_same():
    model = Block()
    ours = compiled(model, BF16_RULES, fullgraph=False, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for rows in (6, 5, 4):
            x = torch.randn(rows, 8)
            assert_same(run(ours, x), eager(model, BF16_RULES, x))


# ---- what torch.compile gives


def test_the_compiled_module_is_torchs():
    model = Block()
    ours, theirs = nc.compile(model, "bf16"), torch.compile(model)
    assert type(ours) is type(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.eval()
    assert not model.training
    ours.load_state_dict({name: torch.zeros_like(value) for name, value in ours.state_dict().items()})
    assert model.up.weight.count_nonzero() == 0


# ---- bad input


def test_unknown_modules_are_refused_at_once():
    policy = nc.Policy(compute="bf16", rules=(nc.rule.module("upp", compute="fp32"),))
    with pytest.raises(PolicyError, match='has no modules "upp"'):
        nc.compile(Block(), policy)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(PolicyError, match="expected a module or a function to compile, got int"):
        nc.compile(3, "bf16")


@pytest.mark.parametrize(
    "rule", [nc.rule.op("gelu", compute="refuse"), nc.rule.module("norm", compute="refuse")], ids=str
)
def test_what_a_rule_refuses(rule):
    ours = compiled(Block(), nc.Policy(compute="bf16", rules=(rule,)))
    with pytest.raises(UnsupportedError, match=r"which a rule refuses|which is refused here"):
        ours(X)
    assert not torch.is_autocast_enabled("cpu")


def test_errors_of_the_backend_stay_what_they_are():
    def failing(graph_module, example_inputs):
        raise ZeroDivisionError("in the backend")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="in the backend"):
        nc.compile(Block(), "bf16", backend=failing)(X)
    assert not torch.is_autocast_enabled("cpu")
