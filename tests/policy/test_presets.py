"""Presets: their names, their meaning on a device, and the errors for wrong names."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import narrowcast as nc
from listed_calls import FUNCTIONAL, TORCH, prepared
from narrowcast.apex.amp.lists import functional_overrides, torch_overrides
from narrowcast.attach import Attachment
from narrowcast.errors import PolicyError
from narrowcast.machine import Choice, best_format
from narrowcast.policy import (
    PRESETS,
    Policy,
    as_policy,
    dtype_of,
    format_name,
    resolve,
    with_fp32_weights,
)

# Of torch, once: a bf16 LSTM without projections has no kernel of oneDNN on some CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
KNOWN = "Known: auto, bf16, fp16, fp32, safe, O0, O1, O2, O3."


def test_presets_are_policies_of_which_o0_and_fp32_are_equal():
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


GUESSES = {"bf61": "bf16", "FP16": "fp16", "o1": "O1", "02": "O2", "sfae": "safe", "16-mixed": "fp16"}


@pytest.mark.parametrize("name", [*GUESSES, "fp8", ""])
def test_an_unknown_name_is_refused_with_near_ones(name):
    guess = f'Did you mean "{GUESSES[name]}"? ' if name in GUESSES else ""
    for make in (Policy.preset, as_policy, with_fp32_weights, lambda name: resolve(name, "cpu")):
        with pytest.raises(PolicyError) as refused:
            make(name)
        assert str(refused.value) == f"unknown policy {name!r}. {guess}{KNOWN}"


@pytest.mark.parametrize("given", [None, 16, torch.float16, ["fp16"]])
def test_other_types_are_no_policy(given):
    with pytest.raises(PolicyError) as refused:
        as_policy(given)
    meant = '; write "fp16"' if given == torch.float16 else ""
    assert str(refused.value) == f"expected a Policy, the name of a preset or a file, got {given!r}{meant}"
    with pytest.raises(PolicyError, match=r"^unknown policy "):
        Policy.preset(given)


# ---- weights in a low format


@pytest.mark.parametrize("name", ["O2", "O3"])
def test_low_weights_are_refused_outside_of_a_stepper(name):
    in_fp16 = replace(Policy.preset(name), compute="fp16")
    weights = {"O2": "fp32 master weights", "O3": "low weights"}[name]
    for policy, called in ((name, name), (in_fp16, f"fp16 with {weights}")):
        for ask in (
            with_fp32_weights,
            lambda policy: resolve(policy, "cpu"),
            lambda policy: nc.autocast("cpu", policy=policy),
        ):
            with pytest.raises(PolicyError, match=rf"'{called}' holds .*, which only nc\.Stepper does"):
                ask(policy)
    with pytest.raises(PolicyError, match=r"which only nc\.Stepper does"):
        Attachment(name)
    assert resolve(in_fp16, "cpu", low_weights=True) is FP16
    assert resolve(name, "cpu", low_weights=True) is resolve("auto", "cpu")
    assert with_fp32_weights("safe") is as_policy("safe")


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

X = torch.randn(4, 6)
CALLS = {**TORCH, **FUNCTIONAL}
# Functions in Python around operators that the rules do not cast.
NOT_BY_OPERATORS = {"local_response_norm"}
FP32_NAMES = {*functional_overrides.FP32_FUNCS, *torch_overrides.FP32_FUNCS} - NOT_BY_OPERATORS
HALF_NAMES = {*functional_overrides.FP16_FUNCS, *torch_overrides.FP16_FUNCS}


def is_floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def call(name, *dtypes, widened=False):
    """Call a listed function with its floating tensors in ``dtypes``, widened to float32 on request."""
    function, arguments = prepared(CALLS[name], *dtypes)
    return function(*(one.float() if widened and is_floating(one) else one for one in arguments))


@pytest.mark.parametrize("name", sorted(FP32_NAMES))
def test_o1_has_apexs_fp32_functions(name):
    with nc.autocast("cpu", policy=in_bf16("O1")):
        ours = call(name, BF16)
    assert ours.dtype == FP32
    # What apex does: the function as it is, on inputs that were cast to fp32. Sums differ in their order.
    # multilabel_soft_margin_loss subtracts its target from 1 before it is in fp32.
    close = 2**-8 if name == "multilabel_soft_margin_loss" else 1e-6
    assert torch.allclose(ours, call(name, BF16, widened=True), rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("name", sorted(HALF_NAMES))
def test_o1_has_apexs_half_functions(name):
    with nc.autocast("cpu", policy=in_bf16("O1")):
        assert call(name, FP32).dtype == BF16


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.LSTMCell(6, 3),
        torch.nn.GRUCell(6, 3),
        torch.nn.RNNCell(6, 3),
        torch.nn.LSTM(6, 3, proj_size=2),
        torch.nn.LSTM(6, 3, bidirectional=True, proj_size=2),
        torch.nn.RNN(6, 3),
    ],
    ids=["LSTMCell", "GRUCell", "RNNCell", "LSTM", "LSTM both ways", "RNN"],
)
def test_o1_runs_recurrent_layers_in_half(layer):
    with nc.autocast("cpu", policy=in_bf16("O1")):
        output = layer(X if "Cell" in type(layer).__name__ else X[None])
    assert (output if isinstance(output, torch.Tensor) else output[0]).dtype == BF16
