"""Every op of the lists that torch tests its own autocast with: result format, and values bit for bit.

Each runs under torch.autocast, under nc.autocast and, outside regions, on inputs that were cast by hand.
"""

import sys
import types
import unittest
from collections.abc import Iterable
from importlib import import_module
from unittest import mock

import pytest
import torch

import narrowcast as nc

# The lists ship with torch; the file around them wants torch's test tools, which want packages that do not.
TOOLS = types.ModuleType("torch.testing._internal.common_utils")
TOOLS.TEST_WITH_ROCM = torch.version.hip is not None
TOOLS.TestCase = unittest.TestCase
with mock.patch.dict(sys.modules, {TOOLS.__name__: TOOLS}):
    LISTS = import_module("torch.testing._internal.autocast_test_lists")
AutocastCPUTestLists, AutocastTestLists = LISTS.AutocastCPUTestLists, LISTS.AutocastTestLists

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODULES = {"torch": torch, "nn": torch._C._nn, "linalg": torch._C._linalg, "methods": None}
# Which list needs what: the place its ops are found, and the format that they run in (None: the region's).
CPU_LISTS = {"torch_16": None, "torch_fp32": FP32, "nn_16": None, "nn_fp32": FP32}
CUDA_LISTS = {
    "torch_fp16": None,
    "torch_fp32": FP32,
    "nn_fp16": None,
    "nn_fp32": FP32,
    "linalg_fp16": None,
    "methods_fp16": None,
    "methods_fp32": FP32,
}


def lists_of(kind, device):
    torch.manual_seed(0)
    return kind(torch.device(device))


def entries(kind, names):
    """(list, position) of each op, with the op's name as the test's."""
    lists = lists_of(kind, "cpu")  # the same ops for every device; no device is touched at collection
    return [
        pytest.param(name, position, id=f"{name}-{entry[0]}")
        for name in names
        for position, entry in enumerate(getattr(lists, name))
    ]


def cast(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return type(value)(cast(part, dtype) for part in value)
    return value


def halves_as(value, dtype):
    """The lists carry bf16 inputs; fp16 regions take the same numbers in fp16."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in (BF16, FP16) else value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return type(value)(halves_as(part, dtype) for part in value)
    return value


def variants(op, module):
    """The function and the method of that name, as far as there are both."""
    found = []
    if module is not None and hasattr(module, op):
        found.append(getattr(module, op))
    if hasattr(torch.Tensor, op):
        found.append(lambda first, *rest, **kwargs: getattr(first, op)(*rest, **kwargs))
    assert found, op
    return found


def same(first, second):
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Iterable):
        return all(same(a, b) for a, b in zip(first, second, strict=True))
    return first == second


def formats(value):
    if isinstance(value, torch.Tensor):
        return {value.dtype} if value.is_floating_point() else set()
    return set().union(*map(formats, value)) if isinstance(value, Iterable) else set()


def check(entry, module, device, region, *, run_as, out=None):
    op, args, *kwargs = entry
    kwargs = kwargs[0] if kwargs and isinstance(kwargs[0], dict) else {}
    for variant in variants(op, module):
        torch.manual_seed(0)
        by_hand = variant(*cast(args, run_as), **kwargs)
        with nc.autocast(device, region):
            torch.manual_seed(0)
            ours = variant(*args, **kwargs)
        assert formats(ours) <= {out or run_as}
        assert same(ours, by_hand)
        if region != FP32:
            with torch.autocast(device, region):
                torch.manual_seed(0)
                theirs = variant(*args, **kwargs)
            assert same(ours, theirs)


@pytest.mark.parametrize("region", [BF16, FP16, FP32])
@pytest.mark.parametrize(("name", "position"), entries(AutocastCPUTestLists, CPU_LISTS))
def test_cpu(name, position, region):
    op, args, *rest = getattr(lists_of(AutocastCPUTestLists, "cpu"), name)[position]
    half = BF16 if region == FP32 else region
    if region == FP32:  # what the region is for: half inputs everywhere
        args = cast(args, BF16)
    run_as = CPU_LISTS[name] or region
    check((op, halves_as(args, half), *rest), MODULES[name.split("_")[0]], "cpu", region, run_as=run_as)


@pytest.mark.parametrize("region", [BF16, FP16, FP32])
@pytest.mark.parametrize(("name", "position"), entries(AutocastCPUTestLists, ["torch_need_autocast_promote"]))
def test_cpu_promotion(name, position, region):
    op, with_bf16, with_fp16 = getattr(lists_of(AutocastCPUTestLists, "cpu"), name)[position]
    args = with_fp16 if region == FP16 else with_bf16
    check((op, args), torch, "cpu", region, run_as=FP32)


@pytest.mark.parametrize("region", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("name", "position"),
    entries(AutocastCPUTestLists, ["torch_expect_builtin_promote", "methods_expect_builtin_promote"]),
)
def test_cpu_built_in_promotion(name, position, region):
    op, with_bf16, with_fp16, out = getattr(lists_of(AutocastCPUTestLists, "cpu"), name)[position]
    args = with_fp16 if region == FP16 else with_bf16
    check((op, args), torch if name.startswith("torch") else None, "cpu", region, run_as=FP32, out=out)


def cpu_half_ops():
    """The ops that the table of the CPU runs in the region's format, beside those that torch's list has."""
    x, w, b = torch.randn(2, 3, 8), torch.randn(3, 3, 3), torch.randn(3)
    heads = torch.randn(1, 2, 4, 8)
    return {
        "conv1d.padding": lambda c: torch.conv1d(c(x), c(w), c(b), padding="same"),
        "linalg_vecdot": lambda c: torch.linalg.vecdot(c(x), c(x)),
        "sdpa": lambda c: torch.nn.functional.scaled_dot_product_attention(c(heads), c(heads), c(heads)),
        "conv_transpose2d": lambda c: torch.conv_transpose2d(c(heads), c(torch.ones(2, 1, 2, 2))),
        "Linear with bias": lambda c: torch.nn.functional.linear(c(x), c(torch.eye(8)), c(torch.ones(8))),
    }


@pytest.mark.parametrize("name", cpu_half_ops())
@pytest.mark.parametrize("region", [BF16, FP16, FP32])
def test_cpu_half_ops_outside_torchs_list(name, region):
    half = BF16 if region == FP32 else FP32
    torch.manual_seed(1)
    op = cpu_half_ops()[name]
    by_hand = op(lambda t: t.to(half).to(region))
    with nc.autocast("cpu", region):
        inside = op(lambda t: t.to(half))
    assert inside.dtype == region
    assert torch.equal(inside, by_hand)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("region", [BF16, FP16, FP32])
@pytest.mark.parametrize(("name", "position"), entries(AutocastTestLists, CUDA_LISTS))
def test_cuda(name, position, region):
    op, args, *rest = getattr(lists_of(AutocastTestLists, "cuda"), name)[position]
    if name.endswith("fp16"):  # here the third entry says that torch's own test skips it
        if rest and rest[0]:
            pytest.skip(f"gpu: torch's own test of {op} skips it too")
        rest = []
    half = BF16 if region == BF16 else FP16
    if region == FP32:
        args = cast(args, FP16)
    run_as = CUDA_LISTS[name] or region
    check((op, halves_as(args, half), *rest), MODULES[name.split("_")[0]], "cuda", region, run_as=run_as)


@pytest.mark.gpu
@pytest.mark.parametrize("region", [BF16, FP16])
@pytest.mark.parametrize(("name", "position"), entries(AutocastTestLists, ["torch_need_autocast_promote"]))
def test_cuda_promotion(name, position, region):
    op, args = getattr(lists_of(AutocastTestLists, "cuda"), name)[position][:2]
    check((op, halves_as(args, region)), torch, "cuda", region, run_as=FP32)


@pytest.mark.gpu
def test_cuda_refuses_binary_cross_entropy():
    lists = lists_of(AutocastTestLists, "cuda")
    for op, args, module in lists.banned:
        with nc.autocast("cuda", FP16), pytest.raises(RuntimeError, match="unsafe to autocast"):
            getattr(module, op)(*args)
