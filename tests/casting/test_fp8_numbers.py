"""fp8 layers against products made by hand: rounded one number at a time, multiplied in float64."""

import math

import pytest
import torch
from casting_cases import Calls, assert_same, rules, trained
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import narrowcast as nc
from narrowcast.casting.fp8._convert import apply_fp8
from narrowcast.errors import UnsupportedError
from narrowcast.formats import FLOAT32, OCP_E4M3, OCP_E5M2, round_to

RECIPES = ["fp8_tensorwise", "fp8_rowwise"]
# Half the distance from 1 to the next number: a rounding is at most this much of the result off.
UNIT = {None: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROWS, IN, OUT = 24, 32, 48
pytestmark = pytest.mark.filterwarnings("ignore:fp8 is emulated:UserWarning")


def policy(recipe="fp8_tensorwise"):
    return rules(nc.rule.op("linear", compute=recipe))


def fp8_linear(recipe, *shape, dtype=torch.float32, **kwargs):
    layer = torch.nn.Linear(*(shape or (IN, OUT)), dtype=dtype, **kwargs)
    handle = apply_fp8(layer, policy(recipe))
    assert handle.converted == {"": recipe}
    return layer


def region(dtype):
    return nc.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


# ---- the oracle


def scale_of(values, recipe, fp8_format):
    largest = max(*(abs(value) for value in values), 1e-12)
    scale = round_to(FLOAT32, fp8_format.max / largest)
    if recipe == "fp8_tensorwise":
        return scale
    # The rowwise recipe rounds its scales down to powers of two.
    return 2.0 ** math.floor(math.log2(scale))


def through_fp8(matrix, recipe, fp8_format, *, along):
    """The values of ``matrix`` once it is in fp8, in float64.

    ``along``: the dimension that the product sums over. Rowwise, what is summed together shares a scale.
    """
    rows = (matrix if along == 1 else matrix.t()).double().tolist()
    everything = [value for row in rows for value in row]
    result = []
    for row in rows:
        scale = scale_of(everything if recipe == "fp8_tensorwise" else row, recipe, fp8_format)
        # Scaled in fp32, as torchao says, then rounded again.
        scaled = [round_to(FLOAT32, value * scale) for value in row]
        result.append([round_to(fp8_format, value, saturate=True) / scale for value in scaled])
    made = torch.tensor(result, dtype=torch.float64)
    return made if along == 1 else made.t()


def product(a, b):
    """``a @ b`` in float64 and the bound that a product in fp32 of the same keeps to.

    Each factor is divided by its scale with one rounding, and n products are summed with n + 1 roundings.
    """
    return a @ b, (a.shape[1] + 4) * 2.0**-24 * (a.abs() @ b.abs())


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_gradients_against_float64(recipe, dtype, weight_dtype):
    layer = fp8_linear(recipe, dtype=weight_dtype)
    x = torch.randn(ROWS, IN) * torch.logspace(-2, 2, ROWS)[:, None]
    x.requires_grad_()
    with region(dtype):
        y = layer(x)
    grad = torch.randn(ROWS, OUT).to(y.dtype)
    y.backward(grad)
    assert y.dtype == (dtype or torch.float32)

    gradient_format = OCP_E5M2 if recipe == "fp8_tensorwise" else OCP_E4M3
    x_in = x.detach().to(y.dtype)
    weight = layer.weight.detach()
    unit = UNIT[dtype]

    # The output: x @ weight.t() + bias. The product is rounded to its format, so is the bias, and so is their
    # sum.
    a = through_fp8(x_in, recipe, OCP_E4M3, along=1)
    b = through_fp8(weight, recipe, OCP_E4M3, along=1)
    expected, bound = product(a, b.t())
    bias = layer.bias.detach().double()
    bound = bound + 2.1 * unit * (expected.abs() + bias.abs())
    assert_within(y, expected + bias, bound)

    # The gradient of the input: grad @ weight, rounded to the format of the output.
    a = through_fp8(grad, recipe, gradient_format, along=1)
    b = through_fp8(weight, recipe, OCP_E4M3, along=0)
    expected, bound = product(a, b)
    assert x.grad.dtype == torch.float32
    assert_within(x.grad, expected, bound + 1.1 * unit * expected.abs())

    # The gradient of the weight: grad.t() @ x, rounded to the format of the output and to that of the weight.
    a = through_fp8(grad, recipe, gradient_format, along=0).t()
    b = through_fp8(x_in, recipe, OCP_E4M3, along=0)
    expected, bound = product(a, b)
    assert layer.weight.grad.dtype == weight_dtype
    coarser_unit = max(unit, UNIT[weight_dtype if weight_dtype != torch.float32 else None])
    assert_within(layer.weight.grad, expected, bound + 2.1 * coarser_unit * expected.abs())


def assert_within(tensor, expected, bound):
    off = (tensor.detach().double() - expected).abs()
    assert (off <= bound).all(), f"{(off / bound).max():.3g} times the bound"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(5, IN), (2, 3, IN), (IN,)])
def test_outside_of_regions_it_is_torchaos_layer_to_the_bit(recipe, shape):
    ours = fp8_linear(recipe)
    settings = Float8LinearConfig.from_recipe_name(recipe.removeprefix("fp8_"))
    object.__setattr__(settings, "emulate", True)
    plain = torch.nn.Linear(IN, OUT)
    plain.load_state_dict(ours.state_dict())
    theirs = convert_to_float8_training(plain, config=settings)
    x = torch.randn(shape)
    assert_same(trained(ours, x), trained(theirs, x))


@pytest.mark.parametrize("rows", [7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_pytorchs_fp8_product_gives_what_the_emulated_one_gives(recipe, dtype, rows):
    """On a CPU, where PyTorch has it too. Sizes are filled up to multiples of 16, which GPUs need."""
    x = torch.randn(rows, IN, dtype=dtype)
    results = []
    layer = fp8_linear(recipe)
    for emulated in (True, False):
        layer.fp8_emulated = emulated
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        with torch.profiler.profile(record_shapes=True) as profile:
            try:
                y = layer(inputs)
            except RuntimeError as error:  # torch 2.11 has no product with a scale for each row there
                if "only supports per-tensor scaling for CPU" not in str(error):
                    raise
                return
            (y * torch.linspace(-1, 1, OUT, dtype=dtype)).sum().backward()
        shapes = [event.input_shapes[:2] for event in profile.events() if event.name == "aten::_scaled_mm"]
        assert len(shapes) == (0 if emulated else 3)
        assert all(a[1] % 16 == b[0] % 16 == b[1] % 16 == 0 for a, b in shapes)
        results.append((y, inputs.grad, layer.weight.grad))
    for emulated, real in zip(*results, strict=True):
        # Rowwise products come out in bf16; a last bit of that each, beside sums in another order.
        torch.testing.assert_close(real.float(), emulated.float(), rtol=2.0**-7, atol=2.0**-7)


# ---- where regions and rules are


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rule_for_the_product_inside_does_not_reach_it(recipe):
    layer = fp8_linear(recipe)
    x = torch.randn(3, IN, requires_grad=True)
    with nc.autocast("cpu", torch.bfloat16):
        expected = layer(x)
    with nc.autocast("cpu", policy=rules(nc.rule.op("mm", compute="fp32"))):
        y = layer(x)
        with pytest.warns(UserWarning, match="backward was called inside"):
            y.sum().backward()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_region_in_fp32_casts_the_input_up(weight_dtype):
    layer = fp8_linear("fp8_tensorwise", dtype=weight_dtype)
    x = torch.randn(3, IN, dtype=torch.bfloat16)
    with nc.autocast("cpu", torch.float32):
        y = layer(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, layer(x.float()))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_under_activation_checkpointing(recipe, reentrant):
    block = torch.nn.Sequential(torch.nn.Linear(IN, OUT), torch.nn.GELU(), torch.nn.Linear(OUT, IN))
    apply_fp8(block, policy(recipe))
    inside = nc.autocast("cpu", torch.bfloat16)
    x = torch.randn(ROWS, IN)
    wrapped = Calls(lambda self, x: checkpoint(self.block, x, use_reentrant=reentrant), block=block)
    plain = Calls(lambda self, x: self.block(x), block=block)
    for one in (wrapped, plain):
        one.forward = inside(one.forward)
    assert_same(trained(wrapped, x), trained(plain, x))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(IN,), (5, IN), (2, 5, IN), (0, IN), (2, 0, IN)])
def test_shapes_and_modes(recipe, shape):
    layer = fp8_linear(recipe)
    x = torch.randn(shape)
    with nc.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert y.shape == linear(x, layer.weight).shape
        with torch.no_grad():
            assert torch.equal(layer(x), y)
        with torch.inference_mode():
            assert torch.equal(layer(x), y)
            assert torch.equal(layer(x.clone()), y)  # of a tensor that was made there
    layer.eval()
    with nc.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), y)
    y.sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(IN,), (5, IN), (2, 5, IN)])
def test_an_output_may_be_changed_in_place(shape, bias):
    layer = fp8_linear("fp8_rowwise", bias=bias)
    x = torch.randn(shape)
    gradients = []
    for relu in (torch.relu, torch.relu_):
        layer.zero_grad()
        y = layer(x)
        assert not y._is_view()
        relu(y).sum().backward()
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(*gradients)


def test_what_a_linear_layer_refuses_is_refused_and_fp64_stays_fp64():
    layer = fp8_linear("fp8_tensorwise")
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(torch.ones(3, IN, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(torch.ones(3, IN, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shape"):
        layer(torch.ones(3, IN + 16))
    layer.double()
    x = torch.randn(3, IN, dtype=torch.float64)
    assert torch.equal(layer(x), linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_gradients_are_refused(recipe):
    layer = fp8_linear(recipe)
    x = torch.randn(3, IN, requires_grad=True)
    with pytest.raises(UnsupportedError, match="without create_graph=True through an fp8 linear layer"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_it_gives_the_same(recipe):
    layer = fp8_linear(recipe)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(ROWS, IN, requires_grad=True)
    for enabled in (False, True):
        with nc.autocast("cpu", torch.bfloat16, enabled=enabled):
            a, b = compiled(x), layer(x)
        assert torch.equal(a, b)
        (of_a,), (of_b,) = (torch.autograd.grad(y.float().square().sum(), x) for y in (a, b))
        assert torch.equal(of_a, of_b)
        with torch.inference_mode():
            assert torch.equal(compiled(x), layer(x))


# ---- NaN, infinity, overflow and underflow


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_all_that_shares_its_scale_nan(bad):
    x = torch.randn(4, IN)
    x[2, 5] = bad
    for recipe, lost in (("fp8_tensorwise", [0, 1, 2, 3]), ("fp8_rowwise", [2])):
        layer = fp8_linear(recipe)
        y = layer(x)
        assert [row for row in range(4) if y[row].isnan().all()] == lost
        assert not y.isinf().any()
        assert y[[row for row in range(4) if row not in lost]].isfinite().all()
        y[0].sum().backward()
        # The gradient of the weight sums over all rows of the input, by column.
        weight_is_nan = layer.weight.grad.isnan()
        if recipe == "fp8_tensorwise":
            assert weight_is_nan.all()
        else:
            assert weight_is_nan[:, 5].all()
            assert weight_is_nan.sum() == OUT  # nowhere else


@pytest.mark.parametrize(("recipe", "lost_rows"), [("fp8_tensorwise", 4), ("fp8_rowwise", 1)])
def test_a_gradient_that_overflowed_is_nan_in_the_gradients_and_none_is_lost(recipe, lost_rows):
    layer = fp8_linear(recipe)
    x = torch.randn(4, IN, requires_grad=True)
    grad = torch.randn(4, OUT)
    grad[1, 7] = math.inf
    layer(x).backward(grad)
    assert x.grad.isnan().all(dim=1).sum() == lost_rows
    assert layer.weight.grad[7].isnan().all()
    assert layer.bias.grad[7] == math.inf


@pytest.mark.parametrize("recipe", RECIPES)
def test_large_finite_numbers_do_not_overflow_and_zeros_stay_zeros(recipe):
    layer = fp8_linear(recipe, 16, 16, bias=False)
    torch.nn.init.eye_(layer.weight)
    # Above 15/16 of the largest fp32 number the next number of E4M3 is 2**128, which is infinite in fp32.
    large = 0.9 * torch.finfo(torch.float32).max
    x = torch.zeros(2, 16)
    x[0, 0], x[0, 1] = large, -large
    y = layer(x).detach()
    assert y[0, 0] == pytest.approx(large, rel=2.0**-4)
    assert y[0, 1] == -y[0, 0]
    assert y[1].abs().sum() == 0


def test_what_is_far_below_the_largest_number_becomes_zero():
    layer = fp8_linear("fp8_tensorwise", 16, 16, bias=False)
    torch.nn.init.eye_(layer.weight)
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = 1, 2.1e-6, 2.3e-6, 3.4e-5
    y = layer(x).detach()[0]
    assert y[1] == 0
    assert y[2] == pytest.approx(2.0**-9 / 448, rel=1e-6)  # E4M3's smallest
    assert y[3] == pytest.approx(3.4e-5, rel=2.0**-4)

    x.requires_grad_()
    grad = torch.zeros(1, 16)
    grad[0, 0], grad[0, 1], grad[0, 2] = 1, 1.3e-10, 1.4e-10
    layer(x).backward(grad)
    assert x.grad[0, 1] == 0
    assert x.grad[0, 2] == pytest.approx(2.0**-16 / 57344, rel=1e-6)  # E5M2's smallest


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("rows", [64, 50])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_instructions_give_what_the_emulated_product_gives(recipe, rows, dtype):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("gpu: this one has no fp8 instructions")
    layer = torch.nn.Linear(256, 128, device="cuda")
    handle = apply_fp8(layer, policy(recipe))
    assert handle.converted == {"": recipe}
    assert not layer.fp8_emulated
    x = torch.randn(rows, 256, device="cuda")
    results = []
    for emulated in (True, False):
        layer.fp8_emulated = emulated
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        with nc.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            y = layer(inputs)
        y.float().square().sum().backward()
        results.append((y.float(), inputs.grad, layer.weight.grad))
    for emulated, real in zip(*results, strict=True):
        # Hopper's instructions sum in 14 bits; rowwise products come out in bf16.
        assert (real - emulated).norm() <= 2.0**-6 * emulated.norm()
