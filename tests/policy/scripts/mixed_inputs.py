"""Prints, as JSON, what becomes of every operator where floating inputs differ in format.

The samples are those that torch tests its operators with, and a few more. Each runs with one floating input
in another format than the rest, in a region of bf16: under PyTorch's table for the CPU, and under that for
CUDA, on the kernels of the CPU, which check their inputs as those of CUDA do. In a process of its own, since
the test tools of torch change settings of the process.
"""

import itertools
import json
import sys
import types
import unittest
import warnings

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import narrowcast as nc
from narrowcast.casting import PolicyRegion
from narrowcast.policy import Policy

# A package that torch's test tools want and nothing here needs.
EXPECTTEST = types.ModuleType("expecttest")
EXPECTTEST.TestCase = unittest.TestCase
EXPECTTEST.assert_expected_inline = None
sys.modules["expecttest"] = EXPECTTEST

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SAFE = Policy.preset("safe").rules
TABLES = ("cpu", "cuda")
PLAIN = {table: Policy(compute="bf16", tables=table) for table in TABLES}
SAMPLES = 12  # an operator
torch.set_num_threads(1)
warnings.simplefilter("ignore")


def own_samples():
    """Operators that torch has no sample of, or none with two floating inputs."""
    x, square, spectrum = torch.rand(4), torch.eye(3) + 0.1, torch.randn(9, 17, dtype=torch.complex64)
    log_p = torch.randn(5, 1, 3).log_softmax(2)
    yield "quantile", torch.quantile, (x, torch.tensor([0.5]))
    yield "nanquantile", torch.nanquantile, (x, torch.tensor([0.5]))
    yield "orgqr", torch.orgqr, (square, torch.ones(3))
    yield (
        "linalg.matrix_rank",
        lambda a, tol: torch.linalg.matrix_rank(a, tol=tol),
        (square, torch.tensor(1e-3)),
    )
    yield "_weight_norm", torch._weight_norm, (square, torch.ones(3, 1), 0)
    yield "chain_matmul", torch.chain_matmul, (square, square, square)
    yield "istft", lambda s, w: torch.istft(s, 16, window=w), (spectrum, torch.ones(16))
    yield (
        "stft",
        lambda a, w: torch.stft(a, 16, window=w, return_complex=True),
        (torch.rand(64), torch.ones(16)),
    )
    yield "equal", torch.equal, (x, x.clone())
    yield "searchsorted", torch.searchsorted, (x.sort()[0], x)
    yield "bucketize", torch.bucketize, (x, x.sort()[0])
    yield "kron", torch.kron, (square, square)
    yield "block_diag", torch.block_diag, (square, square)
    yield "ctc_loss", torch.ctc_loss, (log_p, torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2]))
    weights = (torch.rand(16, 3), torch.rand(16, 4))
    yield "lstm_cell", torch.lstm_cell, (torch.rand(2, 3), (torch.rand(2, 4), torch.rand(2, 4)), *weights)
    yield (
        "gru_cell",
        torch.gru_cell,
        (torch.rand(2, 3), torch.rand(2, 4), torch.rand(12, 3), torch.rand(12, 4)),
    )
    scale = (torch.ones(3), torch.zeros(3).int())
    yield (
        "fake_quantize_per_channel_affine",
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, 0, 0, 255),
        (square, *scale),
    )


def every_sample(most=SAMPLES):
    for op in op_db:
        if FP32 not in op.dtypes:
            continue
        torch.manual_seed(0)
        try:
            samples = list(itertools.islice(op.sample_inputs("cpu", FP32, requires_grad=False), most))
        except Exception:  # some need packages that are not here
            continue
        for sample in samples:
            yield op.name, op.op, (sample.input, *sample.args), sample.kwargs
    for name, call, args in own_samples():
        yield name, call, args, {}


def is_floating(value):
    return isinstance(value, torch.Tensor) and value.dtype == FP32


def runs(policy, call, leaves, spec):
    args, kwargs = tree_unflatten([one.clone() if is_floating(one) else one for one in leaves], spec)
    torch.manual_seed(0)
    try:
        with nc.autocast("cpu", policy=policy):
            call(*args, **kwargs)
    except Exception:
        return False
    return True


def mixtures(leaves, low=BF16):
    """The same leaves with one floating one in ``low``, then with all but that one; named by a number."""
    floating = [position for position, one in enumerate(leaves) if is_floating(one)]
    for number, odd in enumerate(floating if len(floating) > 1 else []):
        for is_narrow in (True, False):
            mixed = [
                one.to(low) if position in floating and (position == odd) == is_narrow else one
                for position, one in enumerate(leaves)
            ]
            yield f"{number}{'narrow' if is_narrow else 'wide'}", mixed


def stopped():
    """(name, table, mixture) -> the first sample that stops although it runs with every input in fp32."""
    found = {}
    for name, call, args, kwargs in every_sample():
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [one.detach() if isinstance(one, torch.Tensor) else one for one in leaves]
        for table in TABLES:
            ways = list(mixtures(leaves))
            if not ways or not runs(PLAIN[table], call, leaves, spec):
                continue
            for way, mixed in ways:
                key = (name, table, way)
                if key not in found and not runs(PLAIN[table], call, mixed, spec):
                    found[key] = (call, mixed, spec)
    return found


def in_place_samples():
    for op in op_db:
        if op.inplace_variant is not None and FP32 in op.dtypes:
            torch.manual_seed(0)
            for sample in itertools.islice(op.sample_inputs("cpu", FP32, requires_grad=False), SAMPLES):
                yield f"{op.name}_", op.inplace_variant, (sample.input, *sample.args), sample.kwargs


def trains(call, leaves, spec, region):
    """Whether forward in ``region`` and backward outside of it run."""
    wanted = [one.clone().requires_grad_() if is_float(one) else one for one in leaves]
    args, kwargs = tree_unflatten([one * 1 if is_float(one) else one for one in wanted], spec)
    torch.manual_seed(0)
    try:
        with region:
            outputs = tree_flatten(call(*args, **kwargs))[0]
        outputs = [one for one in outputs if isinstance(one, torch.Tensor) and one.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    except Exception:
        return False
    return True


def is_float(value):
    return isinstance(value, torch.Tensor) and value.dtype in (BF16, FP16, FP32)


def raising_with_promotion():
    """The operators, in place too, that run in FP32 with backward, and raise in spite of promotion."""
    plain, left, tried = torch.autocast("cpu", enabled=False), set(), 0
    regions = {
        (dtype, table): PolicyRegion(policy, {"cpu": dtype}, lambda _: None)
        for name, dtype in (("bf16", BF16), ("fp16", FP16))
        for table in TABLES
        for policy in [Policy(compute=name, tables=table)]
    }
    samples = itertools.chain(every_sample(), in_place_samples())
    for number, (name, call, args, kwargs) in enumerate(samples):  # bf16 and fp16 in turn
        dtype = (BF16, FP16)[number % 2]
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [one.detach() if isinstance(one, torch.Tensor) else one for one in leaves]
        low = [one.to(dtype) if is_floating(one) else one for one in leaves]
        if trains(call, leaves, spec, plain):
            inputs = (leaves, low, *(mixed for _, mixed in mixtures(leaves, dtype)))
            for table, mixed in itertools.product(TABLES, inputs):
                region, tried = regions[dtype, table], tried + 1
                if not trains(call, mixed, spec, region) and trains(call, leaves, spec, plain):
                    left.add(name if table == "cpu" else f"{name} on {table}")
    return sorted(left), tried


def main():
    cases = stopped()
    left_with_promotion, tried = raising_with_promotion()
    safe = {table: Policy(compute="bf16", tables=table, rules=SAFE) for table in TABLES}
    left = {
        f"{name} {table} {way}" for (name, table, way), case in cases.items() if not runs(safe[table], *case)
    }
    helped = {}
    for one in SAFE:
        for table in TABLES:
            alone = Policy(compute="bf16", tables=table, rules=(one,))
            # Stops again: what a sample finds in uninitialized memory may have stopped it.
            names = {
                name
                for (name, where, _), case in cases.items()
                if where == table and runs(alone, *case) and not runs(PLAIN[table], *case)
            }
            helped.setdefault(one.op, {})[table] = sorted(names)
    found = {"stopped": [list(key) for key in cases], "still": sorted(left), "helped": helped}
    print(json.dumps(found | {"with promotion": left_with_promotion, "tried": tried}))


if __name__ == "__main__":
    main()
