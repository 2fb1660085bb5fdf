"""MPS, XPU, ROCm and extensions, on fake tensors: the rows of docs/supported.md.

Any build of torch makes fake tensors of any device, and calls that device's autocast kernels for them. They
have no values and no autograd.
"""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import narrowcast as nc
from narrowcast import rule
from narrowcast.casting.fp8._use import has_fp8
from narrowcast.errors import DeviceError, UnsupportedError
from narrowcast.machine import best_format
from narrowcast.observe.profiling import stamp
from narrowcast.policy import resolve
from narrowcast.scaling import Dynamic
from narrowcast.verify._diagnosis import SHARES_PHASES, ProfileProbe
from narrowcast.verify.runs import _probes

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def faked(monkeypatch, device):
    """Make a device present, as far as Python asks, and return the mode in which its tensors are fake."""
    monkeypatch.setattr(f"torch.{device}.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    # These ask the device itself.
    monkeypatch.setattr("torch.xpu.is_current_stream_capturing", lambda: False, raising=False)
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "__invert__", lambda tensor: tensor == 0)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda tensor, source: tensor)
    return FakeTensorMode()


def x_on(device):
    return torch.zeros(16, 16, device=f"{device}:0")


def network(device):
    """Layers with fake weights, and a list of the formats of their inputs and outputs at each call."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Softmax(-1))
    seen = []
    for layer in model:
        for name, weight in list(layer.named_parameters()):
            fake = torch.zeros(weight.shape, device=f"{device}:0")
            setattr(layer, name, torch.nn.Parameter(fake, requires_grad=False))
        layer.register_forward_hook(lambda _, args, output: seen.append((args[0].dtype, output.dtype)))
    return model, seen


@pytest.mark.parametrize(("device", "dtype"), [("cuda", FP16), ("xpu", BF16), ("mps", FP16)])
def test_presets_rules_and_bake_on_fake_devices(device, dtype, monkeypatch):
    low = {BF16: "bf16", FP16: "fp16"}[dtype]
    as_torch = [(FP32, dtype), (dtype, dtype), (dtype, FP32)]
    ruled = [rule.module("1", compute="fp32"), rule.op("softmax", compute="lower")]
    policies = {
        low: as_torch,
        nc.Policy(compute=low, tables="cpu"): [*as_torch[:2], (dtype, dtype)],
        nc.Policy(compute=low, rules=ruled): [(FP32, dtype), (FP32, FP32), (FP32, dtype)],
    }
    with faked(monkeypatch, device):
        for region in (torch.autocast(device, dtype), nc.autocast(device, dtype)):
            model, seen = network(device)
            with region:
                model(x_on(device))
            assert seen == as_torch
        for put in (nc.apply, nc.bake):
            for policy, expected in policies.items():
                model, seen = network(device)
                put(model, policy)
                model(x_on(device))
                assert seen == expected, (put, policy)


class Seen(TorchDispatchMode):
    """Collects the operators that were called, and refuses float64 on MPS, which has none."""

    operators = frozenset()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operators |= {func.name().removeprefix("aten::")}
        for made in tree_leaves(result):
            assert not (isinstance(made, torch.Tensor) and made.is_mps and made.dtype == FP64), func
        return result


@pytest.mark.parametrize("device", ["xpu", "mps"])
@pytest.mark.parametrize("scale", [Dynamic(), Dynamic(rule="megatron", hysteresis=2)])
def test_a_scaler_on_fake_devices_calls_torchs_kernels(device, scale, monkeypatch):
    with faked(monkeypatch, device):
        parameter = torch.nn.Parameter(x_on(device))
        parameter.grad = x_on(device)
        optimizer = torch.optim.AdamW([parameter], fused=True)  # others read whether they step

        def iteration(scaler, unscale, *args):
            with Seen() as seen:
                assert scaler.scale(x_on(device)).device.type == device
                unscale(optimizer, *args)
                scaler.step(optimizer)
                scaler.update()
            return seen.operators

        ours, theirs = nc.GradScaler(device, loss_scale=scale), torch.amp.GradScaler(device)
        kernels = {name for name in iteration(theirs, theirs.unscale_) if name.startswith("_amp_")}
        assert kernels == {"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"}
        kernels -= set() if scale.rule == "torch" else {"_amp_update_scale_"}  # torch has no such rule
        assert kernels <= iteration(ours, ours.unscale_)
        for order in (2.0, 3.0):
            ours = nc.GradScaler(device, loss_scale=scale)
            assert "_foreach_norm.Scalar" in iteration(ours, ours.clip_grad_norm_, 1.0, order)


def test_auto_follows_torch(monkeypatch):
    for device in ("xpu", "mps", "mtia"):
        assert resolve("auto", device) is torch.get_autocast_dtype(device)
    monkeypatch.setattr("torch.version.hip", "6.4")  # torch's own answer: every AMD GPU computes in bf16
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "AMD Instinct")
    assert best_format("cuda").because == "AMD Instinct computes in bf16; by the table, not measured"
    assert not has_fp8(torch.device("cuda"))


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_what_is_refused_on_other_devices(device, monkeypatch):
    for absent in (nc.GradScaler, nc.autocast):
        with pytest.raises(DeviceError, match=f"device '{device}' was asked for and"):
            absent(device)
    for unknown in (nc.GradScaler, nc.autocast):  # torch.autocast raises RuntimeError too
        with pytest.raises(RuntimeError, match=r"unknown device type 'cua'.* Known: cpu, cuda"):
            unknown("cua")
    with pytest.raises(DeviceError, match=f'expected "cpu" or "cuda" to profile, got "{device}"'):
        nc.observe.profile(device)
    fp8 = nc.Policy(compute="bf16", rules=[rule.op("linear", compute="fp8_tensorwise")])
    with faked(monkeypatch, device), pytest.warns(UserWarning, match="no fp8 in 2 linear layers: the first"):
        nc.apply(network(device)[0], fp8)
    probe = SimpleNamespace(_phases=SHARES_PHASES, _phase=1, _device=device)
    ProfileProbe._enter(probe)
    assert probe._problem == f"profiles are read on CPUs and CUDA, and the model is on {device!r}"


def test_run_and_compare_take_no_accelerator_for_a_cpu(monkeypatch):
    """Its format is chosen, times wait for it, and its memory is not that of the CPU."""
    waited, written = [], {}
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda *_, **__: torch.device("xpu"))
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: waited.append("xpu"))
    assert resolve(nc.Policy(compute="auto"), "xpu") is FP16
    assert stamp("cpu") <= stamp("xpu") <= stamp("xpu")
    assert waited == ["xpu", "xpu"]
    monkeypatch.setattr(_probes, "write_result", lambda _, result: written.update(result))
    live = SimpleNamespace(peak_bytes=8)
    probe = SimpleNamespace(_counted=threading.get_ident(), _elsewhere=False, _live=live, folder=None)
    with FakeTensorMode():
        _probes.MemoryProbe.called(probe, network("xpu")[0], (), {})
    _probes.MemoryProbe.finish(probe)
    assert written["peak_tensor_bytes"] is None
    assert written["reason"].endswith("or on another device than the CPU")


def extension(words):
    """Register a device as extensions do, with one autocast kernel, and use it."""
    torch.utils.rename_privateuse1_backend("mine")
    module = SimpleNamespace(is_available=lambda: True, get_amp_supported_dtype=lambda: [BF16])
    torch._register_device_module("mine", module)
    others, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")

    def mm(*args):
        with torch.autocast("mine", enabled=False):
            return torch.ops.aten.mm.default(*(one.to(torch.get_autocast_dtype("mine")) for one in args))

    own.impl("mm", mm, "AutocastPrivateUse1")
    auto = nc.autocast("mine", policy="auto")
    for region in (torch.autocast("mine", BF16), nc.autocast("mine", policy="bf16"), auto):
        with FakeTensorMode(), region:
            assert x_on("mine").mm(x_on("mine")).dtype == (FP16 if region is auto else BF16)
    for policy in ("safe", "O1"):
        with pytest.raises(UnsupportedError, match="expected a device whose autocast table is known"):
            nc.autocast("mine", policy=policy)


def test_a_device_of_an_extension(fork_server, tmp_path):
    ended = fork_server.run("test_devices:extension", [], folder=tmp_path, cwd=Path(__file__).parent)
    assert ended.returncode == 0, ended.stderr
