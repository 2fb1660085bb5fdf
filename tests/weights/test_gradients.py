"""Where gradients are before, during and after a step, and what adds up in float32."""

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import OrderError, UnsupportedError
from narrowcast.weights import hold


def one(dtype, updates="masters", value=1.0):
    low = torch.nn.Parameter(torch.full((2,), value).to(dtype))
    optimizer = torch.optim.SGD([low], lr=0.5)
    return low, optimizer, hold(optimizer, updates)


def test_micro_batches_add_up_in_float32(dtype):
    low, optimizer, handle = one(dtype)
    ((_, working),) = handle.parameters
    small = 2.0 ** (-9 if dtype == torch.bfloat16 else -12)
    for gradient in (1.0, small, small):
        low.grad = torch.full_like(low, gradient)
        handle.take_gradients()
        assert low.grad is None
    assert working.grad.dtype == torch.float32
    assert working.grad.tolist() == [1.0 + 2 * small] * 2, "in the low format the small ones would be lost"
    optimizer.step()
    assert working.tolist() == [1.0 - 0.5 * (1.0 + 2 * small)] * 2
    assert working.grad is None, "the step used them up"
    optimizer.step()
    assert working.tolist() == [1.0 - 0.5 * (1.0 + 2 * small)] * 2


def test_a_plain_step_leaves_the_gradient_where_torch_leaves_it(dtype):
    low, optimizer, handle = one(dtype)
    gradient = torch.full_like(low, 0.5)
    low.grad = gradient
    optimizer.step()
    assert low.grad is gradient
    assert handle.parameters[0][1].grad is None
    optimizer.step()
    assert low.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("taken", [True, False])
def test_zero_grad_of_the_optimizer_clears_all(dtype, set_to_none, taken):
    low, optimizer, handle = one(dtype)
    low.grad = torch.ones_like(low)
    if taken:
        handle.take_gradients()
        low.grad = torch.ones_like(low)
    gradient = low.grad
    optimizer.zero_grad(set_to_none=set_to_none)
    assert (low.grad is None) if set_to_none else (low.grad is gradient and not low.grad.any())
    optimizer.step()
    assert low.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model_clears_what_a_plain_step_used(dtype, set_to_none):
    model = torch.nn.Linear(2, 1, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hold(optimizer, "kahan")
    for _ in range(2):
        model.zero_grad(set_to_none=set_to_none)
        before = model.weight.detach().clone()
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        optimizer.step()
        # The gradient is 1 in every step, not 1 and then 2; the weights are below 1, with a unit of 2**-8.
        assert ((before - model.weight).float() - 0.5).abs().max() <= 2.0**-7


def test_a_parameter_without_a_gradient_stays(dtype):
    low, other = (torch.nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2))
    optimizer = torch.optim.Adam([low, other], lr=0.5, weight_decay=0.1)
    hold(optimizer, "kahan")
    low.grad = torch.ones_like(low)
    optimizer.step()
    assert low[0] != 1.0
    assert other.tolist() == [1.0, 1.0]
    assert len(optimizer.state) == 1


def test_a_gradient_with_a_graph_is_taken_without_it(dtype):
    low, optimizer, handle = one(dtype)
    gradient = torch.autograd.grad((low.float() ** 2).sum(), low, create_graph=True)[0]
    assert gradient.grad_fn is not None
    low.grad = gradient
    handle.take_gradients()
    assert handle.parameters[0][1].grad.grad_fn is None
    low.grad = gradient
    optimizer.zero_grad(set_to_none=False)
    assert low.grad.tolist() == [0.0, 0.0]


def test_a_sparse_gradient_is_refused_before_anything_changes(dtype):
    embedding = torch.nn.Embedding(4, 2, sparse=True).to(dtype)
    other = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = torch.optim.SGD([other, *embedding.parameters()], lr=0.5)
    handle = hold(optimizer, "kahan")
    embedding(torch.tensor([1])).sum().backward()
    other.grad = torch.ones_like(other)
    for act in (handle.take_gradients, optimizer.step):
        with pytest.raises(UnsupportedError, match=r"shape \(4, 2\) is torch\.sparse_coo.*sparse=False"):
            act()
        assert other.grad is not None
        assert other.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_torchs_own_scaler_unscales_in_float32_and_skips(updates, fused, unscale_first):
    low = torch.nn.Parameter(torch.full((4,), 0.5, dtype=torch.float16))
    full = torch.nn.Parameter(low.detach().float())
    optimizer, expected = (torch.optim.Adam([p], lr=0.125, fused=fused) for p in (low, full))
    handle = hold(optimizer, updates)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    # The fourth step has gradients past what float16 can hold once they are scaled.
    for size in (2.0**-20, 2.0**-20, 2.0**-19, 100.0, 2.0**-20):
        before, scale = low.detach().clone(), scaler.get_scale()
        scaler.scale((low.float() * size).sum()).backward()
        handle.take_gradients()
        if unscale_first:
            scaler.unscale_(optimizer)
            assert (handle.parameters[0][1].grad == size).all() or size == 100.0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if size == 100.0:
            assert torch.equal(low, before)
            assert scaler.get_scale() == scale / 2
            continue
        full.grad = torch.full((4,), size)
        expected.step()
        # Powers of two scale exactly; what stochastic rounding adds is at most a unit a step.
        bound = 4 * 2.0**-11 if updates == "stochastic" else 2.0**-22
        assert ((handle.full_values()[low] - full).abs() <= bound).all()
    assert low[0] < 0.05


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [torch.amp.GradScaler, nc.GradScaler])
def test_a_scaler_refuses_gradients_of_low_parameters(make, fused):
    """It would look at those of the others alone, and step on low ones that are still scaled."""
    low = torch.nn.Parameter(torch.full((2,), 0.5, dtype=torch.bfloat16))
    full = torch.nn.Parameter(torch.full((2,), 0.5))
    optimizer = torch.optim.SGD([low, full], lr=0.5, fused=fused)
    own = vars(optimizer).get("_step_supports_amp_scaling")
    handle = hold(optimizer, "masters")
    scaler = make("cpu", init_scale=2.0**10)
    scaler.scale((low.float() * 0.25 + full * 0.25).sum()).backward()
    with pytest.raises(OrderError, match="call take_gradients"):
        scaler.step(optimizer)
    assert low.tolist() == full.tolist() == [0.5, 0.5]
    handle.take_gradients()
    scaler.step(optimizer)
    scaler.update()
    assert low.tolist() == full.tolist() == [0.375, 0.375]
    handle.remove()
    assert vars(optimizer).get("_step_supports_amp_scaling") is own


@pytest.mark.parametrize("together", [False, True])
def test_a_scaler_refuses_them_after_unscale_too(together):
    low, full = (torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    optimizer = torch.optim.SGD([low, full], lr=0.5)
    hold(optimizer, "masters")
    scaler = nc.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale((low.float() + full).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(OrderError, match="call take_gradients"):
        scaler.step_together([optimizer]) if together else scaler.step(optimizer)
    assert low.tolist() == full.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("holder", ["nothing", "tensor", "view", "graph"])
def test_gradients_reuse_memory_that_nothing_else_uses(holder):
    low, optimizer, handle = one(torch.bfloat16)
    ((_, working),) = handle.parameters

    def taken(value):
        low.grad = torch.full_like(low, value)
        handle.take_gradients()
        return working.grad

    first = taken(3.0)
    place = first.data_ptr()
    scale = torch.ones(2, requires_grad=True)
    kept = {"nothing": None, "tensor": first, "view": first[1:], "graph": (first * scale).sum()}[holder]
    del first
    optimizer.step()
    assert working.grad is None
    assert taken(torch.nan).isnan().all()
    assert (working.grad.data_ptr() == place) == (holder == "nothing")
    if kept is not None:
        assert (torch.autograd.grad(kept, scale)[0] if holder == "graph" else kept).eq(3.0).all()
