"""Models with unusual parameters, and TorchScript: as under torch.autocast, or refused in one sentence."""

import contextlib
import copy

import pytest
import torch
from casting_cases import BF16, FP32, Calls, rules
from torch import nn

import narrowcast as nc
from ended_apex import end_apex
from narrowcast.apex import amp

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def two():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def using(use, tensor):
    return Calls(lambda m, x: use(m.linear(x), m.own), linear=nn.Linear(4, 4), own=nn.Parameter(tensor))


def with_child(child):
    return Calls(lambda m, x: m.child(m.first(x)), first=nn.Linear(4, 4), child=child)


# The model, and what O2 says where it refuses.
MODELS = {
    "complex": (lambda: using(lambda y, p: y * p.abs(), torch.randn(4, dtype=torch.complex64)), None),
    "empty": (lambda: using(lambda y, p: y + p.sum(), torch.randn(0, 4)), None),
    "0-d": (lambda: using(lambda y, p: y * p, torch.tensor(2.0)), None),
    "sparse": (lambda: using(lambda y, p: y + p.to_dense().sum(), torch.eye(4).to_sparse()), "sparse_coo"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4)), "lazy"),
    "meta": (lambda: two().to("meta"), None),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), None),
    "old weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 4)), None),
    "TorchScript": (lambda: torch.jit.script(two()), "TorchScript"),
    "scripted child": (lambda: with_child(torch.jit.script(two())), "got child"),
    "traced child": (lambda: with_child(torch.jit.trace(two(), X)), "got child"),
}


def result(model, region=None):
    """Output, and the gradients of a second call: the first of TorchScript is not yet compiled."""
    x = X.to("meta") if any(one.is_meta for one in model.parameters()) else X
    for _ in range(2):
        model.zero_grad()
        with region or contextlib.nullcontext():
            output = model(x)
        if not output.is_meta:
            output.float().abs().sum().backward()
    return output, [one.grad for one in model.parameters()]


def made(kind):
    torch.manual_seed(0)
    return MODELS[kind][0]()


@pytest.mark.parametrize("kind", MODELS)
def test_regions_compute_as_torch_autocast(kind):
    """Of ``nc.bake`` only the outputs: the gradients of weights stored in bf16 are in bf16."""
    expected = result(made(kind), torch.autocast("cpu", BF16))
    with nc.apply(model := made(kind), "bf16"):
        torch.testing.assert_close(result(model), expected, rtol=0, atol=0)
    with nc.bake(model := made(kind), "bf16"):
        torch.testing.assert_close(result(model)[0], expected[0], rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", MODELS)
def test_apex_levels_train_or_refuse(kind, level, request):
    expected = result(made(kind), torch.autocast("cpu", BF16))[0]
    model, refusal = made(kind), MODELS[kind][1] if level == "O2" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    request.addfinalizer(end_apex)
    with pytest.raises(nc.errors.NarrowcastError, match=refusal) if refusal else contextlib.nullcontext():
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, half_type=BF16, loss_scale=1.0)
    output = model(X.to("meta") if expected.is_meta else X)
    if not expected.is_meta and not refusal:
        torch.testing.assert_close(output.float(), expected.float(), atol=2**-6, rtol=2**-6)
        with amp.scale_loss(output.float().abs().sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()


def test_rules_inside_torch_script_are_refused():
    """TorchScript casts by a table of its own: an fp32 rule would get inputs that are rounded to bf16."""
    model, convolution = made("scripted child"), nn.Conv2d(1, 1, 1)
    scripted = with_child(torch.jit.script(convolution))
    traced = with_child(torch.jit.trace(convolution, X[None, None]))
    for one, op in ((model, "linear"), (scripted, "conv2d"), (traced, "conv2d")):
        for given in (nc.rule.module("child", compute="fp32"), nc.rule.op(op, compute="fp32")):
            with pytest.raises(nc.errors.PolicyError, match="TorchScript module 'child'"):
                nc.apply(one, rules(given))
            with pytest.raises(nc.errors.PolicyError, match="TorchScript module 'child'"):
                nc.Stepper(one, torch.optim.SGD(one.parameters()), rules(given))
    with pytest.raises(nc.errors.PolicyError, match="has no modules"):
        nc.apply(model, rules(nc.rule.module("child.0", compute="fp32")))
    fp32 = nc.rule.module("first", compute="fp32"), nc.rule.op("layer_norm", compute="fp32")
    safe = nc.Policy(compute="bf16", rules=nc.Policy.preset("safe").rules)  # in bf16 on every CPU
    for fits in (*map(rules, fp32), safe):
        with nc.apply(model, fits):
            assert model(X).dtype == copy.deepcopy(model)(X).dtype == BF16
    assert model(X).dtype == FP32


def test_what_differs_from_torch_autocast():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).eval().requires_grad_(False)
    with torch.autocast("cpu", BF16) as torchs, nc.autocast("cpu", BF16) as ours:
        assert layer(X[None]).dtype == BF16
    with nc.apply(layer, "bf16"):
        assert layer(X[None]).dtype == BF16
    assert (isinstance(torchs, torch.autocast), isinstance(ours, torch.autocast)) == (True, False)
