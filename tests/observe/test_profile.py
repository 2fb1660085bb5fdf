"""Where the time of a step goes: rules on ops made by hand, and counts against torch's own dispatcher."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast.attach import call_site
from narrowcast.errors import OrderError, UnsupportedError
from narrowcast.observe._torch_internals import profiler_is_on
from narrowcast.observe.profiling import (
    HostReads,
    StepProfiler,
    is_product,
    product_size,
    read_rows,
    summarize,
)
from narrowcast.observe.profiling._steps import (
    _MARK,
    Op,
    Operand,
    Recording,
    _recording,
    innermost_products,
    outermost_ops,
    parts_ns,
    products_by_size,
    sum_of_casts,
    union_ns,
)


def tensor(*shape, dtype="float32", storage=0):
    return Operand(shape=shape, dtype=dtype, storage=storage)


def cast(start, duration, *shape, into="bfloat16", source="float32", storage=0):
    """As autocast casts: ``to`` calls ``_to_copy`` calls ``copy_``."""
    operands = (tensor(*shape, dtype=into), tensor(*shape, dtype=source, storage=storage))
    copy = Op(name="aten::copy_", start_ns=start, duration_ns=duration // 2, operands=operands)
    inner = Op(name="aten::_to_copy", start_ns=start, duration_ns=duration, children=(copy,))
    return Op(name="aten::to", start_ns=start, duration_ns=duration, children=(inner,))


def op(name, duration, *children, start=0, operands=(), device_ns=0, thread=1):
    return Op(
        name=name,
        start_ns=start,
        duration_ns=duration,
        children=children,
        operands=operands,
        device_ns=device_ns,
        thread=thread,
    )


# ---- which part an op belongs to


def test_each_nanosecond_belongs_to_one_part():
    linear = op("aten::linear", 100, cast(0, 20, 4, 4), op("aten::addmm", 60))
    backward = op(
        "autograd::engine::evaluate_function: AddmmBackward0",
        50,
        op("AddmmBackward0", 40, op("aten::mm", 30), op("aten::t", 4)),
        op("aten::sum", 5),
    )
    recast = op(
        "autograd::engine::evaluate_function: ToCopyBackward0", 12, op("ToCopyBackward0", 9, cast(0, 6, 4))
    )
    step = op("Optimizer.step#Adam.step", 70, op("aten::add_", 10), op("aten::mm", 15))
    loading = op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 33, op("aten::stack", 9))
    parts = parts_ns([linear, backward, recast, step, loading, op("aten::relu", 8)], device=False)
    assert parts == {
        "products": 20 + 60 + 30 + 15,
        "casts": 20 + 12,
        "other_ops": 4 + 5 + 8,
        "optimizer": 70 - 15,
        "loading": 33,
    }


def test_on_a_gpu_time_is_that_of_kernels():
    softmax = op("aten::_softmax", 9, device_ns=7)
    attention = op("aten::scaled_dot_product_attention", 10, softmax, op("aten::bmm", 1, device_ns=100))
    launched_by_python = op("my_extension", 5, device_ns=3)
    parts = parts_ns([attention, launched_by_python], device=True)
    assert parts == {"products": 107, "casts": 0, "other_ops": 3, "optimizer": 0, "loading": 0}


def test_a_copy_from_one_format_into_another_is_a_cast_by_itself():
    copy = op("aten::copy_", 5, operands=(tensor(2), tensor(2, dtype="float16")))
    assert parts_ns([copy, op("aten::copy_", 3, operands=(tensor(2), tensor(2)))], device=False) == {
        "products": 0,
        "casts": 5,
        "other_ops": 3,
        "optimizer": 0,
        "loading": 0,
    }


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("aten::mm", True),
        ("aten::linear", True),
        ("aten::convolution_backward", True),
        ("aten::mkldnn_convolution", True),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", True),
        ("aten::_cudnn_rnn", True),
        ("mkldnn::_linear_pointwise", True),
        ("aten::mul", False),
        ("aten::layer_norm", False),
        ("aten::linear_something", False),
        ("linear", False),
        ("AddmmBackward0", False),
    ],
)
def test_what_is_a_product(name, product):
    assert is_product(name) is product


def test_outermost_ops_are_those_that_python_and_autograd_call():
    backward = op(
        "autograd::engine::evaluate_function: MmBackward0", 9, op("MmBackward0", 8, op("aten::mm", 7))
    )
    step = op("Optimizer.step#SGD.step", 9, op("aten::_foreach_add_", 7, op("aten::add_", 3)))
    recast = op("autograd::engine::evaluate_function: ToCopyBackward0", 12, cast(0, 6, 4))
    called = outermost_ops([backward, step, recast, op("aten::relu", 5, op("aten::clamp_min", 4))])
    assert [o.name for o in called] == ["aten::mm", "aten::_foreach_add_", "aten::to", "aten::relu"]


# ---- products


@pytest.mark.parametrize(
    ("name", "operands", "size"),
    [
        ("mm", [(2, 3), (3, 5)], ("matmul", (2, 5, 3))),
        ("addmm", [(5,), (2, 3), (3, 5)], ("matmul", (2, 5, 3))),
        ("linear", [(7, 2, 3), (5, 3), (5,)], ("matmul", (14, 5, 3))),
        ("matmul", [(7, 2, 3), (3, 5)], ("matmul", (14, 5, 3))),
        ("mv", [(2, 3), (3,)], ("matmul", (2, 1, 3))),
        ("bmm", [(4, 2, 3), (4, 3, 5)], ("batched matmul", (4, 2, 5, 3))),
        ("baddbmm", [(4, 2, 5), (4, 2, 3), (4, 3, 5)], ("batched matmul", (4, 2, 5, 3))),
        ("convolution", [(8, 3, 9, 9), (6, 3, 2, 2)], ("convolution", (8, 3, 9, 9, 6, 3, 2, 2))),
        (
            "convolution_backward",
            [(8, 6, 8, 8), (8, 3, 9, 9), (6, 3, 2, 2)],
            ("convolution", (8, 3, 9, 9, 6, 3, 2, 2)),
        ),
        (
            "scaled_dot_product_attention",
            [(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)],
            ("attention", (2, 4, 6, 8, 2, 4, 5, 8)),
        ),
        (
            "_scaled_dot_product_flash_attention_backward",
            [(2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 5, 8)],
            ("attention", (2, 4, 6, 8, 2, 4, 5, 8)),
        ),
        ("mkldnn_rnn_layer", [(5, 2, 3)], ("recurrent layer", (5, 2, 3))),
        ("einsum", [], ("matmul", (1, 1, 1))),
    ],
)
def test_sizes_of_products(name, operands, size):
    assert product_size(f"aten::{name}", operands) == size


def test_a_layer_and_its_backward_are_of_one_size_and_its_time_is_a_median():
    def mm(duration, *shapes, name="aten::mm"):
        return op(name, duration, operands=tuple(tensor(*shape) for shape in shapes))

    forward = op("aten::linear", 50, mm(10, (5,), (2, 3), (3, 5), name="aten::addmm"))
    ops = [forward, mm(12, (5, 2), (2, 3)), mm(900, (2, 5), (5, 3)), mm(1, (7, 7), (7, 7))]
    assert products_by_size(ops, device=False) == [
        {"kind": "matmul", "shape": (2, 5, 3), "count": 3, "each_ns": 12},
        {"kind": "matmul", "shape": (7, 7, 7), "count": 1, "each_ns": 1},
    ]
    assert [p.name for p in innermost_products(forward)] == ["aten::addmm"]


# ---- casts


def test_a_cast_is_a_copy_between_two_of_the_formats():
    weights = frozenset({77})
    ops = [
        cast(0, 4, 4, 8, storage=77),
        cast(0, 4, 2, into="float32", source="float16"),
        cast(0, 4, 100, into="float32", source="float32"),
        cast(0, 4, 100, into="float32", source="float64"),
        cast(0, 4, 100, into="float32", source="int64"),
        op("enumerate(DataLoader)#", 9, cast(0, 4, 100)),
    ]
    assert sum_of_casts(ops, weights) == {
        "count": 2,
        "bytes": 32 * (2 + 4) + 2 * (4 + 2),
        "weight_count": 1,
        "weight_bytes": 32 * (2 + 4),
    }


def test_union_of_intervals_that_overlap_and_stick_out():
    assert union_ns([(0, 10), (5, 15), (20, 30), (22, 25), (90, 200)], 2, 100) == 13 + 10 + 10
    assert union_ns([], 0, 10) == 0


# ---- steps


def recording(**more):
    """Three steps of 100 ns, of which the last lasts 400 instead."""
    ops = [
        op("aten::mm", 40, start=10, operands=(tensor(2, 3), tensor(3, 4))),
        op("aten::relu", 10, start=60),
        op("aten::mm", 60, start=110, operands=(tensor(2, 3), tensor(3, 4))),
        op("aten::relu", 300, start=210),
        op("aten::relu", 80, start=120, thread=2),
    ]
    return Recording(ops=ops, marks_ns=[0, 100, 200, 600], thread=1, **more)


def test_a_step_is_summed_up_and_shares_add_up_to_one():
    found = summarize(recording())
    assert found["steps"] == 2, "the third lasted four times as long"
    assert found["step_s"] == pytest.approx(100e-9)
    assert found["shares"]["products"] == pytest.approx(0.5)
    assert found["shares"]["other_ops"] == pytest.approx(0.05), "what another thread does is not waited for"
    assert found["shares"]["python"] == pytest.approx(0.45)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["parts_s"]["products"] == pytest.approx(50e-9)
    (size,) = found["products"]
    assert size | {"share": 0, "each_s": 0} == {
        "kind": "matmul",
        "shape": [2, 4, 3],
        "count": 1,
        "share": 0,
        "each_s": 0,
    }
    assert size["share"] == pytest.approx(0.5)
    assert size["each_s"] == pytest.approx(50e-9)
    assert found["ops"]["count"] == pytest.approx(1.5)
    assert found["ops"]["mean_s"] == pytest.approx(110e-9 / 3)
    assert found["gpu_busy_share"] is None


def test_on_a_gpu_what_kernels_leave_is_waiting():
    ops = [op("aten::mm", 5, start=10, device_ns=60), op("aten::relu", 5, start=20, device_ns=20, thread=2)]
    kernels = [(20, 80), (70, 90)]  # 10 of them side by side
    found = summarize(Recording(ops=ops, marks_ns=[0, 100], kernels_ns=kernels), device="cuda")
    assert found["gpu_busy_share"] == pytest.approx(0.7)
    assert found["shares"]["products"] == pytest.approx(0.7 * 60 / 80)
    assert found["shares"]["other_ops"] == pytest.approx(0.7 * 20 / 80)
    assert found["shares"]["python"] == pytest.approx(0.3)


def test_no_step_is_an_error():
    with pytest.raises(UnsupportedError, match="no step was recorded"):
        summarize(Recording(ops=[], marks_ns=[5]))
    with pytest.raises(OrderError, match="start the profiler first"):
        StepProfiler().stop()


# ---- a known network


class CountedCasts(TorchDispatchMode):
    """Casts as torch's dispatcher hands them on, with their bytes."""

    def __init__(self):
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        floats = {torch.float32, torch.bfloat16, torch.float16}
        if func is torch.ops.aten._to_copy.default and {args[0].dtype, result.dtype} <= floats:
            self.count += args[0].dtype != result.dtype
            self.bytes += args[0].nbytes + result.nbytes
        return result


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
    profiler = StepProfiler()
    profiler.start()
    for _ in range(steps):
        step()
        profiler.mark()
    return summarize(profiler.stop(), **more)


def test_casts_of_a_known_network_are_counted_as_the_dispatcher_counts_them():
    model, step = trainer()
    with CountedCasts() as counted:
        step()
    # Forward: the input, two weights, two biases, the output. Backward: the output's gradient, and those of
    # the four parameters.
    assert counted.count == 11
    weights = [p.untyped_storage().data_ptr() for p in model.parameters()]
    casts = profiled(step, weights=weights)["casts"]
    assert casts["count"] == counted.count
    assert casts["bytes"] == counted.bytes
    assert casts["weight_count"] == 4
    assert casts["weight_bytes"] == sum(p.numel() for p in model.parameters()) * (4 + 2)


def test_products_of_a_known_network_have_its_sizes():
    _, step = trainer()
    found = {(row["kind"], tuple(row["shape"])): row["count"] for row in profiled(step)["products"]}
    # No gradient is asked for the input of the first layer.
    assert found == {("matmul", (16, 40, 24)): 2, ("matmul", (16, 10, 40)): 3}


def test_the_record_of_a_kernel_names_the_op_of_the_tree():
    """A kernel on a GPU is found by the number that its op has in both of torch's records."""
    seen = {}

    class Spy:
        def __init__(self, results):
            self.results = results

        def events(self):
            for event in self.results.events():
                seen[event.correlation_id()] = event.name()
            return []

        def experimental_event_tree(self):
            tree = self.results.experimental_event_tree()
            self.matched = [seen[e.correlation_id] == e.name for e in tree if e.name.startswith("aten::")]
            return tree

    with torch.profiler.profile(record_shapes=True) as profile:
        profiler = StepProfiler()
        profiler.mark()
        torch.ones(3) @ torch.ones(3)
        profiler.mark()
    spy = Spy(profile.profiler.kineto_results)
    _recording(spy)
    assert len(spy.matched) >= 3
    assert all(spy.matched)


def kernel(start, duration, linked, *, device=torch.profiler.DeviceType.CUDA, annotation=False):
    return SimpleNamespace(
        device_type=lambda: device,
        start_ns=lambda: start,
        duration_ns=lambda: duration,
        linked_correlation_id=lambda: linked,
        is_user_annotation=lambda: annotation,
    )


def launcher(name, start, number, kind="TorchOp", children=()):
    return SimpleNamespace(
        tag=SimpleNamespace(name=kind),
        name=name,
        start_time_ns=start,
        duration_time_ns=5,
        start_tid=3,
        correlation_id=number,
        typed=(None, SimpleNamespace(inputs=[])),
        children=list(children),
    )


def test_kernels_are_those_of_the_op_that_launched_them():
    call = launcher("cudaLaunchKernel", 12, 0, kind="Kineto")
    tree = [
        launcher(_MARK, 0, 1),
        launcher("aten::linear", 10, 2, children=[launcher("aten::addmm", 11, 3, children=[call])]),
        launcher(_MARK, 100, 4),
    ]
    events = [
        kernel(20, 30, 3),
        kernel(60, 5, 3),
        kernel(20, 45, 2, annotation=True),
        kernel(10, 5, 2, device=torch.profiler.DeviceType.CPU),
    ]
    found = _recording(SimpleNamespace(events=lambda: events, experimental_event_tree=lambda: tree))
    assert (found.marks_ns, found.thread) == ([0, 100], 3)
    assert found.kernels_ns == [(20, 50), (60, 65)]
    (linear,) = found.ops
    assert linear.device_ns == 0
    assert [(child.name, child.device_ns) for child in linear.children] == [("aten::addmm", 35)]
    assert summarize(found, device="cuda")["shares"]["products"] == pytest.approx(0.35)


def test_another_profiler_is_said():
    with torch.profiler.profile():
        assert profiler_is_on()
        with pytest.raises(UnsupportedError, match="a profiler runs in this thread already"):
            StepProfiler().start()
    assert not profiler_is_on()


# ---- reads


def reads_in(function):
    with HostReads(call_site) as reads:
        function()
    return read_rows(reads.take())


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
    kinds = ["bool()", "tolist()", "printing", "indexing by a mask", "nonzero()", "float()", "int()"]
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


def test_counters_of_optimizers_and_samplers_are_not_counted():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    parameter.grad = torch.ones(3)
    dataset = torch.utils.data.TensorDataset(torch.ones(4))
    loader = torch.utils.data.DataLoader(dataset, shuffle=True)
    assert reads_in(lambda: (optimizer.step(), list(loader))) == []


def test_a_read_that_raises_is_raised_and_counted():
    def reading():
        with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
            torch.ones(2).item()
        torch.ones(1).item()

    assert sum(row["count"] for row in reads_in(reading)) == 2


@pytest.mark.long
def test_a_compiled_model_is_not_compiled_again_to_count_reads():
    compiled = torch.compile(lambda x: (x * 2).relu().sum(), backend="aot_eager")
    compiled(torch.ones(3))
    (row,) = reads_in(lambda: compiled(torch.ones(3)).item())
    assert (row["what"], row["count"]) == ("item()", 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.ones(3))
