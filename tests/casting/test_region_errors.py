"""What a region refuses when it is made, with the whole message."""

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import DeviceError, PolicyError


def test_a_device_that_is_no_string():
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
        nc.autocast(torch.device("cpu"))
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
        torch.autocast(torch.device("cpu"))


@pytest.mark.parametrize(("device", "guess"), [("cdua", "cuda"), ("CPU", "cpu"), ("mpss", "mps")])
def test_an_unknown_device_names_the_near_one(device, guess):
    with pytest.raises(DeviceError) as raised:
        nc.autocast(device)
    assert str(raised.value) == (
        f'expected a device type that torch can autocast, got {device!r}. Did you mean "{guess}"? '
        "Known: cpu, cuda, xpu, mps, hpu, mtia, maia, xla, ipu."
    )
    assert isinstance(raised.value, ValueError)
    with pytest.raises(RuntimeError):
        torch.autocast(device)


def test_a_device_that_torch_knows_and_cannot_autocast():
    with pytest.raises(DeviceError, match="got 'meta'"):
        nc.autocast("meta")


def test_cuda_without_cuda_is_an_error_that_says_the_fix(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError) as raised:
        nc.autocast("cuda", torch.float16)
    assert str(raised.value) == (
        'expected a CUDA device for autocast("cuda"), got a machine or a build of torch without one; '
        'write autocast("cpu"), or autocast("cuda", enabled=torch.cuda.is_available()) to go on in fp32'
    )
    with pytest.warns(UserWarning, match="CUDA is not available"):
        silent = torch.autocast("cuda", torch.float16)
    assert silent._enabled is False, "torch now refuses cuda without CUDA too: is our own check still needed?"


def test_cuda_without_cuda_is_nothing_when_disabled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with nc.autocast("cuda", torch.float16, enabled=False):
        assert not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.float16


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_format_without_autocast(dtype):
    with pytest.raises(PolicyError) as raised:
        nc.autocast("cpu", dtype)
    assert str(raised.value) == (
        f"expected a format that cpu can autocast to, got {dtype}. "
        "Supported: torch.bfloat16, torch.float16, torch.float32"
    )
    with pytest.warns(UserWarning, match="Disabling autocast"):
        assert torch.autocast("cpu", dtype)._enabled is False, "torch refuses it now"
    with nc.autocast("cpu", dtype, enabled=False):
        assert not torch.is_autocast_enabled("cpu")


def test_a_preset_given_as_dtype_is_told_its_place():
    with pytest.raises(PolicyError) as raised:
        nc.autocast("cpu", "bf16")
    assert str(raised.value) == (
        "expected a format that cpu can autocast to, got 'bf16'; write policy=\"bf16\" for a preset. "
        "Supported: torch.bfloat16, torch.float16, torch.float32"
    )


def test_dtype_and_policy_are_one_question():
    with pytest.raises(PolicyError) as raised:
        nc.autocast("cpu", torch.bfloat16, policy="bf16")
    assert str(raised.value) == (
        "expected a dtype or a policy, got both: torch.bfloat16 and 'bf16'; leave one of them out"
    )


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [({"enabled": 1}, "enabled", "1"), ({"cache_enabled": 0}, "cache_enabled", "0")],
)
def test_flags_are_bools(arguments, name, value):
    with pytest.raises(TypeError) as raised:
        nc.autocast("cpu", **arguments)
    assert str(raised.value) == f"expected {name} to be a bool, got {value} of type int"
    with pytest.raises(TypeError), torch.autocast("cpu", **arguments):
        pass
    torch.set_autocast_enabled("cpu", False)  # torch had set half of its state by then
    torch.set_autocast_cache_enabled(True)
    if name == "cache_enabled":
        torch.autocast_decrement_nesting()


def test_only_what_can_be_called_is_decorated():
    with pytest.raises(TypeError) as raised:
        nc.autocast("cpu")(torch.ones(1))
    assert str(raised.value) == (
        "expected a callable to decorate, got Tensor; to open a region write \"with nc.autocast('cpu'):\""
    )
