"""The private names of torch that regions and rules need: this fails loudly when one moves or changes."""

import inspect
import sys
import textwrap

import pytest
import torch
from torch import nn

from child_processes import finished
from narrowcast.casting import _torch_internals as internals
from narrowcast.policy import autocast_key

ATEN = torch.ops.aten
X = torch.randn(4, 4)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu", "mtia", "maia", "hpu", "xla", "ipu"])
def test_every_autocast_key_can_be_excluded_and_gone_below(device):
    with internals.without_key(device)():
        assert not torch.is_autocast_enabled(device)
    below = internals.after_autocast(device)
    assert below.has(torch._C.DispatchKey.AutogradCPU)
    assert below.has(torch._C.DispatchKey.CPU)
    assert not below.has(torch._C._parse_dispatch_key(autocast_key(device)))


def test_a_call_and_a_redispatch_are_the_operators():
    assert torch.equal(internals.call_of(ATEN.softmax.int)(X, -1), X.softmax(-1))
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    assert torch.equal(internals.boxed_redispatch(ATEN.exp.default)(keys, X), X.exp())


def test_what_takes_numbers_for_tensors():
    assert internals.takes_numbers_for_tensors(ATEN.add.Tensor)
    assert not internals.takes_numbers_for_tensors(ATEN.remainder.Tensor)
    assert torch.equal(internals.call_of(ATEN.add.Tensor)(X, 1.5), X + 1.5)
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'"):
        internals.call_of(ATEN.remainder.Tensor)(X, 1.5)


def run_in_a_new_process(script):
    """PyTorch goes on calling a kernel under dispatch modes after it was taken away."""
    imports = (
        "import torch; from narrowcast.casting import _torch_internals as internals; X = torch.randn(4, 4)"
    )
    code = f"{imports}\n{textwrap.dedent(script)}"
    ended = finished([sys.executable, "-c", code])
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
def test_python_is_given_numbers_that_are_tensors_in_c():
    """What ``_calls`` is for: it fails here when PyTorch hands on the tensor."""
    run_in_a_new_process("""
        given = []
        library = torch.library.Library("aten", "IMPL")
        library.impl("remainder.Tensor", lambda *args: given.append(args[1]) or args[0], "AutocastCPU")
        with torch.autocast("cpu", torch.bfloat16):
            torch.take_along_dim(X, torch.zeros(4, 4, dtype=torch.int64), 0)
        assert given == [4], given
    """)


@pytest.mark.long
def test_modes_call_the_kernel_that_was_registered_last():
    """What ``own_kernel`` and the end of a watch see to: it fails here when PyTorch forgets the kernel."""
    run_in_a_new_process("""
        from torch.utils._python_dispatch import TorchDispatchMode

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        called = []
        first, second = torch.library.Library("aten", "IMPL"), torch.library.Library("aten", "IMPL")
        first.impl("exp", lambda x: called.append(1) or x, "AutocastCPU")
        second.impl("exp", lambda x: called.append(2) or x, "AutocastCPU", allow_override=True)
        second._destroy()
        with torch.autocast("cpu", torch.bfloat16):
            X.exp()
            with Mode():
                X.exp()
        assert called == [1, 2], called
    """)


@pytest.mark.long
def test_the_keys_of_torch_func():
    """A call enters the layers on one key, where there is a kernel to fetch; vmap takes composites apart."""
    run_in_a_new_process("""
        front = torch.library.get_kernel("aten::softmax.int", "FuncTorchDynamicLayerFrontMode")
        assert "DynamicLayer" in repr(front)
        assert internals.has_kernel("aten::softmax.int", "FuncTorchBatchedDecomposition")
        assert not internals.has_kernel("aten::softmax.int", "FuncTorchDynamicLayerFrontMode")
        assert internals.has_kernel("aten::where", "FuncTorchBatched")
        assert not internals.is_transforming()
        torch.vmap(lambda x: x if internals.is_transforming() else 1 / 0)(X)
    """)


def test_what_is_being_traced():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []
    make_fx(lambda x: seen.append(internals.is_proxy_tracing()) or x)(X)
    make_fx(lambda x: seen.append(internals.is_proxy_tracing()) or x, pre_dispatch=True)(X)
    with FakeTensorMode():
        seen.append(internals.is_proxy_tracing())
    assert seen == [True] * 3
    assert not internals.is_proxy_tracing()
    assert not internals.is_tracing()
    torch.jit.trace(lambda x: x * 2 if internals.is_tracing() else 1 / 0, X, check_trace=False)


def test_checkpoints_are_made_of_these_names():
    from torch.utils import checkpoint

    assert checkpoint is internals.CHECKPOINT
    calls = inspect.getsource(checkpoint)
    assert "CheckpointFunction.apply(function" in calls
    assert f"gen = {internals.CHECKPOINT_GENERATOR}(" in calls
    assert calls.count("_get_autocast_kwargs(device_type=") == 2


def test_state_dicts_record_what_they_loaded():
    kind, _ = internals.LOADED_KEYS
    assert isinstance(nn.Linear(1, 1).load_state_dict(nn.Linear(1, 1).state_dict()), kind)


def test_an_attribute_stands_in_front_of_hooks_and_forward():
    order = []
    module = nn.Identity()
    module.register_forward_pre_hook(lambda *_: order.append("hook"))

    def call(*args):
        order.append("in front")
        return getattr(type(module), internals.CALL)(module, *args)

    vars(module)[internals.CALL] = call
    module(X)
    assert order == ["in front", "hook"]


def test_data_parallel_copies_modules_by_that_name():
    module = nn.Linear(4, 4)
    replica = getattr(nn.Linear, internals.REPLICATE)(module)
    assert replica is not module
    assert vars(replica).keys() >= vars(module).keys()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_dynamo_traces_the_attribute():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4))
    vars(model[0])[internals.CALL] = lambda x: x + 1
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(X), X + 1)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_dynamo_traces_what_stands_for_a_compiled_function_or_module():
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend="eager")
    assert internals.model_of(compiled) is internals.model_of(model) is model
    compiled.forward = torch.compile(lambda x: x, backend="eager")
    internals.stand_for(compiled.forward, lambda x: x + 1)
    internals.trace_as_called(compiled)
    assert torch.equal(torch.compile(lambda x: compiled(x) * 2, backend="eager")(X), (X + 1) * 2)
    for one in (compiled, compiled.forward):
        assert torch.equal(torch.compile(one, backend="eager")(X), X + 1)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_whether_dynamo_compiles_in_this_thread():
    torch._dynamo.reset()
    seen = []
    note = torch.compiler.assume_constant_result(lambda: seen.append(internals.is_compiling_a_frame()) or 1)
    torch.compile(lambda x: x + note(), backend="eager")(X)
    assert seen == [True]
    assert not internals.is_compiling_a_frame()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_compiler_leaves_a_function_alone():
    seen = []

    @internals.skipped_by_dynamo
    def alone(x):
        seen.append(torch.compiler.is_dynamo_compiling())
        return called_by_it(x)

    def called_by_it(x):
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(
        lambda x: alone(x * 2) * 3, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    assert torch.equal(compiled(X), (X * 2 + 1) * 3)
    assert seen == [False, False]
    assert len(graphs) == 2  # before and after it; nothing of it
    with pytest.raises(internals.dynamo_error()):
        torch.compile(lambda x: alone(x) + 1, backend="eager", fullgraph=True)(X)
    torch._dynamo.reset()


@pytest.mark.long
def test_the_settings_of_the_compiler_that_rules_change():
    """In a process of its own, where nobody changed them yet."""
    run_in_a_new_process("""
        import contextvars
        from torch._functorch import config
        assert config.backward_pass_autocast == "same_as_forward"
        assert internals.trace_backward_outside_of_regions()
        assert config.backward_pass_autocast == "off"
        assert contextvars.Context().run(lambda: config.backward_pass_autocast) == "off"
        config.backward_pass_autocast = [{"device_type": "cpu"}]
        assert not internals.trace_backward_outside_of_regions()
        assert config.backward_pass_autocast == [{"device_type": "cpu"}]
    """)


@pytest.mark.long
@pytest.mark.parametrize("given", [None, "theirs"])
def test_settings_for_every_thread(monkeypatch, given):
    """In a process of its own, with and without an environment variable that sets it too."""
    if given:
        monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", given)
    run_in_a_new_process("""
        import contextvars, torch.compiler.config as config
        internals.set_in_every_thread(config, "cache_key_tag", "ours")
        assert config.cache_key_tag == "ours"
        assert contextvars.Context().run(lambda: config.cache_key_tag) == "ours"
    """)


def test_marks_are_states_that_nothing_reads():
    """Every format is a state of the device types that stand for rules."""
    formats = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    for device in ("ipu", "hpu", "maia", "mtia", "xla"):
        before = torch.get_autocast_dtype(device)
        for dtype in formats:
            torch.set_autocast_dtype(device, dtype)
            assert torch.get_autocast_dtype(device) == dtype
        torch.set_autocast_dtype(device, before)
        assert not torch.is_autocast_enabled(device)


@pytest.mark.long
def test_kernels_of_pytorch_are_known():
    run_in_a_new_process("""
        fetch = lambda: torch.library.get_kernel("aten::linear", "AutocastCPU")
        assert internals.is_of_pytorch(fetch())
        library = torch.library.Library("aten", "IMPL")
        library.impl("linear", lambda *args: args, "AutocastCPU", allow_override=True)
        assert not internals.is_of_pytorch(fetch())
    """)


def test_a_hook_on_a_tensor_is_seen():
    tensor = X.clone().requires_grad_().exp()
    assert not internals.has_hooks(tensor)
    handle = tensor.register_hook(lambda gradient: gradient)
    assert internals.has_hooks(tensor)
    handle.remove()
    assert not internals.has_hooks(tensor)
    tensor.retain_grad()
    assert internals.has_hooks(tensor)


def test_each_frame_that_is_compiled_has_a_number():
    numbers = []

    def backend(_graph, _inputs):
        numbers.append(internals.compile_id())
        return _graph.forward

    for function in (lambda x: x + 1, lambda x: x - 1):
        torch.compile(function, backend=backend)(X)
    torch._dynamo.reset()
    assert len({str(number) for number in numbers}) == 2
    assert None not in numbers
    assert internals.compile_id() is None


def test_whether_hooks_decide_what_is_saved():
    assert not internals.saves_by_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert internals.saves_by_hooks()
    assert not internals.saves_by_hooks()
