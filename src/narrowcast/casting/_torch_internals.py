"""Private names of torch that this package uses; tests/casting/test_torch_internals.py checks each one.

Beside each stand its reason and a link to PyTorch's source: 2.13, or the version whose behaviour requires it.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch.utils import _pytree

from narrowcast.policy import autocast_key, qualified

_F = TypeVar("_F", bound=Callable[..., Any])
_C: Any = torch._C

# ---- state of autocast

torch_autocast: Any = torch.amp.autocast_mode.autocast
"""``torch.autocast`` itself, which a script may have replaced by ``nc.autocast``."""
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/autocast_mode.py

without_autocast: Callable[[], AbstractContextManager[None]] = _C._DisableAutocast
"""Turns the autocast of every device type off, whatever regions are open; torch.autocast takes one type."""
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp


def nesting() -> int:
    """Return how many regions are open in this thread, those of ``torch.autocast`` too."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/autocast_mode.cpp
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1


# ---- the dispatcher


def _key(device_type: str) -> Any:
    # Parsed from its name, since DispatchKey has no attributes for the autocast keys of MTIA, MAIA and XLA.
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/utils/python_dispatch.cpp
    return _C._parse_dispatch_key(autocast_key(device_type))


def without_key(device_type: str) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes contexts in which the dispatcher skips the autocast of ``device_type``.

    PyTorch's own autocast kernels exclude the key in this way. It suits code that may run where autocast is
    off already: there ``torch.set_autocast_enabled`` would have to read the state first, to restore it.
    ``torch.autocast(enabled=False)`` takes five times as long.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/utils/python_dispatch.cpp
    return functools.partial(_C._ExcludeDispatchKeyGuard, _C.DispatchKeySet(_key(device_type)))


def is_below_autograd() -> bool:
    """Return whether this call comes from an autograd kernel, which records what its operator does."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/impl/LocalDispatchKeySet.h
    excluded = _C._dispatch_tls_is_dispatch_key_excluded(_C.DispatchKey.AutogradFunctionality)
    # Inference mode excludes the key everywhere, and records nothing.
    return bool(excluded) and not torch.is_inference_mode_enabled()


def call_of(op: Any) -> Callable[..., Any]:
    """Return what ``op(...)`` of an ``OpOverload`` calls, without a step in Python."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_ops.py
    call: Callable[..., Any] = getattr(op, "_op", op)
    return call


def boxed_redispatch(op: Any) -> Callable[..., Any]:
    """Return ``OpOverload.redispatch`` without a step in Python; it takes a keyset first."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_ops.py
    redispatch: Callable[..., Any] = op._handle.redispatch_boxed
    return redispatch


def after_autocast(device_type: str) -> Any:
    """Return the dispatch keys below the autocast of ``device_type``."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/utils/python_dispatch.cpp
    return _C._dispatch_keyset_full_after(_key(device_type))


def takes_numbers_for_tensors(op: Any) -> bool:
    """Return whether Python may call ``op``, such as ``add``, with a number where it takes a tensor."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/Module.cpp
    namespace, _, base = op._schema.name.partition("::")
    return namespace == "aten" and bool(_C._should_allow_numbers_as_tensors(base))


has_kernel: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key
"""Whether the dispatcher has a kernel for a qualified operator on a key, ours included."""
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/utils/python_dispatch.cpp


def is_of_pytorch(kernel: Any) -> bool:
    """Return whether an autocast kernel, from ``torch.library.get_kernel``, is one of PyTorch's table."""
    # Its repr names the source file that registered it.
    # https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/autocast_mode.cpp
    return "autocast_mode.cpp" in repr(kernel)


def register_kernel(op: str, key: str, kernel: Callable[..., Any], library: Any = None) -> Any:
    """Register ``kernel``, called with a keyset first, on a dispatch key of an existing operator.

    Returns the library that holds it, by default a new one. Its ``_destroy()`` removes its kernels;
    torch.library has no public name for that.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/library.py
    namespace, _, name = qualified(op).partition("::")
    if library is None:
        library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl(name, kernel, key, with_keyset=True, allow_override=True)  # 2.11's default is False
    return library


# ---- tracers


def is_proxy_tracing() -> bool:
    """Return whether ``make_fx`` or ``torch.export`` records calls, or calls compute on fake tensors.

    Casts of weights are not kept then: fake tensors have no values, and a recorded program needs the cast
    itself.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_python_dispatch.py
    keys = _C._TorchDispatchModeKey
    return (
        _C._get_dispatch_mode(keys.PROXY) is not None
        or _C._get_dispatch_mode(keys.FAKE) is not None
        or torch._ops._get_dispatch_mode_pre_dispatch(keys.PROXY) is not None  # type: ignore[no-untyped-call]
    )


def is_exporting() -> bool:
    """Return whether ``torch.export`` traces.

    ``torch.compiler.is_exporting`` also returns True while Dynamo 2.11 traces for ``torch.compile``.
    """
    # https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_dynamo/variables/torch.py
    return torch.compiler._is_exporting_flag


def is_tracing() -> bool:
    """Return whether ``torch.jit.trace`` records calls; it would record a kept cast as a constant."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/jit/_trace.py
    return _C._get_tracing_state() is not None


def is_transforming() -> bool:
    """Return whether calls are made inside a transformation of ``torch.func``."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_functorch/pyfunctorch.py
    return _C._functorch.peek_interpreter_stack() is not None


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a Python hook or ``retain_grad`` is registered for the gradient of ``tensor``.

    The hook that Fabric puts on each output of a model does not count: it only detects a call of
    ``loss.backward()`` in place of ``fabric.backward(loss)``.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_tensor.py (register_hook)
    hooks = (tensor._backward_hooks or {}).values()
    return tensor.retains_grad or not all(map(_is_of_fabric, hooks))


def _is_of_fabric(hook: Any) -> bool:
    # https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.5/src/lightning/fabric/wrappers.py
    inside = getattr(hook, "__wrapped__", hook)  # narrowcast run wraps hooks
    function: Any = getattr(inside, "func", None)
    name, module = getattr(function, "__name__", ""), getattr(function, "__module__", "")
    return name == "_backward_hook" and module.endswith("fabric.wrappers")


def saves_by_hooks() -> bool:
    """Return whether hooks see the tensors that autograd saves, as in a checkpoint and its recomputation."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp
    return _C._autograd._top_saved_tensors_default_hooks(False) is not None


def scripted_as(function: Callable[..., Any], name: str) -> None:
    """Have ``torch.jit.script`` take ``function`` for the operator ``name``."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/jit/_builtins.py
    register: Any = torch.jit._builtins._register_builtin
    register(function, name)


# ---- calls of modules

# nn.Module.__call__ calls ``_call_impl``, which runs the hooks and ``forward``. An attribute of the instance
# with that name stands in front of both, and is traced by Dynamo. ``module.compile()`` sets
# ``_compiled_call_impl``, which is then called instead:
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/variables/nn_module.py
CALL = "_call_impl"
COMPILED_CALL = "_compiled_call_impl"
# Makes the shallow copies of DataParallel, which share the attributes of the instance.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/replicate.py
REPLICATE = "_replicate_for_data_parallel"


# ---- names of torch that stand for functions of ours while regions are open


@dataclass(slots=True)
class _Replaced:
    """The name ``owner.name``: what it stood for (``below``), and what ``make`` made of that (``ours``)."""

    owner: Any
    name: str
    make: Callable[[Any], Any]
    below: Any = None
    ours: Any = None  # made once for what is below, since regions open often


class Replacements:
    """Functions of ours that replace functions of torch by name, as long as there are users.

    If another library wraps one of ours meanwhile, its wrapper stays after the last user, and calls ours. So
    ours must do no harm without users.

    Args:
        names: a tuple for each name: the object that has it, the name, and a function that takes what the
            name stands for and returns what replaces it.
    """

    def __init__(self, *names: tuple[Any, str, Callable[[Any], Any]]) -> None:
        self._names = [_Replaced(owner, name, make) for owner, name, make in names]
        self.users = set[object]()

    def begin(self, user: object) -> None:
        """Put the replacements in place for ``user``, any hashable object that no other caller passes."""
        if not self.users:
            for replaced in self._names:
                now = getattr(replaced.owner, replaced.name)
                # At the first time, and where another library has replaced the name since.
                if now is not replaced.below and now is not replaced.ours:
                    replaced.below = now
                    replaced.ours = replaced.make(now)
                setattr(replaced.owner, replaced.name, replaced.ours)
        self.users.add(user)

    def end(self, user: object) -> None:
        """Put torch's functions back if ``user`` was the last one."""
        self.users.discard(user)
        if not self.users:
            for replaced in self._names:
                # Another library may have put its own in front of ours since.
                if getattr(replaced.owner, replaced.name) is replaced.ours:
                    setattr(replaced.owner, replaced.name, replaced.below)


# Kept casts of weights are dropped when load_state_dict writes to a module. It has no hook that sees every
# module. Replacing the method for each region would empty Python's method caches of every module class
# (measured: 7 microseconds a region with 2,000 classes). So this is what is replaced: the constructor of the
# record that load_state_dict makes after writing each module; its class has no subclasses.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
LOADED_KEYS = (torch.nn.modules.module._IncompatibleKeys, "__new__")
# torch.autograd.backward and torch.autograd.grad look this name up at each call, whoever imported the two.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/__init__.py
ENGINE = (torch.autograd, "_engine_run_backward")
NODE_OF_FUNCTION: Any = torch.autograd.function.BackwardCFunction
"""The base class of the contexts of custom Functions; each Function has a subclass of it.

A context is a node of the graph: PyTorch makes one at each call of the Function, and calls the context's
``apply`` in the backward pass.
"""
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_function.cpp


def gradient_dtypes(node: Any) -> set[torch.dtype]:
    """Return the dtypes of the gradients that a node of a graph takes and passes on."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_cpp_function.cpp
    dtypes = {taken.dtype for taken in node._input_metadata}
    # An edge leads to an input of the next node; None: no gradient is wanted there.
    for next_node, input_number in node.next_functions:
        if next_node is not None:
            dtypes.add(next_node._input_metadata[input_number].dtype)
    return dtypes


# Checkpointing restores neither rules nor a region in float32 on a CPU, and has no hook for it.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py
CHECKPOINT: Any = torch.utils.checkpoint
"""The module that names the parts of activation checkpointing, which are replaced there."""
CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(CHECKPOINT, f"{CHECKPOINT_GENERATOR}_impl"):  # torch 2.15 calls this one alone
    CHECKPOINT_GENERATOR += "_impl"


# ---- Dynamo and AOTAutograd

# These mark functions and code objects, in place of the decorators of torch.compiler: those import
# torch._dynamo, which takes seconds, and put a wrapper around each call.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/decorators.py
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/dynamo/eval_frame.c


def skipped_by_dynamo(function: _F) -> _F:
    """Keep ``torch.compile`` from tracing ``function`` and from compiling it or what it calls.

    As ``torch.compiler.disable``.
    """
    marked: Any = function
    marked._torchdynamo_disable = marked._torchdynamo_disable_recursive = True
    # The marks keep it from being traced inside others; this keeps it and what it calls from being compiled.
    return traced_only_inline(function)


def traced_only_inline(function: _F) -> _F:
    """Let ``torch.compile`` trace ``function`` inside others, but not compile it when Python calls it."""
    frames = _C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def skipped_itself(function: _F) -> _F:
    """As ``traced_only_inline``, but let ``torch.compile`` compile what ``function`` calls."""
    frames = _C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def constant_while_tracing(function: _F) -> _F:
    """Have Dynamo call ``function`` while it traces and use the result as a constant.

    As ``torch.compiler.assume_constant_result``.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
    """Set the autocast dtype in traced code, by one call in the graph: see ``let_dynamo_trace_autocast``.

    Where traced code calls torch's own function, Dynamo 2.15 restores the dtype at the end of the graph.
    """
    # https://github.com/pytorch/pytorch/blob/v2.15.0/torch/_dynamo/variables/torch.py
    torch.set_autocast_dtype(device_type, dtype)


@constant_while_tracing
def let_dynamo_trace_autocast() -> None:
    """Have Dynamo put calls of these functions into the graph; traced code calls this first.

    torch 2.11 breaks the graph at them otherwise.
    """
    # https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_dynamo/trace_rules.py
    for function in (set_autocast_dtype, torch.clear_autocast_cache):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]


def let_dynamo_trace(function: Callable[..., Any]) -> Callable[[], None]:
    """Return a function that traced code calls first, so that Dynamo puts calls of ``function`` into graphs.

    Dynamo does so by itself only with functions of torch that it finds under their names when it is first
    used. It does not find one that has been replaced by then, and functions of ours are not among them.
    """

    # At the time of the trace, so that narrowcast does not import torch._dynamo, which takes seconds.
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/trace_rules.py
    @constant_while_tracing
    def let() -> None:
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]

    return let


def compile_id() -> Any:
    """Return the number of the frame that Dynamo compiles now in this thread, or None."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_guards.py
    return torch._guards.CompileContext.current_compile_id()


@constant_while_tracing
def has_autocast(device_type: str) -> bool:
    """As ``torch.amp.is_autocast_available``, which Dynamo 2.11 cannot trace."""
    return torch.amp.is_autocast_available(device_type)


def keep_graphs_with_regions() -> None:
    """Have AOTAutograd keep on disk graphs that enter ``torch.autocast``, as it does with others.

    It is safe, since the keys of such graphs contain the arguments (``check_node_safe``).
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_functorch/_aot_autograd/autograd_cache.py
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None:
        return
    for name in ("_enter_autocast", "_exit_autocast"):
        config.unsafe_marked_cacheable_functions[f"torch.amp.autocast_mode.{name}"] = "narrowcast"


def trace_backward_outside_of_regions() -> bool:
    """Have ``torch.compile`` cast nothing in backward passes, as eager code does outside of regions.

    By default it casts there as in the forward: a matmul that a region computes in fp32 would have gradients
    in the region's format (https://github.com/pytorch/pytorch/issues/153044). A setting other than the
    default is the caller's, and is kept. Returns whether this function changed the setting.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_functorch/config.py
    from torch._functorch import config

    if getattr(config, "backward_pass_autocast", None) != "same_as_forward":
        return False
    set_in_every_thread(config, "backward_pass_autocast", "off")
    return True


def set_in_every_thread(settings: Any, name: str, value: Any) -> None:
    """Set ``settings.name``, of a module of torch that holds settings, for the whole process.

    Since 2.13 torch keeps what is assigned for the current context alone: another thread, an asyncio task or
    the next cell of a notebook would have the default.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_config_module.py
    setattr(settings, name, value)
    entry = settings._config[name]
    entry.default = value
    # The value of an environment variable comes before the default. Where none is set, the field holds an
    # object of another type.
    if type(entry.env_value_default) is type(value):
        entry.env_value_default = value


def reset_compiled_code() -> bool:
    """Have ``torch.compile`` make the graphs of this process anew; False while one is running in any thread.

    torch frees the graphs at once, also those that a thread runs, and the process would crash.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return True  # nothing was compiled
    if any(map(_is_in_compiled_call, sys._current_frames().values())):
        return False
    dynamo.reset_code_caches()
    return True


def _is_in_compiled_call(frame: FrameType | None) -> bool:
    """Return whether ``frame`` is inside the call of a function that ``torch.compile`` returned."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == _COMPILE_WRAPPER and code.co_filename.endswith("_dynamo/eval_frame.py"):
            return True
        frame = frame.f_back
    return False


_COMPILE_WRAPPER = "compile_wrapper"
"""The function of Dynamo that every call of compiled code runs in."""


def is_compiling_a_frame() -> bool:
    """Return whether Dynamo traces in this thread, or builds the guards of what it traced."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_guards.py
    return torch._guards.CompileContext.try_get() is not None


def dynamo_error() -> type[Exception]:
    """Return the class of what ``torch.compile`` raises in place of an error that it meets."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/exc.py
    error: type[Exception] = sys.modules["torch._dynamo.exc"].TorchDynamoException
    return error


def stand_for(compiled: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Have Dynamo take ``compiled`` for ``function``, in code around it and if it is compiled again.

    Dynamo treats what ``torch.compile`` returns in the same way.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py
    marked: Any = compiled
    marked._torchdynamo_inline = marked._torchdynamo_orig_callable = function
    marked._torchdynamo_wrapper_id = id(compiled)


def trace_as_called(compiled: Any) -> None:
    """Have Dynamo trace ``compiled.forward`` rather than the model that was compiled.

    ``compiled`` is a module that ``torch.compile`` returned; its class becomes one of ours.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/variables/builder.py
    compiled.__class__ = _optimized_module()
    compiled._torchdynamo_orig_callable = compiled.forward._torchdynamo_orig_callable


@functools.cache
def _optimized_module() -> type[torch.nn.Module]:
    """Return a class of compiled modules that Dynamo does not unwrap: it knows them by their exact class."""
    base: Any = sys.modules["torch._dynamo"].OptimizedModule

    class OptimizedModule(base):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return self.forward(*args, **kwargs)
            return super().__call__(*args, **kwargs)

        # Dynamo 2.11 asks for it, and the base class has a __len__ that raises for most models.
        def __bool__(self) -> bool:
            return bool(self._orig_mod)

    return OptimizedModule


def model_of(compiled: torch.nn.Module) -> torch.nn.Module:
    """Return the model in a module that ``torch.compile`` returned; another module as it is."""
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None or not isinstance(compiled, dynamo.OptimizedModule):
        return compiled
    model: torch.nn.Module = vars(compiled)["_modules"]["_orig_mod"]
    return model


# ---- containers


def one_level(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the children of a container that torch's pytree knows, and a function that rebuilds it; or None.

    Libraries register their containers with ``torch.utils._pytree``, although the name is private.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_pytree.py
    children, spec = _pytree.tree_flatten(value, is_leaf=lambda inner: inner is not value)
    if len(children) == 1 and children[0] is value:
        return None
    return children, lambda parts: _pytree.tree_unflatten(parts, spec)
