"""What is in force inside a region and after it: nested, re-entered, in threads, left by exceptions."""

import itertools
import os
import signal
import threading

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.casting import _regions
from narrowcast.errors import OrderError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OUTSIDE = (False, BF16, True)


def state(device="cpu"):
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )


@pytest.fixture
def put_back():
    """Undo what a trap of torch leaves behind."""
    yield
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", BF16)
    torch.set_autocast_cache_enabled(True)
    torch.clear_autocast_cache()
    assert _nesting() == 0


def _nesting():
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("cache", [True, False, None])
def test_the_state_is_torchs(dtype, enabled, cache):
    with torch.autocast("cpu", dtype, enabled, cache):
        expected = state()
    with nc.autocast("cpu", dtype, enabled, cache) as region:
        assert state() == expected == (enabled, dtype, cache is not False)
        assert isinstance(region, nc.autocast)
    assert state() == OUTSIDE


def test_the_default_format_is_the_one_in_force_where_the_region_is_made():
    with nc.autocast("cpu"):
        assert state() == (True, BF16, True)
    with nc.autocast("cpu", FP16):
        inner = nc.autocast("cpu")
    with inner:
        assert state() == (True, FP16, True)
    assert torch.autocast("cpu").fast_dtype == nc.autocast("cpu").fast_dtype


def test_the_state_is_back_after_an_exception():
    with pytest.raises(ZeroDivisionError), nc.autocast("cpu", FP16), nc.autocast("cpu", BF16):
        _ = 1 / 0
    assert state() == OUTSIDE
    assert _nesting() == 0


def test_a_function_and_a_method_are_decorated():
    class Model:
        @nc.autocast("cpu", FP16)
        def forward(self, x, *, more):
            """Says so."""
            return state(), x, more

    assert Model().forward(1, more=2) == ((True, FP16, True), 1, 2)
    assert Model.forward.__name__ == "forward"
    assert Model.forward.__doc__ == "Says so."
    assert state() == OUTSIDE


# --- one object, entered again ------------------------------------------------------------------------------


def _nest_in_itself(region):
    with region:
        with region:
            inside = state()
        between = state()
    return inside, between, state()


def _recurse(autocast):
    @autocast("cpu", FP16)
    def f(depth):
        return state() if depth == 0 else f(depth - 1)

    return f(2), state()


def test_one_instance_nested_in_itself():
    on = (True, FP16, True)
    assert _nest_in_itself(nc.autocast("cpu", FP16)) == (on, on, OUTSIDE)
    assert _recurse(nc.autocast) == (on, OUTSIDE)


def test_one_instance_in_two_threads_at_once():
    region = nc.autocast("cpu", FP16)
    both_inside, first_out = threading.Barrier(2), threading.Event()
    seen = {}

    def first():
        with region:
            both_inside.wait()
        seen["first"] = state()
        first_out.set()

    def second():
        torch.set_autocast_enabled("cpu", True)  # this thread's own state before
        with region:
            both_inside.wait()
            first_out.wait()
            seen["second inside"] = state()
        seen["second"] = state()

    _run(first, second)
    assert seen == {"first": OUTSIDE, "second inside": (True, FP16, True), "second": (True, BF16, True)}
    assert state() == OUTSIDE


def _run(*functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


# --- left in another order ----------------------------------------------------------------------------------


def test_a_region_left_before_the_one_inside_it():
    outer, inner = nc.autocast("cpu", FP16), nc.autocast("cpu", BF16, cache_enabled=False)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(OrderError) as raised:
        outer.__exit__(None, None, None)
    assert str(raised.value) == (
        "expected the innermost region to be left first, got the cpu region in torch.float16 with 1 still "
        "open inside it; a generator or a coroutine that stops inside a region does this: open the region "
        "around each of its steps"
    )
    assert state() == (True, BF16, False)
    inner.__exit__(None, None, None)
    assert state() == OUTSIDE
    assert _nesting() == 0


def test_regions_of_two_devices_left_out_of_order():
    outer, inner = nc.autocast("xpu", BF16, cache_enabled=False), nc.autocast("cpu", FP16)
    xpu_before = state("xpu")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(OrderError):
        outer.__exit__(None, None, None)
    assert state("xpu")[:2] == xpu_before[:2]
    inner.__exit__(None, None, None)
    assert state() == OUTSIDE


def test_a_region_that_was_not_entered_here():
    region = nc.autocast("cpu")
    message = (
        "expected a region that this thread entered, got one that it did not enter or has left already; "
        "leave a region in the thread that entered it, as a with statement does"
    )
    with pytest.raises(OrderError) as raised:
        region.__exit__(None, None, None)
    assert str(raised.value) == message
    with region, pytest.raises(OrderError):
        _run(lambda: region.__exit__(None, None, None))
    assert state() == OUTSIDE


# --- formats nested around one layer ------------------------------------------------------------------------


def _nested_formats(autocast, formats, layer, x):
    """The layer's results on the way in and on the way out again."""
    if not formats:
        return []
    with autocast("cpu", formats[0]):
        before = layer(x)
        inner = _nested_formats(autocast, formats[1:], layer, x)
        return [before, *inner, layer(x)]


@pytest.mark.parametrize("formats", list(itertools.product((BF16, FP16, FP32), repeat=3)))
def test_nested_formats_share_a_layer(formats):
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    expected = {dtype: _explicit(layer, x, dtype) for dtype in formats}
    results = _nested_formats(nc.autocast, formats, layer, x)
    for result, dtype in zip(results, [*formats, *reversed(formats)], strict=True):
        assert result.dtype == dtype
        assert torch.equal(result, expected[dtype])


def _explicit(layer, x, dtype):
    with torch.no_grad():
        return torch.nn.functional.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))


def test_another_format_inside_a_disabled_region_inside_a_region():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    with nc.autocast("cpu", BF16):
        layer(x)
        with nc.autocast("cpu", enabled=False):
            assert layer(x).dtype == FP32
            with nc.autocast("cpu", FP16):
                assert torch.equal(layer(x), _explicit(layer, x, FP16))
            assert layer(x).dtype == FP32
        assert torch.equal(layer(x), _explicit(layer, x, BF16))


def test_ours_inside_torchs():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    with torch.autocast("cpu", BF16):
        layer(x)
        with nc.autocast("cpu", FP16):
            assert layer(x).dtype == FP16
        assert layer(x).dtype == BF16
    torch.clear_autocast_cache()
    with torch.autocast("cpu", BF16):
        layer(x)
        with torch.autocast("cpu", enabled=False), nc.autocast("cpu", FP16):
            assert layer(x).dtype == FP16


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts casts of a shape, in the order they are made."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.casts = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.casts += 1
        return func(*args, **(kwargs or {}))


def test_casts_are_kept_where_that_is_safe():
    layer, x = nn.Linear(8, 4, bias=False), torch.randn(2, 8)
    with Counting(layer.weight.shape) as count:
        with nc.autocast("cpu", BF16):
            layer(x), layer(x)
            with nc.autocast("cpu", BF16):  # the same format shares
                layer(x)
            with nc.autocast("cpu", FP32):  # no casts of this weight
                layer(x)
            with nc.autocast("cpu", enabled=False):
                layer(x)
            layer(x)
        assert count.casts == 1
        with nc.autocast("cpu", BF16):
            layer(x)
        assert count.casts == 2, "the outermost region ended: its casts must be gone"
        with nc.autocast("cpu", BF16, cache_enabled=False):
            layer(x), layer(x)
        assert count.casts == 4
        with nc.autocast("cpu", BF16), nc.autocast("cpu", FP16):
            layer(x), layer(x)
        assert count.casts == 5


def test_casts_are_kept_across_regions_for_who_holds_the_nesting_open():
    layer, x = nn.Linear(8, 4, bias=False), torch.randn(2, 8)
    torch.autocast_increment_nesting()
    with Counting(layer.weight.shape) as count:
        for _ in range(3):
            with nc.autocast("cpu", FP16):
                layer(x)
        assert count.casts == 1
        with nc.autocast("cpu", BF16):
            assert layer(x).dtype == BF16
        with nc.autocast("cpu", FP16):
            layer(x)
        with torch.autocast("cpu", BF16, cache_enabled=False):
            layer(x)
        torch.clear_autocast_cache()
        with torch.autocast("cpu", BF16):
            layer(x)
            with nc.autocast("cpu", FP16):
                assert layer(x).dtype == FP16
    torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


# --- threads in different formats ---------------------------------------------------------------------------


def _two_threads(autocast, layer, x):
    """A bf16 thread fills the cache; then an fp16 thread uses the layer; then the first again."""
    filled, used = threading.Event(), threading.Event()
    results = {}

    def first():
        with autocast("cpu", BF16):
            results["before"] = layer(x)
            filled.set()
            used.wait(30)
            results["after"] = layer(x)

    def second():
        filled.wait(30)
        try:
            with autocast("cpu", FP16):
                results["other"] = layer(x)
                results["cache of other"] = torch.is_autocast_cache_enabled()
        finally:
            used.set()

    _run(first, second)
    return results


def test_two_threads_in_different_formats_share_a_layer():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    results = _two_threads(nc.autocast, layer, x)
    assert results.pop("cache of other") is False, "the answer is truthful"
    assert {name: result.dtype for name, result in results.items()} == {
        "before": BF16,
        "other": FP16,
        "after": BF16,
    }
    for result in results.values():
        assert torch.equal(result, _explicit(layer, x, result.dtype))


def test_two_threads_in_one_format_share_the_cache():
    inside = threading.Barrier(2)
    seen = []

    def thread():
        with nc.autocast("cpu", FP16):
            inside.wait(30)
            seen.append(torch.is_autocast_cache_enabled())
            inside.wait(30)

    _run(thread, thread)
    assert seen == [True, True]


@pytest.mark.long
def test_many_threads_nest_formats_around_shared_layers():
    layers, x = [nn.Linear(16, 16) for _ in range(3)], torch.randn(2, 16)
    expected = {d: [_explicit(layer, x, d) for layer in layers] for d in (BF16, FP16, FP32)}

    def thread(seed):
        def run():
            chosen = torch.Generator().manual_seed(seed)
            for _ in range(60):
                formats = [(BF16, FP16, FP32)[i] for i in torch.randint(3, (3,), generator=chosen).tolist()]
                for number, layer in enumerate(layers):
                    results = _nested_formats(nc.autocast, formats, layer, x)
                    for result, d in zip(results, [*formats, *formats[::-1]], strict=True):
                        assert torch.equal(result, expected[d][number])

        return run

    _run(*(thread(seed) for seed in range(4)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="posix: this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_is_inside():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with nc.autocast("cpu", FP16), _regions._process.lock:
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with nc.autocast("cpu", FP32):
        thread.start()
        entered.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # nobody here will ever give that lock back
            with nc.autocast("cpu", BF16):  # the other thread is not here, so nobody keeps fp16 casts
                right = state() == (True, BF16, True)
            os._exit(0 if right and state()[:2] == (True, FP32) else 1)
        leave.set()
        thread.join(30)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
