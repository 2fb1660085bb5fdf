"""Custom autograd functions: the forward's region in the backward, and inputs cast wherever they are."""

import collections

import pytest
import torch
from casting_cases import BF16, COMPILES, FP16, FP32, assert_same, in_threads

import narrowcast as nc
from narrowcast.casting import cast_floating
from narrowcast.errors import DeviceError, OrderError, PolicyError

pytestmark = COMPILES
TORCH = (torch.amp.custom_fwd, torch.amp.custom_bwd)
OURS = (nc.custom_fwd, nc.custom_bwd)


def product(decorators, cast_inputs=None, seen=None):
    """x @ w with its own backward, which records the state it runs in."""
    forward_decorator, backward_decorator = decorators

    class Product(torch.autograd.Function):
        @staticmethod
        @forward_decorator(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @backward_decorator(device_type="cpu")
        def backward(ctx, grad):
            if seen is not None:
                seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    return Product


def leaves():
    torch.manual_seed(0)
    return torch.randn(3, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)


def gradients(decorators, region, cast_inputs=None):
    x, w = leaves()
    function = product(decorators, cast_inputs)
    with region:
        y = function.apply(x, w)
    y.float().square().sum().backward()
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("decorators", [OURS, (TORCH[0], OURS[1]), (OURS[0], TORCH[1])])
@pytest.mark.parametrize("cast_inputs", [None, FP32, BF16, FP16])
@pytest.mark.parametrize("region", [BF16, FP16, None])
def test_gradients_are_torchs(decorators, cast_inputs, region):
    def in_force(autocast):
        return autocast("cpu", region) if region else autocast("cpu", enabled=False)

    expected = gradients(TORCH, in_force(torch.autocast), cast_inputs)
    assert_same(gradients(decorators, in_force(nc.autocast), cast_inputs), expected)


@pytest.mark.parametrize(
    ("region", "cast_inputs", "epsilon"),
    [(BF16, None, 2**-8), (FP16, None, 2**-11), (BF16, FP32, 2**-24), (FP32, None, 2**-24)],
)
def test_gradients_against_float64(region, cast_inputs, epsilon):
    """Of each stored value at most epsilon is lost, relative to the sums of magnitudes: x, w, y, 2y and the
    product itself are five roundings; ten leaves room for their products."""
    y, *got = gradients(OURS, nc.autocast("cpu", region), cast_inputs)
    x, w = (leaf.detach().double().requires_grad_() for leaf in leaves())
    exact = x @ w
    exact.square().sum().backward()
    magnitude = 2 * (x.abs() @ w.abs()).detach()
    bounds = magnitude @ w.abs().t(), x.abs().t() @ magnitude
    assert ((y - exact).abs() <= 10 * epsilon * magnitude).all()
    for grad, right, bound in zip(got, (x.grad, w.grad), bounds, strict=True):
        assert ((grad - right).abs() <= 10 * epsilon * bound).all()
        if epsilon > 2**-24:
            assert not torch.equal(grad, right.float()), "the region had no effect"


@pytest.mark.parametrize("region", [BF16, FP16, FP32])
def test_the_backward_runs_in_the_region_of_the_forward(region):
    seen = []
    x, w = leaves()
    with nc.autocast("cpu", region):
        y = product(OURS, seen=seen).apply(x, w)
    with torch.autocast("cpu", FP16):
        y.float().sum().backward(retain_graph=True)
    in_threads(y.float().sum().backward)
    assert seen == [(True, region)] * 2
    x, w = leaves()
    product(OURS, seen=seen).apply(x, w).sum().backward()
    assert seen[-1] == (False, BF16)


def capturing(custom_fwd, cast_inputs=FP32):
    class Capture(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, *args, **kwargs):
            Capture.args, Capture.kwargs = args, kwargs
            Capture.enabled = torch.is_autocast_enabled("cpu")
            return torch.zeros(1)

    return Capture


@pytest.mark.parametrize(
    "argument",
    [
        [{"a": (torch.ones(1).to(FP16), [torch.ones(1).to(BF16)])}],
        {torch.ones(1).to(BF16)},
        collections.OrderedDict(a=torch.ones(1).to(BF16)),
        (torch.ones(1).to(BF16), torch.ones(1).double(), torch.ones(1).long(), "text", None),
    ],
    ids=lambda a: type(a).__name__,
)
def test_inputs_are_cast_wherever_they_are(argument):
    capture = capturing(nc.custom_fwd)
    with nc.autocast("cpu"):
        capture.apply(argument, 3)
    expected = cast_floating(argument, FP32)
    assert type(capture.args[0]) is type(argument)
    assert repr(capture.args[0]) == repr(expected)
    assert capture.args[1] == 3
    assert capture.enabled is False
    capture.apply(argument)
    assert capture.args[0] is argument, "outside a region cast_inputs has no effect"


def test_tensors_of_other_devices_and_doubles_stay():
    capture = capturing(nc.custom_fwd, BF16)
    elsewhere, double = torch.ones(1, device="meta"), torch.ones(1).double()
    with nc.autocast("cpu"):
        capture.apply(elsewhere, double, torch.ones(1))
    assert capture.args[0] is elsewhere
    assert capture.args[1] is double
    assert capture.args[2].dtype == BF16


def test_wrong_arguments_are_refused():
    for decorator in OURS:
        with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
            decorator(device_type=torch.device("cpu"))
        with pytest.raises(DeviceError, match='Did you mean "cuda"'):
            decorator(device_type="cudaa")
    with pytest.raises(PolicyError, match="expected cast_inputs to be a floating"):
        nc.custom_fwd(device_type="cpu", cast_inputs=torch.int8)


def test_a_forward_without_custom_fwd_is_named():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @nc.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad * 2

    with pytest.raises(OrderError, match="expected the forward of Half to be decorated with custom_fwd"):
        Half.apply(torch.ones(1, requires_grad=True)).backward()


@pytest.mark.parametrize("cast_inputs", [None, FP32])
@pytest.mark.parametrize("region", [BF16, FP32])
def test_a_compiled_function_is_the_same(cast_inputs, region):
    function = product(OURS, cast_inputs)

    def step(x, w):
        with nc.autocast("cpu", region):
            return function.apply(x, w)

    expected = gradients(OURS, nc.autocast("cpu", region), cast_inputs)
    x, w = leaves()
    y = torch.compile(step, backend="aot_eager")(x, w)
    y.float().square().sum().backward()
    assert_same([y, x.grad, w.grad], list(expected))
