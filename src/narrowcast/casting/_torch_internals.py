"""The names of torch without a promise of stability that this package uses, in one place.

``Module.load_state_dict`` has no hook that sees every module. Replacing the method for the length of each
region would empty Python's method caches of every module class each time (measured: 7 microseconds a region
with 2,000 classes), so what is replaced is the record that it makes after writing each module: a dict entry.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from narrowcast.policy import autocast_key

COMPOSABLE_CHECKPOINT = "torch.distributed._composable.checkpoint_activation"
_F = TypeVar("_F", bound=Callable[..., Any])
_module_file: Any = sys.modules["torch.nn.modules.module"]
LoadedKeys: Any = _module_file._IncompatibleKeys
_autograd: Any = torch.autograd


def replace_loaded_keys(replacement: Any) -> None:
    """What ``Module.load_state_dict`` makes once it has written a module's weights."""
    _module_file._IncompatibleKeys = replacement


def current_loaded_keys() -> Any:
    return _module_file._IncompatibleKeys


def privateuse1_name() -> str:
    """What a device that an extension registered is called; ``privateuseone`` where none did."""
    name: str = torch._C._get_privateuse1_backend_name()
    return name


def cuda_is_missing() -> bool:
    """torch's own answer: no CUDA, and no torch_xla either, which takes regions for ``"cuda"``."""
    missing: bool = torch.cuda.amp.common.amp_definitely_not_available()  # type: ignore[no-untyped-call]
    return missing


def without_key(device_type: str) -> Callable[[], AbstractContextManager[None]]:
    """A maker of context managers in which the autocast of ``device_type`` is off for the dispatcher."""
    keys = torch._C.DispatchKeySet(_key(device_type))
    guard: Any = torch._C._ExcludeDispatchKeyGuard

    return functools.partial(guard, keys)


def call_of(op: Any) -> Callable[..., Any]:
    """What ``op(...)`` of an ``OpOverload`` comes down to, without a step in Python."""
    call: Callable[..., Any] = getattr(op, "_op", op)
    return call


def boxed_redispatch(op: Any) -> Callable[..., Any]:
    """Calls ``op`` at the highest of the dispatch keys that are given first."""
    redispatch: Callable[..., Any] = op._handle.redispatch_boxed
    return redispatch


def after_autocast(device_type: str) -> Any:
    """The dispatch keys below the autocast of ``device_type``."""
    return torch._C._dispatch_keyset_full_after(_key(device_type))


def _key(device_type: str) -> Any:
    # DispatchKey has no attribute for those of MTIA, MAIA and XLA.
    return torch._C._parse_dispatch_key(autocast_key(device_type))


def takes_numbers_for_tensors(op: Any) -> bool:
    """Whether Python may call ``op`` with a number where it takes a tensor, as addition."""
    namespace, _, base = op._schema.name.partition("::")
    return namespace == "aten" and bool(torch._C._should_allow_numbers_as_tensors(base))


def decomposition_of(op: Any) -> Callable[..., Any]:
    """Takes a composite apart: what it is made of is called at once, in C++ but where code is traced."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    tracing = functools.partial(
        torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PythonDispatcher
    )

    def apart(*args: Any, **kwargs: Any) -> Any:
        return op.decompose(*args, **kwargs) if tracing() else op._op_dk(key, *args, **kwargs)

    return apart


def names_of_composites() -> list[str]:
    """The composites that autocast takes apart, as ``"einsum"``; in-place and ``out=`` forms left out."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return [
        name.removeprefix("aten::")
        for name in names
        if has_kernel(name, "CompositeImplicitAutograd")
        and not (name.partition(".")[0].endswith("_") or "out" in name.partition(".")[2])
    ]


def has_kernel(qualified: str, key: str) -> bool:
    """Whether the dispatcher has a kernel for the operator on that key, ours included."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key))


def is_of_pytorch(kernel: Any) -> bool:
    """Whether a kernel that ``torch.library.get_kernel`` gave is one of those that come with PyTorch."""
    return "autocast_mode.cpp" in repr(kernel)


def is_proxy_tracing() -> bool:
    """Whether calls are recorded by ``make_fx`` or ``torch.export``, or computed of fake tensors.

    A tensor of now is of no use to them, nor theirs to anybody else.
    """
    modes: Any = (torch._C, torch._ops)
    keys: Any = torch._C._TorchDispatchModeKey
    return (
        modes[0]._get_dispatch_mode(keys.PROXY) is not None
        or modes[0]._get_dispatch_mode(keys.FAKE) is not None
        or modes[1]._get_dispatch_mode_pre_dispatch(keys.PROXY) is not None
    )


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` records calls, which takes tensors of now for constants."""
    return torch._C._get_tracing_state() is not None


def is_transforming() -> bool:
    """Whether calls are made inside a transformation of ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def checkpoint_modules() -> list[Any]:
    """The modules of torch that name what activation checkpointing is made of."""
    names = ("torch.utils.checkpoint", COMPOSABLE_CHECKPOINT)
    return [sys.modules[name] for name in names if name in sys.modules]


def qualified(op: str) -> str:
    """Return the name of an operator as the dispatcher spells it, ``"aten::softmax.int"``."""
    return op if "::" in op else f"aten::{op}"


def register_kernel(op: str, key: str, kernel: Callable[..., Any], library: Any = None) -> Any:
    """Register ``kernel``, called with a keyset first, on a dispatch key of an existing operator.

    Returns the library that holds it, by default a new one, whose ``_destroy()`` removes its kernels.
    """
    namespace, _, name = qualified(op).partition("::")
    if library is None:
        library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl(name, kernel, key, with_keyset=True)
    return library


def without_autocast() -> AbstractContextManager[None]:
    """The autocast of every type of device is off inside, whatever regions are open."""
    guard: AbstractContextManager[None] = torch._C._DisableAutocast()
    return guard


def current_engine() -> Any:
    """What ``torch.autograd.backward`` and ``torch.autograd.grad`` start autograd's engine with."""
    return _autograd._engine_run_backward


def replace_engine(replacement: Callable[..., Any]) -> None:
    """Both look the name up at each call, whoever imported the two before."""
    _autograd._engine_run_backward = replacement


def nesting() -> int:
    """How many regions are open in this thread, those of ``torch.autocast`` too."""
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1


def skipped_by_dynamo(function: _F) -> _F:
    """Have ``torch.compile`` neither trace ``function`` nor compile it or what it calls.

    As ``torch.compiler.disable``, which would import the whole compiler and put a wrapper around each call.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    its: Any = function
    its._torchdynamo_disable = its._torchdynamo_disable_recursive = True
    frames.set_code_exec_strategy(its.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def traced_only_inline(function: _F) -> _F:
    """Have ``torch.compile`` trace ``function`` inside others, but run it as it is where Python calls it."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def constant_while_tracing(function: _F) -> _F:
    """Have Dynamo call ``function`` while it traces and take the result for a constant.

    As ``torch.compiler.assume_constant_result``, which would import the whole compiler.
    """
    its: Any = function
    its._dynamo_marked_constant = True
    return function


def keep_graphs_with_regions() -> None:
    """Have AOTAutograd keep on disk graphs that enter ``torch.autocast``, as it does with others.

    Their keys hold the arguments (torch/_functorch/_aot_autograd/autograd_cache.py, ``check_node_safe``).
    """
    config: Any = sys.modules.get("torch._inductor.config")
    for name in ("_enter_autocast", "_exit_autocast") if config is not None else ():
        config.unsafe_marked_cacheable_functions[f"torch.amp.autocast_mode.{name}"] = "narrowcast"


def trace_backward_outside_of_regions() -> None:
    """Have ``torch.compile`` cast nothing in backward passes, as eager code whose backward is outside.

    By default it casts there as in the forward: a product that a rule computes in fp32 would have gradients
    in the region's format. Whoever set another behaviour keeps it.
    """
    from torch._functorch import config

    settings: Any = config
    if getattr(settings, "backward_pass_autocast", None) == "same_as_forward":
        settings.backward_pass_autocast = "off"


def guard_hooks_of_modules() -> None:
    """Have ``torch.compile`` notice hooks that a module gets later, which it does not look for by default.

    Graphs that it made before are made again; once in a process.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.config.skip_nnmodule_hook_guards:
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset_code_caches()


def one_level(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The children of a container that torch's pytree knows, and what makes another; None for all else."""
    children, spec = _pytree.tree_flatten(value, is_leaf=lambda one: one is not value)
    if len(children) == 1 and children[0] is value:
        return None
    return children, lambda parts: _pytree.tree_unflatten(parts, spec)
