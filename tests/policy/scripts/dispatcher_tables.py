"""Prints, as JSON, which operators the dispatcher has autocast kernels for, and what these cast.

In a process of its own, in which no rule has put kernels there. Tensors are fake: any build of torch has the
autocast kernels of all devices, and calls them for a fake tensor of the device.
"""

import json
import logging

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast.policy import TABLES, autocast_key, native_table, operator

BF16, FP32 = torch.bfloat16, torch.float32


logging.disable(logging.ERROR)  # fake tensors log each call that fails


class Casts(TorchDispatchMode):
    """The formats that something was cast to, or asked to compute in."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = (*args, *(kwargs or {}).values())
        self.seen.update(str(one) for one in given if isinstance(one, torch.dtype))
        return func(*args, **(kwargs or {}))


def made_up(argument, tensors):
    """Some value of the argument's type; the call may fail, after its inputs were cast."""
    kind = str(argument.type)
    if "Tensor" in kind:
        return [next(tensors), next(tensors)] if kind.startswith("List") else next(tensors)
    if argument.has_default_value():
        return argument.default_value
    if kind.startswith("Optional"):
        return None
    one = {"int": 1, "float": 1.0, "number": 1.0, "bool": False, "str": "same"}
    inner = kind.removeprefix("List[").removesuffix("]")
    return [one[inner]] if kind.startswith("List") else one[kind]


def casts_of(op, dtypes, device):
    """What is cast to which formats where floating inputs come in ``dtypes``, over and over."""

    def tensors():
        while True:
            yield from (torch.ones(2, 2, dtype=dtype, device=device) for dtype in dtypes)

    source = tensors()
    arguments = op._schema.arguments
    with FakeTensorMode():
        args = [made_up(argument, source) for argument in arguments if not argument.kwarg_only]
        kwargs = {argument.name: made_up(argument, source) for argument in arguments if argument.kwarg_only}
        torch.set_autocast_dtype(device, BF16)
        torch.set_autocast_enabled(device, True)  # torch.autocast would not, where there is no such device
        with Casts() as casts:
            try:
                op(*args, **kwargs)
            except Exception as error:  # these arguments are none of the operator's: it fails once cast
                casts.seen.update({"refused"} if "unsafe to autocast" in str(error) else ())
        torch.set_autocast_enabled(device, False)
    return sorted(casts.seen)


has = torch._C._dispatch_has_kernel_for_dispatch_key
names = torch._C._dispatch_get_all_op_names()
print(
    json.dumps(
        {
            "dispatcher": {
                device: sorted(
                    name.removeprefix("aten::") for name in names if has(name, autocast_key(device))
                )
                for device in TABLES
            },
            "casts": {
                device: {
                    op: [
                        casts_of(operator(op), dtypes, device) for dtypes in ((FP32,), (BF16,), (FP32, BF16))
                    ]
                    for op in native_table(device)
                }
                for device in ("cpu", "cuda", "xpu", "mps", "mtia")
            },
        }
    )
)
