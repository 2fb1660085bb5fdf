"""What is in force inside a region and after it: nested, re-entered, in threads, left by exceptions.

Also regions in float32, and what is refused.
"""

import contextlib
import itertools
import os
import signal
import threading

import pytest
import torch
import torch.nn.functional as F
from casting_cases import BF16, FP16, FP32, CountCasts, assert_same, in_threads, linear_by_hand, rules
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.casting import PolicyRegion
from narrowcast.casting.kernels import _kernels
from narrowcast.casting.regions import _autocast, _regions, _scopes
from narrowcast.errors import DeviceError, OrderError, PolicyError

OUTSIDE = (False, BF16, True)


def state(device="cpu"):
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )


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


def test_one_instance_nested_in_itself():
    @nc.autocast("cpu", FP16)
    def recurse(depth):
        return state() if depth == 0 else recurse(depth - 1)

    region = nc.autocast("cpu", FP16)
    with region:
        with region:
            assert state() == (True, FP16, True)
        assert state() == (True, FP16, True)
    assert state() == OUTSIDE
    assert recurse(2) == (True, FP16, True)
    assert state() == OUTSIDE


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

    in_threads(first, second)
    assert seen == {"first": OUTSIDE, "second inside": (True, FP16, True), "second": (True, BF16, True)}
    assert state() == OUTSIDE


# --- left in another order ----------------------------------------------------------------------------------


def test_a_region_left_before_the_one_inside_it():
    outer, inner = nc.autocast("cpu", FP16), nc.autocast("cpu", BF16, cache_enabled=False)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(
        OrderError, match=r"with 1 still open inside it, .* a generator or a coroutine that stops"
    ):
        outer.__exit__(None, None, None)
    assert state() == OUTSIDE
    with pytest.raises(OrderError, match="has left already"):
        inner.__exit__(None, None, None)
    assert state() == OUTSIDE
    assert _nesting() == 0


def test_regions_of_two_devices_left_out_of_order(monkeypatch):
    monkeypatch.setattr("torch.xpu.is_available", lambda: True)
    outer, inner = nc.autocast("xpu", BF16, cache_enabled=False), nc.autocast("cpu", FP16)
    xpu_before = state("xpu")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(OrderError):
        outer.__exit__(None, None, None)
    assert state("xpu") == xpu_before
    assert state() == OUTSIDE


def test_a_region_on_two_devices_that_is_left_before_the_one_inside_it(monkeypatch):
    monkeypatch.setattr("torch.xpu.is_available", lambda: True)
    xpu_before = state("xpu")
    both, inner = PolicyRegion(nc.Policy.preset("bf16"), {"xpu": BF16, "cpu": BF16}), nc.autocast("cpu", FP16)
    both.__enter__()
    inner.__enter__()
    with pytest.raises(OrderError, match="with 1 still open inside it"):
        both.__exit__(None, None, None)
    assert (state("xpu"), state()) == (xpu_before, OUTSIDE)
    assert _nesting() == 0


def test_a_region_that_was_not_entered_here():
    region = nc.autocast("cpu")
    with pytest.raises(
        OrderError, match="expected a region that this thread entered, got one that it did not"
    ):
        region.__exit__(None, None, None)
    with region, pytest.raises(OrderError):
        in_threads(lambda: region.__exit__(None, None, None))
    assert state() == OUTSIDE


# --- formats nested around one layer ------------------------------------------------------------------------


def _nested_formats(formats, layer, x):
    """The layer's results on the way in and on the way out again."""
    if not formats:
        return []
    with nc.autocast("cpu", formats[0]):
        before = layer(x)
        inner = _nested_formats(formats[1:], layer, x)
        return [before, *inner, layer(x)]


@pytest.mark.parametrize("formats", list(itertools.product((BF16, FP16, FP32), repeat=3)))
def test_nested_formats_share_a_layer(formats):
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    expected = {dtype: linear_by_hand(layer, x, dtype) for dtype in formats}
    results = _nested_formats(formats, layer, x)
    for result, dtype in zip(results, [*formats, *reversed(formats)], strict=True):
        assert result.dtype == dtype
        assert torch.equal(result, expected[dtype])


def test_another_format_inside_a_disabled_region_inside_a_region():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    with nc.autocast("cpu", BF16):
        layer(x)
        with nc.autocast("cpu", enabled=False):
            assert layer(x).dtype == FP32
            with nc.autocast("cpu", FP16):
                assert torch.equal(layer(x), linear_by_hand(layer, x, FP16))
            assert layer(x).dtype == FP32
        assert torch.equal(layer(x), linear_by_hand(layer, x, BF16))


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


def test_casts_are_kept_where_that_is_safe():
    layer, x = nn.Linear(8, 4, bias=False), torch.randn(2, 8)
    with CountCasts(layer.weight.shape) as made:
        with nc.autocast("cpu", BF16):
            layer(x), layer(x)
            with nc.autocast("cpu", BF16):  # the same format shares
                layer(x)
            with nc.autocast("cpu", FP32):  # no casts of this weight
                layer(x)
            with nc.autocast("cpu", enabled=False):
                layer(x)
            layer(x)
        assert made.count == 1
        with nc.autocast("cpu", BF16):
            layer(x)
        assert made.count == 2, "the outermost region ended: its casts must be gone"
        with nc.autocast("cpu", BF16, cache_enabled=False):
            layer(x), layer(x)
        assert made.count == 4
        with nc.autocast("cpu", BF16), nc.autocast("cpu", FP16):
            layer(x), layer(x)
        assert made.count == 5


def test_casts_are_kept_across_regions_for_who_holds_the_nesting_open():
    layer, x = nn.Linear(8, 4, bias=False), torch.randn(2, 8)
    torch.autocast_increment_nesting()
    with CountCasts(layer.weight.shape) as made:
        for _ in range(3):
            with nc.autocast("cpu", FP16):
                layer(x)
        assert made.count == 1
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


def test_two_threads_in_different_formats_share_a_layer():
    """A bf16 thread fills the cache; then an fp16 thread uses the layer; then the first again."""
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    filled, used = threading.Event(), threading.Event()

    def first():
        with nc.autocast("cpu", BF16):
            before = layer(x)
            filled.set()
            used.wait(30)
            return before, layer(x)

    def second():
        filled.wait(30)
        try:
            with nc.autocast("cpu", FP16):
                assert not torch.is_autocast_cache_enabled()  # the answer is truthful
                return layer(x)
        finally:
            used.set()

    (before, after), other = in_threads(first, second)
    for result, dtype in ((before, BF16), (other, FP16), (after, BF16)):
        assert result.dtype == dtype
        assert torch.equal(result, linear_by_hand(layer, x, dtype))


def test_two_threads_in_one_format_share_the_cache():
    inside = threading.Barrier(2)

    def thread():
        with nc.autocast("cpu", FP16):
            inside.wait(30)
            enabled = torch.is_autocast_cache_enabled()
            inside.wait(30)
            return enabled

    assert in_threads(thread, thread) == [True, True]


@pytest.mark.long
def test_many_threads_nest_formats_around_shared_layers():
    layers, x = [nn.Linear(16, 16) for _ in range(3)], torch.randn(2, 16)
    expected = {d: [linear_by_hand(layer, x, d) for layer in layers] for d in (BF16, FP16, FP32)}

    def thread(seed):
        def run():
            chosen = torch.Generator().manual_seed(seed)
            for _ in range(60):
                formats = [(BF16, FP16, FP32)[i] for i in torch.randint(3, (3,), generator=chosen).tolist()]
                for number, layer in enumerate(layers):
                    results = _nested_formats(formats, layer, x)
                    for result, d in zip(results, [*formats, *formats[::-1]], strict=True):
                        assert torch.equal(result, expected[d][number])

        return run

    in_threads(*(thread(seed) for seed in range(4)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="posix: this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_is_inside():
    entered, leave = threading.Event(), threading.Event()
    policy = rules(nc.rule.op("softmax", compute="bf16"))

    def other():
        locks = (_regions._process.lock, _scopes._lock, _kernels._lock, _autocast._lock)
        with nc.autocast("cpu", FP16), contextlib.ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with nc.autocast("cpu", FP32):
        thread.start()
        entered.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # nobody here will ever give those locks back
            scopes_of_new_thread = _scopes._Thread()  # takes the lock of scopes
            assert scopes_of_new_thread.regions == []
            with nc.autocast("cpu", BF16):  # the other thread is not here, so nobody keeps fp16 casts
                right = state() == (True, BF16, True)
            with PolicyRegion(policy, {"cpu": BF16}):  # takes the lock of kernels
                pass
            with _autocast._backward_outside(policy):  # takes the lock of lasting regions
                pass
            os._exit(0 if right and state()[:2] == (True, FP32) else 1)
        leave.set()
        thread.join(30)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# --- in float32, which torch leaves undone in silence -------------------------------------------------------


@pytest.mark.parametrize("half", [BF16, FP16])
def test_a_half_tensor_through_an_fp32_layer(half):
    layer, x = nn.Linear(8, 8), torch.randn(2, 8).to(half)
    expected = F.linear(x.float(), layer.weight, layer.bias)
    with nc.autocast("cpu", FP32):
        assert torch.equal(layer(x), expected)
    with nc.autocast("cpu", half):
        inside = layer(x)
        with nc.autocast("cpu", FP32):
            assert torch.equal(layer(x), expected)
            assert layer(inside).dtype == FP32
        assert torch.equal(layer(x), inside)


def test_half_weights_are_cast_up_too():
    layer, x = nn.Linear(8, 8).to(BF16), torch.randn(2, 8)
    with nc.autocast("cpu", FP32):
        assert torch.equal(layer(x), F.linear(x, layer.weight.float(), layer.bias.float()))


def test_gradients_are_of_the_inputs_own_format_and_those_of_explicit_casts():
    x = torch.randn(4, 8, dtype=BF16, requires_grad=True)
    weight = torch.randn(3, 8, requires_grad=True)
    with nc.autocast("cpu", FP32):
        y = F.linear(x, weight)
    found = torch.autograd.grad(y.square().sum(), (x, weight))
    assert found[0].dtype == BF16
    assert_same(found, torch.autograd.grad(F.linear(x.float(), weight).square().sum(), (x, weight)))


def test_doubles_and_integers_stay():
    with nc.autocast("cpu", FP32):
        assert torch.mm(torch.ones(2, 2).double(), torch.ones(2, 2).double()).dtype == torch.float64
        assert torch.mm(torch.ones(2, 2).long(), torch.ones(2, 2).long()).dtype == torch.int64


def test_a_checkpoint_keeps_the_region_inside_it():
    layer = nn.Linear(8, 8)

    def block(x):
        with nc.autocast("cpu", FP32):
            return layer(x)

    x = torch.randn(2, 8, dtype=BF16, requires_grad=True)
    block(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with nc.autocast("cpu", BF16):
        y = checkpoint(block, x, use_reentrant=False)
    y.square().sum().backward()
    assert torch.equal(x.grad, expected)


# --- what is refused when a region is made, where torch warns, or goes on -----------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("cdua",), DeviceError, "type 'cdua'.* Did you mean \"cuda\"[?] Known: cpu, cuda, xpu"),
        (("CPU",), DeviceError, 'Did you mean "cpu"'),
        (("mpss",), DeviceError, 'Did you mean "mps"'),
        (("meta",), DeviceError, "unknown device type 'meta'"),
        (("bf16",), DeviceError, r'got the policy \'bf16\': nc.autocast\("(cpu|cuda)", policy="bf16"\)'),
        ((torch.device("cpu"),), ValueError, "Expected `device_type` of type `str`"),
        (("cpu", "bf16"), PolicyError, 'write policy="bf16" for a preset'),
        (("cpu", BF16, True, None, "bf16"), PolicyError, "expected a dtype or a policy, got both"),
        (("cpu", None, 1), TypeError, "expected enabled to be a bool, got 1 of type int"),
        (("cpu", None, True, 0), TypeError, "expected cache_enabled to be a bool, got 0 of type int"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, match):
    *arguments, policy = arguments if len(arguments) == 5 else (*arguments, None)
    with pytest.raises(error, match=match):
        nc.autocast(*arguments, policy=policy)


def test_cuda_without_cuda_is_an_error_that_says_the_fix(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="Use device 'cpu', or install a CUDA build"):
        nc.autocast("cuda", FP16)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        silent = torch.autocast("cuda", FP16)
    assert silent._enabled is False, "torch now refuses cuda without CUDA too: is our own check still needed?"
    with nc.autocast("cuda", FP16, enabled=False):
        assert not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == FP16


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_format_without_autocast(dtype):
    with pytest.raises(
        PolicyError, match=f"{dtype}. Supported: torch.bfloat16, torch.float16, torch.float32"
    ):
        nc.autocast("cpu", dtype)
    with pytest.warns(UserWarning, match="Disabling autocast"):
        assert torch.autocast("cpu", dtype)._enabled is False, "torch refuses it now"
    with nc.autocast("cpu", dtype, enabled=False):
        assert not torch.is_autocast_enabled("cpu")


def test_only_what_can_be_called_is_decorated():
    with pytest.raises(TypeError, match='to open a region write "with'):
        nc.autocast("cpu")(torch.ones(1))
