"""Presets: what they are called, what they mean on a device, and how wrong names are refused."""

import sys

import pytest
import torch
from torch.nn import functional

import narrowcast as nc
from child_processes import output_of
from narrowcast.attach import Attachment
from narrowcast.errors import PolicyError
from narrowcast.machine import Choice, best_format
from narrowcast.policy import (
    PRESET_TABLE,
    PRESETS,
    Policy,
    as_policy,
    dtype_of,
    format_name,
    resolve,
    resolved,
    with_fp32_weights,
)

# Of torch, once: a bf16 LSTM without projections has no kernel of oneDNN on some CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
KNOWN = "Known: auto, bf16, fp16, fp32, safe, O0, O1, O2, O3."


def test_the_presets():
    assert list(PRESETS) == ["auto", "bf16", "fp16", "fp32", "safe", "O0", "O1", "O2", "O3"]
    for name in PRESETS:
        policy = Policy.preset(name)
        assert policy == as_policy(name) == as_policy(policy) == Policy.preset(name)
        assert as_policy(policy) is policy
        assert as_policy(name) is as_policy(name)  # so that its kernels are made once
    for name in ("auto", *DTYPES):
        assert Policy.preset(name) == Policy(compute=name)
        assert str(Policy.preset(name)).replace("\n   ", "") == f"{name}: {PRESETS[name]}"
    # apex's O0 is FP32, and no other two are the same.
    assert Policy.preset("O0") == Policy.preset("fp32")
    assert len({Policy.preset(name) for name in PRESETS}) == len(PRESETS) - 1
    assert Policy.preset("O2") == Policy(compute="auto", master_weights=True)
    assert Policy.preset("O3") == Policy(compute="auto", low_weights=True)


def test_which_presets_scripts_can_have():
    for name, preset in PRESET_TABLE.items():
        assert preset.meaning == PRESETS[name]
        assert preset.for_scripts != Policy.preset(name).holds_low_weights


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "xpu"])
@pytest.mark.parametrize("name", DTYPES)
def test_a_named_format_is_itself_on_every_device(name, device_type):
    assert resolve(name, device_type) is DTYPES[name]
    assert resolve(Policy.preset(name), device_type) is DTYPES[name]
    assert format_name(DTYPES[name]) == name
    assert dtype_of(name) is DTYPES[name]


def test_auto_is_what_the_device_computes_fast(monkeypatch):
    assert resolve("auto", "cpu") is DTYPES[best_format("cpu").format]
    for name, dtype in DTYPES.items():
        choice = Choice(format=name, because="said so")
        monkeypatch.setattr("narrowcast.machine.best_format", lambda _, choice=choice: choice)
        assert resolve("auto", "cpu") is dtype


@pytest.mark.gpu
def test_auto_on_a_gpu():
    assert resolve("auto", "cuda") is DTYPES[best_format("cuda").format]


def test_other_formats_have_the_name_that_torch_gives_them():
    assert format_name(torch.float64) == "float64"
    assert format_name(torch.float8_e4m3fn) == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("bf61", 'Did you mean "bf16"? '),
        ("FP16", 'Did you mean "fp16"? '),
        ("fp8", ""),
        ("atuo", 'Did you mean "auto"? '),
        ("o1", 'Did you mean "O1"? '),
        ("02", 'Did you mean "O2"? '),
        ("sfae", 'Did you mean "safe"? '),
        ("16-mixed", 'Did you mean "fp16"? '),
        ("bfloat16", 'Did you mean "bf16"? '),
        ("", ""),
    ],
)
def test_an_unknown_name_is_refused_with_near_ones(name, guess):
    for make in (Policy.preset, as_policy, with_fp32_weights, lambda name: resolve(name, "cpu")):
        with pytest.raises(PolicyError) as refused:
            make(name)
        assert str(refused.value) == f"unknown policy {name!r}. {guess}{KNOWN}"


@pytest.mark.parametrize("given", [None, 16, torch.float16, ["fp16"]])
def test_what_is_no_name_is_refused(given):
    with pytest.raises(PolicyError) as refused:
        as_policy(given)
    meant = '; write "fp16"' if given == torch.float16 else ""
    assert str(refused.value) == f"expected a Policy, the name of a preset or a file, got {given!r}{meant}"
    with pytest.raises(PolicyError, match=r"^unknown policy "):
        Policy.preset(given)


# ---- weights in a low format


def test_low_weights_are_refused_where_nobody_holds_them():
    cases = {
        "O2": (Policy(compute="fp16", master_weights=True), " and updates fp32 master weights"),
        "O3": (Policy(compute="fp16", low_weights=True), ""),
    }
    for name, (in_fp16, masters) in cases.items():
        expected = (
            f"policy '{name}' holds the model's weights in a low format{masters}, which only nc.Stepper "
            f"does: nc.Stepper(model, optimizer, policy='{name}'). Here use 'bf16' or 'fp16', which leave "
            "the weights in fp32"
        )
        for policy in (name, in_fp16):
            for ask in (with_fp32_weights, lambda policy: resolve(policy, "cpu")):
                with pytest.raises(PolicyError) as refused:
                    ask(policy)
                assert str(refused.value) == expected
        assert resolve(in_fp16, "cpu", low_weights=True) is FP16
        assert resolve(name, "cpu", low_weights=True) is resolve("auto", "cpu")
    assert with_fp32_weights("safe") is as_policy("safe")


def test_they_are_refused_by_a_region_and_by_an_attachment():
    for name in ("O2", "O3"):
        with pytest.raises(PolicyError, match=r"which only nc\.Stepper does"):
            nc.autocast("cpu", policy=name)
        with pytest.raises(PolicyError, match=r"which only nc\.Stepper does"):
            Attachment(name)


# ---- safe: norms and binary_cross_entropy (mixed inputs: test_safe_preset.py)


def in_bf16(name):
    return Policy(compute="bf16", tables=Policy.preset(name).tables, rules=Policy.preset(name).rules)


NORMS = [(functional.layer_norm, (8,)), (functional.rms_norm, (8,)), (functional.group_norm, 2)]


def test_safe_norms_compute_wide_and_hand_on_narrow():
    x, weight = torch.randn(3, 8) * 3, torch.randn(8)
    with nc.autocast("cpu", policy=in_bf16("safe")):
        for given in (x, x.to(BF16)):
            for norm, shape in NORMS:
                ours, exact = norm(given, shape, weight), norm(given.double(), shape, weight.double())
                assert ours.dtype == BF16
                # Half a unit in the last of bf16's 8 digits, and what fp32 rounds before.
                assert torch.allclose(ours.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("tables", ["native", "cuda"])
def test_safe_binary_cross_entropy_is_in_fp32(tables):
    policy = Policy(compute="bf16", tables=tables, rules=Policy.preset("safe").rules)
    p, y = torch.rand(16), torch.rand(16).round()
    with nc.autocast("cpu", policy=policy):
        loss = functional.binary_cross_entropy(p.to(BF16), y)
    assert loss.dtype == FP32
    assert torch.equal(loss, functional.binary_cross_entropy(p.to(BF16).float(), y))


# ---- O1: apex's lists, as far as they are operators

X, POSITIVE, UNIT = torch.randn(4, 6), torch.rand(4, 6) + 0.5, torch.rand(4, 6)
TARGET, SIGNS = torch.randint(6, (4,)), torch.randint(2, (4,)) * 2 - 1
IMAGE, GRID = torch.randn(1, 2, 6, 6), torch.rand(1, 3, 3, 2)
LABELS, LOG_P = torch.randint(2, (4, 6)).float(), torch.randn(5, 1, 3).log_softmax(2)
APEX_FP32 = {
    "interpolate": lambda h: functional.interpolate(h(IMAGE), scale_factor=2, mode="bilinear"),
    "interpolate nearest": lambda h: functional.interpolate(h(IMAGE), scale_factor=2),
    "grid_sample": lambda h: functional.grid_sample(h(IMAGE), h(GRID), align_corners=False),
    "softplus": lambda h: functional.softplus(h(X)),
    "softmin": lambda h: functional.softmin(h(X), -1),
    "log_softmax": lambda h: functional.log_softmax(h(X), -1),
    "softmax": lambda h: functional.softmax(h(X), -1),
    "gelu": lambda h: functional.gelu(h(X)),
    "layer_norm": lambda h: functional.layer_norm(h(X), (6,)),
    "group_norm": lambda h: functional.group_norm(h(X), 2),
    "normalize": lambda h: functional.normalize(h(X)),
    "cosine_similarity": lambda h: functional.cosine_similarity(h(X), h(POSITIVE)),
    "poisson_nll_loss": lambda h: functional.poisson_nll_loss(h(X), h(UNIT)),
    "cosine_embedding_loss": lambda h: functional.cosine_embedding_loss(h(X), h(POSITIVE), SIGNS),
    "cross_entropy": lambda h: functional.cross_entropy(h(X), TARGET),
    "cross_entropy of probabilities": lambda h: functional.cross_entropy(h(X), h(UNIT), label_smoothing=0.1),
    "hinge_embedding_loss": lambda h: functional.hinge_embedding_loss(h(X), SIGNS[:, None]),
    "kl_div": lambda h: functional.kl_div(h(X), h(UNIT), reduction="batchmean"),
    "l1_loss": lambda h: functional.l1_loss(h(X), h(UNIT)),
    "mse_loss": lambda h: functional.mse_loss(h(X), h(UNIT)),
    "margin_ranking_loss": lambda h: functional.margin_ranking_loss(h(X[:, 0]), h(UNIT[:, 0]), SIGNS),
    "multilabel_margin_loss": lambda h: functional.multilabel_margin_loss(h(X), LABELS.long()),
    "multilabel_soft_margin_loss": lambda h: functional.multilabel_soft_margin_loss(h(X), h(LABELS)),
    "multi_margin_loss": lambda h: functional.multi_margin_loss(h(X), TARGET),
    "nll_loss": lambda h: functional.nll_loss(h(X), TARGET),
    "binary_cross_entropy_with_logits": lambda h: functional.binary_cross_entropy_with_logits(
        h(X), h(LABELS)
    ),
    "smooth_l1_loss": lambda h: functional.smooth_l1_loss(h(X), h(UNIT)),
    "soft_margin_loss": lambda h: functional.soft_margin_loss(h(X), SIGNS[:, None].float()),
    "triplet_margin_loss": lambda h: functional.triplet_margin_loss(h(X), h(UNIT), h(POSITIVE)),
    "ctc_loss": lambda h: functional.ctc_loss(
        h(LOG_P), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])
    ),
    **{
        name: lambda h, name=name: getattr(torch, name)(h(UNIT))
        for name in ("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal")
    },
    **{name: lambda h, name=name: getattr(torch, name)(h(UNIT)) for name in ("rsqrt", "sinh", "tan")},
    **{
        name: lambda h, name=name: getattr(torch, name)(h(X))
        for name in ("norm", "prod", "std", "sum", "var")
    },
    **{
        f"{name} over a dimension": lambda h, name=name: getattr(torch, name)(h(X), dim=1)
        for name in ("cumprod", "cumsum", "norm", "prod", "std", "sum", "var")
    },
    "pow": lambda h: h(POSITIVE) ** 2.5,
    "pow of tensors": lambda h: h(POSITIVE) ** h(X),
    "pow of a number": lambda h: 2.5 ** h(X),
    "dist": lambda h: torch.dist(h(X), h(UNIT)),
    "renorm": lambda h: torch.renorm(h(X), 2, 0, 1.0),
}


@pytest.mark.parametrize("name", APEX_FP32)
def test_o1_has_apexs_fp32_functions(name):
    call = APEX_FP32[name]
    with nc.autocast("cpu", policy=in_bf16("O1")):
        ours = call(lambda t: t.to(BF16))
    assert ours.dtype == FP32
    # What apex does: the function as it is, on inputs that were cast to fp32. Sums differ in their order, and
    # multilabel_soft_margin_loss is in fp32 from its first function on, which is after a negation.
    assert torch.allclose(ours, call(lambda t: t.to(BF16).float()), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: functional.linear(X, torch.randn(3, 6)),
        lambda: functional.conv2d(IMAGE, torch.randn(3, 2, 3, 3)),
        lambda: functional.conv_transpose2d(IMAGE, torch.randn(2, 3, 3, 3)),
        lambda: torch.conv_tbc(torch.randn(5, 1, 2), torch.randn(3, 2, 4), torch.randn(4)),
        lambda: functional.prelu(X, torch.ones(6)),
        lambda: torch.addmm(torch.randn(4, 4), X, X.T),
        lambda: torch.addmv(torch.randn(4), X, X[0]),
        lambda: torch.addr(X, X[:, 0], X[0]),
        lambda: X @ X.T,
        lambda: torch.mm(X, X.T),
        lambda: torch.mv(X, X[0]),
        lambda: torch.bmm(X[None], X.T[None]),
        lambda: torch.baddbmm(torch.randn(1, 4, 4), X[None], X.T[None]),
        lambda: torch.addbmm(torch.randn(4, 4), X[None], X.T[None]),
        lambda: torch.nn.LSTMCell(6, 3)(X)[0],
        lambda: torch.nn.GRUCell(6, 3)(X),
        lambda: torch.nn.RNNCell(6, 3)(X),
        lambda: torch.nn.LSTM(6, 3, proj_size=2)(X[None])[0],
        lambda: torch.nn.LSTM(6, 3, bidirectional=True, proj_size=2)(X[None])[0],
        lambda: torch.nn.RNN(6, 3)(X[None])[0],
    ],
)
def test_o1_has_apexs_half_functions(call):
    with nc.autocast("cpu", policy=in_bf16("O1")):
        assert call().dtype == BF16


@pytest.mark.parametrize("name", ["relu", "sigmoid", "tanh", "dropout", "max_pool2d", "avg_pool2d"])
def test_what_is_on_no_list_stays_in_its_format(name):
    call = getattr(functional, name)
    args = (2,) if name.endswith("pool2d") else ()
    with nc.autocast("cpu", policy=in_bf16("O1")):
        for dtype in (BF16, FP32):
            assert call(IMAGE.to(dtype), *args).dtype == dtype


def test_o1_promotes_as_apex_does():
    narrow, wide = X.to(BF16), UNIT
    calls = [
        lambda a, b: torch.addcdiv(a, a, b),
        lambda a, b: torch.addcmul(a, a, b),
        torch.atan2,
        lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=1),
        lambda a, b: functional.bilinear(a, b, torch.randn(2, 6, 6)),
        lambda a, b: torch.dot(a[0], b[0]),
        torch.add,
        torch.div,
        torch.mul,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.stack([a, b]),
    ]
    with nc.autocast("cpu", policy=in_bf16("O1")):
        for call in calls:
            assert call(narrow, wide).dtype == call(wide, narrow).dtype == FP32
            if call is not calls[4]:  # its weight is in fp32
                assert call(narrow, narrow).dtype == BF16
        assert torch.equal(narrow.float(), narrow)
        assert not (narrow < narrow.float()).any()


def test_o1_refuses_what_apex_bans():
    with nc.autocast("cpu", policy=in_bf16("O1")), pytest.raises(nc.NarrowcastError, match="is refused here"):
        functional.binary_cross_entropy(UNIT.to(BF16), LABELS)


def test_rules_of_presets_are_all_of_some_use():
    """None says what the tables of CPU and CUDA both say already."""
    for name in ("safe", "O1"):
        policy = Policy.preset(name)
        for one in policy.rules:
            kinds = {
                resolved(Policy(compute="bf16", tables=policy.tables), device, "bf16").table.get(one.op)
                for device in ("cpu", "cuda")
            }
            assert kinds != {one.compute} or one.output is not None, one


def test_presets_with_rules_are_made_without_a_region():
    """In a fresh process, on a torch that may lack operators of a later one."""
    code = "from narrowcast.policy import *; [str(Policy.preset(name)) for name in PRESETS]"
    output_of([sys.executable, "-c", code])
