"""Every op of the lists that torch tests its own autocast with: result format, and values bit for bit.

Each runs under torch.autocast, under nc.autocast and, outside regions, on inputs that were cast by hand.
"""

import pytest
import torch
from op_lists import (
    BF16,
    CUDA_LISTS,
    FP16,
    FP32,
    MODULES,
    AutocastTestLists,
    cast,
    check,
    check_cpu_entry,
    cpu_entries,
    entries,
    halves_as,
    lists_of,
)

import narrowcast as nc


def both(device, region):
    """Ours and torch's, which has no region in float32."""
    regions = [lambda: nc.autocast(device, region)]
    if region != FP32:
        regions.append(lambda: torch.autocast(device, region))
    return regions


@pytest.mark.parametrize("region", [BF16, FP16, FP32])
@pytest.mark.parametrize(("name", "position"), cpu_entries())
def test_each_op_of_the_cpu_list_casts_as_torch_says(name, position, region):
    check_cpu_entry(name, position, region, both("cpu", region))


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
def test_each_op_of_the_cuda_list_casts_as_torch_says(name, position, region):
    op, args, *rest = getattr(lists_of(AutocastTestLists, "cuda"), name)[position]
    if name.endswith("fp16"):  # here the third entry says that torch's own test skips it
        if rest and rest[0]:
            pytest.skip(f"gpu: torch's own test of {op} skips it too")
        rest = []
    half = BF16 if region == BF16 else FP16
    if region == FP32:
        args = cast(args, FP16)
    run_as = CUDA_LISTS[name] or region
    check(
        (op, halves_as(args, half), *rest), MODULES[name.split("_")[0]], both("cuda", region), run_as=run_as
    )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("region", [BF16, FP16])
@pytest.mark.parametrize(("name", "position"), entries(AutocastTestLists, ["torch_need_autocast_promote"]))
def test_each_op_that_promotes_on_cuda_does(name, position, region):
    op, args = getattr(lists_of(AutocastTestLists, "cuda"), name)[position][:2]
    check((op, halves_as(args, region)), torch, both("cuda", region), run_as=FP32)


@pytest.mark.gpu
def test_cuda_refuses_binary_cross_entropy():
    lists = lists_of(AutocastTestLists, "cuda")
    for op, args, module in lists.banned:
        with nc.autocast("cuda", FP16), pytest.raises(RuntimeError, match="unsafe to autocast"):
            getattr(module, op)(*args)
