"""nc.compile: modules with rules are entered and left in graphs as nc.apply has them in eager code.

Bit for bit, gradients included, in one graph where Dynamo can make one.
"""

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.casting import _scopes
from narrowcast.errors import OrderError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH = 8
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
rule = nc.rule.module
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
    assert not _scopes.thread.regions


def linear():
    return nn.Linear(WIDTH, WIDTH)


def rules(*given):
    return nc.Policy(compute="bf16", rules=given)


def run(model, x=X):
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(0)
    output = model(x)
    output.float().square().sum().backward()
    gradients = [one.grad for one in (x, *model.parameters()) if one.grad is not None]
    return [output.detach(), *(one.clone() for one in gradients)]


def assert_as_eager(model, policy, fullgraph=True, shown=None):
    """In training, twice, and without gradients before and after.

    Behind a graph break Dynamo adds up gradients in another order, in every format.
    """
    theirs = copy.deepcopy(model)
    ours = nc.compile(model, policy, backend="aot_eager", fullgraph=fullgraph)
    with nc.apply(theirs, policy):
        expected = run(theirs)
        with torch.no_grad():
            without = theirs(X)
    with torch.no_grad():
        assert_same([ours(X)], [without])
    for _ in range(2):
        found = run(ours)
        assert [one.dtype for one in found] == [one.dtype for one in expected]
        shown = shown or (len(found) if fullgraph else 1)
        assert_same(found[:shown], expected[:shown])
    with torch.no_grad():
        assert_same([ours(X)], [without])
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("ipu")
    return expected[0].dtype


def assert_same(first, second):
    assert [one.dtype for one in first] == [one.dtype for one in second]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


class Calls(nn.Module):
    """``function(self, x)`` with the given parts."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


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


class Branches(nn.Module):
    def forward(self, x):
        return x.exp() if x.dtype == FP32 else x.sin()


READ_FORMATS = {
    "a norm in fp32": (lambda: nn.Sequential(linear(), Norm()), [rule("1", compute="fp32")], FP32),
    "and handed on": (
        lambda: nn.Sequential(linear(), Norm()),
        [rule("1", compute="fp32", output="fp16")],
        FP16,
    ),
    "a norm in another rule": (
        lambda: nn.Sequential(linear(), nn.Sequential(linear(), Norm())),
        [rule("1", compute="fp32"), rule("1.1", compute="fp16")],
        FP16,
    ),
    "the model itself": (Norm, [rule("", compute="fp16")], FP16),
    "masks in fp32": (lambda: nn.Sequential(linear(), Masked()), [rule("1", compute="fp32")], FP32),
    "masks in fp16": (lambda: nn.Sequential(linear(), Masked()), [rule("1", compute="fp16")], FP16),
    "masks in the widest": (lambda: nn.Sequential(linear(), Masked()), [rule("1", compute="promote")], FP32),
    "masks as they are": (Masked, [rule("query", compute="as-is")], BF16),
    "an op in there": (
        lambda: nn.Sequential(linear(), Masked()),
        [rule("1", compute="fp16", op="softmax")],
        BF16,
    ),
    "a branch": (lambda: nn.Sequential(linear(), Branches()), [rule("1", compute="fp32")], FP32),
    "twice": (
        lambda: Calls(lambda self, x: self.n(self.n(self.l(x))) + self.n(x), n=Norm(), l=linear()),
        [rule("n", compute="fp32", output="bf16")],
        BF16,
    ),
    "in a checkpoint": (
        lambda: Calls(
            lambda self, x: checkpoint(self.n, self.l(x), use_reentrant=False), n=Norm(), l=linear()
        ),
        [rule("n", compute="fp32")],
        FP32,
    ),
}


@pytest.mark.parametrize("name", READ_FORMATS)
def test_code_in_a_module_reads_the_formats_of_its_rule(name):
    make, given, dtype = READ_FORMATS[name]
    assert assert_as_eager(make(), rules(*given)) == dtype


@pytest.mark.long
def test_code_in_a_module_reads_them_through_inductor():
    model, policy = nn.Sequential(linear(), Norm()), rules(rule("1", compute="fp32"))
    assert nc.compile(model, policy)(X).dtype == FP32


# ---- what is handed


class Gated(nn.Module):
    def forward(self, x, weight, *, bias=None, word="", shape=None):
        y = F.gelu(x) * weight
        return y if bias is None else y + bias * bias


HANDED = {
    "an identity": (
        lambda: nn.Sequential(linear(), nn.Identity(), linear()),
        rule("1", compute="as-is", output="fp16"),
    ),
    "nothing but an identity": (
        lambda: Calls(lambda self, x: self.i(x), i=nn.Identity()),
        rule("i", compute="fp32", output="fp16"),
    ),
    "dropout without effect": (
        lambda: nn.Sequential(linear(), nn.Dropout(0.5)).eval(),
        rule("1", compute="fp32", output="fp16"),
    ),
    "one value twice": (
        lambda: Calls(lambda self, x: self.p(self.l(x)), l=linear(), p=Calls(lambda self, x: (x, x)[1])),
        rule("p", compute="fp32", output="fp16"),
    ),
    "a parameter": (
        lambda: Calls(
            lambda self, x: self.g(self.l(x), self.l.weight[0], bias=self.l.bias), g=Gated(), l=linear()
        ),
        rule("g", compute="fp16"),
    ),
    "a parameter handed on": (
        lambda: Calls(lambda self, x: self.i(self.l.bias) * self.l(x), i=nn.Identity(), l=linear()),
        rule("i", compute="fp16"),
    ),
    "the same by position and name": (
        lambda: Calls(
            lambda self, x: self.g(h := self.l(x), h, bias=h, word="w", shape=x.shape), g=Gated(), l=linear()
        ),
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
    first: torch.Tensor
    second: Any
    count: int = 3


STRUCTURES = {
    "tuple": lambda a, b: (a, [b, None], 5),
    "dict": lambda a, b: {"first": a, "second": [{"b": b}], "indices": torch.arange(3), "word": "w"},
    "named tuple": Pair,
    "dataclass": lambda a, b: Record(a, (b, [b])),
}


def _first_and_last(value):
    if isinstance(value, torch.Tensor):
        return value, value
    parts = list(value.values()) if isinstance(value, dict) else value
    parts = [value.first, value.second] if isinstance(value, Record) else parts
    found = [_first_and_last(one) for one in parts if isinstance(one, torch.Tensor | list | tuple | dict)]
    floating = [one for one in found if one[0].is_floating_point()]
    return floating[0][0], floating[-1][1]


@pytest.mark.long
@pytest.mark.parametrize("handed", STRUCTURES)
@pytest.mark.parametrize("back", STRUCTURES)
def test_tensors_in_structures(handed, back):
    def outside(self, x):
        h = self.linear(x)
        a, b = _first_and_last(self.inside(STRUCTURES[handed](h, h * 2)))
        return a @ b.mT

    def inside(self, value):
        a, b = _first_and_last(value)
        return STRUCTURES[back](self.linear(a), b * 2)

    model = Calls(outside, linear=linear(), inside=Calls(inside, linear=linear()))
    assert assert_as_eager(model, rules(rule("inside", compute="fp32", output="fp16"))) == BF16


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
    one = linear()
    names = ("first", "second")
    parts = {name: nn.ModuleDict({"b": one}) if inside else one for name in names}
    if inside:
        return Calls(lambda self, x: self.second["b"](self.first["b"](x).sin()), **parts)
    return Calls(lambda self, x: self.second(self.first(x).sin()), **parts)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        [("second", {"compute": "fp32"})],
        [("first", {"compute": "fp32", "output": "fp16"})],
        [("first", {"compute": "fp32", "output": "fp16"}), ("second", {"compute": "fp16"})],
    ],
)
def test_shared_modules_have_the_rules_of_all_their_paths(inside, given):
    suffix = ".b" if inside else ""
    policy = rules(*(rule(path + suffix, **how) for path, how in given))
    # Each use of a weight has a cast of its own in a graph: its gradients add up in fp32.
    assert_as_eager(_shared(inside), policy, shown=1)


class Region(nn.Module):
    def __init__(self, **region):
        super().__init__()
        self.linear, self.region = linear(), region

    def forward(self, x):
        with torch.autocast("cpu", **self.region):
            x = self.linear(x)
        return x @ x.mT


@pytest.mark.long
@pytest.mark.parametrize("region", [{"enabled": False}, {"dtype": FP16}], ids=str)
@pytest.mark.parametrize(
    "given",
    [{"compute": "fp32"}, {"compute": "promote", "output": "fp16"}, {"compute": "fp16", "op": "matmul"}],
    ids=str,
)
def test_regions_in_modules_with_rules(region, given):
    model = nn.Sequential(linear(), Region(**region))
    policy = rules(rule("1", **given), rule("0", compute="fp32", output="fp32"))
    assert_as_eager(model, policy)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = Norm(), linear(), linear()

    def forward(self, x):
        y = self.norm(x)
        torch._dynamo.graph_break()
        return x + self.down(F.gelu(self.up(y)))


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    [
        [rule("1.down", compute="fp32")],
        [rule("0.down", compute="fp32")],
        [rule("1.norm", compute="fp32"), rule("0.down", compute="fp16", output="fp16")],
        [rule("1", compute="fp32"), rule("1.norm", compute="fp16")],
    ],
    ids=lambda given: ", ".join(map(str, given)),
)
def test_modules_of_one_class_with_other_rules_share_no_graph(given):
    assert_as_eager(nn.Sequential(Block(), Block(), Block()), rules(*given), fullgraph=False)


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("called_before", [True, False])
def test_modules_that_come_later_have_their_rules(called_before):
    model = Headed()
    policy = nc.Policy(compute="bf16").with_rules(nc.rule.module("head", compute="fp32"))
    compiled = nc.compile(model, policy, backend="eager")
    x = torch.randn(2, 4)
    if called_before:
        assert compiled(x).dtype == torch.float32
    for change in (
        lambda: setattr(model, "head", nn.Linear(4, 4)),
        lambda: vars(model)["_modules"].update(body=model.head, head=model.body),
        lambda: setattr(model, "head", nn.Sequential(model.head)),
    ):
        change()
        out = compiled(x)
        eager = copy.deepcopy(model)
        with nc.apply(eager, policy):
            assert torch.equal(out, eager(x))
        assert out.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*fp8:UserWarning")
def test_a_new_layer_of_an_fp8_rule_is_an_error():
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    policy = nc.Policy(compute="bf16").with_rules(nc.rule.module("1", compute="fp8_tensorwise"))
    compiled = nc.compile(model, policy, backend="eager")
    model[0] = nn.Linear(16, 16)
    compiled(torch.randn(2, 16))
    model[1] = nn.Linear(16, 16)
    with pytest.raises(OrderError, match="a new one at '1' for which there is an fp8 rule"):
        compiled(torch.randn(2, 16))
