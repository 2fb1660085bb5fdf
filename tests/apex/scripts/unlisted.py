"""Prints, as JSON, the operators whose results have another type under O1 than without casts.

The samples are those that torch tests its operators with, each in float32 and in half. In a process of its
own, since the test tools of torch change settings of the process.
"""

import itertools
import json
import sys
import types
import unittest
import warnings

import torch
from torch.utils._pytree import tree_flatten, tree_map

from narrowcast.apex import amp

# A package that torch's test tools want and nothing here needs.
EXPECTTEST = types.ModuleType("expecttest")
EXPECTTEST.TestCase = unittest.TestCase
EXPECTTEST.assert_expected_inline = None
sys.modules["expecttest"] = EXPECTTEST

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

SAMPLES = 4  # an operator
torch.set_num_threads(1)
warnings.simplefilter("ignore")


def in_type(values, dtype):
    def cast(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(dtype) if value.dtype == torch.float32 else value.clone()

    return tree_map(cast, values)


def types_of(operator, args, kwargs):
    """Of what comes out; None where the operator refuses what it is given."""
    try:
        found = operator(*args, **kwargs)
    except Exception:
        return None
    return [str(one.dtype) for one in tree_flatten(found)[0] if isinstance(one, torch.Tensor)]


def samples():
    for op in op_db:
        if torch.float32 not in op.dtypes:
            continue
        torch.manual_seed(0)
        try:
            found = list(itertools.islice(op.sample_inputs("cpu", torch.float32), SAMPLES))
        except Exception:  # some need packages that are not here
            continue
        for one in found:
            for dtype in (torch.float32, torch.float16):
                yield op.name, op.op, in_type((one.input, *one.args), dtype), in_type(one.kwargs, dtype)


def main():
    everything = list(samples())
    plain = [
        types_of(call, tree_map(_copy, args), tree_map(_copy, kwargs)) for _, call, args, kwargs in everything
    ]
    amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", verbosity=0)
    different = {
        name
        for (name, call, args, kwargs), before in zip(everything, plain, strict=True)
        if before is not None and types_of(call, args, kwargs) != before
    }
    amp.shutdown()
    print(json.dumps({"different": sorted(different), "samples": len(everything)}))


def _copy(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


main()
