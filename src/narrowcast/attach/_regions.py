"""Autocast regions under a script: the outermost call of each module that holds parameters.

Also the rules for modules, and what activation checkpoints need to know of regions.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.data import get_worker_info

from narrowcast.attach._recorder import Reading
from narrowcast.attach._run import Patches, Run
from narrowcast.attach._torch_internals import NO_GRAPH_TASK, graph_task_id, is_jit_tracing
from narrowcast.casting import Applied, autocast, cast_floating, modules_by_path, region_in
from narrowcast.errors import UnsupportedError, few
from narrowcast.gradients import is_capturing
from narrowcast.machine import best_format, known_device_types, slow_format_warning
from narrowcast.observe.op_trace import near_module
from narrowcast.observe.profiling import seconds_between, stamp
from narrowcast.policy import Policy, Rule, class_names, format_name, resolve
from narrowcast.scaling import Dynamic

NAMED_NOTHING = "named no module of what the script called"
"""Ending of the note on a rule that matched no module."""


class _Thread(threading.local):
    """How many of our regions this thread is in, whether it is opening one, whether it is in an outermost
    call of a module, and whether the next backward is that of a recomputation.
    """

    depth = 0
    opening = False
    observed = False
    recomputes = False


class Regions:
    """Replace ``nn.Module.__call__``, so that a region is closed even if the call raises.

    Scripts that use autocast or a GradScaler themselves are left alone from then on.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._policy = run.policy
        self._recorder = run.recorder
        self._observer = run.observer
        self._thread = _Thread()
        self._dtypes: dict[str, torch.dtype | None] = {}
        self._called: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._titles: Counter[str] = Counter()
        self._rules = _ModuleRules(run.policy)
        self._stand_ins: dict[int, weakref.ref[torch.Tensor]] = {}
        # While Dynamo traces, only known values may be read and attributes set.
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        self._traceable_dtypes = {device: resolve(run.policy, device) for device in devices}
        self._traced_on: str | None = None
        self._in_fp32 = False

    def install(self, patches: Patches) -> None:
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        patches.replace(torch.nn.Module, "__call__", self._module_call(torch.nn.Module.__call__))
        patches.wrap(torch.utils.checkpoint, "checkpoint", self._checkpoint)
        patches.wrap(torch.autocast, "__enter__", self._autocast_enter)
        patches.wrap(autocast, "__enter__", self._autocast_enter)
        patches.wrap(torch.amp.GradScaler, "__init__", self._scaler_init)

    def uninstall(self) -> None:
        for note in self._rules.remove():
            self._recorder.note(note)
        torch.backends.mha.set_fastpath_enabled(self._fastpath)

    def continue_in_fp32(self) -> None:
        """Open no region from now on."""
        self._in_fp32 = True
        self._rules.remove()

    def parameter_names(self) -> dict[int, str]:
        """Return the names; the second module of a class is ``Class-2``, in the order of first calls."""
        return {
            id(parameter): f"{title}.{name}"
            for module, title in reversed(list(self._called.items()))
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
            if thread.depth or self._recorder.left_alone is not None:
                return original(module, *args, **kwargs)
            return self._outermost_call(
                functools.partial(original, module, *args, **kwargs), module, args, kwargs
            )

        return __call__

    def _outermost_call(
        self, call: Callable[[], Any], module: torch.nn.Module, args: Any, kwargs: Any
    ) -> Any:
        parameter = next(module.parameters(), None)
        if parameter is None or get_worker_info() is not None or is_jit_tracing():
            # torch.jit.trace would keep the casts in the traced module after the run.
            return call()
        device_type = parameter.device.type
        dtype = None if self._in_fp32 else self._dtype_on(device_type)
        if not self._thread.observed and module not in self._called:
            self._first_call(module)
        in_backward = graph_task_id() != NO_GRAPH_TASK
        if in_backward and torch.is_autocast_enabled(device_type):
            # In a backward, an open region belongs to a recomputed forward.
            return call()
        if in_backward or self._thread.observed:
            return self._in_region(call, device_type, dtype)
        self._thread.observed = True
        try:
            self._observer.called(module, args, kwargs)
            if self._in_fp32:
                dtype = None
            timed = not self._recorder.backwards and not is_capturing()
            began = stamp(device_type) if timed else None
            output = self._in_region(call, device_type, dtype)
            if began is not None:
                self._recorder.saw_forward(_lasted(began, stamp(device_type)), training=module.training)
            self._observer.returned(module, output)
        finally:
            self._thread.observed = False
        self._run.stopping.forward_ended()
        return output

    def _in_region(self, call: Callable[[], Any], device_type: str, dtype: torch.dtype | None) -> Any:
        """Call a module in a region of ``dtype`` and cast its outputs to fp32; None: no region."""
        thread = self._thread
        if dtype is None:
            # If no device has regions, inner modules skip this wrapper as they do in a region: FP32 is the
            # baseline of speed measurements. Otherwise an inner module may open one on another device.
            alone = self._in_fp32 or (self._policy.compute == "fp32" and self._policy.is_plain)
            thread.depth += alone
            try:
                return call()
            finally:
                thread.depth -= alone
        region = region_in(self._policy, device_type, dtype)
        thread.opening = True
        region.__enter__()
        thread.opening = False
        thread.depth += 1
        try:
            output = call()
        finally:
            thread.depth -= 1
            region.__exit__(*sys.exc_info())
        return cast_floating(output, torch.float32)

    def _traced_call(
        self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Do the same inside a function that ``torch.compile`` traces, in code that it can trace."""
        parameter = next(module.parameters(), None)
        if (
            self._recorder.left_alone is not None
            or parameter is None
            or torch.is_autocast_enabled(parameter.device.type)
        ):
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

    def finish_traced(self) -> None:
        """Choose the format of a device whose regions were only traced so far."""
        if self._traced_on is not None:
            self._dtype_on(self._traced_on)

    def _dtype_on(self, device_type: str) -> torch.dtype | None:
        """Return the dtype of regions on this device; None: it needs none."""
        if device_type not in self._dtypes:
            self._decide(device_type)
        return self._dtypes[device_type]

    def _decide(self, device_type: str) -> None:
        if device_type not in known_device_types():
            self._dtypes[device_type] = None
            self._recorder.note(
                f"modules on device {device_type!r} stay in fp32: torch has no autocast for it"
            )
            return
        dtype = resolve(self._policy, device_type)
        because = best_format(device_type).because if self._policy.compute == "auto" else "as asked"
        name = format_name(dtype)
        self._recorder.saw_device(device_type, name, because)
        slow = slow_format_warning(name, device_type)
        if slow:
            self._recorder.note(slow, at_once=True)
        if dtype == torch.float16 and self._run.asked_scale is None and not self._run.scale.active:
            self._run.scale.value = Dynamic()
        if dtype != torch.float32:
            # The fast path of nn.TransformerEncoder in evaluation raises on operands of two formats.
            torch.backends.mha.set_fastpath_enabled(False)
        self._dtypes[device_type] = None if dtype == torch.float32 and self._policy.is_plain else dtype

    def _first_call(self, module: torch.nn.Module) -> None:
        """Name a module that the script calls for the first time, and attach its rules."""
        if self._run.scale.active:
            _refuse_sharded(module)
        kind = type(module).__name__
        if not self._in_fp32:
            self._rules.attach(module)
        self._titles[kind] += 1  # modules that were deleted, and other classes of that name, count too
        self._called[module] = f"{kind}-{self._titles[kind]}" if self._titles[kind] > 1 else kind

    # ---- recomputation

    def _checkpoint(
        self, original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Recompute at the depth in our regions at which the first computation ran.

        Tensors among the inputs that the first computation did not have are stand-ins: leaves that a
        reentrant checkpoint makes of its inputs. Their gradients are passed on, still scaled, to those.
        """
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
                self._recomputes(stand_ins)
            before, self._thread.depth = self._thread.depth, depth
            try:
                return function(*inputs, **keywords)
            finally:
                self._thread.depth = before

        return original(at_depth, *args, **kwargs)

    def _recomputes(self, stand_ins: Sequence[torch.Tensor]) -> None:
        """Record that a checkpoint runs its function again; its own backward follows in this thread."""
        self._thread.recomputes = True
        self._stand_ins = {key: kept for key, kept in self._stand_ins.items() if kept() is not None}
        self._stand_ins |= {id(tensor): weakref.ref(tensor) for tensor in stand_ins}

    def begins_recomputed_backward(self) -> bool:
        """Return whether the backward that begins now in this thread is that of a recomputation."""
        recomputes, self._thread.recomputes = self._thread.recomputes, False
        return recomputes

    def is_stand_in(self, tensor: torch.Tensor) -> bool:
        kept = self._stand_ins.get(id(tensor))
        return kept is not None and kept() is tensor

    # ---- scripts that use mixed precision themselves

    def _autocast_enter(self, original: Callable[..., Any], region: Any) -> Any:
        result = original(region)
        if torch.compiler.is_dynamo_compiling() or self._thread.opening:
            return result
        device = getattr(region, "device", None) or region.device_type
        if torch.is_autocast_enabled(device) and _entered_by_the_script(sys._getframe(2)):
            self._run.leave_alone("the script uses autocast itself")
        return result

    def _scaler_init(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            self._run.leave_alone("the script makes a GradScaler itself")


def _refuse_sharded(module: torch.nn.Module) -> None:
    """Refuse to scale losses of FSDP modules and DTensors, whose gradients do not pass leaf hooks."""
    fsdp1 = any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules())
    if fsdp1 or any(type(parameter).__name__ == "DTensor" for parameter in module.parameters()):
        raise UnsupportedError(
            f"{type(module).__name__} is sharded (FSDP or DTensor parameters), where the gradients of a "
            "scaled loss cannot be unscaled from outside, so fp16 would train on wrong numbers. "
            "Use --policy bf16, which needs no loss scale."
        )


def _lasted(began: Any, ended: Any) -> Reading:
    """Return seconds; those of a GPU are read later, without waiting here."""
    if isinstance(began, float):
        return seconds_between(began, ended)
    return lambda: seconds_between(began, ended)


def _entered_by_the_script(frame: Any) -> bool:
    """Return whether code of neither torch nor narrowcast entered a region."""
    while frame is not None:
        if frame.f_code.co_name == "_enter_autocast":
            return False  # a compiled graph enters the regions that were traced
        module = frame.f_globals.get("__name__", "")
        helper = module.endswith("autocast_mode") or module.startswith("narrowcast.")
        if not helper and module != "contextlib":
            return bool(module.split(".")[0] != "torch")
        frame = frame.f_back
    return True


class _ModuleRules:
    """Hooks for the rules of ``policy`` on each model of a script, from its first call on.

    A path in a rule starts at the module that the script calls. If the script calls a part first and the
    whole model later, paths start at the whole model from then on.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._applied: dict[torch.nn.Module, Applied] = {}
        self._unmatched: dict[Rule, set[str]] = {}
        self._guesses: dict[Rule, str] = {}
        self._models: set[str] = set()
        self._left_out: dict[str, list[str]] = {}  # reason -> layers that do not multiply in fp8

    def attach(self, model: torch.nn.Module) -> None:
        """Put hooks on ``model``, which the script calls for the first time."""
        if not self._policy.names_modules or any(model in set(whole.modules()) for whole in self._applied):
            return
        inside = set(model.modules())
        for part in [part for part in self._applied if part in inside]:
            self._applied.pop(part).remove()
        kind = type(model).__name__
        self._models.add(kind)
        applied = self._applied[model] = Applied(model, self._policy, opens=False, strict=False)
        for rule in applied.missed:
            self._unmatched.setdefault(rule, set()).add(kind)
            if not self._guesses.get(rule):
                named = ((path, class_names(type(module))) for path, module in modules_by_path(model))
                self._guesses[rule] = near_module(rule, list(named))
        for path, why in applied.fp8.left_out.items():
            self._left_out.setdefault(why, []).append(f"{kind}.{path}" if path else kind)

    def remove(self) -> list[str]:
        """Remove the hooks; return notes on rules that did not apply everywhere."""
        for applied in self._applied.values():
            applied.remove()
        self._applied.clear()
        if not self._models:
            return []
        called = ", ".join(sorted(self._models))
        missed = [rule for rule, kinds in self._unmatched.items() if kinds == self._models]
        self._models.clear()
        notes = [f"the rule for {r.target} {NAMED_NOTHING} ({called}){self._guesses[r]}" for r in missed]
        for why, paths in self._left_out.items():
            notes.append(f"{few(paths)} {'does' if len(paths) == 1 else 'do'} not multiply in fp8: {why}")
        return notes
