"""Where the time of a step goes: rules on ops made by hand, and counts against torch's own dispatcher."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from counted_casts import CountedCasts
from torch import nn
from torch.nn import functional as F

from narrowcast.attach import call_site
from narrowcast.errors import UnsupportedError
from narrowcast.observe._torch_internals import profiler_is_on
from narrowcast.observe.profiling import (
    HostReads,
    Recorder,
    is_product,
    summarize,
)
from narrowcast.observe.profiling._block import CLOSURE, MARK
from narrowcast.observe.profiling._steps import product_size, union_ns

STEP_NS = 1000


def tensor(*shape, dtype=torch.float32, storage=0, strides=None):
    strides = strides or torch.empty(shape, device="meta").stride()
    return SimpleNamespace(sizes=list(shape), strides=list(strides), dtype=dtype, storage_data_ptr=storage)


def op(name, duration, *children, start=0, operands=(), number=0, thread=1, kind="TorchOp"):
    """As torch's profiler represents an op in its tree; ``number`` is that of its kernels."""
    return SimpleNamespace(
        tag=SimpleNamespace(name=kind),
        name=name,
        start_time_ns=start,
        duration_time_ns=duration,
        start_tid=thread,
        correlation_id=number,
        typed=(None, SimpleNamespace(inputs=list(operands))),
        children=list(children),
    )


def cast(duration, *shape, into=torch.bfloat16, source=torch.float32, storage=0):
    """As autocast casts: ``to`` calls ``_to_copy`` calls ``copy_``."""
    operands = (tensor(*shape, dtype=into), tensor(*shape, dtype=source, storage=storage))
    copy = op("aten::copy_", duration // 2, operands=operands)
    return op("aten::to", duration, op("aten::_to_copy", duration, copy))


def mm(duration, *shapes, name="aten::mm"):
    return op(name, duration, operands=[tensor(*shape) for shape in shapes])


def kernel(start, duration, linked, *, device=torch.profiler.DeviceType.CUDA, annotation=False):
    return SimpleNamespace(
        device_type=lambda: device,
        start_ns=lambda: start,
        duration_ns=lambda: duration,
        linked_correlation_id=lambda: linked,
        is_user_annotation=lambda: annotation,
    )


def summed(*ops, marks=(0, STEP_NS), kernels=(), thread=1, **more):
    tree = [*(op(MARK, 0, start=mark, thread=thread) for mark in marks), *ops]
    return summarize(tree, SimpleNamespace(events=lambda: kernels), **more)


def parts_ns(found):
    return {
        part: round(share * STEP_NS) for part, share in found["shares"].items() if share and part != "python"
    }


# ---- which part an op belongs to


def test_each_nanosecond_belongs_to_one_part():
    linear = op("aten::linear", 100, cast(20, 4, 4), op("aten::addmm", 60))
    node = "autograd::engine::evaluate_function: "
    matmuls = op("AddmmBackward0", 40, op("aten::mm", 30), op("aten::t", 4))
    backward = op(f"{node}AddmmBackward0", 50, matmuls, op("aten::sum", 5))
    recast = op(f"{node}ToCopyBackward0", 12, op("ToCopyBackward0", 9, cast(6, 4)))
    step = op("Optimizer.step#Adam.step", 70, op("aten::add_", 10), op("aten::mm", 15))
    loading = op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 33, op("aten::stack", 9))
    found = summed(linear, backward, recast, step, loading, op("aten::relu", 8))
    assert parts_ns(found) == {
        "products": 20 + 60 + 30 + 15,
        "casts": 20 + 12,
        "other_ops": 4 + 5 + 8,
        "optimizer": 70 - 15,
        "loading": 33,
    }
    assert found["loading_share"] == pytest.approx(0.033)
    # Those that Python and autograd called: linear, mm, t, sum, to, add_, mm, stack, relu.
    assert found["ops"]["count"] == 9
    assert found["ops"]["mean_s"] == pytest.approx((100 + 30 + 4 + 5 + 6 + 10 + 15 + 9 + 8) / 9e9)


def test_a_product_in_the_loading_of_data_is_no_product_of_the_step():
    loading = op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 33, op("aten::mm", 9))
    found = summed(loading)
    assert parts_ns(found) == {"loading": 33}
    assert found["products"] == []


def test_a_closure_of_a_step_is_no_part_of_the_optimizer():
    linear = op("aten::linear", 100, cast(20, 4, 4), op("aten::addmm", 60))
    closure = op(CLOSURE, 150, linear, op("aten::mse_loss", 10), op("aten::relu", 8))
    step = op("Optimizer.step#Adam.step", 200, closure, op("aten::add_", 10))
    found = summed(step)
    parts = {"products": 100 - 20, "casts": 20, "other_ops": 10 + 8, "optimizer": 200 - 150}
    assert parts_ns(found) == parts
    assert found["shares"]["python"] == pytest.approx(1 - sum(parts.values()) / STEP_NS)


def test_on_a_gpu_time_is_that_of_kernels():
    softmax, bmm = op("aten::_softmax", 9, number=1), op("aten::bmm", 1, number=2)
    attention = op("aten::scaled_dot_product_attention", 10, softmax, bmm)
    launched_by_python = op("my_extension", 5, number=3)
    kernels = [kernel(0, 7, 1), kernel(7, 100, 2), kernel(107, 3, 3)]
    found = summed(attention, launched_by_python, kernels=kernels, device="cuda")
    assert parts_ns(found) == {"products": 107, "other_ops": 3}


def test_on_a_gpu_what_kernels_leave_is_waiting():
    ops = [op("aten::mm", 5, start=10, number=1), op("aten::relu", 5, start=20, number=2, thread=2)]
    # 100 of them side by side.
    found = summed(*ops, kernels=[kernel(200, 600, 1), kernel(700, 200, 2)], device="cuda")
    assert found["gpu_busy_share"] == pytest.approx(0.7)
    assert found["shares"]["products"] == pytest.approx(0.7 * 600 / 800)
    assert found["shares"]["other_ops"] == pytest.approx(0.7 * 200 / 800)
    assert found["shares"]["python"] == pytest.approx(0.3)


def test_matmuls_convolutions_and_attention_are_products():
    products = ["mm", "linear", "convolution_backward", "mkldnn_convolution", "_cudnn_rnn"]
    products.append("_scaled_dot_product_flash_attention_for_cpu_backward")
    assert all(is_product(f"aten::{name}") for name in products)
    assert is_product("mkldnn::_linear_pointwise")
    assert is_product("aten::thnn_conv2d")
    assert is_product("aten::addmm_")
    others = ["aten::mul", "aten::_convert_indices_from_csr_to_coo", "aten::linear_something", "linear"]
    assert not any(map(is_product, others))


# ---- products


IMAGE, WEIGHT, GRADIENT = (8, 3, 9, 9), (6, 3, 2, 2), (8, 6, 8, 8)
QUERY, KEY = (2, 4, 6, 8), (2, 4, 5, 8)
SIZES = {
    "mm": ([(2, 3), (3, 5)], "matmul", (2, 5, 3)),
    "addmm": ([(5,), (2, 3), (3, 5)], "matmul", (2, 5, 3)),
    "linear": ([(7, 2, 3), (5, 3), (5,)], "matmul", (14, 5, 3)),
    "matmul": ([(7, 2, 3), (3, 5)], "matmul", (14, 5, 3)),
    "mv": ([(2, 3), (3,)], "matmul", (2, 1, 3)),
    "addmv": ([(2,), (2, 3), (3,)], "matmul", (2, 1, 3)),
    "addmm_": ([(2, 5), (2, 3), (3, 5)], "matmul", (2, 5, 3)),
    "addbmm": ([(2, 5), (4, 2, 3), (4, 3, 5)], "batched matmul", (4, 2, 5, 3)),
    "bmm": ([(4, 2, 3), (4, 3, 5)], "batched matmul", (4, 2, 5, 3)),
    "baddbmm": ([(4, 2, 5), (4, 2, 3), (4, 3, 5)], "batched matmul", (4, 2, 5, 3)),
    "convolution": ([IMAGE, WEIGHT], "convolution", IMAGE + WEIGHT),
    "convolution_backward": ([GRADIENT, IMAGE, WEIGHT], "convolution", IMAGE + WEIGHT),
    "scaled_dot_product_attention": ([QUERY, KEY, KEY], "attention", QUERY + KEY),
    "_scaled_dot_product_flash_attention_backward": ([QUERY, QUERY, KEY], "attention", QUERY + KEY),
    "mkldnn_rnn_layer": ([(5, 2, 3)], "recurrent layer", (5, 2, 3)),
    "einsum": ([], "matmul", (1, 1, 1)),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_size_of_a_product_is_that_of_its_operands(name):
    operands, kind, size = SIZES[name]
    assert product_size(f"aten::{name}", operands) == (kind, size)


def test_a_layer_and_its_backward_are_of_one_size():
    forward = op("aten::linear", 50, mm(10, (5,), (2, 3), (3, 5), name="aten::addmm"))
    found = summed(forward, mm(12, (5, 2), (2, 3)), mm(14, (2, 5), (5, 3)), mm(1, (7, 7), (7, 7)))
    sizes = [(row["kind"], row["shape"], row["count"], row["each_s"]) for row in found["products"]]
    assert sizes == [("matmul", [2, 5, 3], 3, 12e-9), ("matmul", [7, 7, 7], 1, 1e-9)]


def test_the_time_of_products_has_no_outliers_but_tells_slow_layouts():
    """A layer of three: two of its products have the same operands but for a transposed one, and are slow."""
    ops = [mm(duration, (4,), (4, 4), (4, 4), name="aten::addmm") for duration in (10, 10, 11)]
    ops += [mm(duration, (4, 4), (4, 4)) for duration in (12, 14, 900)]
    for duration in (300, 302, 9000):
        operands = [tensor(4, 4, strides=(1, 4)), tensor(4, 4)]
        ops.append(op("aten::mm", duration, operands=operands))
    (size,) = summed(*ops)["products"]
    assert size["count"] == 9
    assert size["each_s"] == pytest.approx((3 * 10 + 3 * 14 + 3 * 302) / 9 * 1e-9)


# ---- casts


def test_a_cast_is_a_copy_between_two_of_the_formats():
    ops = [
        cast(4, 4, 8, storage=77),
        cast(4, 2, into=torch.float32, source=torch.float16),
        cast(4, 100, into=torch.float32, source=torch.float32),
        cast(4, 100, into=torch.float32, source=torch.float64),
        cast(4, 100, into=torch.float32, source=torch.int64),
        op("enumerate(DataLoader)#", 9, cast(4, 100)),
    ]
    casts = summed(*ops, weights=[77])["casts"]
    assert casts | {"share": 0} == {
        "count": 2,
        "bytes": 32 * (2 + 4) + 2 * (4 + 2),
        "weight_count": 1,
        "weight_bytes": 32 * (2 + 4),
        "share": 0,
    }


def test_time_covered_by_overlapping_intervals_counts_once():
    assert union_ns([(0, 10), (5, 15), (20, 30), (22, 25), (90, 200)], 2, 100) == 13 + 10 + 10
    assert union_ns([], 0, 10) == 0


# ---- steps


def test_a_step_is_summed_up_and_shares_add_up_to_one():
    """Three steps of 100 ns, of which the last lasts 400 instead."""
    operands = (tensor(2, 3), tensor(3, 4))
    ops = [
        op("aten::mm", 40, start=10, operands=operands),
        op("aten::relu", 10, start=60),
        op("aten::mm", 60, start=110, operands=operands),
        op("aten::relu", 300, start=210),
        op("aten::relu", 80, start=120, thread=2),
    ]
    found = summed(*ops, marks=[0, 100, 200, 600])
    assert found["steps"] == 2, "the third lasted four times as long"
    assert found["step_s"] == pytest.approx(100e-9)
    assert found["shares"]["products"] == pytest.approx(0.5)
    assert found["shares"]["other_ops"] == pytest.approx(0.05), "what another thread does is not waited for"
    assert found["shares"]["python"] == pytest.approx(0.45)
    (size,) = found["products"]
    assert (size["kind"], size["shape"], size["count"]) == ("matmul", [2, 4, 3], 1)
    assert (size["share"], size["each_s"]) == (pytest.approx(0.5), pytest.approx(50e-9))
    assert found["ops"] == {"count": pytest.approx(1.5), "mean_s": pytest.approx(110e-9 / 3)}
    assert found["gpu_busy_share"] is None


def test_a_record_without_a_step_is_refused():
    with pytest.raises(UnsupportedError, match="no step was recorded"):
        summed(marks=[5])
    with pytest.raises(UnsupportedError, match="a range of torch's profiler is open"):
        summed(op("my range", 9, op(MARK, 1)), marks=[])


# ---- a known network


def trainer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(16, 24), torch.randint(0, 10, (16,))

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(inputs)
        loss = F.cross_entropy(output.float(), targets)
        loss.backward()
        optimizer.step()

    return model, step


def profiled(step, steps=3, **more):
    step()
    profiler = Recorder()
    profiler.start()
    for _ in range(steps):
        step()
        profiler.mark()
    return summarize(*profiler.stop(), **more)


def test_casts_and_products_of_a_known_network_are_counted():
    model, step = trainer()
    with CountedCasts() as counted:
        step()
    # Forward: the input, two weights, two biases, the output. Backward: the output's gradient, and those of
    # the four parameters.
    assert counted.count == 11
    weights = [p.untyped_storage().data_ptr() for p in model.parameters()]
    found = profiled(step, weights=weights)
    casts = found["casts"]
    assert (casts["count"], casts["bytes"]) == (counted.count, counted.bytes)
    assert casts["weight_count"] == 4
    assert casts["weight_bytes"] == sum(p.numel() for p in model.parameters()) * (4 + 2)
    sizes = {(row["kind"], tuple(row["shape"])): row["count"] for row in found["products"]}
    # No gradient is asked for the input of the first layer.
    assert sizes == {("matmul", (16, 40, 24)): 2, ("matmul", (16, 10, 40)): 3}


def test_the_record_of_a_kernel_names_the_op_of_the_tree():
    """A kernel on a GPU is found by the number that its op has in both of torch's records."""
    profiler = Recorder()
    profiler.start()
    torch.ones(3) @ torch.ones(3)
    tree, results = profiler.stop()
    names = {event.correlation_id(): event.name() for event in results.events()}
    ops = [event for event in tree if event.name.startswith("aten::")]
    assert len(ops) >= 3
    assert all(names[event.correlation_id] == event.name for event in ops)


def test_kernels_are_those_of_the_op_that_launched_them():
    addmm = op("aten::addmm", 5, op("cudaLaunchKernel", 5, kind="Kineto"), number=3)
    linear = op("aten::linear", 5, addmm, start=10, number=2, thread=3)
    events = [
        kernel(20, 30, 3),
        kernel(60, 5, 3),
        kernel(20, 45, 2, annotation=True),
        kernel(10, 5, 2, device=torch.profiler.DeviceType.CPU),
    ]
    found = summed(linear, marks=[0, 100], kernels=events, thread=3, device="cuda")
    assert found["gpu_busy_share"] == found["shares"]["products"] == pytest.approx(0.35)


def test_another_profiler_in_between_is_refused():
    with torch.profiler.profile():
        assert profiler_is_on()
        with pytest.raises(UnsupportedError, match="a profiler runs in this thread already"):
            Recorder().start()
    assert not profiler_is_on()


# ---- reads


def reads_in(function):
    with HostReads(call_site) as reads:
        function()
    return reads.rows()


def test_reads_are_counted_by_line_and_kind():
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, False])

    def reading():
        for _ in range(3):
            x.sum().item()
        assert x.sum() > 0
        x.tolist()
        str(x)
        f"{x.sum():.2f}"
        x[mask]
        x[0]
        x[torch.tensor([0, 1])]
        x + 1
        torch.nonzero(x)
        float(x.sum())
        int(x.sum())
        x.numpy()
        x.cpu()
        torch.ones(4).to("cpu")

    rows = reads_in(reading)
    kinds = ["bool()", "tolist()", "repr()", "format()", "getitem()", "nonzero()", "float()", "int()"]
    assert {(row["what"], row["count"]) for row in rows} == {
        ("item()", 3),
        *((what, 1) for what in [*kinds, "numpy()", "cpu()"]),
    }
    assert len(rows) == 11  # two lines print
    lines = {row["what"]: row["site"] for row in rows}
    first = reading.__code__.co_firstlineno
    assert lines["item()"].endswith(f"test_profile.py:{first + 2}")
    assert lines["bool()"].endswith(f"test_profile.py:{first + 3}")
    assert {row["device"] for row in rows} == {"cpu"}


@pytest.mark.parametrize(("non_blocking", "count"), [(False, 1), (True, 0)])
def test_a_copy_that_does_not_block_is_no_read(non_blocking, count):
    def copying():
        with suppress(NotImplementedError):  # a tensor on "meta" has no values to copy
            nn.Linear(1, 1, bias=False, device="meta").to("cpu", non_blocking=non_blocking)

    assert sum(row["count"] for row in reads_in(copying)) == count


def test_counters_of_optimizers_and_samplers_are_not_counted():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    parameter.grad = torch.ones(3)
    dataset = torch.utils.data.TensorDataset(torch.ones(4))
    loader = torch.utils.data.DataLoader(dataset, shuffle=True)
    assert reads_in(lambda: (optimizer.step(), list(loader))) == []


@pytest.mark.long
def test_a_compiled_model_is_not_compiled_again_to_count_reads():
    compiled = torch.compile(lambda x: (x * 2).relu().sum(), backend="aot_eager")
    compiled(torch.ones(3))
    (row,) = reads_in(lambda: compiled(torch.ones(3)).item())
    assert (row["what"], row["count"]) == ("item()", 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.ones(3))
