"""The example shows the dtypes of both libraries' regions, and what rounding does to the numbers."""

import re

import pytest
import torch
from example_runs import run, succeeded

LONG = {"bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dtypes_and_roundings(dtype, tmp_path):
    short = LONG[dtype]
    lines = succeeded(
        run("autocast_dtypes.py", "--dtype", dtype, "--size", "64", "--device", "cpu", folder=tmp_path)
    )
    assert lines[0] == f"x and y: float32 of 64 by 1 on cpu; regions in {dtype}"
    table = [re.split(r"\s{2,}", line.strip()) for line in lines[2:7]]
    assert table == [
        ["outside", "torch.autocast", "nc.autocast"],
        ["x @ y.T", "float32", short, short],
        ["x + y", "float32", "float32", "float32"],
        ["x @ y.T + x", "float32", "float32", "float32"],
        [f"{dtype} x @ y.T, fp32 region", short, short, "float32"],
    ]
    assert lines[7] == "afterwards x and y are float32 and float32"
    torch.manual_seed(0)
    x, y = (0.5 + torch.rand(64, 1) / 2 for _ in range(2))
    target = getattr(torch, short)
    expected = (x[0].to(target).double() * y[0].to(target).double()).to(target).item()
    assert lines[9] == f"first product: {(x[0] * y[0]).item():.8f} in float32, {expected:.8f} in {short}"
    assert lines[10] == f"  rounded by hand: {expected:.8f}, the same"
    worst, limit = map(float, re.findall(r"\d\.\d\de-\d\d", lines[11]))
    assert 0 < worst <= limit == float(f"{1.5 * torch.finfo(target).eps:.2e}")
    assert lines[12:] == ["  the same bits in both regions: True", "sums: the same bits everywhere: True"]
