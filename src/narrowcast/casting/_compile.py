"""``nc.compile``: ``torch.compile`` with a policy's casts written into its graphs.

The compiled model opens the region of its policy when it is called, as ``nc.apply`` has a model do. In that
region Dynamo traces, so that code which reads formats (``torch.finfo(x.dtype).min``) reads what it would
without a compiler, and what Dynamo leaves to Python (pieces between graph breaks, functions it skips) is cast
by the eager engine. A graph itself runs with autocast off: each of its casts stands in it, and with them in
the key of whatever keeps compiled graphs. Every ``nc.compile`` is a backend of its own, which Dynamo compares
before it runs a graph again.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.casting import _regions
from narrowcast.casting._compile_hooks import CompiledHooks
from narrowcast.casting._compile_places import models_in, modules_of, variables_of
from narrowcast.casting._fp8 import Fp8Handle, apply_fp8
from narrowcast.casting._fp8_linear import Fp8Linear, turn_back
from narrowcast.casting._graph import Writer
from narrowcast.casting._graph_calls import Backend, is_bound, nodes_of, path_at, rule_at, without_bounds
from narrowcast.casting._graph_nodes import has_transforms, tensors_of
from narrowcast.casting._graph_places import Places
from narrowcast.casting._kernels import root_place
from narrowcast.casting._module_hooks import device_types
from narrowcast.casting._modules import applied_to, check_rules, refuse_new_fp8
from narrowcast.casting._places import here
from narrowcast.casting._structure import Structure
from narrowcast.casting._torch_internals import (
    inductor,
    splitting_by_buckets,
    without_autocast,
    without_cache_of_joint_graphs,
)
from narrowcast.errors import NarrowcastError, PolicyError, UnsupportedError
from narrowcast.machine import check_device
from narrowcast.policy import (
    FP8_RECIPES,
    Policy,
    Scope,
    format_name,
    resolve,
    resolved,
    with_fp32_weights,
)

# The fp8 layers of models, kept by what was compiled from each, with the policy.
_fp8_of: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[_Fp8]] = weakref.WeakKeyDictionary()

_IN_THE_GRAPH = Places(Policy(compute="fp32"))  # where modules are entered and left


def compile(
    model: Any,
    policy: Policy | str,
    *,
    backend: Any = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """``torch.compile(model)`` that computes by ``policy``, in training and inference, without a region.

    The casts that the policy asks for are written into the graphs that Dynamo makes, one for all uses of a
    value, before they are compiled; casts up and down again are left out. Each op gets the inputs, and so
    gives the formats, that it does in eager code under ``nc.apply(model, policy)``; a compiler rounds in
    other places. Layers that an fp8 rule is for multiply in fp8 for as long as what was compiled lives, in
    calls of the model itself too. Parameters, their gradients and buffers stay in fp32. What the model
    returns stays in the formats in which it comes out. A region of the caller, with another policy too,
    changes nothing inside.
    Code that Dynamo does not trace is cast as eager code is.

    Args:
        model: a module or a function. A module's ``state_dict`` is that of ``torch.compile``. Rules for
            modules hold in those that a function has as arguments or in variables that it names, in lists,
            dicts and attributes of objects too; by their paths in there, with or without the variable's name.
        policy: the name of a preset, a ``Policy``, or the path of one. It holds on the types of device that
            the model's parameters are on; without parameters, on those of its inputs.
        backend: who compiles the graph with casts: a name of ``torch.compiler.list_backends()``, or a
            function of a graph module and its example inputs.
        mode: as for ``torch.compile``.
        options: as for ``torch.compile``.
        settings: ``fullgraph``, ``dynamic`` and what else ``torch.compile`` takes.

    Returns:
        As ``torch.compile`` does: a module around ``model``, whose weights it shares, or a function.

    Raises:
        PolicyError: ``model`` cannot be called; or the policy does not exist, names modules that the model
            does not have, or needs weights in a low format.
        UnsupportedError: a function was given with an fp8 rule; in a call, where a rule refuses what is
            called, or a module with a rule is in a graph with a transform of ``torch.func``, was left by an
            exception that traced code caught, or is called by a function that has it from nowhere where it
            can be found.
        OrderError: in a call, where a layer came since for which there is an fp8 rule.
    """
    if not callable(model):
        raise PolicyError(f"expected a module or a function to compile, got {type(model).__name__}")
    wanted = with_fp32_weights(policy)
    module = model if isinstance(model, torch.nn.Module) else None
    if module is not None:
        check_rules(wanted, module)
    fp8 = _fp8(module, wanted)
    inner = _inner(backend, mode, options, settings.get("dynamic"))
    places = Places(wanted)
    hooks = CompiledHooks(wanted) if places.has_rules else None
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # since 2.12
        settings.setdefault("isolate_recompiles", True)
    compiled: Any = torch.compile(model, backend=_Backend(places, module, inner, hooks), **settings)
    if module is None:
        in_region = _in_region(compiled, wanted, None)
        return in_region if hooks is None else _looking_for_modules(in_region, model, places, hooks)
    if hooks is not None:
        hooks.follow(module)
    compiled.forward = _in_region(compiled.forward, wanted, module, hooks, fp8)
    compiled.__dict__["_narrowcast_keeps"] = (fp8, hooks)
    made_of = (module, wanted, backend, mode, options, settings)
    compiled.__dict__["__reduce_ex__"] = lambda _protocol: (_compile_again, made_of)
    return compiled


def _compile_again(
    model: torch.nn.Module, policy: Policy, backend: Any, mode: Any, options: Any, settings: dict[str, Any]
) -> Any:
    """A copy of what was compiled, or what comes out of a pickle: the same of a model of its own."""
    for part in model.modules():
        if isinstance(part, Fp8Linear):
            turn_back(part)
    return compile(model, policy, backend=backend, mode=mode, options=options, **settings)


class _Fp8:
    """The layers of one model that multiply in fp8, for as long as something compiled from it lives."""

    def __init__(self, policy: Policy, handle: Fp8Handle, model: torch.nn.Module) -> None:
        self.policy = policy
        self._structure = Structure(model)
        weakref.finalize(self, handle.remove).atexit = False

    def check(self, model: torch.nn.Module) -> None:
        """See that no layer came for which there is an fp8 rule."""
        if not self._structure.holds():
            refuse_new_fp8(model, self.policy)
            self._structure = Structure(model)


def _fp8(module: torch.nn.Module | None, policy: Policy) -> _Fp8 | None:
    """Have the layers of ``module`` multiply in fp8 for which rules of ``policy`` ask it."""
    rule = next((one for one in policy.rules if one.compute in FP8_RECIPES), None)
    if rule is None:
        return None
    if module is None:
        raise UnsupportedError(
            f"expected a module to compile with an fp8 rule ({rule}), which changes the linear layers of the "
            "module, got a function: compile the module whose layers it calls, or leave the rule out"
        )
    if applied_to(module, policy) is not None:
        return None  # by nc.apply
    known = _fp8_of.get(module)
    found = known() if known is not None else None
    if found is None or found.policy != policy:
        found = _Fp8(policy, apply_fp8(module, policy), module)
        _fp8_of[module] = weakref.ref(found)
    return found


def _in_region(
    function: Callable[..., Any],
    policy: Policy,
    module: torch.nn.Module | None,
    hooks: CompiledHooks | None = None,
    fp8: _Fp8 | None = None,
) -> Any:
    owner = object()

    @functools.wraps(function)
    def in_region(*args: Any, **kwargs: Any) -> Any:
        if fp8 is not None and module is not None:
            fp8.check(module)
        with _region(owner, policy, module, (args, kwargs)):
            try:
                if hooks is not None and module is not None:
                    return hooks.call(function, module, args, kwargs)
                return function(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise _own_error(error) or error from None

    return in_region


def _looking_for_modules(
    compiled: Callable[..., Any], function: Callable[..., Any], places: Places, hooks: CompiledHooks
) -> Any:
    """``compiled``, with hooks on the modules that ``function`` can come to before it is called.

    The first call warns of rules for modules that it comes to none of.
    """
    pending = list(places.rules)

    @functools.wraps(compiled)
    def looking(*args: Any, **kwargs: Any) -> Any:
        models = models_in(variables_of(function, args, kwargs))
        if not hooks.know(model for _, _, model in models):
            hooks.put_on(modules_of(models))
        result = compiled(*args, **kwargs)
        missed = [one for one in pending if one not in hooks.reached]
        pending.clear()
        for rule in missed:
            warnings.warn(
                f"the first call of the compiled function came to no {rule.target}, which has a rule "
                f'({rule}): expected the path of a module in the function, as in "model.norm" or "*.norm"',
                UserWarning,
                stacklevel=2,
            )
        return result

    return looking


def _own_error(error: BaseException) -> NarrowcastError | None:
    """The error of ours that Dynamo met while it traced, or was given by the backend."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, NarrowcastError):
        found = getattr(found, "inner_exception", None) or found.__cause__ or found.__context__
    return found


@contextmanager
def _region(owner: object, policy: Policy, module: torch.nn.Module | None, values: Any) -> Iterator[None]:
    entered = 0
    try:
        for device in device_types(module, *values):
            dtype = resolve(policy, device)
            place = None if policy.is_plain else root_place(policy, device, dtype)
            on = dtype != torch.float32 or place is not None
            check_device(device)
            caches = torch.is_autocast_cache_enabled()
            _regions.enter(owner, device, dtype, on, caches, audible=False, place=place)
            entered += 1
        yield
    finally:
        for _ in range(entered):
            _regions.leave(owner)


def _inner(backend: Any, mode: str | None, options: Any, dynamic: Any) -> Callable[..., Any]:
    """What compiles a graph that holds its casts."""
    if backend == "inductor":
        return inductor(mode, options, dynamic)
    from torch._dynamo.backends.registry import lookup_backend

    given = {"mode": mode} if mode else {}
    return functools.partial(lookup_backend(backend), **given, **({"options": options} if options else {}))


def _nothing() -> None:
    """Where there are no hooks."""


class _Backend(Backend):
    """The Dynamo backend of one ``nc.compile``."""

    __name__ = "narrowcast"  # in messages of Dynamo

    def __init__(
        self,
        places: Places,
        module: torch.nn.Module | None,
        inner: Callable[..., Any],
        hooks: CompiledHooks | None,
    ) -> None:
        self.inner = inner
        self.places = places
        self._hooks = _nothing if hooks is None else weakref.ref(hooks)  # Dynamo keeps this
        self._of_function = module is None
        self._state = set() if module is None else {id(t) for t in (*module.parameters(), *module.buffers())}

    def __call__(self, graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        hooks = self._hooks()
        if self._of_function and hooks is not None:
            self._refuse_modules_without_hooks(graph_module, hooks)
        if has_transforms(graph_module):
            # Operators inside torch.func's transforms are seen by the eager engine alone.
            self._refuse_rules_beside_transforms(graph_module)
            with without_cache_of_joint_graphs():
                return self.inner(graph_module, example_inputs)  # type: ignore[no-any-return]
        slots = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        state = {
            slot
            for slot, given in zip(slots, example_inputs, strict=True)
            if id(given) in self._state or isinstance(given, torch.nn.Parameter)
        }
        for device in sorted({t.device.type for t in tensors_of(graph_module, "example_value")}):
            root = self._root(device)
            if root is not None:
                Writer(root, _IN_THE_GRAPH, example="example_value").write(graph_module, state)
        without_bounds(graph_module)
        with without_autocast():
            compiled = splitting_by_buckets(self.inner)(graph_module, example_inputs)

        def run(*args: Any) -> Any:
            with without_autocast():
                return compiled(*args)

        return run

    def _refuse_rules_beside_transforms(self, graph_module: torch.fx.GraphModule) -> None:
        for node in nodes_of(graph_module):
            if is_bound(node):
                raise UnsupportedError(
                    f"module {path_at(node)!r}, which has a rule ({rule_at(node)}), was traced into a graph "
                    "with a transform of torch.func, beside which rules for modules cannot be followed: call "
                    "the transform from a function under torch.compiler.disable, or use nc.apply"
                )

    def _refuse_modules_without_hooks(self, graph_module: torch.fx.GraphModule, hooks: CompiledHooks) -> None:
        for node in nodes_of(graph_module):
            for call in self.places.around(node):
                identity = call.key.partition("@")[0]
                if not (identity.isdecimal() and hooks.has(int(identity))):
                    raise UnsupportedError(
                        f"module {call.path!r}, which has a rule ({call.rules[0]}), is called by a compiled "
                        "function that has it from nowhere where it can be found: expected it among the "
                        "function's arguments or in the variables that it names; or compile the module"
                    )

    def _root(self, device: str) -> Scope | None:
        """The place that the graph is called from, on ``device``; None: nothing is cast there."""
        if device == "meta" or not torch.amp.is_autocast_available(device):
            return None
        if device in here.places:
            return here.places[device]
        lower = format_name(torch.get_autocast_dtype(device))
        return resolved(_plain(lower), device, lower).root


@functools.cache
def _plain(lower: str) -> Policy:
    return Policy(compute=lower if lower in ("bf16", "fp16") else "fp32")
