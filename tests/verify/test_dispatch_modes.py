"""Random ops draw in every format what torch draws in fp32; exact ops against float64 as the oracle."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from narrowcast.verify.certificate._dispatch_modes import ExactOps, Fp32Draws

NARROW = [torch.bfloat16, torch.float16]
SIZE = (5, 7)


def like(dtype, low=0.25, high=0.75):
    """The same values in every format: multiples of 2**-6, which bf16 and fp16 hold."""
    return torch.linspace(low * 64, high * 64, 35).round().div(64).reshape(SIZE).to(dtype)


def seeded():
    return torch.Generator().manual_seed(5)


def filled(method, *args, **kwargs):
    return lambda dtype: getattr(torch.empty(SIZE, dtype=dtype), method)(*args, **kwargs)


def into(op, *args):
    return lambda dtype: op(
        *(a(dtype) if callable(a) else a for a in args), out=torch.empty(SIZE, dtype=dtype)
    )


def rrelu(dtype):
    return F.rrelu(like(dtype, -0.5, 0.5), training=True)


OPS = {
    "rand": lambda dtype: torch.rand(SIZE, dtype=dtype),
    "rand out": into(torch.rand, SIZE),
    "rand_like": lambda dtype: torch.rand_like(like(dtype)),
    "rand_like to": lambda dtype: torch.rand_like(torch.ones(SIZE), dtype=dtype),
    "randn": lambda dtype: torch.randn(SIZE, dtype=dtype),
    "randn of 3": lambda dtype: torch.randn(3, dtype=dtype),
    "randn generator": lambda dtype: torch.randn(SIZE, dtype=dtype, generator=seeded()),
    "randn_like": lambda dtype: torch.randn_like(like(dtype)),
    "randint": lambda dtype: torch.randint(-100, 100, SIZE, dtype=dtype),
    "randint_like": lambda dtype: torch.randint_like(like(dtype), 100),
    "randperm": lambda dtype: torch.randperm(40, dtype=dtype),
    "random_": filled("random_", 0, 99),
    "normal": lambda dtype: torch.normal(like(dtype), like(dtype)),
    "normal of mean": lambda dtype: torch.normal(like(dtype), 0.5),
    "normal of std": lambda dtype: torch.normal(0.5, like(dtype)),
    "normal of floats": lambda dtype: torch.normal(1.0, 0.5, SIZE, dtype=dtype),
    "normal out": into(torch.normal, like, like),
    "normal_": filled("normal_", 1.0, 0.5),
    "uniform_": filled("uniform_", -2.0, 3.0),
    "exponential_": filled("exponential_", 2.0),
    "log_normal_": filled("log_normal_", 0.0, 0.5),
    "cauchy_": filled("cauchy_", 0.0, 0.5),
    "geometric_": filled("geometric_", 0.5),
    "bernoulli": lambda dtype: torch.bernoulli(like(dtype)),
    "bernoulli of p": lambda dtype: torch.bernoulli(like(dtype), 0.3),
    "bernoulli out": into(torch.bernoulli, like),
    "bernoulli_": filled("bernoulli_", 0.3),
    "bernoulli_ of tensor": lambda dtype: torch.empty(SIZE, dtype=dtype).bernoulli_(like(dtype)),
    "bernoulli_ of others": lambda dtype: torch.empty(SIZE).bernoulli_(like(dtype)),
    "poisson": lambda dtype: torch.poisson(like(dtype) * 8),
    "binomial": lambda dtype: torch.binomial(torch.full(SIZE, 9.0, dtype=dtype), like(dtype)),
    "multinomial": lambda dtype: torch.multinomial(like(dtype), 3),
    "multinomial again": lambda dtype: torch.multinomial(like(dtype), 9, replacement=True),
    "gamma": lambda dtype: torch._standard_gamma(like(dtype)),
    "dirichlet": lambda dtype: torch._sample_dirichlet(like(dtype)),
    "native_dropout": lambda dtype: torch.native_dropout(like(dtype), 0.5, True)[1],
    "dropout": lambda dtype: F.dropout(torch.ones(SIZE, dtype=dtype), 0.5),
    "dropout in place": lambda dtype: F.dropout(torch.ones(SIZE, dtype=dtype), 0.5, inplace=True),
    "feature dropout": lambda dtype: F.dropout2d(torch.ones(4, 8, 3, 3, dtype=dtype), 0.5),
    "rrelu": rrelu,
}  # fmt: skip


def after(seed, op, dtype, *, mode=True):
    torch.manual_seed(seed)
    if mode:
        with Fp32Draws() as draws:
            result = op(dtype)
        assert draws.undecidable is None
    else:
        result = op(dtype)
    return result, torch.get_rng_state()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_every_op_draws_what_torch_draws_in_fp32(name, dtype):
    for seed in range(3):
        expected, state = after(seed, OPS[name], torch.float32, mode=False)
        wide, state_wide = after(seed, OPS[name], torch.float32)
        narrow, state_narrow = after(seed, OPS[name], dtype)
        assert torch.equal(wide, expected)
        assert torch.equal(state_wide, state)
        assert torch.equal(state_narrow, state)
        if expected.dtype == torch.float32 and name != "bernoulli_ of others":
            assert narrow.dtype == dtype
        if name != "rrelu":  # of rounded noise, below
            assert torch.equal(narrow, expected.to(narrow.dtype))
        else:
            torch.testing.assert_close(narrow.float(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    "layer",
    [F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout3d],
    ids=lambda layer: layer.__name__,
)
def test_dropouts_drop_the_same_and_go_backward_right(layer, dtype):
    found = []
    for one in (torch.float32, dtype):
        torch.manual_seed(1)
        x = torch.ones(2, 8, 3, 3, 3, dtype=one, requires_grad=True)
        with Fp32Draws():
            y = layer(x, 0.5, training=True)
            y.sum().backward()
        found.append((y, x.grad))
    (wide, wide_grad), (narrow, narrow_grad) = found
    torch.testing.assert_close(narrow.float(), wide, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(narrow_grad.float(), wide_grad, rtol=2**-7, atol=2**-7)
    assert 0 < (wide_grad == 0).float().mean() < 1
    assert torch.equal(narrow_grad == 0, wide_grad == 0)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
def test_the_order_of_strides_does_not_change_what_is_drawn(dtype):
    """bf16 convolutions on a CPU hand on other strides than fp32 ones do."""
    x = torch.ones(2, 3, 4, 5, dtype=dtype)
    for op in (
        lambda x: F.dropout(x, 0.5),
        torch.randn_like,
        torch.rand_like,
        lambda x: x.clone().normal_(),
        lambda x: torch.bernoulli(x * 0.5),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
    ):
        one, state = after(3, lambda _, op=op: op(x), dtype)
        other, state_other = after(3, lambda _, op=op: op(x.to(memory_format=torch.channels_last)), dtype)
        assert torch.equal(one, other)
        assert torch.equal(state, state_other)
        assert other.is_contiguous(memory_format=torch.channels_last)
        assert one.is_contiguous()


def test_a_slice_is_filled_in_place():
    whole = torch.zeros(4, 6, dtype=torch.bfloat16)
    with Fp32Draws():
        returned = whole[:, ::2].normal_()
    assert returned.data_ptr() == whole.data_ptr()
    assert (whole[:, ::2] != 0).all()
    assert (whole[:, 1::2] == 0).all()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_uniform_number_stays_below_its_end(dtype):
    with Fp32Draws():
        assert torch.rand(200_000, dtype=dtype).max() < 1
        assert torch.empty(200_000, dtype=dtype).uniform_(-1, 0.3).max() < 0.3


def test_fp64_and_integers_are_left_alone():
    for op in (
        lambda _: torch.randn(40, dtype=torch.float64),
        lambda _: torch.randint(9, (40,)),
        lambda _: torch.randperm(40),
        lambda _: torch.empty(40, dtype=torch.bool).bernoulli_(0.5),
        lambda _: torch.empty(40, dtype=torch.int32).random_(),
    ):
        expected, state = after(0, op, None, mode=False)
        found, state_found = after(0, op, None)
        assert torch.equal(found, expected)
        assert torch.equal(state_found, state)


def test_draws_are_the_same_in_inference_mode():
    with torch.inference_mode():
        expected, _ = after(0, lambda dtype: F.dropout(torch.ones(99, dtype=dtype), 0.5), torch.float32)
        narrow, _ = after(0, lambda dtype: F.dropout(torch.ones(99, dtype=dtype), 0.5), torch.bfloat16)
    assert torch.equal(narrow.float(), expected)


def test_recomputation_in_the_backward_draws_the_same():
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        x = torch.ones(99, dtype=dtype, requires_grad=True)
        with Fp32Draws():
            checkpoint(lambda x: torch.randn_like(x) * x, x, use_reentrant=False).sum().backward()
        found.append(x.grad)
    assert torch.equal(found[0].bfloat16(), found[1])


def test_what_a_fused_kernel_draws_is_undecidable():
    """No such kernel runs on a CPU, so the op is refused here after it was noticed."""
    q = torch.ones(1, 1, 4, 4, dtype=torch.bfloat16)
    with Fp32Draws() as draws:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0)
        assert draws.undecidable is None
        with pytest.raises(RuntimeError):
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)
    assert draws.undecidable == (
        "_scaled_dot_product_flash_attention_for_cpu draws its dropout inside a fused kernel, so FP32 and "
        "mixed precision saw different masks."
    )


def test_a_generator_of_the_users_own_can_be_put_back():
    generator = torch.Generator().manual_seed(7)
    with Fp32Draws() as draws:
        first = torch.randn(9, generator=generator)
        torch.rand(3, generator=generator)
        draws.rewind_generators()
        assert torch.equal(torch.randn(9, generator=generator), first)


def test_made_narrow_is_set_by_a_16_bit_result():
    with Fp32Draws() as draws:
        torch.ones(3) + 1
        assert not draws.made_narrow
        torch.ones(3).bfloat16()
        assert draws.made_narrow


# ---- FP32 by ops that round once

ULP = 2.0**-23


@pytest.mark.parametrize(
    "compute",
    [
        F.gelu,
        lambda x: x.reshape(1024, 1024) @ x.reshape(1024, 1024),
        lambda x: F.layer_norm(x.reshape(4, -1), (1 << 18,)),
        lambda x: torch.logsumexp(x.reshape(1024, 1024), 0),
        lambda x: x.reshape(1024, 1024).softmax(1),
    ],
)
def test_an_op_is_that_of_float64_rounded_once(compute):
    x = torch.randn(1 << 20) + 3
    with ExactOps():
        exact = compute(x)
    assert exact.dtype == torch.float32
    assert torch.equal(exact, compute(x.double()).float())
    assert not torch.equal(exact, compute(x))


def test_backward_is_exact_too_and_in_the_formats_that_it_has():
    x = torch.randn(64, 256, requires_grad=True)
    weight = torch.randn(8, 256, requires_grad=True)
    with ExactOps():
        F.linear(x, weight).square().sum().backward()
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    F.linear(wide_x, wide_weight).square().sum().backward()
    assert x.grad.dtype == torch.float32
    # Three roundings to fp32 on the way of numbers that are not small against their sum.
    for mine, oracle in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert (mine - oracle).norm() <= 2 * ULP * oracle.norm()


def test_complex_numbers_made_of_fp32_are_exact_too_and_meet_fp32_weights():
    x, weight = torch.randn(8, 64), torch.randn(64, 4, requires_grad=True)
    with ExactOps():
        spectrum = torch.fft.rfft(x @ weight, dim=0)
        spectrum.real.square().sum().backward()
        back = torch.fft.irfft(spectrum, dim=0)
        assert (torch.polar(x.abs(), x).real @ weight).dtype == torch.float32
    assert (spectrum.dtype, back.dtype, weight.grad.dtype) == (torch.complex64, torch.float32, torch.float32)
    exact = torch.fft.rfft((x.double() @ weight.double()).float().double(), dim=0)
    assert torch.equal(spectrum, exact.to(torch.complex64))


def test_what_cannot_be_exact_is_as_it_is():
    x = torch.randn(64)
    torch.manual_seed(5)
    plain = torch.randn_like(x), F.dropout(x, 0.5)
    torch.manual_seed(5)
    with ExactOps():
        drawn = torch.randn_like(x), F.dropout(x, 0.5)
        assert x.view(8, 8).data_ptr() == x.data_ptr()
        whole = torch.arange(5) + 1
        assert (x.bfloat16() + x.bfloat16()).dtype == torch.bfloat16
        assert (x.double() + 1).dtype == torch.float64
        written = x.clone().add_(1)
    assert all(torch.equal(a, b) for a, b in zip(plain, drawn, strict=True))
    assert whole.tolist() == [1, 2, 3, 4, 5]
    assert torch.equal(written, x + 1)


def test_an_op_without_a_float64_kernel_falls_back():
    with ExactOps():
        got = torch.fake_quantize_per_tensor_affine(torch.linspace(-1, 1, 9), 0.1, 0, -8, 7)
    assert torch.equal(got, torch.fake_quantize_per_tensor_affine(torch.linspace(-1, 1, 9), 0.1, 0, -8, 7))
