"""nc.compile: copies and pickles of what was compiled and of its model, and models in DDP."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

import narrowcast as nc

FP16, FP32 = torch.float16, torch.float32
X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
POLICY = nc.Policy(compute="bf16", rules=(nc.rule.module("1", compute="fp32", output="fp16"),))
pytestmark = [
    # Of Dynamo, about what it does itself.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made():
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))


def compiled(model, policy=POLICY):
    return nc.compile(model, policy, backend="aot_eager", fullgraph=True)


def eager(model, policy=POLICY):
    with nc.apply(model, policy):
        return model(X)


def assert_same(first, second):
    assert first.dtype == second.dtype
    assert torch.equal(first, second)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


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
    assert_same(eager(other), expected)


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


@pytest.mark.filterwarnings("ignore:fp8 is emulated:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Enum subclass.*")
@pytest.mark.parametrize("again", [copy.deepcopy, pickled], ids=["copy", "pickle"])
def test_a_copy_of_what_was_compiled_has_fp8_layers_of_its_own(again):
    pytest.importorskip("torchao")
    model = made()
    policy = nc.Policy(compute="bf16", rules=(nc.rule.module("0", compute="fp8_tensorwise"),))
    ours = compiled(model, policy)
    expected = ours(X)
    other = again(ours)
    del ours
    assert type(model[0]) is nn.Linear
    assert_same(other(X), expected)
    inside = other._orig_mod
    del other
    assert type(inside[0]) is nn.Linear


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


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which init_process_group replaces
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def _gradients(model, x):
    model.zero_grad()
    output = model(x)
    output.float().square().sum().backward()
    return [output.detach(), *(one.grad.clone() for one in model.parameters())]


class Layers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 4)
        self.inside = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def forward(self, x):
        return self.last(self.inside(self.first(x)))


class Counting:
    def __init__(self):
        self.count = 0

    def __call__(self, graph_module, example_inputs):
        self.count += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph_module, example_inputs)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    "policy",
    [
        "bf16",
        nc.Policy(compute="bf16", rules=(nc.rule.module("inside", compute="fp32", output="fp16"),)),
        nc.Policy(compute="bf16", rules=(nc.rule.module("inside.*", compute="fp16"),)),
    ],
    ids=["preset", "module", "inside"],
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_models_in_ddp(group, split, outside, policy):
    width = 512 if split else 16  # a first bucket holds one MiB
    model = Layers(width)
    theirs = copy.deepcopy(model)
    with nc.apply(theirs, policy):
        expected = _gradients(theirs, X)
    backend = Counting()
    wrap = lambda module: nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1)  # noqa: E731
    make = lambda module: nc.compile(module, policy, backend=backend)  # noqa: E731
    ours = make(wrap(model)) if outside else wrap(make(model))
    for _ in range(2):
        found = _gradients(ours, X)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    assert backend.count > 1 if split else backend.count == 1
    assert torch._dynamo.config.optimize_ddp is True
