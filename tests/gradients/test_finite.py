"""The finite check against what torch.isfinite says element by element."""

import torch

from narrowcast.gradients import nonfinite_flags


def test_the_finite_check_sees_nan_infinity_and_large_finite_values():
    largest = torch.finfo(torch.float32).max
    sparse = torch.sparse_coo_tensor([[1, 1]], [1.0, float("inf")], (3,), check_invariants=True)
    tensors = [
        torch.tensor([1.0, float("nan")]),
        torch.tensor([-float("inf"), 0.0]),
        torch.tensor([largest, -largest]),
        torch.tensor([]),
        torch.tensor([1.0], dtype=torch.float16),
        torch.tensor([float("inf")], dtype=torch.bfloat16),
        sparse,
        torch.tensor([complex(0.0, float("nan"))]),
        torch.tensor([-0.0, 1e-45]),
    ]
    flags = nonfinite_flags(tensors)
    assert flags.read() == [True, True, False, False, False, True, True, True, False]
    assert nonfinite_flags([]).read() == []


def test_every_16_bit_pattern():
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        flags = nonfinite_flags(list(values.split(1))).read()
        assert flags == (~torch.isfinite(values)).tolist()
