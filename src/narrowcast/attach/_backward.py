"""Backward passes of a script: scaled where they start, unscaled in the leaves.

``p.grad`` is the true gradient whenever the script can look. A hook asks the autograd engine for the number
of the pass that it works for, so nested passes and other threads are told apart.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.nn.modules import module as module_hooks

from narrowcast.attach._leaves import Leaves, true_gradient
from narrowcast.attach._recorder import call_site
from narrowcast.attach._regions import Regions
from narrowcast.attach._run import Call, Nesting, Patches, Run
from narrowcast.attach._torch_internals import (
    NO_GRAPH_TASK,
    graph_task_id,
    is_functorch_wrapped,
    without_layers,
)
from narrowcast.errors import UnsupportedError
from narrowcast.gradients import nonfinite_flags, untraced

_OF_EDGE = (
    "backward from a GradientEdge cannot be scaled for fp16: call backward on the tensor itself, or use "
    "--policy bf16"
)
_OF_TORCH_FUNC = (
    "torch.func differentiates without the loss scale, so its gradients may underflow in fp16; --policy bf16 "
    "has no such limit"
)


class Backward:
    """Replaces ``torch.autograd.backward`` and ``grad``, and wraps the hooks that see gradients."""

    def __init__(self, run: Run, regions: Regions) -> None:
        self._scale = run.scale
        self._recorder = run.recorder
        self._stopping = run.stopping
        self._regions = regions
        self._nesting = Nesting()
        self._returning: dict[int, float] = {}
        self._retained: list[weakref.ref[torch.Tensor]] = []
        self._nested_leaves: list[torch.Tensor] = []
        self.leaves = Leaves(run.scale, run.recorder)
        self.before_modules = False  # a pass differentiated what no module computed

    in_force: Backward | None = None

    def install(self, patches: Patches) -> None:
        self._torch_backward: Any = torch.autograd.backward
        self._torch_grad: Any = torch.autograd.grad
        backward = self._wrap(self._torch_backward, self.backward, self._stopping.backward_ended)
        patches.replace(torch.autograd, "backward", backward)
        patches.replace(torch.autograd, "grad", self._wrap(self._torch_grad, self.grad))
        patches.wrap(torch.Tensor, "retain_grad", self._retain_grad)

        # The hooks that the script registers on tensors and modules see true gradients.
        def of_tensor(register: Call, tensor: torch.Tensor, hook: Call) -> Any:
            return register(tensor, TrueView(hook, 0, tensor.grad_fn is None))

        def of_module(register: Call, module: Any, hook: Call, *args: Any, **kwargs: Any) -> Any:
            return register(module, TrueView(hook, 1, False), *args, **kwargs)

        def of_all(register: Call, hook: Call) -> Any:
            return register(TrueView(hook, 1, False))

        patches.replace(Backward, "in_force", self)
        patches.wrap(torch.Tensor, "register_hook", of_tensor)
        for kind in ("full_backward_hook", "full_backward_pre_hook", "backward_hook"):
            patches.wrap(torch.nn.Module, f"register_{kind}", of_module)
        for kind in ("full_backward_hook", "full_backward_pre_hook"):
            patches.wrap(module_hooks, f"register_module_{kind}", of_all)

    def _wrap(self, original: Call, replacement: Call, ended: Callable[[], None] = lambda: None) -> Call:
        @untraced
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # Tensor subclasses make torch call itself by name: that is the same pass, not a nested one.
            if self._nesting.depth and graph_task_id() == NO_GRAPH_TASK:
                return original(*args, **kwargs)
            run = replacement if self._recorder.left_alone is None else original
            try:
                with self._nesting:
                    result = run(*args, **kwargs)
            except (RuntimeError, TypeError) as error:
                self._regions.note_formats_in_backward(error)
                raise
            if graph_task_id() == NO_GRAPH_TASK:
                ended()
            return result

        return wrapper

    def backward(
        self, tensors: Any, grad_tensors: Any = None, *rest: Any, inputs: Any = None, **options: Any
    ) -> None:
        """``torch.autograd.backward`` from scaled losses, leaves getting true gradients."""
        roots = _as_tuple(tensors)
        enclosing = graph_task_id()
        outermost = enclosing == NO_GRAPH_TASK
        scaled = self._scale.active
        site, loss = "", None
        if outermost:
            self.before_modules = self.before_modules or not self._regions.called_a_module
            if scaled or self._recorder.keeps_losses:
                site, loss = call_site(), _one_number(roots)
            self._recorder.saw_backward(loss, site)

        # The pass that encloses a nested one has scaled the gradients that it starts from.
        factor = self._scale.value.scale if outermost else self._factor_of(enclosing)
        if factor is None or (outermost and not scaled):
            self._torch_backward(tensors, grad_tensors, *rest, inputs=inputs, **options)
            return
        if not all(isinstance(root, torch.Tensor) for root in roots):
            raise UnsupportedError(_OF_EDGE)

        # A leaf gets a graph node, on which a hook can be put.
        roots = tuple(root.view_as(root) if root.requires_grad and root.is_leaf else root for root in roots)
        nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        seeds = _as_seeds(grad_tensors, len(roots))
        if outermost:
            seeds = _scaled(roots, seeds, factor)
        run = functools.partial(self._torch_backward, roots, seeds, *rest, inputs=inputs, **options)
        if not outermost:
            self._nested_pass(run, nodes, factor)
            return

        leaves, runs_python = self.leaves.reached_from(nodes)
        number = self._scale.next_backward()
        self.leaves.backward_begins(leaves)
        # ``rest`` and ``options`` may make a graph of the gradients.
        makes_graph = any(rest[1:]) or options.get("create_graph")
        seen_early = bool(runs_python or _views or self._retained or inputs is not None or makes_graph)
        with (
            self._numbered(nodes, self.leaves.factors, factor),
            self._retained_unscaled(inputs, factor),
            self.leaves.unscaled(leaves, factor, seen_early) as together,
        ):
            run()

        # Only now has DDP reduced what it reduces, so that every rank sees the same.
        if self._nested_leaves:
            nested, self._nested_leaves = self._nested_leaves, []
            leaves = list({id(leaf): leaf for leaf in [*leaves, *nested]}.values())
        left = together[0] if together else None
        self.leaves.backward_ended(leaves, number, loss, site, left)

    def _nested_pass(self, run: Callable[[], None], nodes: Sequence[Any], factor: float) -> None:
        """Run a pass that a node of an outer pass begins; the end of that checks its gradients too."""
        self.leaves.unscale_arrived()
        leaves, _ = self.leaves.reached_from(nodes)
        stands_in = self._stands_in()
        leaves = [leaf for leaf in leaves if not stands_in(leaf)]
        self.leaves.backward_begins(leaves)
        self.leaves.hook(leaves)
        with self._numbered(nodes, self.leaves.factors, factor):
            run()
        self._nested_leaves += leaves

    def _stands_in(self) -> Callable[[torch.Tensor], bool]:
        """Return which leaves of the nested pass that begins now stand in for tensors of the outer pass.

        Those of a checkpoint are known. Other Functions may run a pass inside their backward too: there a
        leaf stands in for a tensor if it is not a parameter and no outer pass has reached it.
        """
        if self._regions.begins_recomputed_backward():
            return self._regions.is_stand_in
        return lambda t: not isinstance(t, torch.nn.Parameter) and not self.leaves.is_hooked(t)

    def factor_at_hook(self, at_leaf: bool) -> float | None:
        """Return the factor of the gradients that a hook would see now; None: they are true."""
        # ``backward`` has unscaled a leaf's gradient before its hooks run; ``grad`` has not.
        task = graph_task_id()
        return self._returning.get(task) if at_leaf else self._factor_of(task)

    def _factor_of(self, task: int) -> float | None:
        factor = self.leaves.factors.get(task)
        return self._returning.get(task) if factor is None else factor

    @contextmanager
    def _numbered(self, nodes: Sequence[Any], table: dict[int, float], factor: float) -> Iterator[None]:
        """Enter the pass that starts at ``nodes`` into ``table`` while it runs, under the engine's number."""
        numbers: list[int] = []

        def enter(_: Any) -> None:
            number = graph_task_id()
            numbers.append(number)
            table[number] = factor

        handles = [node.register_prehook(enter) for node in nodes]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for number in numbers:
                table.pop(number, None)

    def grad(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """``torch.autograd.grad`` from scaled outputs, returning true gradients.

        A scaled pass that overflows is run again unscaled, since no later step could be skipped for it.
        """
        roots = _as_tuple(outputs)
        # A subclass may have no data: torch.compile differentiates such tensors while it traces.
        plain = all(type(root) is torch.Tensor and root.grad_fn is not None for root in roots)
        given = (outputs, inputs, grad_outputs, retain_graph, *rest)
        if not (self._scale.active and graph_task_id() == NO_GRAPH_TASK and plain):
            return self._torch_grad(*given, **options)
        if any(is_functorch_wrapped(root) for root in roots):
            self._recorder.note(_OF_TORCH_FUNC)
            return self._torch_grad(*given, **options)
        factor = self._scale.value.scale
        seeds = _scaled(roots, _as_seeds(grad_outputs, len(roots)), factor)
        numbered = self._numbered([root.grad_fn for root in roots], self._returning, factor)
        with numbered, self._retained_unscaled(None, factor) as retained:
            scaled = self._torch_grad(roots, inputs, seeds, True, *rest, **options)
            # Under vmap over this function, all rows are checked together.
            overflowed = any(nonfinite_flags([without_layers(g) for g in scaled if g is not None]).read())
            for tensor in retained if overflowed else ():
                tensor.grad = None
        if overflowed:
            return self._torch_grad(*given, **options)
        return tuple(None if g is None else true_gradient(g, factor) for g in scaled)

    # ---- gradients in the middle of a graph

    def _retain_grad(self, original: Call, tensor: torch.Tensor) -> None:
        if tensor.grad_fn is not None and not any(kept() is tensor for kept in self._retained):
            self._retained.append(weakref.ref(tensor))
        original(tensor)

    @contextmanager
    def _retained_unscaled(self, inputs: Any, factor: float) -> Iterator[list[torch.Tensor]]:
        """Unscale gradients of the tensors that keep theirs; what these held before is added afterwards."""
        self._retained = [kept for kept in self._retained if kept() is not None]
        named = [t for t in _as_tuple(inputs) if isinstance(t, torch.Tensor)] if inputs is not None else []
        kept = {id(t): t for ref in self._retained if (t := ref()) is not None}
        kept |= {id(t): t for t in named if t.grad_fn is not None}
        earlier = [(tensor, _gradient_of(tensor)) for tensor in kept.values()]
        for tensor, _ in earlier:
            tensor.grad = None
        try:
            yield list(kept.values())
        finally:
            for tensor, before in earlier:
                scaled = _gradient_of(tensor)
                true = None if scaled is None else true_gradient(scaled, factor)
                tensor.grad = before if true is None else true if before is None else before + true


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return ``tensor.grad`` without torch's warning about tensors in the middle of a graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.grad


def _as_tuple(tensors: Any) -> tuple[Any, ...]:
    single = isinstance(tensors, torch.Tensor | torch.autograd.graph.GradientEdge)
    if isinstance(tensors, dict):
        return tuple(tensors.values())
    return (tensors,) if single else tuple(tensors)


def _as_seeds(grad_tensors: Any, count: int) -> list[Any]:
    return [None] * count if grad_tensors is None else list(_as_tuple(grad_tensors))


def _one_number(roots: tuple[Any, ...]) -> torch.Tensor | None:
    if len(roots) != 1 or not isinstance(roots[0], torch.Tensor):
        return None
    return roots[0] if roots[0].numel() == 1 and not roots[0].is_complex() else None


def _scaled(roots: Sequence[torch.Tensor], seeds: Sequence[Any], factor: float) -> list[Any]:
    scaled: list[Any] = []
    for root, seed in zip(roots, seeds, strict=False):
        if seed is not None:
            scaled.append(seed * factor)
        elif root.numel() == 1 and not root.is_complex():
            scaled.append(torch.ones_like(root) * factor)  # infinite, as any overflow, if root is in fp16
        else:
            scaled.append(None)  # torch raises
    return scaled


# ---- hooks


class TrueView:
    """A hook that receives true gradients in fp32; its result is scaled like the argument that it replaces.

    Args:
        hook: the script's.
        replaces: index of the argument that the result replaces.
        at_leaf: whether it is a hook of a leaf.
    """

    def __new__(cls, *_: Any) -> Self:
        # Here, since a copy of a module with hooks makes copies of them without ``__init__``.
        view = super().__new__(cls)
        _views.add(view)
        return view

    def __init__(self, hook: Call, replaces: int, at_leaf: bool) -> None:
        functools.update_wrapper(self, hook)
        self.hook = hook
        self.replaces = replaces
        self.at_leaf = at_leaf

    def __call__(self, *args: Any) -> Any:
        backward = Backward.in_force
        factor = None if backward is None else backward.factor_at_hook(self.at_leaf)
        if factor is None:
            return self.hook(*args)
        result = self.hook(*_true(args, factor))
        return None if result is None else _scaled_like(result, args[self.replaces], factor)


_views: weakref.WeakSet[TrueView] = weakref.WeakSet()


def _true(value: Any, factor: float) -> Any:
    """Return an argument of a hook, a gradient or a sequence of them, with true gradients."""
    if isinstance(value, list | tuple):
        return tuple(_true(one, factor) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    return (value.float() if value.is_floating_point() else value) / factor


def _scaled_like(result: Any, like: Any, factor: float) -> Any:
    if isinstance(result, list | tuple) and isinstance(like, list | tuple):
        return tuple(_scaled_like(r, g, factor) for r, g in zip(result, like, strict=False))
    if isinstance(like, tuple) and len(like) == 1:
        return _scaled_like(result, like[0], factor)
    if isinstance(result, torch.Tensor) and isinstance(like, torch.Tensor):
        return (result * factor).to(like.dtype)
    return result
