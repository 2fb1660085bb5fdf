"""Private names of torch that this package uses; a test fails when one changes."""

from __future__ import annotations

import re


def operator_names() -> list[str]:
    """Return the qualified names of all operators, as ``"aten::softmax.int"``."""
    import torch

    # dir(torch.ops.aten) knows only operators that were used before.
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/utils/python_dispatch.cpp
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def has_torchs_own_kernel(qualified: str, key: str) -> bool:
    """Return whether the operator has a kernel from C++ on dispatch key ``key``.

    Kernels registered from Python do not count: otherwise the answer would depend on the rules in force.
    """
    import torch

    # No public function says where a kernel comes from.
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/utils/python_dispatch.cpp
    dump = torch._C._dispatch_dump(qualified)
    files = re.findall(rf"^{key}(?: \(inactive\))?: registered at (.+?):\d+ ::", dump, re.MULTILINE)
    return any(re.search(r"\.(?:cpp|cc|cu|cuh|h)$", file) for file in files)
