"""The outside oracle for casts: those that torch's dispatcher hands on."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FORMATS = {torch.float32, torch.bfloat16, torch.float16}


class CountedCasts(TorchDispatchMode):
    """Counts casts between fp32, bf16 and fp16, and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and len({args[0].dtype, result.dtype} & FORMATS) == 2:
            self.count += 1
            self.bytes += args[0].nbytes + result.nbytes
        return result
