"""The lists of ops that torch tests its own autocast with, and what is compared about each."""

from collections.abc import Iterable

import pytest
import torch

from autocast_lists import LISTS

AutocastCPUTestLists, AutocastTestLists = LISTS.AutocastCPUTestLists, LISTS.AutocastTestLists

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODULES = {"torch": torch, "nn": torch._C._nn, "linalg": torch._C._linalg, "methods": None}
# Which list needs what: the place its ops are found, and the format that they run in (None: the region's).
CPU_LISTS = {"torch_16": None, "torch_fp32": FP32, "nn_16": None, "nn_fp32": FP32}
CPU_PROMOTIONS = (
    "torch_need_autocast_promote",
    "torch_expect_builtin_promote",
    "methods_expect_builtin_promote",
)
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


def cast(value, dtype, only=None):
    """All floating tensors in a value, or those of the formats ``only``, in another format."""
    if isinstance(value, torch.Tensor):
        wanted = value.dtype in only if only else value.is_floating_point()
        return value.to(dtype) if wanted else value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return type(value)(cast(part, dtype, only) for part in value)
    return value


def halves_as(value, dtype):
    """The lists carry bf16 inputs; fp16 regions take the same numbers in fp16."""
    return cast(value, dtype, only=(BF16, FP16))


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


def check(entry, module, regions, *, run_as, out=None):
    """In each of ``regions`` every way to call an op is as on inputs that were cast to ``run_as`` by hand."""
    op, args, *kwargs = entry
    kwargs = kwargs[0] if kwargs and isinstance(kwargs[0], dict) else {}
    for variant in variants(op, module):
        torch.manual_seed(0)
        by_hand = variant(*cast(args, run_as), **kwargs)
        for region in regions:
            with region():
                torch.manual_seed(0)
                inside = variant(*args, **kwargs)
            assert formats(inside) <= {out or run_as}
            assert same(inside, by_hand)


def cpu_entries():
    return entries(AutocastCPUTestLists, [*CPU_LISTS, *CPU_PROMOTIONS])


def check_cpu_entry(name, position, region, regions):
    """``check`` of one op of the CPU's lists, whose result is as in a region of format ``region``."""
    entry = getattr(lists_of(AutocastCPUTestLists, "cpu"), name)[position]
    if name in CPU_LISTS:
        op, args, *rest = entry
        if region == FP32:  # what the region is for: half inputs everywhere
            args = cast(args, BF16)
        args = halves_as(args, BF16 if region == FP32 else region)
        run_as = CPU_LISTS[name] or region
        check((op, args, *rest), MODULES[name.split("_")[0]], regions, run_as=run_as)
        return
    op, with_bf16, with_fp16, *out = entry
    args = with_fp16 if region == FP16 else with_bf16
    module = torch if name.startswith("torch") else None
    check((op, args), module, regions, run_as=FP32, out=out[0] if out else None)
