"""What a region refuses when it is made, where torch warns, or goes on."""

import pytest
import torch
from casting_cases import BF16, FP16

import narrowcast as nc
from narrowcast.errors import DeviceError, PolicyError


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("cdua",), DeviceError, "type 'cdua'.* Did you mean \"cuda\"[?] Known: cpu, cuda, xpu"),
        (("CPU",), DeviceError, 'Did you mean "cpu"'),
        (("mpss",), DeviceError, 'Did you mean "mps"'),
        (("meta",), DeviceError, "unknown device type 'meta'"),
        ((torch.device("cpu"),), ValueError, "Expected `device_type` of type `str`"),
        (("cpu", "bf16"), PolicyError, 'write policy="bf16" for a preset'),
        (("cpu", BF16, True, None, "bf16"), PolicyError, "expected a dtype or a policy, got both"),
        (("cpu", None, 1), TypeError, "expected enabled to be a bool, got 1 of type int"),
        (("cpu", None, True, 0), TypeError, "expected cache_enabled to be a bool, got 0 of type int"),
    ],
)
def test_what_is_refused(arguments, error, match):
    *arguments, policy = arguments if len(arguments) == 5 else (*arguments, None)
    with pytest.raises(error, match=match):
        nc.autocast(*arguments, policy=policy)


def test_cuda_without_cuda_is_an_error_that_says_the_fix(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="Use device 'cpu', or install a CUDA build"):
        nc.autocast("cuda", FP16)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        silent = torch.autocast("cuda", FP16)
    assert silent._enabled is False, "torch now refuses cuda without CUDA too: is our own check still needed?"
    with nc.autocast("cuda", FP16, enabled=False):
        assert not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == FP16


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_format_without_autocast(dtype):
    with pytest.raises(
        PolicyError, match=f"{dtype}. Supported: torch.bfloat16, torch.float16, torch.float32"
    ):
        nc.autocast("cpu", dtype)
    with pytest.warns(UserWarning, match="Disabling autocast"):
        assert torch.autocast("cpu", dtype)._enabled is False, "torch refuses it now"
    with nc.autocast("cpu", dtype, enabled=False):
        assert not torch.is_autocast_enabled("cpu")


def test_only_what_can_be_called_is_decorated():
    with pytest.raises(TypeError, match='to open a region write "with'):
        nc.autocast("cpu")(torch.ones(1))
