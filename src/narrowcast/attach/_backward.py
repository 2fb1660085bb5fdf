"""Backward passes of a script: scaled where they start, unscaled in the leaves.

``p.grad`` is the true gradient whenever the script can look. A hook asks the autograd engine for the number
of the pass that it works for, so nested passes and other threads are told apart.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.nn.modules import module as module_hooks

from narrowcast.attach._leaves import Leaves, PassGradients, gradient_of, gradients_left_in, true_gradient
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
from narrowcast.gradients import is_capturing, nonfinite_flags, untraced
from narrowcast.scaling import Dynamic

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
        self._observer = run.observer
        self._stopping = run.stopping
        self._regions = regions
        self._nesting = Nesting()
        self._returning: dict[int, float] = {}
        self._retained: list[weakref.ref[torch.Tensor]] = []
        self._nested_leaves: list[torch.Tensor] = []
        self.frees_graph = False
        self.leaves = Leaves(run.scale, run.recorder)
        self.before_modules = False  # a pass differentiated what no module computed

    in_force: Backward | None = None

    def install(self, patches: Patches) -> None:
        self._torch_backward: Any = torch.autograd.backward
        self._torch_grad: Any = torch.autograd.grad
        backward = self._wrap(self._torch_backward, self.backward, self._ended)
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

    def _ended(self) -> None:
        self._observer.backward_ended()
        self._stopping.backward_ended()

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
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
            self._observer.backward_begins(roots)

        # The pass that encloses a nested one has scaled the gradients that it starts from.
        factor = self._scale.value.scale if outermost else self._factor_of(enclosing)
        if factor is None or (outermost and not scaled):
            self._torch_backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        if not all(isinstance(root, torch.Tensor) for root in roots):
            raise UnsupportedError(_OF_EDGE)

        # A leaf gets a graph node, on which a hook can be put.
        roots = tuple(root.view_as(root) if root.requires_grad and root.is_leaf else root for root in roots)
        nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        seeds = _as_seeds(grad_tensors, len(roots))
        if not outermost:
            options = (retain_graph, create_graph, grad_variables, inputs)
            run = functools.partial(self._torch_backward, roots, seeds, *options)
            self._nested_pass(run, nodes, factor)
            return

        leaves, runs_python = self.leaves.reached_from(nodes)
        number = self._scale.next_backward()
        self.leaves.backward_begins(leaves)
        seen_early = bool(runs_python or _views or self._retained or inputs is not None or create_graph)
        retained = create_graph if retain_graph is None else retain_graph

        def one_pass(factor: float, keeps_graph: bool) -> PassGradients | None:
            scaled_seeds = _scaled(roots, seeds, factor)
            with (
                self._numbered(nodes, self.leaves.factors, factor),
                self._retained_unscaled(inputs, factor),
                self.leaves.unscaled(leaves, factor, seen_early) as together,
            ):
                options = (keeps_graph, create_graph, grad_variables, inputs)
                self._torch_backward(roots, scaled_seeds, *options)
            return together[0] if together else None

        if not runs_python and self._may_run_again(leaves, retained):
            left = self._until_finite(one_pass, leaves, inputs, factor, number, create_graph)
            if not retained:
                self._free_graph(roots, inputs)
        else:
            left = one_pass(factor, retained)

        # Only now has DDP reduced what it reduces, so that every rank sees the same.
        if self._nested_leaves:
            nested, self._nested_leaves = self._nested_leaves, []
            leaves = list({id(leaf): leaf for leaf in [*leaves, *nested]}.values())
        self.leaves.backward_ended(leaves, number, factor, loss, site, left)

    # ---- passes that are run again

    def _may_run_again(self, leaves: Sequence[torch.Tensor], retained: bool) -> bool:
        """Return whether a pass may be run again at a lower scale, if its gradients overflow.

        ``p.grad`` may be what the script wants: it has not stepped yet. Not where code in Python would run
        twice that may not be made for it: custom Functions, checkpoints, compiled graphs.
        """
        if not self.leaves.may_run_again(leaves, retained=retained) or self._regions.checkpoints:
            return False
        # What leaves hold is set aside meanwhile, and hooks might look at it.
        if _views and any(leaf.grad is not None for leaf in leaves):
            return False
        known_hooks = all(
            isinstance(hook, TrueView) or hook == self.leaves.unscale
            for leaf in leaves
            for hook in (leaf._backward_hooks or {}).values()
        )
        return known_hooks and isinstance(self._scale.value, Dynamic) and not is_capturing()

    def _until_finite(
        self,
        one_pass: Callable[[float, bool], PassGradients | None],
        leaves: Sequence[torch.Tensor],
        inputs: Any,
        factor: float,
        number: int,
        makes_graph: bool,
    ) -> PassGradients | None:
        """Run a pass, at lower scales until its gradients are finite; what leaves hold is added afterwards.

        If they are not finite at a scale of 1 either, they stay so, as in FP32, and the scale falls once.
        """
        holders = [*leaves, *self._kept_in_graph(inputs)]
        aside = [(tensor, gradient_of(tensor)) for tensor in holders]

        def gradients_at(scale: float) -> PassGradients:
            for tensor in holders:
                tensor.grad = None
            return one_pass(scale, True) or gradients_left_in(leaves)

        try:
            left = gradients_at(factor)
            if not left.wait_if_finite() and factor > 1.0:
                left = gradients_at(1.0)
                if left.wait_if_finite():
                    left = self._lowered(gradients_at, number)
        finally:
            self.leaves.put_together(aside, makes_graph=makes_graph)
        accumulated = any(before is not None for _, before in aside)
        return None if accumulated else left

    def _lowered(self, gradients_at: Callable[[float], PassGradients], number: int) -> PassGradients:
        """Lower the scale until a pass is finite, which it is at a scale of 1."""
        value = self._scale.value
        while True:
            lower = value.after_step(overflow=True)
            if lower == value or lower.scale <= 1.0:
                break  # it falls no further, or a scale of 1 is known to do
            falls = lower.scale < value.scale
            value = lower
            if falls:
                left = gradients_at(value.scale)
                if left.wait_if_finite():
                    self._scale.lower_to(value, number)
                    return left
        self._scale.lower_to(lower, number)
        return gradients_at(1.0)

    def _free_graph(self, roots: Sequence[torch.Tensor], inputs: Any) -> None:
        """Free what the graph saved for a pass that was run with ``retain_graph=True``.

        A pass that receives no gradient visits the same nodes, computes nothing and frees them.
        """
        apply: Any = _NoGradient.apply
        ends = [apply(root) for root in roots if root.grad_fn is not None]
        self.frees_graph = True
        try:
            self._torch_backward(ends, [torch.zeros_like(end) for end in ends], inputs=inputs)
        finally:
            self.frees_graph = False

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

    def _kept_in_graph(self, inputs: Any) -> list[torch.Tensor]:
        """Return the tensors in the middle of a graph that keep their gradients in a pass."""
        self._retained = [kept for kept in self._retained if kept() is not None]
        named = [t for t in _as_tuple(inputs) if isinstance(t, torch.Tensor)] if inputs is not None else []
        kept = {id(t): t for ref in self._retained if (t := ref()) is not None}
        kept |= {id(t): t for t in named if t.grad_fn is not None}
        return list(kept.values())

    @contextmanager
    def _retained_unscaled(self, inputs: Any, factor: float) -> Iterator[list[torch.Tensor]]:
        """Unscale gradients of the tensors that keep theirs; what these held before is added afterwards."""
        kept = self._kept_in_graph(inputs)
        earlier = [(tensor, gradient_of(tensor)) for tensor in kept]
        for tensor, _ in earlier:
            tensor.grad = None
        try:
            yield kept
        finally:
            for tensor, before in earlier:
                scaled = gradient_of(tensor)
                true = None if scaled is None else true_gradient(scaled, factor)
                tensor.grad = before if true is None else true if before is None else before + true


class _NoGradient(torch.autograd.Function):
    """Passes on no gradient: the nodes below it are visited and compute nothing."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor) -> torch.Tensor:
        return root.view_as(root)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


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
        if backward is not None and backward.frees_graph:
            return None  # a pass without gradients
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
