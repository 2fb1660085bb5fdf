"""nc.compile: modules with rules are entered and left in graphs as nc.apply has them in eager code.

Bit for bit, gradients included, in one graph where Dynamo can make one.
"""

import copy
import dataclasses
import gc
import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, COMPILES, FP16, FP32, Calls, assert_same, eager, has_no_hooks, rules, trained
from torch import nn
from torch._dynamo import lookup_backend
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.casting import active_scopes

pytestmark = COMPILES
WIDTH = 8
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
rule = nc.rule.module


def linear():
    return nn.Linear(WIDTH, WIDTH)


def assert_as_eager(model, policy, fullgraph=True, shown=None):
    """In training, twice, and in inference before and after.

    Behind a graph break Dynamo adds up gradients in another order, in every format.
    """
    theirs = copy.deepcopy(model)
    ours = nc.compile(model, policy, backend="aot_eager", fullgraph=fullgraph)
    with nc.apply(theirs, policy):
        expected = trained(theirs, X)
        with torch.no_grad():
            without = theirs(X)
    with torch.no_grad():
        assert_same(ours(X), without)
    for _ in range(2):
        found = trained(ours, X)
        shown = shown or (len(found) if fullgraph else 1)
        assert_same(found[:shown], expected[:shown])
    with torch.inference_mode():
        assert_same(ours(X), without)
    assert not active_scopes()
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("ipu")
    return expected[0].dtype


# ---- code that reads formats


class Norm(nn.Module):
    """As those of T5 and Llama: in fp32, and back to what came."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * h).to(x.dtype)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = linear()

    def forward(self, x):
        scores = self.query(x) @ x.mT
        least = torch.finfo(x.dtype).min
        mask = torch.zeros(6, 6, dtype=x.dtype).masked_fill(torch.ones(6, 6).triu(1).bool(), least)
        return (scores + mask).softmax(-1) @ x


def after(part):
    """A part that is given bf16."""
    return nn.Sequential(linear(), part())


def branches():
    return Calls(lambda self, x: x.exp() if x.dtype == FP32 else x.sin())


def twice():
    return Calls(lambda self, x: self.n(self.n(self.l(x))) + self.n(x), n=Norm(), l=linear())


def checkpointed():
    return Calls(lambda self, x: checkpoint(self.n, self.l(x), use_reentrant=False), n=Norm(), l=linear())


READ_FORMATS = {
    "a norm in fp32": (lambda: after(Norm), [rule("1", compute="fp32")], FP32),
    "a norm in another rule": (
        lambda: nn.Sequential(linear(), after(Norm)),
        [rule("1", compute="fp32"), rule("1.1", compute="fp16")],
        FP16,
    ),
    "the model itself": (Norm, [rule("", compute="fp16")], FP16),
    "masks in fp16": (lambda: after(Masked), [rule("1", compute="fp16")], FP16),
    "masks in the widest": (lambda: after(Masked), [rule("1", compute="promote")], FP32),
    "masks as they are": (Masked, [rule("query", compute="as-is")], BF16),
    "an op in there": (lambda: after(Masked), [rule("1", compute="fp16", op="softmax")], BF16),
    "no rule": (lambda: after(Masked), [], BF16),
    "a branch": (lambda: after(branches), [rule("1", compute="fp32")], FP32),
    "twice": (twice, [rule("n", compute="fp32", output="bf16")], BF16),
    "in a checkpoint": (checkpointed, [rule("n", compute="fp32")], FP32),
}


@pytest.mark.parametrize("name", READ_FORMATS)
def test_code_in_a_module_reads_the_formats_of_its_rule(name):
    make, given, dtype = READ_FORMATS[name]
    assert assert_as_eager(make(), rules(*given)) == dtype


# ---- what is handed


class Gated(nn.Module):
    def forward(self, x, weight, *, bias=None, word="", shape=None):
        y = F.gelu(x) * weight
        return y if bias is None else y + bias * bias


def gated(function):
    return Calls(function, g=Gated(), l=linear())


HANDED = {
    "an identity": (
        lambda: nn.Sequential(linear(), nn.Identity(), linear()),
        rule("1", compute="as-is", output="fp16"),
    ),
    "nothing but an identity": (
        lambda: Calls(lambda self, x: self.i(x), i=nn.Identity()),
        rule("i", compute="fp32", output="fp16"),
    ),
    "dropout without effect": (lambda: after(nn.Dropout).eval(), rule("1", compute="fp32", output="fp16")),
    "one value twice": (
        lambda: after(lambda: Calls(lambda self, x: (x, x)[1])),
        rule("1", compute="fp32", output="fp16"),
    ),
    "a parameter": (
        lambda: gated(lambda self, x: self.g(self.l(x), self.l.weight[0], bias=self.l.bias)),
        rule("g", compute="fp16"),
    ),
    "a parameter handed on": (
        lambda: Calls(lambda self, x: self.i(self.l.bias) * self.l(x), i=nn.Identity(), l=linear()),
        rule("i", compute="fp16"),
    ),
    "the same by position and name": (
        lambda: gated(lambda self, x: self.g(h := self.l(x), h, bias=h, word="w", shape=x.shape)),
        rule("g", compute="fp32", output="bf16"),
    ),
}


@pytest.mark.parametrize("name", HANDED)
def test_what_modules_are_handed_and_hand_on(name):
    make, given = HANDED[name]
    assert_as_eager(make(), rules(given))


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    count: int = 3


def test_tensors_in_structures():
    def pack(a, b):
        return {"pair": Pair(a, [Record(b), None]), "indices": torch.arange(3), "word": "w"}

    def unpack(value):
        return value["pair"].first, value["pair"].second[0].value

    def outside(self, x):
        h = self.linear(x)
        a, b = unpack(self.inside(pack(h, h * 2)))
        return a @ b.mT

    def inside(self, value):
        a, b = unpack(value)
        return pack(self.linear(a), b * 2)

    model = Calls(outside, linear=linear(), inside=Calls(inside, linear=linear()))
    policy = rules(rule("inside", compute="fp32", output="fp16"))
    one_graph = hasattr(torch._dynamo.polyfills, "copy")  # torch 2.11 does not trace copy.copy
    assert assert_as_eager(model, policy, fullgraph=one_graph) == BF16


@dataclasses.dataclass
class Checked:
    value: torch.Tensor

    def __post_init__(self):
        assert self.value.dim() == 2


def test_what_only_eager_code_can_rebuild_is_left_to_it():
    model = nn.Sequential(linear(), Calls(lambda self, x: Checked(x)), Calls(lambda self, x: x.value.sin()))
    policy = rules(rule("1", compute="fp32", output="fp16"))
    assert assert_as_eager(model, policy, fullgraph=False) == FP16


# ---- shared modules, regions, and pieces


def _shared(inside):
    one = nn.ModuleDict({"b": linear()}) if inside else linear()
    call = (lambda part, x: part["b"](x)) if inside else (lambda part, x: part(x))
    second = nn.ModuleDict({"b": one["b"]}) if inside else one
    return Calls(lambda self, x: call(self.second, call(self.first, x).sin()), first=one, second=second)


@pytest.mark.parametrize(
    ("inside", "given"),
    [
        pytest.param(inside, given, marks=[pytest.mark.long] * (not inside or len(given) == 1))
        for inside in (False, True)
        for given in (
            {"second": {"compute": "fp32"}},
            {"first": {"compute": "fp32", "output": "fp16"}},
            {"first": {"compute": "fp32", "output": "fp16"}, "second": {"compute": "fp16"}},
        )
    ],
)
def test_shared_modules_have_the_rules_of_all_their_paths(inside, given):
    suffix = ".b" if inside else ""
    policy = rules(*(rule(path + suffix, **how) for path, how in given.items()))
    # Each use of a weight has a cast of its own in a graph: its gradients add up in fp32.
    assert_as_eager(_shared(inside), policy, shown=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "region"),
    [
        *itertools.product(
            [
                {},
                {"compute": "fp32"},
                {"compute": "promote", "output": "fp16"},
                {"compute": "fp16", "op": "matmul"},
            ],
            [{"enabled": False}, {"dtype": FP16}],
        ),
        ({}, {}),
    ],
    ids=str,
)
def test_regions_in_modules_with_rules(given, region):
    def forward(self, x):
        with torch.autocast("cpu", **region):
            x = self.linear(x if given else x.float())
        return x @ x.mT if given else x + self.after(x)

    model = nn.Sequential(linear(), Calls(forward, linear=linear(), after=linear()))
    ruled = [rule("1", **given), rule("0", compute="fp32", output="fp32")] if given else []
    assert_as_eager(model, rules(*ruled))


def test_an_equal_policy_may_be_freed_while_a_graph_is_made():
    def backend(graph, inputs):
        others.clear()
        gc.collect()
        return lookup_backend("aot_eager")(graph, inputs)

    model = nn.Sequential(linear(), Calls(lambda _self, x: x @ x.mT))
    others = [rules(rule("1", compute="fp16", op="matmul"))]
    with nc.apply(model, others[0]):
        model(X)
    ours = nc.compile(model, rules(rule("1", compute="fp16", op="matmul")), backend=backend)
    assert ours(X).dtype == FP16


@pytest.mark.parametrize(
    ("around", "compute"),
    [
        (True, "fp16"),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in [(True, "fp32"), (False, "fp16"), (False, "fp32")]
        ),
    ],
)
def test_modules_called_where_the_model_turned_autocast_off(around, compute):
    def forward(self, x):
        if not around:
            return self.inner(x)
        with torch.autocast("cpu", enabled=False):
            x = self.inner(x)
        return x.sin()

    model = Calls(forward, inner=nn.Sequential(linear()))
    assert_as_eager(model, rules(rule("inner", compute=compute, output="bf16")))


@pytest.mark.parametrize(
    "given",
    [
        rule("", compute="fp32", output="fp16"),
        pytest.param(rule("", compute="fp16"), marks=pytest.mark.long),
        rule("", op="layer_norm", compute="fp16"),
        pytest.param(rule("", compute="as-is", output="fp16"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_bounds_of_the_model_itself(given):
    assert_as_eager(nn.Sequential(linear(), nn.LayerNorm(WIDTH)), rules(given))


def test_rules_for_modules_beside_transforms():
    def forward(self, x):
        return self.inner(torch.vmap(lambda row: self.weight @ row)(self.first(x)))

    model = Calls(forward, first=linear(), inner=linear(), weight=nn.Parameter(torch.randn(WIDTH, WIDTH)))
    assert_as_eager(model, rules(rule("inner", compute="fp32")))


# ---- modules that Dynamo leaves to Python


def breaks(self, x):
    x = self.up(x)
    torch._dynamo.graph_break()
    return self.down(x)


@torch.compiler.disable
def untraced(self, x):
    return self.inner(x)


def broken():
    return Calls(breaks, up=linear(), down=linear())


def partly_untraced():
    inner = nn.Sequential(linear(), nn.LayerNorm(WIDTH))
    return Calls(lambda self, x: untraced(self, self.first(x)), first=linear(), inner=inner)


def with_a_break():
    return nn.Sequential(
        linear(), nn.Sequential(linear(), Calls(breaks, up=nn.GELU(), down=nn.GELU()), linear())
    )


LEFT_TO_PYTHON = {
    "a break in a container": (with_a_break, rule("1", compute="fp32", output="fp16")),
    "an entry of a container with a break": (with_a_break, rule("1.2", compute="fp32")),
    "two of one class": (lambda: nn.Sequential(broken(), broken()), rule("1", op="linear", compute="fp16")),
    "two of one class, the first": (
        lambda: nn.Sequential(broken(), broken()),
        rule("0", op="linear", compute="fp16"),
    ),
    "a disabled part": (partly_untraced, rule("inner", compute="fp32")),
    "inside a disabled part": (partly_untraced, rule("inner.1", compute="fp32", output="fp16")),
    "an operator in a disabled part": (partly_untraced, nc.rule.op("layer_norm", compute="fp16")),
}


@pytest.mark.parametrize("name", LEFT_TO_PYTHON)
def test_modules_that_dynamo_leaves_to_python(name, monkeypatch):
    make, given = LEFT_TO_PYTHON[name]
    model, policy = make(), rules(given)
    expected, plain = eager(model, policy, X)[0], model(X)
    ours = nc.compile(model, policy, backend="aot_eager")
    for _ in range(2):
        assert_same(trained(ours, X)[0], expected)
    if name == "inside a disabled part":
        with monkeypatch.context() as patch:  # of the whole process: another thread compiles meanwhile
            patch.setattr(torch.compiler, "_is_compiling_flag", True)
            assert_same(ours(X), expected)
    del ours
    assert_same(model(X), plain)
    assert has_no_hooks(model)


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    [
        [rule("1.inner.down", compute="fp32")],
        [rule("0.inner.down", compute="fp32")],
        [rule("1.norm", compute="fp32"), rule("0.inner.down", compute="fp16", output="fp16")],
        [rule("1", compute="fp32"), rule("1.norm", compute="fp16")],
    ],
    ids=lambda given: ", ".join(map(str, given)),
)
def test_modules_of_one_class_with_other_rules_share_no_graph(given):
    def block():
        return Calls(lambda self, x: x + self.inner(self.norm(x)), norm=Norm(), inner=broken())

    assert_as_eager(nn.Sequential(block(), block(), block()), rules(*given), fullgraph=False)


def test_modules_that_come_later_have_their_rules():
    model = Calls(lambda self, x: self.head(self.body(x)), body=linear(), head=linear())
    policy = rules(rule("head", compute="fp32"))
    ours = nc.compile(model, policy, backend="eager")
    for change in (
        lambda: None,
        lambda: setattr(model, "head", linear()),
        lambda: vars(model)["_modules"].update(body=model.head, head=model.body),
        lambda: setattr(model, "head", nn.Sequential(model.head)),
    ):
        change()
        assert ours(X).dtype == FP32
        assert_same(ours(X), eager(model, policy, X)[0])
