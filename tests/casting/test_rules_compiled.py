"""Rules and torch.compile, torch.export and tracers: each graph has the rules of its region, or an error.

``nc.compile``, which needs no region, has tests of its own.
"""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, COMPILES, FP16, FP32, assert_same, eager, rules, trained
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import narrowcast as nc
from child_processes import finished
from narrowcast.casting.regions import _scopes
from narrowcast.errors import UnsupportedError

pytestmark = COMPILES
rule = nc.rule
X = torch.linspace(-1, 1, 16).reshape(4, 4)
FIRST = rules(rule.op("softmax", compute="fp16"))
SECOND = rules(rule.op("softmax", compute="bf16"), rule.op("linear", compute="fp32"), compute="fp16")


def both(x):
    return torch.softmax(x, -1), F.linear(x, x)


def formats(function, x=X):
    return tuple(out.dtype for out in function(x))


# ---- the region outside


def test_two_policies_take_turns_on_one_compiled_function():
    graphs = []
    compiled = torch.compile(both, backend=lambda graph, _inputs: graphs.append(graph) or graph.forward)
    for _ in range(3):
        with nc.autocast("cpu", policy=FIRST):
            assert formats(compiled) == (FP16, BF16)
        with nc.autocast("cpu", policy=rules(*FIRST.rules)):  # made again: the same graph
            assert formats(compiled) == (FP16, BF16)
        with nc.autocast("cpu", policy=SECOND):
            assert formats(compiled) == (BF16, FP32)
        for region in (nc.autocast("cpu", policy="bf16"), torch.autocast("cpu", BF16)):
            with region:
                assert formats(compiled) == (FP32, BF16)
        assert formats(compiled) == (FP32, FP32)
    assert len(graphs) == 4  # a preset's is that of torch.autocast


def test_more_policies_than_torch_can_tell_apart_in_turn(monkeypatch):
    """A policy that takes the dtype of another one shares no graph with it."""
    monkeypatch.setattr(_scopes, "_MARKS", _scopes._MARKS[:1])
    second = rules(rule.op("linear", compute="fp32"))
    compiled = torch.compile(both, backend="aot_eager")
    for _ in range(2):
        with nc.autocast("cpu", policy=FIRST):
            assert formats(compiled) == (FP16, BF16)
        with nc.autocast("cpu", policy=second):
            assert formats(compiled) == (FP32, FP32)


def test_graphs_stay_while_another_thread_runs_one(monkeypatch):
    """The dtype that stands for a policy cannot be given to another one meanwhile."""
    monkeypatch.setattr(_scopes, "_MARKS", _scopes._MARKS[:1])
    runs, may_end = threading.Event(), threading.Event()

    @torch._dynamo.disable
    def wait():
        runs.set()
        assert may_end.wait(60)

    def waiting(x):
        x = x.softmax(-1)
        wait()
        return x.softmax(-1)

    thread = threading.Thread(target=torch.compile(waiting, backend="eager"), args=(X,))
    with nc.autocast("cpu", policy=FIRST):
        both(X)
    thread.start()
    assert runs.wait(60)
    with pytest.raises(UnsupportedError, match="when no compiled function is running"):
        nc.autocast("cpu", policy=SECOND).__enter__()
    may_end.set()
    thread.join()
    with nc.autocast("cpu", policy=SECOND):
        assert formats(both) == (BF16, FP32)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("policy", [FIRST, SECOND])
def test_values_and_gradients_are_those_of_eager_code(policy, backend):
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    expected = trained_inside(model, policy)
    assert_same(trained_inside(torch.compile(model, backend=backend), policy), expected)


def trained_inside(function, policy):
    """Backward is called after the region."""
    function.zero_grad()
    with nc.autocast("cpu", policy=policy):
        output = function(X)
    output.float().square().sum().backward()
    return [output.detach(), *(weight.grad.clone() for weight in function.parameters())]


@pytest.mark.long
def test_a_compiler_that_is_first_imported_inside_a_region():
    """In a process of its own: what no graph knew of before."""
    script = """
import sys, torch, narrowcast as nc
policy = nc.Policy(compute="bf16").with_rules(nc.rule.op("softmax", compute="fp16"))
x = torch.ones(4, 4)
with nc.autocast("cpu", policy=policy):
    assert "torch._dynamo" not in sys.modules
    compiled = torch.compile(lambda x: torch.softmax(x @ x, -1), backend="eager")
    first = compiled(x).dtype
with torch.autocast("cpu", torch.bfloat16):
    second = compiled(x).dtype
print(first, second)
"""
    done = finished([sys.executable, "-c", script])
    assert done.stdout.split() == ["torch.float16", "torch.bfloat16"], done.stderr


@pytest.mark.long
@pytest.mark.parametrize("first", ["nothing", "torch.autocast", "a thread"])
def test_gradients_of_an_fp32_island_from_the_first_region_on(first):
    """In a process of its own: without rules, 65536 is infinite if the island's gradient is in fp16."""
    script = """
import contextvars, sys, threading, torch, narrowcast as nc

x, w = torch.ones(2, 2), torch.nn.Parameter(torch.ones(2, 2))

def island():
    with torch.autocast("cpu", enabled=False):
        return x @ w

def compiled(region):
    w.grad = None
    with region:
        output = torch.compile(island, backend="aot_eager")()
    output.backward(torch.full((2, 2), 65536.0))

fp16 = lambda: nc.autocast("cpu", torch.float16)
first = sys.argv[1]
if first == "nothing":
    with fp16():
        assert "torch._dynamo" not in sys.modules
if first == "torch.autocast":
    compiled(torch.autocast("cpu", torch.float16))
if first == "a thread":
    def elsewhere():
        with fp16():
            pass
    threading.Thread(target=contextvars.copy_context().run, args=[elsewhere]).start()
compiled(fp16())
print(w.grad.tolist())
"""
    done = finished([sys.executable, "-c", script, first])
    assert done.stdout.strip() == "[[131072.0, 131072.0], [131072.0, 131072.0]]", done.stderr


# ---- a region inside


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("way", ["inside", "made outside", "decorated", "by name"])
def test_a_region_of_rules_in_compiled_code_is_an_error(way, fullgraph):
    region = nc.autocast("cpu", policy=FIRST)

    def inside(x):
        with nc.autocast("cpu", policy=FIRST):
            return both(x)

    def made_outside(x):
        with region:
            return both(x)

    def by_name(x):
        with nc.autocast("cpu", policy="safe"):
            return both(x)

    ways = {"inside": inside, "made outside": made_outside, "decorated": region(both), "by name": by_name}
    with pytest.raises((UnsupportedError, torch._dynamo.exc.TorchDynamoException)) as raised:
        torch.compile(ways[way], backend="eager", fullgraph=fullgraph)(X)
    if not fullgraph and way != "by name":
        assert "open it around the compiled function, or use nc.compile" in str(raised.value)
    assert not torch.is_autocast_enabled("cpu")


# ---- models with a policy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x), self.b(x), x.softmax(-1)


ONE = rules(rule.module("a", compute="fp16"), rule.op("softmax", compute="fp16"))
OTHER = rules(rule.module("b", compute="fp16"))
WITH_ONE, WITH_OTHER, WITHOUT = (FP16, BF16, FP16), (BF16, FP16, FP32), (FP32, FP32, FP32)


@pytest.mark.long
@pytest.mark.parametrize("way", ["a model", "a wrapper", "in place", "a part", "a function that calls it"])
@pytest.mark.parametrize("called_before", [False, True])
def test_policies_come_and_go_on_a_compiled_model(way, called_before):
    model = Model()
    function = model
    if way in ("a model", "a wrapper"):
        function = torch.compile(model, backend="eager")
    elif way == "in place":
        model.compile(backend="eager")
    elif way == "a part":
        model.a = torch.compile(model.a, backend="eager")
    else:
        function = torch.compile(lambda x: tuple(model(x)), backend="eager")
    target = function if way == "a wrapper" else model
    if called_before:
        assert formats(function) == WITHOUT
    for policy, expected in ((ONE, WITH_ONE), (OTHER, WITH_OTHER), (ONE, WITH_ONE)):
        with nc.apply(target, policy):
            assert formats(function) == expected
            assert formats(function) == expected
        assert formats(function) == WITHOUT


def test_training_a_compiled_model_with_rules():
    policy = rules(rule.module("1", compute="fp16", output="fp32"), rule.op("softmax", compute="fp32"))
    inner = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    model = nn.Sequential(nn.Linear(4, 8), inner, nn.Linear(8, 4))
    expected = eager(model, policy, X)
    with nc.apply(model, policy):
        assert_same(trained(torch.compile(model, backend="aot_eager"), X), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_with_rules_is_one_graph(backend):
    model = Model()
    with nc.apply(model, ONE):
        assert formats(torch.compile(model, backend=backend, fullgraph=True)) == WITH_ONE
    assert not torch.is_autocast_enabled("cpu")


# ---- other tracers


SMALL = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
def test_export_inside_a_region_of_rules_is_an_error(strict):
    """Not even torch.autocast around an export is kept by the program."""
    with torch.autocast("cpu", BF16):
        program = torch.export.export(SMALL, (X,), strict=strict)
    assert program.module()(X).dtype == FP32
    with (
        nc.autocast("cpu", policy=FIRST),
        pytest.raises(Exception, match="an exported program keeps no region"),
    ):
        torch.export.export(SMALL, (X,), strict=strict)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", [make_fx, lambda model: lambda x: torch.jit.trace(model, x)])
def test_tracers_record_the_casts_of_rules(tracer):
    """Of a weight too, a cast of which may not be kept: it would be a constant of the trace."""
    policy = rules(rule.op("linear", compute="fp16"), *FIRST.rules)
    with nc.autocast("cpu", policy=policy):
        traced, expected = tracer(SMALL)(X), SMALL(X)
    assert expected.dtype == FP16
    assert_same(traced(X), expected)


@pytest.mark.filterwarnings("ignore")
def test_torch_script_calls_our_kernels():
    scripted = torch.jit.script(SMALL)
    with nc.autocast("cpu", policy=FIRST):
        assert scripted(X).dtype == FP16
    assert scripted(X).dtype == FP32


@pytest.mark.filterwarnings("ignore")
def test_a_region_in_scripted_code_is_torchs_alone():
    def theirs(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    def ours(x):
        with nc.autocast("cpu", torch.bfloat16):
            return x @ x

    assert torch.jit.script(theirs)(torch.ones(2, 2)).dtype == BF16
    with pytest.raises(
        torch.jit.frontend.NotSupportedError, match="autocast' is being compiled since it was"
    ):
        torch.jit.script(ours)
