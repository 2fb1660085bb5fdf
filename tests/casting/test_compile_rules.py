"""nc.compile: rules that graphs alone cannot follow, against nc.apply in eager code."""

import copy

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import UnsupportedError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
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


def compiled(model, policy, **settings):
    return nc.compile(model, policy, **{"backend": "aot_eager", **settings})


def eager(model, policy, x=X):
    model = copy.deepcopy(model)
    with nc.apply(model, policy):
        return model(x)


def assert_same(first, second):
    assert first.dtype == second.dtype
    assert torch.equal(first, second)


def rules(*given):
    return nc.Policy(compute="bf16", rules=given)


# ---- fp8

FP8 = rules(nc.rule.module("0", compute="fp8_tensorwise"))


@pytest.mark.filterwarnings("ignore:fp8 is emulated:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Enum subclass.*")
def test_fp8_layers_for_as_long_as_the_compiled_module_lives():
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    expected, plain = eager(model, FP8), eager(model, "bf16")
    assert not torch.equal(expected, plain)
    ours, again = compiled(model, FP8, fullgraph=True), compiled(model, FP8, fullgraph=True)
    assert_same(ours(X), expected)
    del ours
    assert_same(again(X), expected)
    del again
    assert type(model[0]) is nn.Linear
    assert_same(eager(model, "bf16"), plain)


@pytest.mark.parametrize(
    "rule", [nc.rule.op("linear", compute="fp8_tensorwise"), nc.rule.module("1", compute="fp32")], ids=str
)
def test_functions_have_no_modules_for_rules(rule):
    with pytest.raises(UnsupportedError, match=r"expected a module to compile with a rule for modules"):
        nc.compile(lambda x: x @ x.T, rules(rule))


# ---- modules that Dynamo leaves to Python


class Breaks(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x * 1


class BreaksInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(x)


class Untraced(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))

    @torch.compiler.disable
    def part(self, x):
        return self.inner(x)

    def forward(self, x):
        return self.part(self.first(x))


class Transforms(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(torch.vmap(lambda row: row * 2)(self.first(x)))


LEFT_TO_PYTHON = {
    "a break in a container": (
        lambda: nn.Sequential(
            nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), Breaks(), nn.Linear(16, 16))
        ),
        [nc.rule.module("1", compute="fp32", output="fp16")],
    ),
    "an entry of a container with a break": (
        lambda: nn.Sequential(
            nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), Breaks(), nn.Linear(16, 16))
        ),
        [nc.rule.module("1.2", compute="fp32")],
    ),
    "two of one class": (
        lambda: nn.Sequential(BreaksInside(), BreaksInside()),
        [nc.rule.module("1", op="linear", compute="fp16")],
    ),
    "two of one class, the first": (
        lambda: nn.Sequential(BreaksInside(), BreaksInside()),
        [nc.rule.module("0", op="linear", compute="fp16")],
    ),
    "a disabled part": (Untraced, [nc.rule.module("inner", compute="fp32")]),
    "inside a disabled part": (Untraced, [nc.rule.module("inner.1", compute="fp32", output="fp16")]),
}


@pytest.mark.parametrize("name", LEFT_TO_PYTHON)
def test_modules_that_dynamo_leaves_to_python(name):
    make, given = LEFT_TO_PYTHON[name]
    model, policy = make(), rules(*given)
    expected = eager(model, policy)
    ours = compiled(model, policy)
    for _ in range(2):
        assert_same(ours(X), expected)
    plain = model(X)
    del ours
    assert_same(model(X), plain)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_modules_that_python_calls_while_another_thread_compiles(monkeypatch):
    make, given = LEFT_TO_PYTHON["inside a disabled part"]
    model, policy = make(), rules(*given)
    expected = eager(model, policy)
    ours = compiled(model, policy)
    ours(X)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # of the whole process
    assert_same(ours(X), expected)


def test_rules_for_modules_beside_transforms():
    model, policy = Transforms(), rules(nc.rule.module("inner", compute="fp32"))
    assert_same(compiled(model, policy, fullgraph=True)(X), eager(model, policy))


@pytest.mark.parametrize(
    "rule",
    [
        nc.rule.module("", compute="fp32", output="fp16"),
        nc.rule.module("", compute="fp16"),
        nc.rule.module("", op="layer_norm", compute="fp16"),
        nc.rule.module("", compute="as-is", output="fp16"),
    ],
    ids=str,
)
def test_bounds_of_the_model_itself(rule):
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    expected = eager(model, rules(rule))
    ours = compiled(model, rules(rule), fullgraph=True)
    for _ in range(2):
        assert_same(ours(X), expected)
    assert not torch.is_autocast_enabled("cpu")


class TurnsOff(nn.Module):
    def __init__(self, around):
        super().__init__()
        self.inner, self.around = nn.Sequential(nn.Linear(16, 16)), around

    def forward(self, x):
        if not self.around:
            return self.inner(x)
        with torch.autocast("cpu", enabled=False):
            x = self.inner(x)
        return x.sin()


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_modules_called_where_the_model_turned_autocast_off(around, compute):
    model = TurnsOff(around)
    policy = rules(nc.rule.module("inner", compute=compute, output="bf16"))
    assert_same(compiled(model, policy, fullgraph=True)(X), eager(model, policy))
