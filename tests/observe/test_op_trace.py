"""The record of each operator, against formats and casts seen without it, and bytes counted by hand."""

from dataclasses import replace

import pytest
import torch
from counted_casts import CountedCasts
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.observe.op_trace import OpTrace, together, trace_events
from narrowcast.policy import as_policy


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.softmax(self.up(self.norm(x)), -1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def watched(policy, compute, *models):
    """The events of what ``compute`` does in a region of ``policy``."""
    policy = as_policy(policy)
    with OpTrace(policy) as trace:
        for model in models:
            trace.paths.add_model(model)
        with nc.autocast("cpu", policy=policy):
            result = compute()
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.float().sum().backward()
    return trace_events(together([trace.take()]), trace.rules.unreached(), {"steps": 1})


def sites(events, **wanted):
    return [
        event
        for event in events
        if event["event"] == "site" and all(event[name] == value for name, value in wanted.items())
    ]


def only(events, **wanted):
    (found,) = sites(events, **wanted)
    return found


def of(events, kind):
    return [event for event in events if event["event"] == kind]


def plain(policy, rules=()):
    return as_policy(policy).with_rules(*rules)


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32"])
def test_formats_are_those_without_the_trace(policy):
    model, x = Net(), torch.randn(3, 16)
    formats, names = {}, {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    hooks = [
        module.register_forward_hook(
            lambda _m, given, out, path=path: formats.update({path: (given[0].dtype, out.dtype)})
        )
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.LayerNorm)
    ]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(policy)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        expected = model(x)
    for hook in hooks:
        hook.remove()
    results = []
    events = watched(policy, lambda: results.append(model(x)) or results[0], model)
    assert torch.equal(results[0], expected)
    assert results[0].dtype == expected.dtype
    for path, (given, out) in formats.items():
        found = [site for site in sites(events, path=path, phase="forward") if site["kind"] != "view"]
        assert len(found) == 1, path
        assert names[given] in found[0]["inputs"]
        assert found[0]["outputs"] == [names[out]]


@pytest.mark.parametrize("policy", ["bf16", "fp16", "safe"])
def test_casts_and_their_bytes_are_those_without_the_trace(policy):
    """Also under rules, whose casts of weights are kept for the next use as without a watch."""
    model, x = Net(), torch.randn(3, 16)
    policy = replace(as_policy("safe"), compute="bf16") if policy == "safe" else as_policy(policy)

    def twice():
        return model(x) + model(x)

    with CountedCasts() as casts:
        with nc.autocast("cpu", policy=policy):
            out = twice()
        out.float().sum().backward()
    model.zero_grad()
    events = watched(policy, twice, model)
    (totals,) = of(events, "watched")
    assert (totals["casts"], totals["cast_bytes"]) == (casts.count, casts.bytes)
    assert sum(site["casts"] for site in sites(events)) == totals["casts"]
    assert sum(site["cast_bytes"] for site in sites(events)) == totals["cast_bytes"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_counts_as_forward(reentrant):
    block, x = Block(), torch.randn(3, 16, requires_grad=True)
    events = watched("bf16", lambda: checkpoint(block, x, use_reentrant=reentrant), block)
    assert only(events, path="up", op="linear", phase="forward")["calls"] == 2


def test_a_composite_is_one_row_unless_something_inside_is_decided():
    x = torch.randn(3, 4, 4)
    events = watched("bf16", lambda: torch.einsum("abc,acd->abd", x, x))
    product = only(events, kind="product")
    assert (product["op"], product["within"], product["computes"]) == ("bmm", ["einsum"], "bf16")
    dropout = watched("bf16", lambda: nn.functional.dropout(x, 0.5))
    assert [site["op"] for site in sites(dropout) if site["kind"] == "other"] == ["dropout"]


def test_paths_are_those_of_the_model_inside_wrappers():
    model, x = Net(), torch.randn(3, 16)
    wrapped = nn.DataParallel(model)
    events = watched("bf16", lambda: wrapped(x), wrapped)
    assert {site["path"] for site in sites(events, op="linear")} == {
        "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head",
    }  # fmt: skip
    assert {site["root"] for site in sites(events, op="linear")} == {"Net"}


@pytest.mark.parametrize("root", [False, True])
def test_casts_at_the_border_of_a_module_are_by_its_rule(root):
    """Also of the model itself, whose region has ended when what it returns is cast."""
    layer = nn.Linear(16, 16)
    model = layer if root else nn.Sequential(layer)
    rule = nc.rule.module("" if root else "0", compute="fp16", output="fp32")
    policy, x = plain("bf16", [rule]), torch.randn(3, 16)
    with OpTrace(policy) as trace:
        trace.paths.add_model(model)
        with nc.apply(model, policy):
            model(x)
        asked = x.bfloat16()  # by no rule
    events = trace_events(trace.take(), trace.rules.unreached(), {})
    borders = [site for site in sites(events, kind="cast") if site["rule"] == str(rule)]
    assert [(site["inputs"], site["outputs"]) for site in borders] == [
        (["fp32"], ["fp16"]),
        (["fp16"], ["fp32"]),
    ]
    assert all(site["because"].startswith("a rule for the module casts") for site in borders)
    assert only(events, outputs=["bf16"])["rule"] is None
    assert asked.dtype == torch.bfloat16


def test_an_operator_of_a_promote_rule_is_one_row_with_its_decision():
    x = torch.randn(3, 16)
    policy = plain("bf16", [nc.rule.op("add", compute="promote")])
    events = watched(policy, lambda: x + x.bfloat16())
    site = only(events, op="add.Tensor")
    assert (site["rule"], site["kind"], site["inputs"]) == ("add: promote", "other", ["fp32", "bf16"])
    assert (site["computes"], site["calls"], site["casts"]) == ("fp32", 1, 1)


def test_an_exception_inside_leaves_no_hook_and_the_paths_are_right_after_it():
    class Stops(nn.Module):
        def forward(self, x):
            raise ValueError("stop")

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.stops, self.last = Stops(), nn.Linear(4, 4)

        def forward(self, x):
            with pytest.raises(ValueError, match="stop"):
                self.stops(x)
            return self.last(x.relu())

    model = Catches()
    events = watched("bf16", lambda: model(torch.randn(2, 4)), model)
    assert only(events, op="relu")["path"] == ""
    assert only(events, op="linear")["path"] == "last"
    assert not any(module._forward_hooks for module in model.modules())


def test_rules_that_no_call_reached_and_why():
    nowhere = "it names none of the modules that were called"
    whole = "which is decided about as a whole: a rule for linear reaches it"
    elsewhere = "was decided by a more specific rule, or is outside of its modules"
    reasons = {
        nc.rule.op("mm", compute="fp16"): f"mm runs only inside linear, {whole}",
        nc.rule.op("conv2d", compute="fp32"): "conv2d was not called",
        nc.rule.module("no.*", compute="fp32"): nowhere,
        nc.rule.module("haed", compute="fp32"): f'{nowhere} (did you mean "head"?)',
        nc.rule.module("head", op="softmax", compute="fp32"): f"each call of softmax {elsewhere}",
    }
    reached = nc.rule.op("softmax.int", compute="bf16")
    with OpTrace(plain("bf16", [*reasons, reached])) as trace:
        model = Net()
        trace.paths.add_model(model)
        for_ops = [rule for rule in [*reasons, reached] if not rule.is_for_modules]
        with nc.autocast("cpu", policy=plain("bf16", for_ops)):
            model(torch.randn(3, 16))
    assert {one["rule"]: one["reason"] for one in trace.rules.unreached()} == {
        str(rule): reason for rule, reason in reasons.items()
    }


def test_operations_that_no_operator_of_a_region_called_are_listed():
    layer = nn.Linear(16, 8)
    with OpTrace(as_policy("bf16")) as trace:
        trace.paths.add_model(layer)
        layer(torch.randn(8, 16))
        with nc.autocast("cpu", policy="bf16"):
            layer(torch.zeros(8, 16))  # a factory has no input that autocast could see
    events = trace_events(trace.take(), [], {})
    site = only(events, kind="product", listed=False)
    assert (site["op"], site["because"]) == ("addmm", "outside of every region")
    assert only(events, op="zeros")["because"] == "it has no input to cast"


def test_steps_are_joined_and_only_new_sites_of_the_first_added():
    model, x = Net(), torch.randn(3, 16)
    with OpTrace(as_policy("bf16")) as trace:
        trace.paths.add_model(model)
        parts = []
        for call in (lambda: model(x), lambda: model.head(x), lambda: model.head(x)):
            with nc.autocast("cpu", policy="bf16"):
                call()
            parts.append(trace.take())
    first, *others = parts
    alone = trace_events(together(others), [], {})
    assert only(alone, op="linear")["calls"] == 2
    both = trace_events(together(others, also=first), [], {})
    calls = {(site["path"], *site["inputs"]): site["calls"] for site in sites(both, op="linear")}
    assert calls["head", "fp32"] == 2
    assert calls["blocks.0.up", "fp32"] == 1


def test_a_backward_inside_a_forward_is_backward():
    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return torch.autograd.grad(self.layer(x).float().sum(), x)[0]

    model = Penalised()
    events = watched("bf16", lambda: model(torch.randn(4, 8, requires_grad=True)), model)
    assert only(events, op="mm")["phase"] == "backward"


@pytest.mark.filterwarnings("ignore:fp8 is emulated:UserWarning")
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", pytest.param("fp8_rowwise", marks=pytest.mark.long)])
def test_what_a_layer_in_fp8_computes_is_by_its_rule(recipe):
    """torchao takes the layer apart below autocast: to find scales, to round, and to multiply."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 10)), torch.randn(16, 16)
    policy = plain("bf16", [nc.rule.op("linear", compute=recipe)])
    with OpTrace(policy) as trace, nc.apply(model, policy):
        trace.paths.add_model(model)
        model[0](model[0](x)).float().sum().backward()
    events = trace_events(trace.take(), trace.rules.unreached(), {})
    assert {site["rule"] for site in sites(events, path="0")} == {f"linear: {recipe}"}
    found = only(events, path="0", kind="product")
    assert (found["calls"], found["computes"], found["because"]) == (2, recipe, f"linear: {recipe}")
    assert not of(events, "unreached")
    assert any(site["kind"] == "product" for site in sites(events, phase="backward"))


class Tree(nn.Module):
    """A module that calls itself, as a network over trees does."""

    def __init__(self):
        super().__init__()
        self.at_leaf = nn.Linear(16, 16)

    def forward(self, x, depth):
        if depth == 0:
            return self.at_leaf(x)
        return torch.softmax(self(x, depth - 1), -1)


def test_a_module_that_calls_itself_keeps_its_place_to_the_end():
    model, x = Tree(), torch.randn(3, 16)
    events = watched("bf16", lambda: model(x, 2), model)
    found = only(events, op="softmax.int", phase="forward")
    assert (found["path"], found["calls"]) == ("", 2)
    assert not sites(events, op="softmax.int", phase="outside")


def test_casts_in_inference_mode_are_counted():
    model, x = nn.Linear(16, 16), torch.randn(3, 16)
    with torch.inference_mode():
        inside = watched("bf16", lambda: model(x), model)
    outside = watched("bf16", lambda: model(x), model)
    casts = [only(events, op="linear", phase="forward")["casts"] for events in (inside, outside)]
    assert casts[0] == casts[1] > 0


def test_what_writes_in_place_says_why_it_is_not_cast():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)), torch.randn(3, 16)
    found = only(watched("bf16", lambda: model(x), model), op="relu_")
    assert found["because"] == "it writes to its argument, which autocast never casts"
