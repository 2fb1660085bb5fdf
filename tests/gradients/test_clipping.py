"""Clipping: one read of the gradients gives the norm, the check and the step."""

import math

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import OrderError, ScaleError

OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1.0),
    "SGD foreach": lambda ps: torch.optim.SGD(ps, lr=1.0, foreach=True),
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=1.0, fused=True),
}
# An fp32 norm of n squares is off by at most n/2 + 1 roundings of 2**-24, in fact far less; factor and
# product add four.
TOLERANCE = 1e-6


@pytest.fixture(params=OPTIMIZERS)
def make_optimizer(request):
    return OPTIMIZERS[request.param]


def parameters_with(values):
    """Parameters of 0, and the losses that give them these gradients."""
    parameters = [torch.nn.Parameter(torch.zeros_like(value)) for value in values]
    return parameters, lambda: sum((p * v).sum() for p, v in zip(parameters, values, strict=True))


def norm_of(values, order):
    every = torch.cat([value.double().flatten() for value in values])
    return float(torch.linalg.vector_norm(every, order))


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("order", [2.0, math.inf, 1.0, 3.0, 2])
@pytest.mark.parametrize("scale", [2.0**16, 1000.0, 0.75])
def test_norm_and_step_against_fp64(make_optimizer, scale, order, small):
    shapes = ((3,), (2, 5), ()) if small else ((30, 40), (7,), (600,))
    values = [torch.randn(shape) * 0.01 for shape in shapes]
    expected = norm_of(values, order)
    for max_norm in (expected / 3, expected * 3, 0.0, math.inf):
        parameters, loss = parameters_with(values)
        optimizer, scaler = make_optimizer(parameters), nc.GradScaler("cpu", scale)
        scaler.scale(loss()).backward()
        norm = scaler.clip_grad_norm_(optimizer, max_norm, order)
        assert norm.shape == ()
        assert not norm.requires_grad
        assert float(norm) == pytest.approx(expected, rel=TOLERANCE)
        result = scaler.step(optimizer)
        assert result.grad_norm == float(norm)
        kept = min(max_norm / (expected + 1e-6), 1.0)
        for parameter, value in zip(parameters, values, strict=True):
            torch.testing.assert_close(-parameter.detach(), value * kept, rtol=4 * TOLERANCE, atol=1e-12)
            torch.testing.assert_close(parameter.grad, value * kept, rtol=4 * TOLERANCE, atol=1e-12)


def test_gradients_of_several_formats_have_one_norm(make_optimizer):
    values = [torch.randn(4), torch.randn(3, dtype=torch.float64), torch.randn(5).bfloat16()]
    expected = norm_of(values, 2)
    parameters, loss = parameters_with(values)
    optimizer, scaler = make_optimizer(parameters), nc.GradScaler("cpu", 8.0)
    scaler.scale(loss()).backward()
    assert float(scaler.clip_grad_norm_(optimizer, 0.5)) == pytest.approx(expected, rel=TOLERANCE)
    assert not scaler.step(optimizer).skipped
    for parameter, value in zip(parameters, values, strict=True):
        rounding = 2.0**-8 if value.dtype == torch.bfloat16 else 4 * TOLERANCE
        kept = value.double() * 0.5 / expected
        torch.testing.assert_close(-parameter.detach().double(), kept, rtol=rounding, atol=1e-12)


@pytest.mark.parametrize("after_unscaling", [False, True])
def test_squares_that_overflow_skip_a_clipped_step(make_optimizer, after_unscaling):
    """As on a GPU, where a second read would need a host sync; a lower scale may mend it."""
    values = [torch.full((3,), 6.6e19), torch.full((600,), -6.6e19)]
    parameters, loss = parameters_with(values)
    optimizer, scaler = make_optimizer(parameters), nc.GradScaler("cpu", 2.0)
    scaler.scale(loss()).backward()
    if after_unscaling:
        scaler.unscale_(optimizer)
    assert math.isinf(scaler.clip_grad_norm_(optimizer, 1.0))
    assert scaler.step(optimizer).skipped
    assert not any(parameter.any() for parameter in parameters)
    scaler.update()
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_divisor_too_large_for_fp32(make_optimizer, order):
    """2**62 times 1e20 is no fp32 number, and a division by infinity would train on zeros."""
    parameters, loss = parameters_with([torch.full((2,), 0.5)])
    optimizer, scaler = make_optimizer(parameters), nc.GradScaler("cpu", 2.0**62)
    scaler.scale(loss()).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1e-20, order)
    assert not scaler.step(optimizer).skipped
    expected = 0.5 * 1e-20 / float(norm)
    assert parameters[0].tolist() == pytest.approx([-expected] * 2, rel=1e-5, abs=0.0)


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_the_parts_of_a_sparse_gradient_are_summed_first(clip):
    """Row 1 is used twice: its gradient is 2 in each of two places."""
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer, scaler = torch.optim.SGD(table.parameters(), lr=1.0), nc.GradScaler("cpu", 64.0)
    before = table.weight.detach().clone()
    scaler.scale(table(torch.tensor([1, 1, 2])).sum()).backward()
    assert not table.weight.grad.is_coalesced()
    if clip == "norm":
        assert float(scaler.clip_grad_norm_(optimizer, 1.0)) == pytest.approx(math.sqrt(10))
        expected = torch.tensor([[0, 0], [2, 2], [1, 1], [0, 0]]) / math.sqrt(10)
    else:
        scaler.clip_grad_value_(optimizer, 1.5)
        expected = torch.tensor([[0, 0], [1.5, 1.5], [1, 1], [0, 0]])
    assert not scaler.step(optimizer).skipped
    torch.testing.assert_close(before - table.weight.detach(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_gradients_may_not_change_before_a_fused_step(change):
    parameters, loss = parameters_with([torch.tensor([3.0, 4.0])])
    optimizer, scaler = torch.optim.SGD(parameters, lr=1.0, fused=True), nc.GradScaler("cpu", 8.0)
    scaler.scale(loss()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    assert parameters[0].grad.tolist() == [24.0, 32.0]
    if change == "in place":
        parameters[0].grad.mul_(2.0)
    else:
        parameters[0].grad = torch.ones(2)
    message = r"^the gradients were changed between clip_grad_norm_ and step, while they were still scaled"
    with pytest.raises(OrderError, match=message):
        scaler.step(optimizer)
    with pytest.raises(OrderError, match=message):
        scaler.clip_grad_value_(optimizer, 1.0)


@pytest.mark.parametrize("max_norm", [0.5, 4.9, 5.1, 100.0])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_after_unscaling_it_only_clips_and_never_makes_larger(make_optimizer, order, max_norm):
    (ours, loss), (plain, plain_loss) = (parameters_with([torch.tensor([3.0, -4.0])]) for _ in range(2))
    optimizer, scaler = make_optimizer(ours), nc.GradScaler("cpu", 8.0)
    scaler.scale(loss()).backward()
    plain_loss().backward()
    scaler.unscale_(optimizer)
    expected = torch.nn.utils.clip_grad_norm_(plain, max_norm, order)
    assert torch.equal(scaler.clip_grad_norm_(optimizer, max_norm, order), expected)
    assert torch.equal(ours[0].grad, plain[0].grad)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_clipping_by_value_hides_no_overflow(make_optimizer, value):
    parameters, loss = parameters_with([torch.tensor([1.0, value])])
    optimizer, scaler = make_optimizer(parameters), nc.GradScaler("cpu")
    scaler.scale(loss()).backward()
    scaler.clip_grad_value_(optimizer, 0.5)
    assert parameters[0].grad[0] == 0.5
    assert math.isnan(value) == math.isnan(parameters[0].grad[1])
    assert scaler.step(optimizer).skipped
    assert parameters[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_value_may_be_a_tensor_of_one_element(make_optimizer, enabled):
    """As in ``torch.nn.utils.clip_grad_value_``."""
    for value in (torch.tensor(0.5), torch.tensor([0.5])):
        parameters, loss = parameters_with([torch.tensor([3.0, -4.0])])
        optimizer, scaler = make_optimizer(parameters), nc.GradScaler("cpu", 8.0, enabled=enabled)
        scaler.scale(loss()).backward()
        scaler.clip_grad_value_(optimizer, value)
        assert parameters[0].grad.tolist() == [0.5, -0.5]


def test_limits_that_are_no_limits_are_refused(make_optimizer):
    parameters, loss = parameters_with([torch.ones(2)])
    optimizer, scaler = make_optimizer(parameters), nc.GradScaler("cpu")
    scaler.scale(loss()).backward()
    for bad in (-1.0, math.nan, -math.inf, "1", None):
        with pytest.raises(ScaleError, match=rf"^max_norm must be a number of at least 0, got {bad!r}$"):
            scaler.clip_grad_norm_(optimizer, bad)
        with pytest.raises(ScaleError, match=rf"^value must be a number of at least 0, got {bad!r}$"):
            scaler.clip_grad_value_(optimizer, bad)
    for clip in (scaler.clip_grad_norm_, scaler.clip_grad_value_):
        with pytest.raises(ScaleError, match=r"^expected the optimizer, .*, got list: give the "):
            clip(parameters, 1.0)
    assert float(scaler.clip_grad_norm_(optimizer, torch.tensor(0.5))) == pytest.approx(math.sqrt(2))


def test_order_of_calls(make_optimizer):
    parameters, loss = parameters_with([torch.ones(2)])
    optimizer, scaler = make_optimizer(parameters), nc.GradScaler("cpu")
    for clip in (scaler.clip_grad_norm_, scaler.clip_grad_value_):
        with pytest.raises(OrderError, match=rf"^Attempted {clip.__name__} but no loss was scaled yet"):
            clip(optimizer, 1.0)
    scaler.scale(loss()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(OrderError, match=r"^unscale_\(\) has already been called on this optimizer since"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for clip in (scaler.clip_grad_norm_, scaler.clip_grad_value_):
        with pytest.raises(OrderError, match=rf"^{clip.__name__}\(\) is being called after step\(\)"):
            clip(optimizer, 1.0)


def test_a_disabled_scaler_still_clips(make_optimizer):
    for order in (2.0, 1.0):
        parameters, loss = parameters_with([torch.tensor([3.0, -4.0])])
        optimizer, scaler = make_optimizer(parameters), nc.GradScaler("cpu", enabled=False)
        scaler.scale(loss()).backward()
        assert float(scaler.clip_grad_norm_(optimizer, 1.0, order)) == (5.0 if order == 2.0 else 7.0)
        expected = (torch.tensor([3.0, -4.0]) / (5.0 if order == 2.0 else 7.0)).tolist()
        assert parameters[0].grad.tolist() == pytest.approx(expected, rel=1e-5)
        scaler.clip_grad_value_(optimizer, 0.01)
        assert parameters[0].grad.tolist() == pytest.approx([0.01, -0.01])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_of_their_own(make_optimizer):
    weight = torch.nn.Parameter(torch.tensor([1.5, 2.0]))
    optimizer, scaler = make_optimizer([weight]), nc.GradScaler("cpu", 8.0)
    scaler.scale(weight.square().sum()).backward(create_graph=True)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert not norm.requires_grad
    assert float(norm) == 5.0
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, 1.2]), rtol=1e-5, atol=0.0)
    weight.grad = None  # which holds the graph, and the graph the weight


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("after_unscale", [False, True])
@pytest.mark.parametrize("max_norm", [math.nan, -1.0])
def test_a_max_norm_in_a_tensor_that_cannot_clip_skips_the_step(max_norm, after_unscale, fused):
    """It is not read, so it is not refused; no NaN and no ascent comes of it."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1, fused=fused)
    scaler = nc.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    if after_unscale:
        scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, torch.tensor(max_norm))
    assert scaler.step(optimizer).skipped
    assert torch.equal(weight, torch.ones(3))


def test_gradients_infinite_after_unscaling_skip_the_step():
    """torch does not look again: the NaN of the clipping reaches the parameter."""
    for scaler_of in (torch.amp.GradScaler, nc.GradScaler):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], 0.1)
        scaler = scaler_of("cpu", init_scale=8.0)
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        weight.grad[0] = math.inf
        if scaler_of is nc.GradScaler:
            scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        assert bool(weight.isnan().any()) == (scaler_of is not nc.GradScaler)


def test_a_gradient_removed_before_clipping_is_not_named(make_optimizer):
    """As scripts do that freeze a layer for some steps. The squares of the gradient that is left overflow."""
    parameters, loss = parameters_with([torch.ones(2), torch.full((2,), 1e30)])
    optimizer, scaler = make_optimizer(parameters), nc.GradScaler("cpu", 1.0)
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    parameters[0].grad = None
    scaler.clip_grad_norm_(optimizer, 1.0)
    result = scaler.step(optimizer)
    assert result.skipped
    assert result.nonfinite == ()
