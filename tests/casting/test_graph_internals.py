"""The private names of torch that graphs need: this fails loudly when one moves or changes its meaning."""

import pytest
import torch
from torch import nn

from narrowcast.casting import _torch_internals as internals

ATEN = torch.ops.aten


class Seeing(internals.ModeAboveAutograd):
    def __init__(self):
        super().__init__(None, "real", pre_dispatch=True)
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append(op)
        return op(*args, **(kwargs or {}))


def test_a_mode_above_autograd_is_shown_composites_whole():
    mode = Seeing()
    x, w = torch.randn(2, 3), torch.randn(4, 3, requires_grad=True)
    result = internals.run_in_mode(mode, nn.functional.linear, (x, w), {})
    assert mode.seen == [ATEN.linear.default]
    assert result.grad_fn is not None


def test_what_is_recorded_keeps_composites_and_takes_what_is_called_instead():
    def call(x, w):
        return torch.einsum("ij,kj->ik", nn.functional.linear(x, w), x).relu()

    def instead(x):
        return x.clamp(min=0)

    graph = internals.record_above_autograd(
        call, {ATEN.relu.default: instead}, [torch.randn(2, 3), torch.randn(3, 3)]
    ).graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called == [ATEN.linear.default, ATEN.einsum.default, ATEN.clamp.default]


def test_whether_autocast_is_off_for_the_dispatcher():
    is_off = internals.asks_whether_key_is_off("cpu")
    assert is_off()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_off()
        with internals.without_key("cpu")():
            assert is_off()
        with internals.without_autocast():
            assert is_off()
            assert not torch.is_autocast_enabled("cpu")
        assert not is_off()


def test_a_node_is_given_the_name_of_an_erased_one():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    name = first.name
    graph.erase_node(first)
    second = graph.call_function(torch.relu, (x,))
    assert second.name != name
    internals.rename_node(second, name)
    graph.output(second)
    graph.lint()
    assert second.name == name


@pytest.mark.filterwarnings("ignore")
def test_modules_are_known_by_identity():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

        def forward(self, x):
            return self.layers[1](self.layers[1](x))

    model, stacks = Model(), []

    def backend(graph_module, example_inputs):
        nodes = [node for node in graph_module.graph.nodes if node.op == "call_function"]
        stacks.extend(list(node.meta["nn_module_stack"]) for node in nodes)
        return graph_module

    torch.compile(model, backend=backend)(torch.randn(2, 3))
    torch._dynamo.reset()
    inner = str(id(model.layers[1]))
    assert [stack[-1] for stack in stacks] == [inner, f"{inner}@1"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("breaks", [False, True])
def test_what_stands_in_graphs_is_called_once_a_trace_and_told_of_its_end(breaks):
    events = []

    def stands(x):
        events.append("opened")
        internals.when_tracing_ends(lambda: events.append("ended"))
        return [x]

    def inner(x):
        x = stands(x)[0] + 1
        if breaks:
            torch._dynamo.graph_break()
        return x

    def function(x):
        return inner(x) * 2

    def backend(graph_module, example_inputs):
        events.append([node.target is stands for node in graph_module.graph.nodes].count(True))
        return lambda *args: (x,)

    internals.stand_in_graphs(stands)
    x = torch.ones(2)
    with torch.no_grad():
        if breaks:
            with pytest.raises(torch._dynamo.exc.Unsupported):
                torch.compile(function, backend=backend, fullgraph=True)(x)
            assert events == ["opened", "ended"]
        else:
            torch.compile(function, backend=backend)(x)
            assert events == ["opened", "ended", 1]
    torch._dynamo.reset()


def test_the_backend_of_inductor_takes_its_settings():
    assert internals.inductor("max-autotune", None, None).config["max_autotune"] is True
    assert internals.inductor(None, {"max_autotune": True}, False).config == {"max_autotune": True}
    with internals.without_cache_of_joint_graphs():
        assert not torch._functorch.config.enable_autograd_cache
