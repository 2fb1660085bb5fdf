"""Every sample input that torch has for each of its operators, with kernels of ours on all of them.

Prints, as JSON, how many were compared and the operators whose results or errors differ from those of
torch.autocast without kernels of ours. Arguments: the type of device, and the formats of the regions.
"""

import itertools
import json
import sys
import types
import unittest
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from dispatch_table import FORMATS, everywhere, kernels

from narrowcast.casting import PolicyRegion

# torch's test tools want this package for one name.
sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
OPS = __import__("torch.testing._internal.common_methods_invocations", fromlist=["op_db"]).op_db

SAMPLES_EACH = 3
# Memory that nobody has written yet: what these return, and what LAPACK's gelsy starts from.
UNINITIALIZED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
UNINITIALIZED |= {"linalg.lstsq"}


def samples(device):
    for op in OPS:
        if op.name in UNINITIALIZED or not op.supports_dtype(torch.float32, device):
            continue
        torch.manual_seed(0)
        for sample in itertools.islice(op.sample_inputs(device, torch.float32), SAMPLES_EACH):
            for half in (False, True):
                yield op, sample, half


def in_format(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is torch.float32 else value.clone()
    if type(value) in (list, tuple):
        return type(value)(in_format(part, dtype) for part in value)
    return value


def call(op, sample, half, dtype):
    """What the operator returns, or the error that it raises."""
    wanted = dtype if half else torch.float32
    first, rest = in_format(sample.input, wanted), in_format(sample.args, wanted)
    torch.manual_seed(0)
    try:
        return op.op(first, *rest, **sample.kwargs)
    except Exception as error:  # compared as well
        return f"{type(error).__name__}: {error}"


def same(a, b):
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return False
        return torch.equal(numbers(a), numbers(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return str(a).partition("\n")[0] == str(b).partition("\n")[0]


def numbers(tensor):
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.float().nan_to_num() if tensor.is_floating_point() else tensor


def compared(compute, device):
    """How many samples were compared, and the operators that differ."""
    dtype, key = FORMATS[compute], f"Autocast{device.upper()}"
    cases = list(samples(device))
    assert len(kernels(key)) < 500
    with torch.autocast(device, dtype):
        native = [call(*case, dtype) for case in cases]
        if device == "cuda":  # atomic additions come in any order
            alike = [same(one, call(*case, dtype)) for one, case in zip(native, cases, strict=True)]
            native, cases = ([x for x, ok in zip(xs, alike, strict=True) if ok] for xs in (native, cases))
    policy = everywhere(compute)
    differing = {}
    for name, region in (
        ("no rule here", PolicyRegion(policy, {device: dtype})),
        ("no region of ours here", torch.autocast(device, dtype)),
    ):
        assert len(kernels(key)) > 1500
        with region:
            for theirs, case in zip(native, cases, strict=True):
                if not same(theirs, call(*case, dtype)):
                    differing.setdefault(f"{case[0].name} {case[0].variant_test_name}".strip(), name)
    return {
        "compared": len(cases),
        "operators": len({case[0].name for case in cases}),
        "differing": differing,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(sys.argv[1] == "cuda", warn_only=True)
    print(json.dumps({compute: compared(compute, sys.argv[1]) for compute in sys.argv[2:]}))
