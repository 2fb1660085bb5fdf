"""What nc.compile returned, inside code that torch.compile compiles, and compiled again: the policy holds."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, COMPILES, FP16, FP32, assert_same, eager, rules, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import UnsupportedError

pytestmark = COMPILES
rule = nc.rule
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
OP = rules(rule.op("softmax", compute="fp16"))
MODULE = rules(rule.module("down", compute="fp32", output="bf16"))


class Block(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(8, 16), nn.Linear(16, 8), breaks

    def forward(self, x):
        h = F.gelu(self.up(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(h).softmax(-1)


class Whole(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x)


def theirs(function, **settings):
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True, **settings})


def ours(model, policy):
    return nc.compile(model, policy, backend="aot_eager")


def in_a_function(compiled, **settings):
    def outer(*args):
        return compiled(*args)

    return theirs(outer, **settings)


def in_place(compiled):
    compiled.compile(backend="aot_eager")
    return compiled


def ran(compiled):
    with contextlib.suppress(TypeError):
        compiled(X)
    return torch._dynamo.run(compiled)


WAYS = {
    "in a function": in_a_function,
    "in a module": lambda compiled: theirs(Whole(compiled)),
    "in a checkpoint": lambda compiled: theirs(lambda x: checkpoint(compiled, x, use_reentrant=False)),
    "in the region of a caller": lambda compiled: torch.autocast("cpu", FP16)(in_a_function(compiled)),
    "torch.compile": theirs,
    "torch.compile in place": in_place,
    "torch._dynamo.run": ran,
    "torch._dynamo.disable": torch._dynamo.disable,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", [rules(), OP, MODULE], ids=["preset", "an op", "a module"])
def test_outputs_and_gradients_are_those_of_eager_code(way, policy):
    model = Block()
    expected = eager(model, policy, X)
    called = WAYS[way](ours(model, policy))
    for _ in range(2):
        x = X.clone().requires_grad_()
        model.zero_grad()
        output = called(x)
        output.float().square().sum().backward()
        assert_same([output, x.grad, *(weight.grad for weight in model.parameters())], expected)
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("ipu")


@pytest.mark.parametrize("way", [in_a_function, theirs], ids=["in a function", "torch.compile"])
def test_a_graph_break_in_the_model(way):
    model = Block(breaks=True)
    called = way(ours(model, MODULE), fullgraph=False)
    assert_same(called(X), eager(model, MODULE, X)[0])


def test_an_fp32_island_behind_a_graph_break_has_gradients_in_fp32():
    weight = nn.Parameter(torch.ones(2, 2))

    def island(x):
        torch._dynamo.graph_break()
        with torch.autocast("cpu", enabled=False):
            return x @ weight

    output = in_a_function(ours(island, "fp16"), fullgraph=False)(torch.ones(2, 2))
    output.backward(torch.full((2, 2), 65536.0))
    assert torch.equal(weight.grad, torch.full((2, 2), 131072.0))


@pytest.mark.parametrize("target", [Block(), lambda x: x @ X.mT], ids=["a module", "a function"])
def test_an_outer_graph_is_used_for_one_policy_alone(target):
    outer = theirs(lambda compiled, x: compiled(x) * 2)
    for policy in ("bf16", "fp16", OP):
        with nc.autocast("cpu", policy=policy):
            expected = target(X)
        assert_same(outer(ours(target, policy), X), expected * 2)


def test_two_policies_and_none_in_one_graph():
    model = Block()
    first, second = ours(model, "bf16"), ours(model, MODULE)
    results = theirs(lambda x: (first(x), second(x), model(x)))(X)
    assert_same(results, (eager(model, "bf16", X)[0], eager(model, MODULE, X)[0], model(X)))


def test_a_part_with_a_policy_in_a_whole_with_another():
    whole = nn.Sequential(nn.Linear(8, 8), Block())
    with torch.autocast("cpu", FP16):
        between = whole[0](X)
    expected = eager(whole[1], MODULE, between)[0]
    whole[1] = ours(whole[1], MODULE)
    assert_same(ours(whole, "fp16")(X), expected)
    with nc.apply(whole, "fp16"):
        assert_same(whole(X), expected)
        assert_same(theirs(whole)(X), expected)


@pytest.mark.parametrize("compile_first", [ours, lambda model, _: theirs(model)], ids=["nc", "torch"])
def test_the_policy_that_came_last_holds(compile_first):
    model = Block()
    assert_same(trained(ours(compile_first(model, "fp16"), OP), X), eager(model, OP, X))
    with torch.autocast("cpu", BF16):
        expected = X @ X.mT
    assert_same(ours(compile_first(lambda x: x @ x.mT, "fp16"), "bf16")(X), expected)


def test_functions_without_inputs_weights_or_a_frame():
    product, square = ours(torch.matmul, "bf16"), ours(lambda: X @ X.mT, "bf16")
    assert in_a_function(square)().dtype == BF16
    assert theirs(lambda x: product(x, x.mT))(X).dtype == theirs(product)(X, X.mT).dtype == BF16
    assert in_a_function(ours(nn.Softmax(-1), OP))(X).dtype == FP16


def test_a_compiled_model_that_goes_while_another_is_traced():
    """Dynamo guards what stood in front of the modules."""
    model = Block()
    models = [ours(model, MODULE)]
    models.append(ours(model, rules(rule.module("down", compute="fp32"))))

    @torch.compiler.assume_constant_result
    def drop():
        models.clear()
        return 1

    last = ours(model, rules(rule.module("up", compute="fp32", output="bf16"), *MODULE.rules))
    output = theirs(lambda x: last(x) * drop())(X)
    assert output.dtype == FP32


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("policy", ["bf16", OP], ids=["preset", "rules"])
def test_export_of_a_compiled_model_is_an_error(policy, strict):
    compiled = ours(Block(), policy)
    with pytest.raises(
        (UnsupportedError, torch._dynamo.exc.Unsupported), match="export the model that it was"
    ):
        torch.export.export(compiled, (X,), strict=strict)
    assert not torch.is_autocast_enabled("cpu")
