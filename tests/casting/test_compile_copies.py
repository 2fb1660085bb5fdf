"""nc.compile: copies and pickles of what was compiled and of its model, fp8 layers, and models in DDP."""

import copy
import itertools

import pytest
import torch
from casting_cases import COMPILES, FP32, Calls, assert_same, eager, pickled, rules, trained
from torch import nn

import narrowcast as nc
from narrowcast.errors import OrderError

rule = nc.rule.module
X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
POLICY = rules(rule("1", compute="fp32", output="fp16"))
FP8 = rules(rule("0", compute="fp8_tensorwise"))
pytestmark = [
    *COMPILES,
    pytest.mark.filterwarnings("ignore:fp8 is emulated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Enum subclass.*"),
]


def made():
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))


def compiled(model, policy=POLICY):
    return nc.compile(model, policy, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("again", [copy.deepcopy, pickled], ids=["copy", "pickle"])
def test_a_copy_of_a_model_that_is_compiled_is_plain(again):
    model = made()
    ours = compiled(model)
    expected = ours(X)
    other = again(model)
    del ours, model
    assert_same(other(X), copy.deepcopy(other)(X))
    assert other(X).dtype == FP32
    assert torch.compile(other, backend="aot_eager", fullgraph=True)(X).dtype == FP32
    assert_same(compiled(other)(X), expected)
    assert_same(eager(other, POLICY, X)[0], expected)


def test_a_shallow_copy_of_a_ruled_part_computes_by_itself():
    model = made()
    ours = compiled(model)
    part = copy.copy(model[1])
    part._parameters = {name: torch.zeros_like(weight) for name, weight in part._parameters.items()}
    assert not part(X).any()
    assert ours(X).any()


@pytest.mark.parametrize("policy", ["bf16", POLICY], ids=["preset", "rules"])
@pytest.mark.parametrize("again", [copy.deepcopy, pickled], ids=["copy", "pickle"])
def test_a_copy_of_what_was_compiled_computes_by_the_policy(again, policy):
    ours = compiled(made(), policy)
    expected = ours(X)
    other = again(ours)
    assert type(other) is type(ours)
    assert_same(other(X), expected)
    inside = again(nn.ModuleDict({"one": ours}))
    assert_same(inside["one"](X), expected)
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert not torch.equal(other(X), expected)
    assert_same(ours(X), expected)


@pytest.mark.parametrize("again", [copy.deepcopy, pickled], ids=["copy", "pickle"])
def test_a_copy_of_what_was_compiled_has_fp8_layers_of_its_own(again):
    model = made()
    expected, plain = eager(model, FP8, X)[0], eager(model, "bf16", X)[0]
    assert not torch.equal(expected, plain)
    with nc.apply(model, FP8):
        ours = compiled(model, FP8)
        other = again(ours)
        assert_same(ours(X), expected)
        assert_same(other(X), expected)


def test_fp8_layers_are_converted_by_apply():
    model = made()
    with pytest.raises(OrderError, match="got one at '0' that is not: call"):
        compiled(model, FP8)
    with nc.apply(model, FP8):
        ours = compiled(model, FP8)
        ours(X)
    with pytest.raises(OrderError, match="got one at '0' that is not: call"):
        ours(X)


def test_the_model_can_be_compiled_and_exported_plainly_meanwhile():
    model = made()
    ours = compiled(model)
    expected, plain = ours(X), model(X)
    for backend in ("eager", "aot_eager"):
        assert_same(torch.compile(model, backend=backend, fullgraph=True)(X), plain)
    for strict in (False, True):
        exported = torch.export.export(model, (X,), strict=strict).module()
        assert_same(exported(X), plain)
    assert_same(ours(X), expected)


# ---- DDP

LAYERS = {
    "preset": "bf16",
    "module": rules(rule("inside", compute="fp32", output="fp16")),
    "inside": rules(rule("inside.*", compute="fp16")),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize(
    ("outside", "split", "policy"),
    [
        pytest.param(
            *one, marks=[pytest.mark.long] * (one not in [(True, False, "module"), (False, True, "inside")])
        )
        for one in itertools.product([True, False], [True, False], LAYERS)
    ],
)
def test_models_in_ddp(split, outside, policy):
    policy, graphs = LAYERS[policy], []
    width = 512 if split else 16  # a first bucket holds one MiB
    inside = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    parts = {"first": nn.Linear(16, width), "inside": inside, "last": nn.Linear(width, 4)}
    model = Calls(lambda self, x: self.last(self.inside(self.first(x))), **parts)
    expected = eager(model, policy, X)

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    if outside:
        ours = nc.compile(
            nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1), policy, backend=backend
        )
    else:
        ours = nc.compile(model, policy, backend=backend)
        ours = nn.parallel.DistributedDataParallel(ours, bucket_cap_mb=1)
    for _ in range(2):
        assert_same(trained(ours, X), expected)
    assert len(graphs) > 1 if split else len(graphs) == 1
    assert torch._dynamo.config.optimize_ddp is True
