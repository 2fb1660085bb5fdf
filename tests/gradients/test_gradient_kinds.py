"""Gradients in fp16, bf16 and fp64, sparse ones, the finite check, and scales below 1."""

import math

import pytest
import torch
from pairs import iterate, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import narrowcast as nc
from narrowcast.errors import ScaleError
from narrowcast.gradients import nonfinite_flags, starts_momentum, unscale_by

SWITCHES = [{}, {"foreach": True}, {"fused": True}]


def half_and(**switches):
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]).half())
    other = torch.nn.Parameter(torch.ones(1))
    named = [("layer.weight", weight), ("layer.bias", other)]
    return weight, other, torch.optim.SGD(named, lr=0.25, **switches)


@pytest.mark.parametrize("method", ["step", "unscale_", "clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_fp16_gradients_are_refused_by_name(switches, method):
    """torch lets them through where the optimizer is fused."""
    weight, other, optimizer = half_and(**switches)
    scaler = nc.GradScaler("cpu", 8.0)
    scaler.scale(weight.sum() + other.sum()).backward()
    arguments = (1.0,) if method.startswith("clip") else ()
    with pytest.raises(ScaleError, match=r"expected gradients in fp32, got fp16 for layer\.weight"):
        getattr(scaler, method)(optimizer, *arguments)
    assert weight.grad.tolist() == [8.0, 8.0]
    assert other.grad.tolist() == [8.0]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_complex_gradients_of_fp16_numbers_are_refused_by_name():
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex32))
    optimizer = torch.optim.SGD([("layer.weight", weight)], lr=0.25)
    scaler = nc.GradScaler("cpu", 8.0)
    scaler.scale(torch.ones(1))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ScaleError, match=r"got fp16 for layer\.weight: an update smaller than 2\*\*-11"):
        scaler.step(optimizer)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.3, math.inf])
def test_fp16_gradients_allowed_are_stepped_as_torch_steps_them(switches, factor, monkeypatch):
    weights = []
    for make in (torch.amp.GradScaler, nc.GradScaler):
        weight, other, optimizer = half_and(**switches)
        scaler = make("cpu", 8.0, **({"allow_fp16_gradients": True} if make is nc.GradScaler else {}))
        if make is torch.amp.GradScaler:  # as people do it: the check is an argument of a private method
            unscale = scaler._unscale_grads_
            monkeypatch.setattr(scaler, "_unscale_grads_", lambda *a, unscale=unscale: unscale(*a[:3], True))
        for _ in range(3):
            iterate(scaler, optimizer, lambda w=weight, o=other: (w * factor).sum() + o.sum())
        weights.append((weight.detach(), other.detach(), scaler.get_scale()))
    (theirs, their_other, their_scale), (ours, our_other, our_scale) = weights
    assert same(ours, theirs)
    assert same(our_other, their_other)
    assert our_scale == their_scale


@pytest.mark.parametrize("allow", [True, False])
def test_sparse_gradients_in_fp16_overflow_when_summed(allow):
    """Twice 40000 is no fp16 number, each 40000 is."""
    table = torch.nn.Embedding(3, 1, sparse=True, dtype=torch.float16)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler = nc.GradScaler("cpu", 1.0, allow_fp16_gradients=allow)
    before = table.weight.detach().clone()
    scaler.scale((table(torch.tensor([1, 1])).float() * 40000.0).sum()).backward()
    if not allow:
        with pytest.raises(ScaleError):
            scaler.step(optimizer)
        return
    assert scaler.step(optimizer).skipped
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize("clip", ["norm", "norm after unscale_"])
def test_clipped_bf16_gradients_are_rounded_once(clip):
    """A factor rounded to bf16 itself would make it twice."""
    gradient = torch.randn(500).bfloat16()
    weight = torch.nn.Parameter(torch.zeros(500).bfloat16())
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), nc.GradScaler("cpu", 1024.0)
    scaler.scale((weight * gradient).float().sum()).backward()
    if "after" in clip:
        scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 0.7)
    true = gradient.double() * 0.7 / gradient.double().norm()
    # bf16 has 8 bits, so one rounding is off by 2**-8 at most; the fp32 factor by less than 1e-6.
    assert ((weight.grad.double() - true).abs() <= true.abs() * (2.0**-8 + 1e-6)).all()


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_formats_step_as_without_a_scaler(dtype, switches):
    """A power of two in and out again changes nothing."""
    start, stepped = torch.randn(50, dtype=torch.float64), []
    for scaler in (None, nc.GradScaler("cpu", 1024.0)):
        weight = torch.nn.Parameter(start.to(dtype))
        optimizer = torch.optim.SGD([weight], lr=0.5, **switches)
        loss = weight.square().sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step() if scaler is None else scaler.step(optimizer)
        stepped.append(weight.detach())
    assert torch.equal(*stepped)


@pytest.mark.parametrize("way", ["step", "unscale_", "norm", "infinity norm", "value", "closure"])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("scale", [2.0**-20, 1e-6])
def test_below_a_scale_of_one_no_infinity_reaches_a_parameter(scale, switches, way):
    """Scaled, the gradient of 1e42 is finite; unscaled it is not."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0, **switches), nc.GradScaler("cpu", scale)

    def closure():
        optimizer.zero_grad()
        loss = (weight * 1e30).sum() * 1e12
        scaler.scale(loss).backward()
        return loss

    if way == "closure":
        result = scaler.step(optimizer, closure)
    else:
        closure()
        assert torch.isfinite(weight.grad).all()
        if way == "unscale_":
            scaler.unscale_(optimizer)
        elif way == "value":
            scaler.clip_grad_value_(optimizer, 1.0)
        elif way != "step":
            scaler.clip_grad_norm_(optimizer, 1.0, math.inf if way == "infinity norm" else 2.0)
        result = scaler.step(optimizer)
    assert result.skipped
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("scale", [0.25, 0.3])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_below_a_scale_of_one_finite_gradients_step(switches, scale):
    stepped = []
    for make in (torch.amp.GradScaler, nc.GradScaler):
        weight = torch.nn.Parameter(torch.ones(20))
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0, **switches), make("cpu", scale)
        scaler.scale((weight * torch.linspace(-1, 1, 20)).sum()).backward()
        scaler.step(optimizer)
        stepped.append(weight.detach())
    # A fused step divides under torch; here it multiplies by the inverse, which is rounded once more.
    torch.testing.assert_close(*stepped, rtol=1e-6, atol=1e-7)
    assert scale != 0.25 or torch.equal(*stepped)


@pytest.mark.parametrize("scale", [8.0, 10.0])
def test_gradients_after_a_skipped_fused_step(scale):
    seen = []
    for make in (torch.amp.GradScaler, nc.GradScaler):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0, fused=True), make("cpu", scale)
        scaler.scale((weight * torch.tensor([1.0, math.inf])).sum()).backward()
        scaler.step(optimizer)
        seen.append(weight.grad[0].item())
    assert seen == [scale, 1.0 if scale == 8.0 else scale]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_gradients_that_came_after_unscaling_are_refused(switches):
    """Nobody has checked or divided them."""
    for make in (torch.amp.GradScaler, nc.GradScaler):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0, **switches), make("cpu")
        loss = scaler.scale(weight.sum())
        scaler.unscale_(optimizer)
        loss.backward()
        accident = AttributeError if make is torch.amp.GradScaler and "fused" in switches else AssertionError
        with pytest.raises(accident):
            scaler.step(optimizer)
        assert weight.tolist() == [1.0, 1.0]


def test_fused_momentum_after_a_skipped_first_step():
    """torch leaves its buffer as the memory was, and adds to it at the next step."""
    weights = []
    for skips in (0, 1):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
        scaler = nc.GradScaler("cpu")
        for factor in [math.inf] * skips + [1.0, 1.0]:
            iterate(scaler, optimizer, (weight * factor).sum)
            assert bool(optimizer.state) == math.isfinite(factor)
        weights.append(weight.detach())
    assert torch.equal(*weights)


def test_a_group_that_was_added_later_still_makes_its_momentum():
    """Its first step must not be left to torch's fused SGD, which would leave the momentum unwritten."""
    weight, later = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    weight.grad = torch.ones(2)
    assert starts_momentum(optimizer)
    optimizer.step()
    assert not starts_momentum(optimizer)
    optimizer.add_param_group({"params": [later]})
    assert not starts_momentum(optimizer), "it has no gradient yet"
    later.grad = torch.ones(2)
    assert starts_momentum(optimizer)
    optimizer.step()
    assert not starts_momentum(optimizer)


@pytest.mark.parametrize("scale", [8.0, 10.0])
def test_a_grad_scale_of_the_user_counts_for_one_step(scale):
    stepped = []
    for make in (torch.amp.GradScaler, nc.GradScaler):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0, fused=True), make("cpu", scale)
        for factor in (3.0, math.inf, 3.0):
            optimizer.grad_scale = torch.tensor(4.0)
            iterate(scaler, optimizer, (weight * factor).sum)
            assert not hasattr(optimizer, "grad_scale")
            assert not hasattr(optimizer, "found_inf")
        stepped.append(weight.detach())
    assert torch.equal(*stepped)
    assert stepped[0].tolist() == pytest.approx([-0.5, -0.5])


# ---- the finite check, and gradients that are divided by a scale of the caller's


def test_nan_infinity_and_large_finite_values():
    largest = torch.finfo(torch.float32).max
    sparse = torch.sparse_coo_tensor([[1, 1]], [1.0, float("inf")], (3,), check_invariants=True)
    tensors = [
        torch.tensor([1.0, float("nan")]),
        torch.tensor([-float("inf"), 0.0]),
        torch.tensor([largest, -largest]),
        torch.tensor([]),
        torch.tensor([1.0], dtype=torch.float16),
        torch.tensor([float("inf")], dtype=torch.bfloat16),
        sparse,
        torch.tensor([complex(0.0, float("nan"))]),
        torch.tensor([complex(0.0, float("inf"))]).conj(),
        torch.tensor([-0.0, 1e-45]),
    ]
    flags = nonfinite_flags(tensors)
    assert flags.read() == [True, True, False, False, False, True, True, True, True, False]
    assert nonfinite_flags([]).read() == []


def test_16_bit_patterns():
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        # Every infinity, every NaN within 64 of one, and numbers of every exponent.
        near = torch.arange(2**16) % (2**7 if dtype == torch.bfloat16 else 2**10) < 64
        values = torch.cat([values[near & ~values.isfinite()], values[::61]])
        flags = nonfinite_flags(list(values.split(1))).read()
        assert flags == (~torch.isfinite(values)).tolist()


# ---- unscale_by


def optimizer_with(*gradients):
    parameters = [torch.nn.Parameter(torch.zeros_like(g.to_dense())) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    parameters.append(torch.nn.Parameter(torch.zeros(1)))
    return torch.optim.SGD(parameters, lr=1.0), parameters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [2.0**16, 2.0**-16, 1.0, 3.0])
def test_gradients_are_divided_and_rounded_once(dtype, scale):
    values = torch.tensor([3.0, -0.0, 1.5, -96.0, 2.0**-10], dtype=dtype) * (
        2.0**6 if scale > 1 else 2.0**-14
    )
    optimizer, (parameter, _) = optimizer_with(values)
    assert unscale_by(optimizer, scale).item() == 0.0
    # torch multiplies by the float32 next to the inverse, in float32 and wider, and rounds to the format.
    inverse = torch.tensor(1.0 / scale, dtype=torch.float32)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(parameter.grad, (values.to(wide) * inverse.to(wide)).to(dtype))
    assert torch.signbit(parameter.grad[1])


def test_without_gradients_nothing_is_found():
    optimizer, _ = optimizer_with()
    assert unscale_by(optimizer, 8.0) == 0


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_gradients_that_are_conjugated_lazily(kind, one_process):
    values = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert values.is_conj()
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    gradient = values
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (1,))
        parameter = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        gradient = DTensor.from_local(values, mesh, [Shard(0)])
    parameter.grad = gradient
    assert unscale_by(torch.optim.SGD([parameter], lr=1.0), 2.0) == 0.0

    assert type(parameter.grad) is type(gradient)
    found = parameter.grad.to_local() if kind == "sharded" else parameter.grad
    assert found.tolist() == [0.5 - 1j, 1.5 + 2j]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_flags_are_fp32_whatever_the_default_dtype_is(default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        optimizer, (parameter, _) = optimizer_with(torch.tensor([1.0, torch.inf], dtype=torch.float32))
        found = unscale_by(optimizer, 2.0)
        assert (found.dtype, found.item()) == (torch.float32, 1.0)
        scaler = nc.GradScaler("cpu", init_scale=4.0)
        parameter.grad = None
        scaler.scale(parameter.square().sum()).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        assert not scaler.step(optimizer).skipped
    finally:
        torch.set_default_dtype(before)
