"""A kernel from Python is none of torch's and hides none, whenever a table is read.

In a process of its own: PyTorch goes on calling such a kernel under dispatch modes after it was taken away.
"""

import warnings

import torch

from narrowcast.policy import FP32, TABLES, _ops, autocast_key, native_table
from narrowcast.policy._torch_internals import has_torchs_own_kernel

key = autocast_key("cpu")
_ops.TABLES = {"cpu": {**TABLES["cpu"], "relu": FP32, "rms_norm": FP32}}
library = torch.library.Library("aten", "IMPL")
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
    for op in ("relu", "rms_norm", "linear"):
        library.impl(op, lambda *args: args, key)
assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::relu", key)
assert not has_torchs_own_kernel("aten::relu", key)
assert has_torchs_own_kernel("aten::linear", key)
read_with_them = dict(native_table.__wrapped__("cpu"))
library._destroy()
assert read_with_them == native_table.__wrapped__("cpu")
assert "relu" not in read_with_them
assert "linear" in read_with_them
