"""Private names of torch that this package uses; a test fails when one changes."""

from __future__ import annotations

import re


def operator_names() -> list[str]:
    """The qualified names of every operator, ``"aten::softmax.int"``, in-place and ``out=`` forms too."""
    import torch

    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def has_torchs_own_kernel(qualified: str, key: str) -> bool:
    """Whether PyTorch, or another library in C++, has a kernel for the operator on dispatch key ``key``.

    Those registered from Python do not count, ours among them, nor do they hide one beneath. Asking whether
    there is a kernel at all would make the answer depend on which rules happen to be in force.
    """
    import torch

    dump = torch._C._dispatch_dump(qualified)
    of_key = re.findall(rf"^{key}(?: \(inactive\))?: registered at (.+?):\d+ ::", dump, re.MULTILINE)
    return any(re.search(r"\.(?:cpp|cc|cu|cuh|h)$", file) for file in of_key)
