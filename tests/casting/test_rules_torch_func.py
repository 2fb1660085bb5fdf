"""Rules inside the transformations of torch.func: the formats of the plain call, under every layer.

torch.vmap takes composites apart above autocast, and each layer switches autocast on again below it.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, FP16, FP32, assert_same, rules
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import narrowcast as nc
from narrowcast.errors import UnsupportedError

rule = nc.rule
RULES = (
    rule.op("softmax", compute="fp16"),
    rule.op("linear", compute="fp32"),
    rule.op("layer_norm", compute="fp16"),
    rule.op("log_softmax", compute="fp16"),
)


def region(*given, **settings):
    return nc.autocast("cpu", policy=rules(*given, **settings))


class Formats(TorchDispatchMode):
    """The formats in which the kernels of a device compute, below every layer."""

    only_looks_on = True

    def __init__(self, *wanted):
        super().__init__()
        self.wanted = wanted
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._schema.name.removeprefix("aten::") in self.wanted:
            self.seen += [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        return op(*args, **(kwargs or {}))


def computed_in(function, *wanted):
    with Formats(*wanted) as formats:
        function()
    assert formats.seen
    return set(formats.seen)


# A function of a vector, the kernels that matter, and the formats in which they compute in a plain call.
X, W = torch.linspace(-2, 2, 32).reshape(4, 8), torch.linspace(-1, 1, 64).reshape(8, 8)
TARGETS = torch.arange(4)
FUNCTIONS = {
    "a composite": (lambda t: torch.softmax(t, -1), ["_softmax"], {FP16}),
    "a composite of what is listed": (lambda t: F.linear(t, W), ["mm", "addmm", "mv"], {FP32}),
    "a composite that is no operator of Python's": (
        lambda t: F.layer_norm(t, (8,)),
        ["native_layer_norm"],
        {FP16},
    ),
    "listed, without a rule": (lambda t: torch.matmul(t, W), ["mm", "addmm", "mv", "bmm"], {BF16}),
    "a composite without a rule": (
        lambda t: torch.einsum("j,jk->k", t, W) if t.dim() == 1 else torch.einsum("ij,jk->ik", t, W),
        ["mm", "bmm"],
        {BF16},
    ),
    "inside another one": (lambda t: F.cosine_similarity(t, torch.softmax(t, -1), -1), ["_softmax"], {FP16}),
}
LAYERS = {
    "plain": lambda f: f(X),
    "vmap": lambda f: vmap(f)(X),
    "vmap of vmap": lambda f: vmap(vmap(f))(torch.stack([X, X])),
    "grad": lambda f: grad(lambda t: f(t).float().sum())(X),
    "vmap of grad": lambda f: vmap(grad(lambda t: f(t).float().sum()))(X),
    "grad of vmap": lambda f: grad(lambda t: vmap(f)(t).float().sum())(X),
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "vjp": lambda f: vjp(f, X)[0],
    "jacrev": lambda f: jacrev(f)(X),
    "jacfwd": lambda f: jacfwd(f)(X),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_region_inside_the_function(name, layer):
    """As it should be written: what a transformation computes backward is outside of the region."""
    function, wanted, formats = FUNCTIONS[name]

    def with_region(t):
        with region(*RULES):
            return function(t)

    assert computed_in(lambda: LAYERS[layer](with_region), *wanted) == formats


@pytest.mark.parametrize("layer", ["plain", "vmap", "vmap of vmap", "jvp", "vjp"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_region_around_the_transformation(name, layer):
    function, wanted, formats = FUNCTIONS[name]

    def run():
        with region(*RULES):
            LAYERS[layer](function)

    assert computed_in(run, *wanted) == formats


@pytest.mark.parametrize("layer", LAYERS)
def test_values_are_those_of_casts_by_hand(layer):
    def ruled(t):
        with region(*RULES):
            return F.softmax(F.linear(t, W), -1)

    def by_hand(t):
        return F.softmax(F.linear(t, W).half(), -1)

    assert_same(LAYERS[layer](ruled), LAYERS[layer](by_hand))


def test_a_rule_inside_a_composite_without_one():
    """torch.special.log_softmax calls log_softmax, which vmap takes out of it."""

    def special(t):
        with region(*RULES):
            return torch.special.log_softmax(t, -1)

    for layer in ("plain", "grad", "jvp"):
        assert computed_in(lambda layer=layer: LAYERS[layer](special), "_log_softmax") == {FP16}
    with pytest.raises(UnsupportedError, match=r"vmap would ignore what is decided about log_softmax\.int"):
        LAYERS["vmap"](special)


def test_per_sample_gradients_of_a_loss_under_the_table_of_cuda():
    """cross_entropy, which is on no table, calls log_softmax and nll_loss, which are."""

    def loss(t, target):
        with region(rule.op("nll_loss", compute="bf16"), tables="cuda"):
            return F.cross_entropy(t, target)

    gradients = vmap(grad(lambda t, target: loss(t, target).float()))(X, TARGETS)
    for sample, target, gradient in zip(X, TARGETS, gradients, strict=True):
        plain = sample.clone().requires_grad_()
        loss(plain, target).float().backward()
        assert torch.equal(gradient, plain.grad)


def test_per_sample_gradients_of_a_module():
    """The recipe of torch.func's tutorial, against a loop over samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, sample):
        with region(*RULES):
            out = functional_call(model, weights, (sample.unsqueeze(0),))
        return out.float().square().sum()

    together = vmap(grad(loss), in_dims=(None, 0))(weights, X)
    for index, sample in enumerate(X):
        model.zero_grad()
        loss(dict(model.named_parameters()), sample).backward()
        for name, weight in model.named_parameters():
            # A batch of products sums in another order: 8 terms of fp16's 2**-11, relative to the largest.
            assert torch.allclose(together[name][index], weight.grad, rtol=0.02, atol=2.0**-11)


def test_a_module_with_rules_under_vmap():
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    policy = rules(rule.module("1", op="softmax", compute="fp16"))
    with nc.apply(model, policy):
        assert vmap(model)(X).dtype == FP16
        assert computed_in(lambda: vmap(model)(X), "_softmax") == {FP16}
        assert computed_in(lambda: grad(lambda t: model(t).float().sum())(X), "_softmax") == {FP16}


def test_refusing_and_promoting():
    mixed = (X.half(), X.bfloat16())
    with region(rule.op("mul", compute="promote"), rule.op("softmax", compute="refuse")):
        assert vmap(torch.mul)(*mixed).dtype == FP32
        with pytest.raises(UnsupportedError, match=r"softmax\.int was called, which is refused here"):
            vmap(lambda t: t.softmax(-1))(X)


def test_where_vmap_would_pass_over_a_rule_it_is_an_error():
    """A layer that calls the composite itself meets no kernel of ours in front of it."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)

    policy = rules(rule.op("softmax", compute="fp16"))
    with nc.autocast("cpu", policy=policy):
        kernel = torch.library.get_kernel("aten::softmax.int", "FuncTorchBatched")

    def called_by_a_layer(t):
        return kernel.call_boxed(keys, t, -1)

    with (
        nc.autocast("cpu", policy=policy),
        pytest.raises(UnsupportedError, match="would ignore what is decided about") as raised,
    ):
        vmap(called_by_a_layer)(X)
    assert "since softmax.int was called inside another operator" in str(raised.value)
    with torch.autocast("cpu", BF16):
        assert vmap(called_by_a_layer)(X).dtype == FP32


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_rules_the_layers_are_torchs_own(name, layer):
    """Kernels stand in front of the layers for another thread's sake."""
    policy, function = rules(*RULES), FUNCTIONS[name][0]
    with nc.autocast("cpu", policy=policy):
        pass
    for region, formats in ((torch.autocast("cpu", BF16), {BF16, FP32}), (contextlib.nullcontext(), {FP32})):
        with region:
            found = LAYERS[layer](function)
        assert {one.dtype for one in tree_leaves(found)} <= formats
