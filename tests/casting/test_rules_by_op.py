"""Rules for operators: each call is as the same call outside of regions, of inputs cast by hand."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, FP16, FP32, FP64, assert_same, rules
from op_lists import same
from torch import nn
from torch.autograd import forward_ad

import narrowcast as nc
from narrowcast.casting.kernels import _kernels, _operators
from narrowcast.errors import UnsupportedError
from narrowcast.policy import PROMOTE, TABLES
from torch_alone import torch_alone

rule = nc.rule
FORMATS = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
CASTABLE = (BF16, FP16, FP32)


def region(*given, compute="bf16", **settings):
    return nc.autocast("cpu", policy=rules(*given, compute=compute), **settings)


def cast(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in CASTABLE else value
    if isinstance(value, list):
        return [cast(part, dtype) for part in value]
    return value


def calls():
    """Operator -> a call of it and its arguments: on PyTorch's table in each way, composite, neither."""
    torch.manual_seed(0)
    x, y, heads = torch.randn(4, 6), torch.randn(6, 6), torch.randn(1, 2, 4, 8)
    wide = torch.randn(4, 8)
    gates = [torch.randn(4 * 8, 8), torch.randn(4 * 8, 8), torch.randn(4 * 8), torch.randn(4 * 8)]
    return {
        "softmax": (torch.softmax, x, -1),
        "log_softmax": (F.log_softmax, x, -1),
        "linear": (F.linear, x, y, y[0]),
        "matmul": (torch.matmul, x, y),
        "mm": (torch.mm, x, y),
        "layer_norm": (F.layer_norm, x, (6,), y[0], y[1]),
        "gelu": (F.gelu, x),
        "exp": (torch.exp, x),
        "add": (torch.add, x, x),
        "where": (torch.where, x > 0, x, x),
        "cat": (torch.cat, [x, x]),
        "stack": (torch.stack, [x, x]),
        "sum": (torch.sum, x),
        "prod": (torch.prod, x, 0),
        "cumsum": (torch.cumsum, x, 0),
        "mse_loss": (F.mse_loss, x, x + 1),
        "cross_entropy_loss": (F.cross_entropy, x, torch.arange(4)),
        "binary_cross_entropy": (F.binary_cross_entropy, x.sigmoid(), x.sigmoid()),
        "einsum": (torch.einsum, "ij,jk->ik", x, y),
        "tensordot": (torch.tensordot, x, y, 1),
        "scaled_dot_product_attention": (F.scaled_dot_product_attention, heads, heads, heads),
        "conv1d": (F.conv1d, heads[0], torch.ones(3, 4, 3)),
        "lstm_cell": (torch.lstm_cell, wide, [wide, wide], *gates),
        "index_copy": (torch.index_copy, x, 0, torch.tensor([0, 1]), x[2:]),
        "topk": (lambda t: torch.topk(t, 2)[0], x),
        "std": (torch.std, x),
    }


def by_hand(call, dtype):
    function, *args = call
    found = function(*(cast(value, dtype) for value in args))
    return found if isinstance(found, torch.Tensor) else found[0]


def by_rule(call):
    function, *args = call
    found = function(*args)
    return found if isinstance(found, torch.Tensor) else found[0]


@pytest.mark.parametrize("compute", [*FORMATS, "lower"])
@pytest.mark.parametrize("op", calls())
def test_a_rule_casts_to_its_format_whatever_comes_in(op, compute):
    """Whatever the region's format, and whatever comes in."""
    for region_format, given in itertools.product(FORMATS, CASTABLE):
        dtype = FORMATS[region_format if compute == "lower" else compute]
        call = [cast(part, given) for part in calls()[op]]
        expected = by_hand(call, dtype)
        with region(rule.op(op, compute=compute), compute=region_format):
            assert same(by_rule(call), expected)


@pytest.mark.parametrize("output", [*FORMATS, "lower"])
@pytest.mark.parametrize("op", ["softmax", "linear", "gelu", "lstm_cell", "topk"])
def test_an_output_rule_casts_what_is_handed_on(op, output):
    call = calls()[op]
    for region_format in FORMATS:
        with region(rule.op(op, compute="fp16", output=output), compute=region_format):
            ours = by_rule(call)
        assert same(ours, by_hand(call, FP16).to(FORMATS[region_format if output == "lower" else output]))


@pytest.mark.parametrize(("first", "second"), list(itertools.product(CASTABLE, CASTABLE)))
def test_promote_takes_the_widest_format(first, second):
    a, b = torch.randn(4, 4).to(first), torch.randn(4, 4).to(second)
    widest = torch.promote_types(first, second)
    for op, function in (("mm", torch.mm), ("linear", F.linear), ("matmul", torch.matmul)):
        with region(rule.op(op, compute="promote")):
            ours = function(a, b)
        assert same(ours, function(a.to(widest), b.to(widest)))


def test_promotion_looks_at_what_is_cast_alone():
    """Not at integers and float64, nor at numbers."""
    a = torch.randn(4).half()
    products = [
        lambda: a * torch.arange(4),
        lambda: a * 2.0,
        lambda: a * a.double(),
        lambda: torch.arange(4) * 2,
    ]
    for product in products:
        with region(rule.op("mul", compute="promote")):
            ours = product()
        assert same(ours, product())
    with region(rule.op("mul", compute="promote")):
        mixed = a * a.bfloat16()
    assert same(mixed, a.float() * a.bfloat16().float())


EACH_ROW = torch.arange(4)
MEETING = {  # every operator that promotes on the table of the CPU or of CUDA
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "index_copy": lambda a, b: torch.index_copy(a, 0, EACH_ROW, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "atan2": torch.atan2,
    "bilinear": lambda a, b: F.bilinear(a, b, a.new_ones(2, 4, 4)),
    "cross": lambda a, b: torch.cross(a[:3], b[:3], dim=0),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "vdot": lambda a, b: torch.vdot(a[0], b[0]),
    "grid_sampler": lambda a, b: torch.grid_sampler(a[None, None], b.view(1, 4, 2, 2), 0, 0, False),
    "index_put": lambda a, b: torch.index_put(a, (EACH_ROW,), b),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=1),
    "scatter_add": lambda a, b: torch.scatter_add(a, 0, EACH_ROW[:, None].expand(4, 4), b),
}


def promoting(table):
    return {op for op, how in TABLES[table].items() if how == PROMOTE} - {"index_copy.dimname"}


@pytest.mark.parametrize("table", ["cpu", "cuda"])
def test_bf16_and_fp16_promote_to_fp32(table):
    """One of them by a rule: PyTorch's own kernels would raise an error."""
    x = torch.rand(4, 4)
    for op in promoting(table):
        call = MEETING[op]
        with nc.autocast("cpu", policy=rules(rule.op("softmax", compute="fp16"), tables=table)):
            half, product = torch.softmax(x, 0), torch.mm(x, x)
            ours = call(product, half), call(half, product), call(half, half)
        assert (half.dtype, product.dtype) == (FP16, BF16)
        assert same(ours[0], call(product.float(), half.float())), op
        assert same(ours[1], call(half.float(), product.float())), op
        assert same(ours[2], call(half, half)), op


def test_an_as_is_rule_casts_nothing():
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with region(rule.op("linear", compute="as-is"), rule.op("prod", compute="as-is", output="fp32")):
        ours = F.linear(a, b)
        product = a.half().prod()
        with pytest.raises(RuntimeError, match="same dtype"):
            F.linear(a, b.half())
    assert same(ours, F.linear(a, b))
    assert same(product, a.half().prod().float())


def test_a_refused_operator_raises_and_no_other():
    a = torch.randn(4, 4)
    with region(rule.op("softmax", compute="refuse")):
        with pytest.raises(UnsupportedError, match=r"softmax.int was called, .* \(softmax: refuse\)"):
            a.softmax(-1)
        assert (a @ a).dtype == BF16
    assert a.softmax(-1).dtype == FP32


def test_aliases_reach_what_they_call():
    a = torch.randn(4, 4).half()
    with region(rule.op("mul", compute="fp32"), rule.op("softmax", compute="bf16")):
        assert torch.multiply(a, a).dtype == FP32
        assert torch.special.softmax(a, -1).dtype == BF16
        assert nn.Softmax(-1)(a).dtype == BF16
        assert a.softmax(-1).dtype == BF16


def test_a_rule_on_mm_never_sees_linear():
    """``linear`` is on PyTorch's table and encloses it; a rule for ``matmul`` does reach the operator @."""
    a = torch.randn(4, 4)
    with region(rule.op("mm", compute="fp32")):
        assert torch.mm(a, a).dtype == FP32
        assert F.linear(a, a).dtype == BF16
        assert (a @ a).dtype == BF16


def test_the_dtype_that_a_caller_gives_counts():
    """The input is cast as the rule says; the operator then does what its caller asked for."""
    a = torch.randn(4, 4)
    with region(rule.op("softmax", compute="fp16")):
        ours = torch.softmax(a, -1, dtype=FP32)
    assert same(ours, torch.softmax(a.half(), -1, dtype=FP32))
    assert not same(ours, torch.softmax(a, -1))


# ---- what is never cast


@pytest.mark.parametrize("given", [FP64, torch.complex64, torch.int64, torch.bool])
def test_other_formats_are_left_alone(given):
    a = torch.ones(4, 4).to(given)
    rules = [rule.op(op, compute="fp16") for op in ("add", "sum", "matmul", "softmax", "cat")]
    functions = [lambda: a + a, a.sum, lambda: torch.cat([a, a])]
    if given is not torch.bool:
        functions.append(lambda: a @ a)
    for function in functions:
        expected = function()
        with region(*rules):
            assert same(function(), expected)


def test_in_place_and_out_forms_are_never_cast():
    """As under PyTorch's own autocast: what is written to keeps its format."""
    a, out, product = torch.randn(4, 4), torch.empty(4, 4), torch.empty(4, 4)
    rules = [
        rule.op("add", compute="fp16"),
        rule.op("softmax", compute="fp16"),
        rule.op("mm", compute="fp32"),
    ]
    with region(*rules):
        first, second = a.clone().add_(a), a.clone()
        second += a
        torch.softmax(a, -1, out=out)
        torch.mm(a, a, out=product)
    assert same(first, a + a)
    assert same(second, a + a)
    assert same(out, a.softmax(-1))
    assert same(product, a @ a)


def test_tensors_elsewhere_are_left_alone():
    a = torch.empty(4, 4, device="meta")
    with region(rule.op("softmax", compute="fp16"), rule.op("add", compute="fp16")):
        assert a.softmax(-1).dtype == FP32
        assert (a + a).dtype == FP32


def order_of_gradients(region):
    """The names of parameters, in the order in which their gradients arrive."""
    layer, arrived = nn.Linear(4, 4), []
    for name, weight in layer.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    with region:
        loss = layer(torch.ones(2, 4)).float().sum()
    loss.backward()
    return arrived


def test_gradients_arrive_in_torchs_order():
    with torch_alone():
        expected = order_of_gradients(torch.autocast("cpu", BF16))
    assert order_of_gradients(region(rule.op("linear", compute="bf16"))) == expected


# ---- what else can be given


def test_numbers_beside_tensors():
    """Which C++ makes tensors of, and Python is given as numbers."""
    a, positions = torch.randn(4).half(), torch.tensor([-1, 2])
    functions = [
        lambda t: t + 1.5,
        lambda t: 1 + t,
        lambda t: torch.rsub(t, 1),
        lambda t: t.remainder(0.3),
        lambda t: torch.where(t > 0, t, 0.5),
        lambda t: torch.xlogy(2.0, t.abs()),
        lambda t: torch.take_along_dim(t, positions, 0).float(),  # which calls remainder
    ]
    ops = ("add", "rsub", "remainder", "where", "xlogy")
    for function in functions:
        with region(*(rule.op(op, compute="fp32") for op in ops)):
            ours = function(a)
        assert same(ours, function(a.float()))


def test_a_number_beside_two_tensors_widens_neither():
    """No operator of torch is called so yet."""
    integers, zero_dim = torch.arange(2), torch.tensor(1.0)
    assert _operators._tensor_of(0.5, [integers, zero_dim]).dtype == FP32
    assert _operators._tensor_of(0.5, [integers, zero_dim.half()]).dtype == FP16
    assert _operators._tensor_of(1, [integers > 0, integers[0].to(torch.int8)]).dtype == torch.int8


def test_fake_tensors_are_cast_as_real_ones():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), region(rule.op("softmax", compute="fp16")):
        assert torch.randn(4, 4).softmax(-1).dtype == FP16
        assert nn.Linear(4, 4)(torch.randn(2, 4)).dtype == BF16


def test_a_subclass_of_tensor_keeps_its_class():
    class Named(torch.Tensor):
        pass

    a = torch.randn(4, 4).as_subclass(Named)
    with region(rule.op("softmax", compute="fp16"), rule.op("add", compute="fp16")):
        assert type(a.softmax(-1)) is Named
        assert a.softmax(-1).dtype == FP16
        assert type(a + a) is Named
        assert (a + a).dtype == FP16


def test_sparse_tensors_follow_rules():
    a = torch.eye(4).half().to_sparse()
    with region(rule.op("add", compute="fp32"), rule.op("mm", compute="fp32")):
        assert (a + a).dtype == FP32
        assert torch.sparse.mm(a.float(), torch.ones(4, 4)).dtype == BF16
        assert torch.mm(a, torch.ones(4, 4)).dtype == FP32


def test_rules_for_recurrent_layers_decide_as_a_whole():
    x = torch.randn(3, 2, 4)
    lengths = nn.utils.rnn.pack_padded_sequence(x, [3, 2])
    lstm, gru = nn.LSTM(4, 4, 2, bidirectional=True), nn.GRU(4, 4)
    with region(rule.op("lstm", compute="fp32"), rule.op("gru", compute="fp16")):
        out, (hidden, cell) = lstm(x)
        packed = lstm(lengths)[0].data
        gated = gru(x)[0]
    assert same(out, lstm(x)[0])
    assert same(packed, lstm(lengths)[0].data)
    assert (hidden.dtype, cell.dtype) == (FP32, FP32)
    half = nn.GRU(4, 4).half()
    half.load_state_dict(gru.state_dict())
    assert same(gated, half(x.half())[0])
    out.sum().backward()
    assert all(weight.grad.dtype == FP32 for weight in lstm.parameters())


# ---- differentiation


def backward(function, x, w):
    return torch.autograd.grad(function(x, w).float().square().sum(), (x, w))


def double_backward(function, x, w):
    gradients = torch.autograd.grad(function(x, w).float().square().sum(), (x, w), create_graph=True)
    return torch.autograd.grad(sum(one.square().sum() for one in gradients), (x, w))


def forward_mode(function, x, w):
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(x.detach(), torch.ones(4, 8)), w.detach())
        return tuple(forward_ad.unpack_dual(dual))


@pytest.mark.parametrize("derivatives", [backward, double_backward, forward_mode])
def test_derivatives_are_those_of_casts_by_hand(derivatives):
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def ruled(a, b):
        with region(rule.op("linear", compute="fp16"), rule.op("softmax", compute="fp32", output="bf16")):
            return F.softmax(F.linear(a, b), -1)

    def cast_by_hand(a, b):
        return F.softmax(F.linear(a.half(), b.half()).float(), -1).bfloat16()

    assert_same(derivatives(ruled, x, w), derivatives(cast_by_hand, x, w))


# ---- operators of other libraries


@pytest.fixture(scope="module")
def library():
    """Three operators: one without autocast, one with, and one that writes to its argument."""

    @torch.library.custom_op("narrowcast_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.library.custom_op("narrowcast_tests::thrice", mutates_args=())
    def thrice(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @torch.library.custom_op("narrowcast_tests::double_", mutates_args=("x",))
    def double(x: torch.Tensor) -> None:
        x.mul_(2)

    for op in (twice, thrice):
        op.register_fake(torch.empty_like)
        op.register_autograd(lambda ctx, gradient: gradient * 7)
    thrice.register_autocast("cpu", BF16)
    return twice, thrice, double


def test_a_custom_operator_follows_its_rule(library):
    twice, thrice, _ = library
    x = torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", BF16):
        assert (twice(x).dtype, thrice(x).dtype) == (FP32, BF16)
    with region(
        rule.op("narrowcast_tests::twice", compute="fp16"),
        rule.op("narrowcast_tests::thrice", compute="fp32"),
    ):
        assert same(twice(x), x.half() * 2)
        assert same(thrice(x.half()), x.half().float() * 3)
        out = twice(x)
    out.float().sum().backward()
    assert same(x.grad, torch.full((4,), 7.0))
    with torch.autocast("cpu", BF16):
        assert (twice(x).dtype, thrice(x).dtype) == (FP32, BF16)


def test_a_custom_operator_beside_one_with_a_rule(library):
    _, thrice, _ = library
    x = torch.randn(4)
    with region(rule.op("narrowcast_tests::twice", compute="fp16")):
        assert thrice(x).dtype == BF16
    with region(rule.module("", op="narrowcast_tests::thrice", compute="fp32"), enabled=False):
        assert thrice(x).dtype == FP32


def test_kernels_that_could_not_be_installed_are_tried_again(monkeypatch):
    monkeypatch.setattr(_kernels, "register_kernel", None)
    policy = rules(rule.op("lgamma", compute="fp16"))
    with pytest.raises(TypeError), nc.autocast("cpu", policy=policy):
        pass
    monkeypatch.undo()
    with nc.autocast("cpu", policy=policy):
        assert torch.rand(4).lgamma().dtype == FP16
