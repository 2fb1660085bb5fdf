"""Prints, as JSON, where low inputs still give a third format, or stop vmap, in regions that promote.

The samples are those of ``mixed_inputs.py``, and those of torch for integers, whose other inputs may be
floating. Gradients are not compared: autograd casts each to the format of what it belongs to.
"""

import itertools
import json

import torch
from mixed_inputs import BF16, FP16, FP32, TABLES, every_sample, is_float, mixtures, op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from narrowcast.casting import PolicyRegion
from narrowcast.policy import Policy

PLAIN = torch.autocast("cpu", enabled=False)
SAMPLES = 4


# On a table the regions have rules, for which there are more kernels under vmap.
REGIONS = {
    (dtype, table): PolicyRegion(
        Policy(compute=name, tables=table or "native"), {"cpu": dtype}, lambda _: None
    )
    for name, dtype in (("bf16", BF16), ("fp16", FP16))
    for table in (None, *TABLES)
}


def samples_of_integers():
    for op in op_db:
        if FP32 in op.dtypes or torch.int64 not in op.dtypes:
            continue
        torch.manual_seed(0)
        for sample in itertools.islice(op.sample_inputs("cpu", torch.int64, requires_grad=False), SAMPLES):
            yield op.name, op.op, (sample.input, *sample.args), sample.kwargs
    index, weights = torch.tensor([0, 1, 1]), torch.rand(3)
    yield "bincount", torch.bincount, (index, weights), {}
    yield "stft", lambda a, w: torch.stft(a, 16, window=w, return_complex=True), (weights, torch.ones(16)), {}


def flat(args, kwargs):
    """Return the leaves with fp32 for every floating one, and how to put them together."""
    leaves, spec = tree_flatten((args, kwargs))
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().float() if leaf.dtype == torch.float64 else leaf.detach()  # noqa: PLW2901
        found.append(leaf)
    return found, spec


def outputs(call, leaves, spec, where):
    args, kwargs = tree_unflatten([one.clone() if is_float(one) else one for one in leaves], spec)
    torch.manual_seed(0)
    with where:
        found = tree_flatten(call(*args, **kwargs))[0]
    return [one for one in found if isinstance(one, torch.Tensor)]


def third_formats():
    """Operators that give something else than the low format or what they give in FP32."""
    found = set()
    for name, call, args, kwargs in itertools.chain(every_sample(), samples_of_integers()):
        leaves, spec = flat(args, kwargs)
        for (dtype, table), where in REGIONS.items():
            low = [one.to(dtype) if is_float(one) else one for one in leaves]
            try:
                expected, got = outputs(call, leaves, spec, PLAIN), outputs(call, low, spec, where)
            except Exception:  # the other script looks for these
                continue
            for right, one in zip(expected, got, strict=True):
                if one.dtype not in (right.dtype, dtype):
                    found.add(f"{name} {one.dtype} on {table}")
    return sorted(found)


def rows_of_a_jacobian(call, leaves, spec, where):
    wanted = [one.clone().requires_grad_() if is_float(one) else one for one in leaves]
    inputs = [one for one in wanted if is_float(one)]
    args, kwargs = tree_unflatten([one * 1 if is_float(one) else one for one in wanted], spec)
    torch.manual_seed(0)
    with where:
        found = tree_flatten(call(*args, **kwargs))[0]
    output = next(one for one in found if isinstance(one, torch.Tensor) and one.requires_grad)

    def row(v):
        return torch.autograd.grad(output, inputs, v, retain_graph=True, materialize_grads=True)

    torch.vmap(row)(torch.ones(2, *output.shape, dtype=output.dtype))


def gradients_of_samples(call, leaves, spec, where):
    at = [position for position, one in enumerate(leaves) if is_float(one)]

    def loss(*given):
        put = list(leaves)
        for position, one in zip(at, given, strict=True):
            put[position] = one
        found = outputs(call, put, spec, where)
        return next(one for one in found if one.is_floating_point()).float().sum()

    samples = [torch.stack([leaves[position]] * 2) for position in at]
    torch.vmap(torch.func.grad(loss, tuple(range(len(at)))), randomness="same")(*samples)


def backward(call, leaves, spec, where):
    wanted = [one.clone().requires_grad_() if is_float(one) else one for one in leaves]
    found = outputs(call, [one * 1 if is_float(one) else one for one in wanted], spec, where)
    found = [one for one in found if one.requires_grad]
    torch.autograd.backward(found, [torch.ones_like(one) for one in found])


def works(way, *case):
    try:
        way(*case)
    except Exception:
        return False
    return True


def stopped_under_vmap():
    """Operators that run in FP32 under vmap, and in regions that promote without vmap alone."""
    found, tried = set(), 0
    for number, (name, call, args, kwargs) in enumerate(every_sample(SAMPLES)):
        dtype = (BF16, FP16)[number % 2]
        leaves, spec = flat(args, kwargs)
        low = [one.to(dtype) if is_float(one) else one for one in leaves]
        for way in (rows_of_a_jacobian, gradients_of_samples):
            if not works(way, call, leaves, spec, PLAIN):
                continue
            inputs = (leaves, low, *(mixed for _, mixed in mixtures(leaves, dtype)))
            for table, given in itertools.product((None, "cpu"), inputs):
                tried += 1
                case = (call, given, spec, REGIONS[dtype, table])
                if not works(way, *case) and works(backward, *case):
                    found.add(name if table is None else f"{name} by rules")
    return sorted(found), tried


stopped, tried = stopped_under_vmap()
print(json.dumps({"third formats": third_formats(), "stopped under vmap": stopped, "tried": tried}))
