"""Policies: what they are called, what they mean on a device, and how wrong ones are refused."""

import copy
import dataclasses
import pickle

import pytest
import torch

import narrowcast as nc
from narrowcast.attach import Attachment
from narrowcast.errors import PolicyError
from narrowcast.machine import Choice, best_format
from narrowcast.policy import PRESETS, Policy, as_policy, format_name, resolve

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def test_the_presets():
    assert set(PRESETS) == {"auto", *DTYPES, "O2"}
    for name in PRESETS:
        policy = Policy.preset(name)
        made = Policy(compute=name) if name != "O2" else Policy(compute="auto", master_weights=True)
        assert policy == made == as_policy(name) == as_policy(policy)
        assert as_policy(policy) is policy
        assert str(policy) == f"{name}: {PRESETS[name]}"
    assert len({Policy.preset(name) for name in PRESETS}) == len(PRESETS)


def test_a_policy_is_a_value():
    policy = Policy(compute="fp16", master_weights=True)
    assert [field.name for field in dataclasses.fields(Policy)] == ["compute", "master_weights"]
    journeys = [
        copy.copy(policy),
        copy.deepcopy(policy),
        pickle.loads(pickle.dumps(policy)),
        dataclasses.replace(policy),
        Policy(**dataclasses.asdict(policy)),
        eval(repr(policy), {"Policy": Policy}),
    ]
    for arrived in journeys:
        assert (arrived, hash(arrived)) == (policy, hash(policy))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.compute = "bf16"
    with pytest.raises(TypeError):
        Policy("fp16")


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "xpu"])
@pytest.mark.parametrize("name", DTYPES)
def test_a_named_format_is_itself_on_every_device(name, device_type):
    assert resolve(name, device_type) is DTYPES[name]
    assert resolve(Policy.preset(name), device_type) is DTYPES[name]
    assert format_name(DTYPES[name]) == name


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
        ("O1", 'Did you mean "auto"? '),
        ("16-mixed", 'Did you mean "fp16"? '),
        ("", ""),
    ],
)
def test_an_unknown_name_is_refused_with_near_ones(name, guess):
    for make in (Policy.preset, as_policy, lambda name: Policy(compute=name), lambda n: resolve(n, "cpu")):
        with pytest.raises(PolicyError) as refused:
            make(name)
        expected = f"unknown policy {name!r}. {guess}Known: auto, bf16, fp16, fp32, O2."
        assert str(refused.value) == expected


@pytest.mark.parametrize("given", [None, 16, torch.float16, ["fp16"]])
def test_what_is_no_name_is_refused(given):
    with pytest.raises(PolicyError) as refused:
        as_policy(given)
    meant = '; write "fp16"' if given == torch.float16 else ""
    assert str(refused.value) == f"expected a Policy or the name of a preset, got {given!r}{meant}"
    with pytest.raises(PolicyError, match="Known: auto, bf16, fp16, fp32"):
        Policy(compute=given)


def test_master_weights_are_refused_where_nobody_keeps_them():
    for policy in ("O2", Policy(compute="fp16", master_weights=True)):
        with pytest.raises(PolicyError, match=r"which only nc\.Stepper does"):
            resolve(policy, "cpu")
    o2_in_fp16 = Policy(compute="fp16", master_weights=True)
    assert resolve(o2_in_fp16, "cpu", master_weights=True) is torch.float16
    assert resolve("O2", "cpu", master_weights=True) is resolve("auto", "cpu")
    assert str(o2_in_fp16) == f"O2 in fp16: {PRESETS['O2']}"
    with pytest.raises(PolicyError, match="compute must not be 'fp32'"):
        Policy(compute="fp32", master_weights=True)
    with pytest.raises(PolicyError, match="expected master_weights to be a bool, got 1"):
        Policy(compute="fp16", master_weights=1)


def test_o2_is_refused_by_a_region_and_by_an_attachment():
    with pytest.raises(PolicyError, match=r"which only nc\.Stepper does"):
        nc.autocast("cpu", policy="O2")
    with pytest.raises(PolicyError, match=r"which only nc\.Stepper does"):
        Attachment("O2")
