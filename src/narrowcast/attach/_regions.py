"""Autocast regions under a script: the outermost call of each module that holds parameters.

Also what activation checkpoints need to know of regions.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.data import get_worker_info

from narrowcast.attach._fast_path import FastPath
from narrowcast.attach._module_rules import ModuleRules, note_on_sharded, notes_on_unreached
from narrowcast.attach._recorder import Reading
from narrowcast.attach._run import AttachedRun, Call, Nesting, Patches
from narrowcast.attach._torch_internals import NO_GRAPH_TASK, graph_task_id, is_jit_tracing
from narrowcast.casting import (
    PROMOTING,
    DirectResults,
    NotesOfResults,
    PolicyRegion,
    autocast,
    begin_traced_model,
    call_compiled,
    cast_floating,
    recomputed_while_traced,
    traced_only_inline,
    with_what_it_wraps,
)
from narrowcast.errors import UnsupportedError, few
from narrowcast.gradients import is_capturing
from narrowcast.machine import best_format, known_device_types, slow_formats
from narrowcast.observe.profiling import seconds_between, stamp
from narrowcast.policy import format_name, resolve
from narrowcast.replay import FOR_PYTHON, FOR_SCRIPTS, SkipExplainer, Surroundings
from narrowcast.scaling import Dynamic

# For each backward pass; torchdiffeq's examples take 50 to 86 in fp32 and 1,500 to 5,000 in bf16.
_MANY_CALLS = 500
_SOLVER = (
    "modules were called {:,.0f} times for each backward pass: if an adaptive solver calls them (of an ODE, "
    "as torchdiffeq has), it may take many more steps in a low format than in fp32, as rounding is an error "
    "to it; narrowcast compare counts the calls in both formats"
)
_USES_AUTOCAST = "the script or its trainer uses autocast itself"
# Hosts whose wrapper of a model (Fabric's module, Accelerate's forward, DeepSpeed's engine) opens an autocast
# region before anything is computed, and packages whose functions may be around that wrapper.
_WRAPPING = frozenset(
    (
        "lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "deepspeed", "torch",
        "contextlib", "narrowcast",
    )
)  # fmt: skip
_FORMAT_WORDS = ("BFloat16", "Half", "dtype", "scalar type")


class _ThreadCalls(Nesting):
    """The running calls of a thread. In a ``with`` block of it, the thread opens no region.

    Attributes:
        depth: how many running calls keep modules that they call from opening a region: calls in a region
            of narrowcast, outermost calls of a run in FP32, and blocks of ``without_regions``.
        observed: whether an outermost call of a module is running.
        recomputes: whether the next backward is that of a recomputation.
        is_main: whether it is the thread in which narrowcast was attached.
    """

    observed = False
    recomputes = False
    is_main = False


class ScriptRegions:
    """Replace ``nn.Module.__call__``, so that a region is closed even if the call raises.

    Scripts that use autocast or a GradScaler themselves are left alone from then on.

    Attributes:
        in_fp32: whether no region is opened for the time being.
        explainer: explains skipped steps.
        checkpoints: whether a part of a model is computed again in a backward pass.
    """

    def __init__(self, run: AttachedRun) -> None:
        self._run = run
        self._policy = run.policy
        self._policy_is_fp32 = run.policy.compute == "fp32" and run.policy.is_plain
        self._recorder = run.recorder
        self._observer = run.observer
        self._tell_now = functools.partial(run.recorder.note, at_once=True)
        self._rules = ModuleRules(run.policy)
        self._fast_path = FastPath(run)
        self._thread = _ThreadCalls()
        self.in_fp32 = False
        self.checkpoints = False
        self.explainer = SkipExplainer(
            run.policy,
            say=self._say_story,
            wording=FOR_PYTHON if run.recorder.in_python else FOR_SCRIPTS,
        )
        self._recording = self.explainer.recording

        # By type of device: dtype of the regions (None: it needs none), the region, and the kernels that note
        # what the model returns straight from a sigmoid or softmax.
        self._dtypes: dict[str, torch.dtype | None] = {}
        self._region_on: dict[str, PolicyRegion] = {}
        self._notes_of_results: dict[str, NotesOfResults] = {}

        # Modules that the script has called, with their names; how many there were of each class.
        self._called: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._titles: Counter[str] = Counter()
        self._compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._any_compiled = False
        self._training_calls = 0  # outermost ones with gradients, in a region
        self._made_way = False  # whether a region was left, so that a host's own takes its place
        # By id: leaves that a reentrant checkpoint made of its inputs.
        self._stand_ins: dict[int, weakref.ref[torch.Tensor]] = {}

        # Dynamo calls this while it traces, and keeps the result. The first call makes the region, whose
        # promotion is then there for the operators of that same trace.
        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def dtype_while_traced(device_type: str) -> torch.dtype | None:
            return self._dtype_on(device_type)

        self._dtype_while_traced = dtype_while_traced

    def install(self, patches: Patches) -> None:
        self._thread.is_main = True
        self._recording.records = self._run.explains_skips
        self._fast_path.install(patches)
        self._torch_call = nn.Module.__call__
        patches.replace(nn.Module, "__call__", self._module_call(nn.Module.__call__))
        patches.wrap(torch.utils.checkpoint, "checkpoint", self._checkpoint)
        patches.wrap(torch.autocast, "__enter__", self._autocast_enter)
        patches.wrap(autocast, "__enter__", self._autocast_enter)
        patches.wrap(torch.amp.GradScaler, "__init__", self._scaler_init)
        patches.replace(torch.Tensor, "numpy", _numpy_of(torch.Tensor.numpy))

    def uninstall(self) -> None:
        self._recording.records = False
        self._recording.clear()
        notes_on_rules = self._rules.remove()
        for note in notes_on_rules:
            self._recorder.note(note)
        if any(self._dtypes.values()) and self._recorder.left_alone is None:
            for note in notes_on_unreached(self._policy, notes_on_rules):
                self._recorder.note(note)
        self._region_on.clear()
        self._fast_path.restore()
        self._notes_of_results.clear()

    def continue_in_fp32(self) -> None:
        """Open no region from now on."""
        self.in_fp32 = True
        self._rules.remove()

    def continue_by_policy(self) -> None:
        """Open regions again, with the rules for modules."""
        self.in_fp32 = False
        for module in self._called:
            self._rules.attach(module)

    def parameter_names(self) -> dict[int, str]:
        """Return the names; the second module of a class is ``Class-2``, in the order of first calls."""
        names = {}
        # A parameter of several modules has the name of that which was called first.
        for module, title in reversed(list(self._called.items())):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names[id(parameter)] = f"{title}.{name}"
        return names

    @property
    def opens_regions(self) -> bool:
        """Whether regions are opened, on any device."""
        return bool(self._region_on) and not self.in_fp32

    @property
    def in_main_thread(self) -> bool:
        """Whether this is the thread in which narrowcast was attached; only its calls are recorded."""
        return self._thread.is_main

    @property
    def called_a_module(self) -> bool:
        return bool(self._dtypes or self._titles)

    def note_many_calls(self) -> None:
        """Note many calls for each backward pass, as of an adaptive solver that takes more steps in bf16."""
        backwards = self._recorder.backwards
        if backwards and self._training_calls > _MANY_CALLS * backwards:
            self._recorder.note(_SOLVER.format(self._training_calls / backwards))

    def _module_call(self, original: Call) -> Call:
        thread, recorder = self._thread, self._recorder
        is_traced = torch.compiler.is_dynamo_compiling  # looked up once: every call of a module comes here

        @functools.wraps(original)
        def __call__(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if is_traced():
                return self._traced_call(original, module, args, kwargs)
            recorder.module_calls += 1
            if thread.depth or recorder.left_alone is not None:
                return original(module, *args, **kwargs)
            call = functools.partial(original, module, *args, **kwargs)
            return self._call_outside_of_regions(call, module, args, kwargs)

        return __call__

    def _call_outside_of_regions(self, call: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module while this thread is in none of our regions, and open one if the module needs it.

        The caller is one of three: a backward pass, which computes a part of the model again; a module that
        the script has called, for which no region was opened; or the script itself.
        """
        # No region for modules without parameters, nor in a worker of a DataLoader, which only loads data.
        # torch.jit.trace would keep the casts in the traced module after the run.
        parameter = first_parameter(module)
        if parameter is None or get_worker_info() is not None or is_jit_tracing():
            return call()
        thread = self._thread
        device_type = parameter.device.type
        dtype = None
        if not self.in_fp32 and not self._is_double(module, parameter):
            dtype = self._dtype_on(device_type)
        if not thread.observed and module not in self._called:
            self._first_call(module)

        in_backward = graph_task_id() != NO_GRAPH_TASK
        if dtype is not None and (in_backward or torch.is_grad_enabled()):
            self._training_calls += 1
        # In a backward, an open region belongs to a recomputed forward.
        if in_backward and torch.is_autocast_enabled(device_type):
            return call()
        if in_backward or thread.observed:
            return self._in_region(call, module, device_type, dtype)
        return self._call_by_script(call, module, args, kwargs, device_type, dtype)

    def _call_by_script(
        self,
        call: Call,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        device_type: str,
        dtype: torch.dtype | None,
    ) -> Any:
        """Call a module for the script itself: the call is observed, and recorded to be made again."""
        thread = self._thread
        thread.observed = True
        try:
            self._observer.called(module, args, kwargs)
            if self.in_fp32:  # the observer has asked for it
                dtype = None
            recorded = None
            if self._recording.records and thread.is_main and (dtype is not None or self._run.scale.active):
                recorded = self._recording.begin(module, args, kwargs)
            # What a model writes into a dict that it was given is a result too.
            dicts: list[dict[Any, Any]] = []
            if dtype is not None:
                dicts = [value for value in (*args, *kwargs.values()) if isinstance(value, dict)]
            before = [dict(value) for value in dicts]
            # A script that trains is timed by its steps.
            if self._recorder.backwards or is_capturing():
                output = self._in_region(call, module, device_type, dtype)
            else:
                output = self._timed_in_region(call, module, device_type, dtype)
            # The region of a host casts by itself.
            if not self._made_way:
                for written_to, earlier in zip(dicts, before, strict=True):
                    self._cast_written(written_to, earlier)
            if recorded is not None:
                self._recording.end(recorded, output)
            self._observer.returned(module, output)
        finally:
            thread.observed = False
        self._run.stopping.forward_ended()
        return output

    def _cast_written(self, written_to: dict[Any, Any], earlier: dict[Any, Any]) -> None:
        """Cast what was put into a dict since ``earlier`` to fp32, as what a model returns."""
        for key, value in written_to.items():
            if value is not earlier.get(key):
                written_to[key] = cast_floating(value, torch.float32, tell=self._tell_now)

    def _timed_in_region(
        self, call: Call, module: nn.Module, device_type: str, dtype: torch.dtype | None
    ) -> Any:
        began = stamp(device_type)
        output = self._in_region(call, module, device_type, dtype)
        read_duration_s = functools.partial(seconds_between, began, stamp(device_type))
        if not self._made_way:
            duration_s: Reading = read_duration_s  # of a GPU: it is read later, without waiting here
            if isinstance(began, float):
                duration_s = read_duration_s()
            self._recorder.saw_forward(duration_s, module)
        return output

    # ---- calls that are made again, to say where a skipped step went wrong

    def _say_story(self, story: str) -> None:
        """Show at once what was found of a skipped step, and record it as a note."""
        self._recorder.note(story, told=True, story=True)
        self._run.tell_story(story)

    def surroundings(self) -> Surroundings:
        """Return how calls are made again."""
        formats = {device: dtype or torch.float32 for device, dtype in self._dtypes.items()}
        return Surroundings(self._call_again, self.without_regions, formats)

    def without_regions(self) -> _ThreadCalls:
        """Return a context in which no region is opened in this thread: its calls count as inner ones."""
        return self._thread

    def _call_again(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module in its region, as when the script called it."""
        parameter = first_parameter(module)
        assert parameter is not None  # else no call of it was recorded
        dtype = None
        if not self._is_double(module, parameter):
            dtype = self._dtype_on(parameter.device.type)
        thread = self._thread
        thread.observed = True
        try:
            call = functools.partial(self._torch_call, module, *args, **kwargs)
            return self._in_region(call, module, parameter.device.type, dtype)
        finally:
            thread.observed = False

    def _is_double(self, module: nn.Module, parameter: torch.Tensor) -> bool:
        """Return whether all weights are in fp64, which autocast leaves as they are; note it."""
        if parameter.dtype != torch.float64:
            return False
        double = all(p.dtype == torch.float64 for p in module.parameters() if p.is_floating_point())
        if double and not self._thread.observed and not self._policy_is_fp32:
            name = type(module).__name__
            self._recorder.note(f"{name} computes in fp64, as its weights are: no region was opened")
        return double

    def _in_region(self, call: Call, module: nn.Module, device_type: str, dtype: torch.dtype | None) -> Any:
        """Call a module in a region of ``dtype`` and cast its outputs to fp32; None: no region."""
        thread = self._thread
        if dtype is None:
            if not (self.in_fp32 or self._policy_is_fp32):
                return call()  # an inner module may open a region on another device
            # Where no device has regions, inner modules skip this wrapper as they do in a region: FP32 is the
            # baseline of speed measurements. (This is ``without_regions``, with one Python call less.)
            with thread:
                return call()
        # What the model returns straight from a sigmoid or a softmax is computed again in fp32.
        depth = thread.depth
        results = DirectResults(functools.partial(self._say_low, module))
        before = results.begin()
        try:
            thread.depth = depth + 1
            if self._any_compiled and module in self._compiled:
                call = functools.partial(call_compiled, call)
            output = self._region_on[device_type].around(call)
            if not thread.depth:  # the region has made way for that of a host
                return output
            output = results.recomputed(output)
            if results.compiled_low(output):
                self._say_compiled(module)
        except (RuntimeError, TypeError) as error:
            note_formats(error, module, dtype)
            raise
        finally:
            thread.depth = depth
            results.end(before)
        return cast_floating(output, torch.float32, tell=self._tell_now)

    def _say_low(self, module: nn.Module, did: str, op: str, dtype: torch.dtype, why: str) -> None:
        """Note a result in a low format that ``module`` returned, or used where it should be in fp32.

        ``did``: what the module did with the result, such as "returned".
        """
        kind, name = type(module).__name__, format_name(dtype)
        self._recorder.note(
            f"{kind} {did} a {op} that was computed in {name}, since {why}: "
            f'nc.rule.op("{op}", compute="fp32") computes it in fp32',
            at_once=True,
        )

    def _say_compiled(self, module: nn.Module) -> None:
        """Note that results which ``module`` returns from compiled code may be rounded."""
        self._recorder.note(
            f"{type(module).__name__} calls sigmoid, softmax or log_softmax in compiled code: if it returns "
            "what they compute, that may be rounded to the low format; compiled in one graph, by "
            "torch.compile(model, fullgraph=True), it computes that in fp32",
            at_once=True,
        )

    def _traced_call(self, original: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module, in a region if it needs one, inside a function that ``torch.compile`` traces.

        Torch's own regions are what Dynamo can trace. The autocast state of ``PROMOTING`` says two things: it
        is enabled while ``call_compiled`` calls a compiled model, and its dtype makes operators promote.
        """
        parameter = next(module.parameters(), None)
        if self._recorder.left_alone is not None or parameter is None:
            return original(module, *args, **kwargs)
        device_type = parameter.device.type
        if torch.is_autocast_enabled(device_type):
            called_by_script = torch.is_autocast_enabled(PROMOTING[0])
            if not called_by_script:
                return original(module, *args, **kwargs)
            # The whole of a compiled model; the modules in it are not called by the script.
            begin_traced_model()
            with _promoting_inner_calls():
                output = original(module, *args, **kwargs)
            return recomputed_while_traced(output)
        if not self._policy.is_plain:
            raise UnsupportedError(
                f"a function that calls {type(module).__name__} is compiled as a whole, where the rules of a "
                "policy could not be kept: compile the module itself, torch.compile(model), or use a preset "
                "without rules"
            )
        dtype = self._dtype_while_traced(device_type)
        if dtype is None:
            return original(module, *args, **kwargs)
        with torch.autocast(device_type, dtype), _promoting_inner_calls():
            output = original(module, *args, **kwargs)
        return cast_floating(recomputed_while_traced(output), torch.float32)

    def _dtype_on(self, device_type: str) -> torch.dtype | None:
        """Return the dtype of regions on this device; None: it needs none."""
        if device_type not in self._dtypes:
            self._dtypes[device_type] = self._decide(device_type)
        return self._dtypes[device_type]

    def _decide(self, device_type: str) -> torch.dtype | None:
        """Decide the dtype at the first call on this device, and prepare the region."""
        if device_type not in known_device_types():
            self._recorder.note(
                f"modules on device {device_type!r} stay in fp32: torch has no autocast for it"
            )
            return None
        dtype = resolve(self._policy, device_type)
        because = "as asked"
        if self._policy.compute == "auto":
            because = best_format(device_type).because
        name = format_name(dtype)
        self._recorder.saw_device(device_type, name, because)
        for slow in slow_formats([name, *(rule.compute for rule in self._policy.rules)], device_type):
            self._recorder.note(slow, at_once=True, told=True)
        self.expect_on([device_type])
        if dtype != torch.float32:
            self._fast_path.turn_off()
        if dtype == torch.float32 and self._policy.is_plain:
            return None
        self._region_on[device_type] = PolicyRegion(self._policy, {device_type: dtype}, self._recorder.note)
        self._notes_of_results[device_type] = NotesOfResults(device_type)
        return dtype

    def expect_on(self, device_types: Iterable[str]) -> None:
        """Scale losses from the next backward on if regions on one of these devices are in fp16."""
        run = self._run
        if run.asked_scale is not None or run.scale.active or self.in_fp32 or run.recorder.left_alone:
            return
        known = set(device_types).intersection(known_device_types())
        if any(resolve(self._policy, kind) == torch.float16 for kind in known):
            run.scale.value = Dynamic()

    def _first_call(self, module: nn.Module) -> None:
        """Name a module that the script calls for the first time, and attach its rules."""
        if self._run.scale.active:
            _refuse_sharded(module)
        kind = type(module).__name__
        if not self.in_fp32:
            note = note_on_sharded(self._policy, module)
            if note:
                self._recorder.note(note, at_once=True)
            self._rules.attach(module)
        if any(type(inside).__name__ == "OptimizedModule" for inside in with_what_it_wraps(module)):
            self._compiled.add(module)
            self._any_compiled = True
        # Counts modules that are gone too, and those of other classes of that name: a title is given once.
        self._titles[kind] += 1
        number = self._titles[kind]
        self._called[module] = kind if number == 1 else f"{kind}-{number}"

    def note_formats_in_backward(self, error: Exception) -> None:
        """Add a note to an error about formats in a backward pass: which models ran in a low format."""
        names = sorted({format_name(dtype) for dtype in self._dtypes.values() if dtype is not None})
        if not names or not _needs_note_on_formats(error):
            return
        error.add_note(
            f"narrowcast: raised in the backward pass of what {few(sorted(self._titles))} computed in "
            f'{" and ".join(names)}; in a policy, nc.rule.module("*", compute="fp32") keeps it in fp32, and '
            "a path in place of the star one part of it (docs/policies.md)."
        )

    # ---- recomputation

    def _checkpoint(self, original: Call, /, function: Call, *args: Any, **kwargs: Any) -> Any:
        """Call ``torch.utils.checkpoint``; its recomputation opens regions as the first computation did.

        A reentrant checkpoint gives the recomputation new leaves in place of its inputs: stand-ins, tensors
        that the first computation did not have. The checkpoint passes their gradients on to its inputs, so
        these must stay scaled.
        """
        if torch.compiler.is_dynamo_compiling():
            return original(function, *args, **kwargs)
        self.checkpoints = True
        thread = self._thread
        depth = thread.depth
        first_inputs: set[int] | None = None

        @functools.wraps(function)
        def at_depth(*inputs: Any, **keywords: Any) -> Any:
            nonlocal first_inputs
            tensors = {id(t): t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad}
            if first_inputs is None:
                first_inputs = set(tensors)
            else:
                self._note_stand_ins([t for key, t in tensors.items() if key not in first_inputs])
            before = thread.depth
            thread.depth = depth
            try:
                return function(*inputs, **keywords)
            finally:
                thread.depth = before

        return original(at_depth, *args, **kwargs)

    def _note_stand_ins(self, tensors: list[torch.Tensor]) -> None:
        if not tensors:
            return
        self._thread.recomputes = True  # the backward of the recomputation follows in this thread
        for key, reference in list(self._stand_ins.items()):
            if reference() is None:
                self._stand_ins.pop(key, None)
        for tensor in tensors:
            self._stand_ins[id(tensor)] = weakref.ref(tensor)

    def begins_recomputed_backward(self) -> bool:
        """Return whether the backward that begins now in this thread is that of a recomputation."""
        recomputes = self._thread.recomputes
        self._thread.recomputes = False
        return recomputes

    def is_stand_in(self, tensor: torch.Tensor) -> bool:
        kept = self._stand_ins.get(id(tensor))
        return kept is not None and kept() is tensor

    # ---- scripts that use mixed precision themselves

    def _autocast_enter(self, original: Call, region: Any) -> Any:
        result = original(region)
        if torch.compiler.is_dynamo_compiling() or self._recorder.left_alone is not None:
            return result
        device = getattr(region, "device", None) or region.device_type
        frame = sys._getframe(2)
        if not torch.is_autocast_enabled(device) or not _entered_by_the_script(frame):
            return result
        in_call = bool(self._thread.depth) and self.opens_regions
        # If nothing has computed in our region yet, the host's may take its place. Not under rules for
        # modules: the calls that are running would restore the rules of our region when they end.
        if in_call and not self._policy.names_modules and _in_wrapper_of_host(frame):
            region.__exit__(None, None, None)
            self._make_way()
            original(region)
            in_call = False
        self._run.leave_alone(_USES_AUTOCAST, in_call=in_call)
        return result

    def _make_way(self) -> None:
        """Leave the region that the running call of a module has opened."""
        for region in self._region_on.values():
            if region.is_open():
                region.__exit__()
        self._thread.depth = 0
        self._made_way = True

    def _scaler_init(self, original: Call, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            self._run.leave_alone("the script makes a GradScaler itself")


def first_parameter(module: nn.Module) -> nn.Parameter | None:
    """Return the first of ``module.parameters()``, in a fifth of the time that ``parameters`` takes."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        parameter = None if child is None else first_parameter(child)
        if parameter is not None:
            return parameter
    return None


def _promoting_inner_calls() -> torch.autocast:
    """Return a context for traced code: operators promote, and modules do not count as the script's calls."""
    return torch.autocast(*PROMOTING, enabled=False)


def note_formats(error: Exception, model: nn.Module, dtype: torch.dtype) -> None:
    """Add to an error about formats where in ``model`` it was raised, and the rule that avoids it."""
    if not _needs_note_on_formats(error):
        return
    paths = {id(module): path for path, module in model.named_modules()}
    path = ""
    trace = error.__traceback__
    while trace is not None:
        path = paths.get(id(trace.tb_frame.f_locals.get("self")), path)
        trace = trace.tb_next
    where = type(model).__name__
    keep = "rules keep operators"
    if path:
        where = f"module {path!r} of {where}"
        keep = f'nc.rule.module("{path}", compute="fp32") keeps it'
    error.add_note(
        f"narrowcast: raised in {where}, called in {format_name(dtype)}; in a policy, {keep} in fp32 "
        "(docs/policies.md)."
    )


def _needs_note_on_formats(error: Exception) -> bool:
    """Return whether ``error`` is about formats, and has no note yet."""
    return any(word in str(error) for word in _FORMAT_WORDS) and not getattr(error, "__notes__", None)


def _numpy_of(original: Call) -> Call:
    """Return a ``Tensor.numpy`` that gives fp32 for bf16, which NumPy lacks.

    The copy is read-only: what is written to it would not reach the tensor.
    """

    @traced_only_inline
    @functools.wraps(original)
    def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype != torch.bfloat16:
            return original(tensor, *args, **kwargs)
        array = original(tensor.float(), *args, **kwargs)
        array.flags.writeable = False
        return array

    return numpy


def _refuse_sharded(module: nn.Module) -> None:
    """Refuse to scale losses of FSDP modules and DTensors, whose gradients do not pass leaf hooks."""
    fsdp1 = any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules())
    dtensors = any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())
    if fsdp1 or dtensors:
        raise UnsupportedError(
            f"{type(module).__name__} is sharded (FSDP or DTensor parameters), where the gradients of a "
            "scaled loss cannot be unscaled from outside, so fp16 would train on wrong numbers. "
            "Use --policy bf16, which needs no loss scale."
        )


def _in_wrapper_of_host(frame: Any) -> bool:
    """Return whether a module's outermost call has called nothing but a host's wrapper so far."""
    while frame is not None and frame.f_code is not ScriptRegions._call_outside_of_regions.__code__:
        package, _, _ = frame.f_globals.get("__name__", "").partition(".")
        if package not in _WRAPPING:
            return False
        frame = frame.f_back
    return frame is not None


def _entered_by_the_script(frame: Any) -> bool:
    """Return whether code outside of torch entered a region.

    Functions of narrowcast and of torch's autocast module are passed over: what called them decides.
    """
    while frame is not None:
        if frame.f_code.co_name == "_enter_autocast":
            return False  # a compiled graph enters the regions that were traced
        module = frame.f_globals.get("__name__", "")
        helper = module.endswith("autocast_mode") or module.startswith("narrowcast.")
        if not helper and module != "contextlib":
            return bool(module.split(".")[0] != "torch")
        frame = frame.f_back
    return True
