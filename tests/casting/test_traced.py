"""Regions in and around compiled and exported code: the right formats, and no graph break."""

import pytest
import torch
from casting_cases import BF16, FP16, FP32, Calls, linear_by_hand
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def layer():
    return nn.Linear(8, 8)


@pytest.fixture
def x():
    return torch.randn(2, 8)


def compiled_whole(f):
    counter = CompileCounter()
    return torch.compile(f, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize("outer", [BF16, FP16, FP32])
@pytest.mark.parametrize("inner", [BF16, FP16, FP32])
def test_nested_formats_share_a_layer_in_one_graph(layer, x, outer, inner):
    def f(x):
        with nc.autocast("cpu", outer):
            first = layer(x)
            with nc.autocast("cpu", inner):
                second = layer(x)
            return first, second, layer(x)

    compiled, counter = compiled_whole(f)
    with nc.autocast("cpu", FP16 if outer == BF16 else BF16):
        layer(x)  # whose cast must not be met inside
        results = compiled(x)
    assert counter.frame_count == 1
    for result, dtype in zip(results, (outer, inner, outer), strict=True):
        assert torch.equal(result, linear_by_hand(layer, x, dtype))


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_a_decorated_function_is_one_graph(layer, x, dtype):
    compiled, counter = compiled_whole(nc.autocast("cpu", dtype)(layer.forward))
    assert torch.equal(compiled(x), linear_by_hand(layer, x, dtype))
    assert counter.frame_count == 1


def test_a_region_made_outside_breaks_the_graph_and_is_right(layer, x):
    region = nc.autocast("cpu", FP16)

    def f(x):
        y = x * 2
        with region:
            y = layer(y)
        return y, layer(x)

    inside, outside = torch.compile(f, backend="eager")(x)
    assert torch.equal(inside, linear_by_hand(layer, x * 2, FP16))
    assert outside.dtype == FP32


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_follows_the_region_that_it_is_called_in(layer, x, backend):
    compiled = torch.compile(layer, backend=backend)
    for dtype in (BF16, FP16, FP32, BF16):
        with nc.autocast("cpu", dtype):
            assert torch.equal(compiled(x), linear_by_hand(layer, x, dtype))
            with nc.autocast("cpu", FP32):
                assert torch.equal(compiled(x.to(BF16)), linear_by_hand(layer, x.to(BF16), FP32))
            with nc.autocast("cpu", FP16):
                assert compiled(x).dtype == FP16
            assert compiled(x).dtype == dtype
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize(("dtype", "checkpointed"), [(BF16, False), (FP32, False), (BF16, True)])
def test_gradients_through_a_compiled_region(layer, x, dtype, checkpointed):
    def block(x):
        with nc.autocast("cpu", dtype):
            return layer(x).relu()

    def f(x):
        y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return y.float().square().sum()

    f(x).backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    torch.compile(f, backend="aot_eager", fullgraph=True)(x).backward()
    assert torch.equal(layer.weight.grad, expected)


def test_an_error_at_run_time_leaves_no_region_open(layer, x):
    def f(x, i):
        with nc.autocast("cpu", FP32):
            return layer(x)[i]

    # With backend="eager" torch.compile leaves the state of torch.autocast behind just so.
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    assert compiled(x, torch.tensor([1])).dtype == FP32
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([7]))
    assert not torch.is_autocast_enabled("cpu")


# Dynamo looks at modules that call deprecated parts of torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["step", "closure"])
def test_a_compiled_optimizer_step_drops_casts(layer, x, method):
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(x).sum().backward()
    step = torch.compile(optimizer.step, backend="eager")
    with nc.autocast("cpu", BF16):
        before = layer(x)
        step() if method == "step" else step(lambda: None)
        assert torch.equal(layer(x), linear_by_hand(layer, x, BF16))
        assert not torch.equal(layer(x), before)


def with_region(autocast, dtype):
    def forward(self, x):
        with autocast("cpu", dtype):
            return self.layer(x)

    return Calls(forward, layer=nn.Linear(8, 8))


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_the_region(x, strict):
    graphs = []
    for autocast in (torch.autocast, nc.autocast):
        model = with_region(autocast, BF16)
        program = torch.export.export(model, (x,), strict=strict)
        assert torch.equal(program.module()(x), linear_by_hand(model.layer, x, BF16))
        assert program.run_decompositions().module()(x).dtype == BF16
        graphs.append([str(node.target) for node in program.graph.nodes])
    assert graphs[0] == graphs[1]


def test_an_exported_float32_region_is_refused(x):
    with pytest.raises(UnsupportedError, match="expected a region in float16 or bfloat16"):
        torch.export.export(with_region(nc.autocast, FP32), (x,), strict=False)


class RegionOnTheCpu(nc.autocast):
    """As ``torch.cpu.amp.autocast``: a region with arguments of its own."""

    def __init__(self, enabled=True):
        super().__init__("cpu", torch.bfloat16, enabled)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_subclass_with_its_own_arguments_is_traced(enabled):
    def inside(x):
        with RegionOnTheCpu(enabled):
            low = x @ x
        return low, x @ x

    x = torch.randn(4, 4)
    compiled = torch.compile(inside, backend="eager", fullgraph=True)
    for ours, eager in zip(compiled(x), inside(x), strict=True):
        assert ours.dtype == eager.dtype
        assert torch.equal(ours, eager)
    assert compiled(x)[0].dtype == (torch.bfloat16 if enabled else torch.float32)
