"""Every CPU op of the lists that torch tests its own autocast with, as the one node of a graph with casts.

Result formats and values bit for bit as under torch.autocast, by the plain policy and by one with rules for
other operators; the graph itself runs with autocast off.
"""

import pytest
import torch
from op_lists import BF16, FP16, MODULES, AutocastCPUTestLists, cpu_entries, halves_as, lists_of, same
from torch._subclasses import FakeTensorMode

import narrowcast as nc
from narrowcast.casting._graph import Writer
from narrowcast.casting._graph_calls import as_it_was
from narrowcast.casting._graph_places import Places
from narrowcast.policy import format_name, resolved

# Rules for what no op of the lists is, or is made of.
OTHERS = (
    nc.rule.op("gelu", compute="fp32"),
    nc.rule.op("hardswish", compute="fp16", output="bf16"),
    nc.rule.op("logit", compute="as-is"),
    nc.rule.op("celu", compute="promote"),
)


def nodes_of(op, module):
    """The function and the method of that name, as far as there are both: (kind of node, its target)."""
    found = []
    if module is not None and hasattr(module, op):
        found.append(("call_function", getattr(module, op)))
    if hasattr(torch.Tensor, op):
        found.append(("call_method", op))
    assert found, op
    return found


def graph_of(kind, target, args, kwargs):
    """A graph of that one call, as Dynamo makes them, and its inputs."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    inputs = []

    def slot(value):
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{len(inputs)}")
            node.meta["example_value"] = mode.from_tensor(value)
            inputs.append(value)
            return node
        if isinstance(value, list | tuple):
            return type(value)(slot(part) for part in value)
        return value

    call = getattr(graph, kind)(target, tuple(slot(value) for value in args), kwargs)
    graph.output(call)
    return torch.fx.GraphModule(torch.nn.Module(), graph), inputs


def with_casts(graph_module, policy, dtype):
    root = resolved(policy, "cpu", format_name(dtype)).root
    with as_it_was():
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", dtype)
        Writer(root, Places(policy), example="example_value").write(graph_module, set())
    return graph_module


@pytest.mark.parametrize("rules", [(), OTHERS], ids=["plain", "with rules for other ops"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("name", "position"), cpu_entries())
def test_as_native(name, position, dtype, rules):
    op, args, *rest = getattr(lists_of(AutocastCPUTestLists, "cpu"), name)[position]
    if "promote" in name:
        args = rest[0] if dtype == FP16 else args
        rest = []
    args = halves_as(args, dtype)
    kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
    policy = nc.Policy(compute=format_name(dtype), rules=rules)
    for kind, target in nodes_of(op, MODULES[name.split("_")[0]]):
        graph_module, inputs = graph_of(kind, target, args, kwargs)
        ours = with_casts(graph_module, policy, dtype)
        torch.manual_seed(0)
        result = ours(*inputs)
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype):
            call = getattr(args[0], target) if kind == "call_method" else target
            expected = call(*(args[1:] if kind == "call_method" else args), **kwargs)
        assert same(result, expected)
