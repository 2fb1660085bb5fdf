"""Where mixed precision is on: the outermost call of a module that holds parameters, and nowhere else."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.data import get_worker_info

from narrowcast.attach._ledger import Ledger, Reading, is_capturing
from narrowcast.attach._patches import Patches
from narrowcast.attach._recomputation import Recomputation
from narrowcast.attach._rules import ModuleRules
from narrowcast.attach._scale import RunningScale
from narrowcast.attach._torch_internals import NO_GRAPH_TASK, graph_task_id, is_jit_tracing
from narrowcast.attach._watcher import Watcher
from narrowcast.casting import autocast, cast_floating, region_in
from narrowcast.errors import UnsupportedError
from narrowcast.machine import best_format, known_device_types, slow_format_warning
from narrowcast.observe.profiling import seconds_between, stamp
from narrowcast.policy import Policy, format_name, resolve
from narrowcast.scaling import Dynamic, LossScale


class _Thread(threading.local):
    """How many of our regions this thread is in, whether it is opening one, and whether it is in a call
    that is watched as a whole.
    """

    depth = 0
    opening = False
    watched = False


class Regions:
    """Replaces ``nn.Module.__call__``, so that a region closes whatever is raised in it, and steps aside for
    scripts that use autocast or a GradScaler themselves.
    """

    def __init__(
        self,
        policy: Policy,
        asked_scale: LossScale | None,
        scale: RunningScale,
        ledger: Ledger,
        step_aside: Callable[[str], None],
        tell: Callable[[str], None],
        watcher: Watcher,
        forward_ended: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._asked_scale = asked_scale
        self._scale = scale
        self._ledger = ledger
        self._step_aside = step_aside
        self._tell = tell
        self._watcher = watcher
        self._forward_ended = forward_ended
        self.recomputation = Recomputation()
        self._thread = _Thread()
        self._dtypes: dict[str, torch.dtype | None] = {}
        self._trained: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._titles: Counter[str] = Counter()
        self._rules = ModuleRules(policy)
        # Tracing may read what is known beforehand and set an attribute, and no more.
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        self._traceable_dtypes = {device: resolve(policy, device) for device in devices}
        self._traced_on: str | None = None
        self.set_aside = False
        self.in_fp32 = False

    def install(self, patches: Patches) -> None:
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        patches.replace(torch.nn.Module, "__call__", self._module_call(torch.nn.Module.__call__))
        patches.replace(
            torch.utils.checkpoint, "checkpoint", self._checkpoint(torch.utils.checkpoint.checkpoint)
        )
        patches.replace(torch.autocast, "__enter__", self._autocast_enter(torch.autocast.__enter__))
        patches.replace(autocast, "__enter__", self._autocast_enter(autocast.__enter__))
        patches.replace(torch.amp.GradScaler, "__init__", self._scaler_init(torch.amp.GradScaler.__init__))

    def uninstall(self) -> None:
        for note in self._rules.remove():
            self._ledger.note(note)
        torch.backends.mha.set_fastpath_enabled(self._fastpath)

    def continue_in_fp32(self) -> None:
        """Open no region from now on."""
        self.in_fp32 = True
        self._rules.remove()

    def parameter_names(self) -> dict[int, str]:
        """``id`` of each parameter of the modules that were called -> its name, with the module's class.

        The second module of a class is ``Class-2``, in the order in which they were called first.
        """
        return {
            id(parameter): f"{title}.{name}"
            for module, title in reversed(list(self._trained.items()))
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    @property
    def called_a_module(self) -> bool:
        return bool(self._dtypes) or bool(self._titles)

    # ---- the region

    def _module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        thread = self._thread

        @functools.wraps(original)
        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if torch.compiler.is_dynamo_compiling():
                return self._traced_call(original, module, args, kwargs)
            if thread.depth:
                return original(module, *args, **kwargs)
            if self.set_aside:
                return self._call_left_alone(original, module, args, kwargs)
            return self._outermost_call(original, module, args, kwargs)

        return __call__

    def _outermost_call(
        self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any
    ) -> Any:
        parameter = next(module.parameters(), None)
        if parameter is None or get_worker_info() is not None or is_jit_tracing():
            # A traced module would keep the casts after the run.
            return original(module, *args, **kwargs)
        device_type = parameter.device.type
        dtype = None if self.in_fp32 else self._dtype_on(device_type)
        if not self._thread.watched and module not in self._trained:
            self._meet(module)
        in_backward = graph_task_id() != NO_GRAPH_TASK
        if in_backward and torch.is_autocast_enabled(device_type):
            # Within a backward, a region that is already on belongs to a recomputed forward.
            return original(module, *args, **kwargs)
        if in_backward or self._thread.watched:
            return self._in_region(original, module, args, kwargs, device_type, dtype)
        self._thread.watched = True
        try:
            self._watcher.called(module, args, kwargs)
            if self.in_fp32:
                dtype = None
            timed = not self._ledger.backwards and not is_capturing()
            began = stamp(device_type) if timed else None
            output = self._in_region(original, module, args, kwargs, device_type, dtype)
            if began is not None:
                self._ledger.saw_forward(_lasted(began, stamp(device_type)), training=module.training)
            self._watcher.returned(module, output)
        finally:
            self._thread.watched = False
        self._forward_ended()
        return output

    def _call_left_alone(
        self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """The outermost call of a module in a script that does it itself; only its end is told."""
        if next(module.parameters(), None) is None or get_worker_info() is not None:
            return original(module, *args, **kwargs)
        self._thread.depth += 1
        try:
            output = original(module, *args, **kwargs)
        finally:
            self._thread.depth -= 1
        if graph_task_id() == NO_GRAPH_TASK:
            self._forward_ended()
        return output

    def _in_region(
        self,
        original: Callable[..., Any],
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
        device_type: str,
        dtype: torch.dtype | None,
    ) -> Any:
        """Call ``module`` in a region of ``dtype``, its floating outputs in fp32; None: as it is."""
        thread = self._thread
        if dtype is None:
            # Where other devices have regions, modules inside may open one; where none has, the modules
            # inside are as quick to call as in a region: FP32 is what mixed precision is timed against.
            alone = self.in_fp32 or (self._policy.compute == "fp32" and self._policy.is_plain)
            thread.depth += alone
            try:
                return original(module, *args, **kwargs)
            finally:
                thread.depth -= alone
        region = region_in(self._policy, device_type, dtype)
        thread.opening = True
        region.__enter__()
        thread.opening = False
        thread.depth += 1
        try:
            output = original(module, *args, **kwargs)
        finally:
            thread.depth -= 1
            region.__exit__(*sys.exc_info())
        return cast_floating(output, torch.float32)

    def _traced_call(
        self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """The same inside a function that ``torch.compile`` traces, in terms that it can trace."""
        parameter = next(module.parameters(), None)
        if self.set_aside or parameter is None or torch.is_autocast_enabled(parameter.device.type):
            return original(module, *args, **kwargs)
        if not self._policy.is_plain:
            raise UnsupportedError(
                f"a function that calls {type(module).__name__} is compiled as a whole, where the rules of a "
                "policy could not be kept: compile the module itself, torch.compile(model), or use a preset "
                "without rules"
            )
        dtype = self._traceable_dtypes.get(parameter.device.type, torch.float32)
        if dtype == torch.float32:
            return original(module, *args, **kwargs)
        self._traced_on = parameter.device.type
        with torch.autocast(parameter.device.type, dtype):
            output = original(module, *args, **kwargs)
        return cast_floating(output, torch.float32)

    def settle(self) -> None:
        """Decide for a device whose regions were only traced so far."""
        if self._traced_on is not None:
            self._dtype_on(self._traced_on)

    def _dtype_on(self, device_type: str) -> torch.dtype | None:
        """What a region on this device computes in; None: there is nothing to open."""
        if device_type not in self._dtypes:
            self._decide(device_type)
        return self._dtypes[device_type]

    def _decide(self, device_type: str) -> None:
        if device_type not in known_device_types():
            self._dtypes[device_type] = None
            self._ledger.note(f"modules on device {device_type!r} stay in fp32: torch has no autocast for it")
            return
        dtype = resolve(self._policy, device_type)
        automatic = self._policy.compute == "auto"
        because = best_format(device_type).because if automatic else "as asked"
        name = format_name(dtype)
        self._ledger.saw_device(device_type, name, because)
        slow = slow_format_warning(name, device_type)
        if slow:
            self._ledger.note(slow)
            self._tell(slow)
        if dtype == torch.float16 and self._asked_scale is None and not self._scale.active:
            self._scale.value = Dynamic()
        if dtype != torch.float32:
            # The fast path of nn.TransformerEncoder in evaluation fails on operands of two formats.
            torch.backends.mha.set_fastpath_enabled(False)
        self._dtypes[device_type] = None if dtype == torch.float32 and self._policy.is_plain else dtype

    def _meet(self, module: torch.nn.Module) -> None:
        """A module is called from outside for the first time.

        Raises:
            UnsupportedError: its gradients do not pass leaf hooks, and the loss would be scaled.
        """
        if self._scale.active:
            refuse_sharded(module)
        kind = type(module).__name__
        if not self.in_fp32:
            self._rules.meet(module)
        self._titles[kind] += 1  # also of modules that are gone, and of other classes of that name
        self._trained[module] = f"{kind}-{self._titles[kind]}" if self._titles[kind] > 1 else kind

    # ---- recomputation

    def _checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Recomputation knows how deep in our regions the first computation was."""

        @functools.wraps(original)
        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return original(function, *args, **kwargs)
            depth = self._thread.depth
            first_inputs: set[int] | None = None

            @functools.wraps(function)
            def at_depth(*inputs: Any, **keywords: Any) -> Any:
                nonlocal first_inputs
                tensors = {id(t): t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad}
                if first_inputs is None:
                    first_inputs = set(tensors)
                elif stand_ins := [t for key, t in tensors.items() if key not in first_inputs]:
                    self.recomputation.begins(stand_ins)
                before, self._thread.depth = self._thread.depth, depth
                try:
                    return function(*inputs, **keywords)
                finally:
                    self._thread.depth = before

            return original(at_depth, *args, **kwargs)

        return checkpoint

    # ---- scripts that do it themselves

    def _autocast_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __enter__(region: Any) -> Any:  # noqa: N807
            if torch.compiler.is_dynamo_compiling() or self._thread.opening:
                return original(region)
            result = original(region)
            if not self.set_aside and _is_on(region) and _entered_by_the_script(sys._getframe(1)):
                self._step_aside("the script uses autocast itself")
            return result

        return __enter__

    def _scaler_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(scaler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(scaler, *args, **kwargs)
            if scaler.is_enabled():
                self._step_aside("the script makes a GradScaler itself")

        return __init__


def refuse_sharded(module: torch.nn.Module) -> None:
    """Refuse to scale losses for modules whose gradients pass no leaf hooks.

    Raises:
        UnsupportedError: for FSDP, FSDP2 and parameters that are DTensors.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None and "torch.distributed.tensor" not in sys.modules:
        return
    names = ("FSDPModule", "FullyShardedDataParallel")
    kinds = tuple(vars(fsdp)[name] for name in names if fsdp and name in vars(fsdp))
    sharded = any(isinstance(part, kinds) for part in module.modules()) if kinds else False
    distributed = any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())
    if sharded or distributed:
        raise UnsupportedError(
            f"{type(module).__name__} is sharded (FSDP or DTensor parameters), where the gradients of a "
            "scaled loss cannot be unscaled from outside, so fp16 would train on wrong numbers. "
            "Use --policy bf16, which needs no loss scale."
        )


def _lasted(began: Any, ended: Any) -> Reading:
    """Seconds; those of a GPU are read later, without waiting here."""
    if isinstance(began, float):
        return seconds_between(began, ended)
    return lambda: seconds_between(began, ended)


def _is_on(region: Any) -> bool:
    return bool(torch.is_autocast_enabled(getattr(region, "device", None) or region.device_type))


def _entered_by_the_script(frame: Any) -> bool:
    """Whether code that is neither torch's own nor ours entered a region."""
    while frame is not None:
        if frame.f_code.co_name == "_enter_autocast":
            return False  # a compiled graph enters what was traced
        module = frame.f_globals.get("__name__", "")
        helper = module.endswith("autocast_mode") or module.startswith("narrowcast.")
        if not helper and module != "contextlib":
            return bool(module.split(".")[0] != "torch")
        frame = frame.f_back
    return True
