"""Backward passes of a script: scaled where they start, unscaled in the leaves.

``p.grad`` is the true gradient whenever the script can look. A hook finds its pass by the number that the
autograd engine gives it, so nested passes and those of other threads do not mix.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.nn.modules import module as module_hooks
from torch.utils.weak import WeakIdKeyDictionary

from narrowcast.attach._leaves import (
    Leaves,
    PassFacts,
    PassGradients,
    add_to_earlier,
    gradient_of,
    gradients_left_in,
    true_gradient,
)
from narrowcast.attach._recorder import call_site
from narrowcast.attach._regions import ScriptRegions
from narrowcast.attach._run import AttachedRun, Call, Nesting, Patches
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
    """Replaces ``torch.autograd.backward`` and ``grad``, and wraps the hooks that see gradients.

    Attributes:
        leaves: the leaves that scaled passes reach.
        in_hook: counts the hooks of the script that are running in this thread.
        before_modules: whether a pass began before the script had called any module.
        frees_graph: whether the pass that runs now only frees a graph, and has no gradients.
    """

    # The instance of the run that is going on. ``TrueView`` finds it here, since a hook may outlive the run
    # in which the script registered it, and be called in a later one.
    in_force: Backward | None = None

    def __init__(self, run: AttachedRun, regions: ScriptRegions) -> None:
        self._scale = run.scale
        self._recorder = run.recorder
        self._observer = run.observer
        self._stopping = run.stopping
        self._regions = regions
        self._nesting = Nesting()
        self.in_hook = Nesting()
        self._factors_of_grad: dict[int, float] = {}  # number of each pass of ``grad`` -> its loss scale
        # Tensors on which the script called ``retain_grad``; an entry goes with its tensor.
        self._retained: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary()
        # Leaves of the passes inside the running one, which checks them when it ends.
        self._nested_leaves: list[torch.Tensor] = []
        self.leaves = Leaves(run.scale, run.recorder)
        self.before_modules = False
        self.frees_graph = False

    def install(self, patches: Patches) -> None:
        self._torch_backward: Any = torch.autograd.backward
        self._torch_grad: Any = torch.autograd.grad
        backward = self._wrap(self._torch_backward, self.backward, self._ended)
        patches.replace(torch.autograd, "backward", backward)
        patches.replace(torch.autograd, "grad", self._wrap(self._torch_grad, self.grad))
        patches.wrap(torch.Tensor, "retain_grad", self._retain_grad)

        # The hooks that the script registers on tensors and modules see true gradients.
        def of_tensor(register: Call, tensor: torch.Tensor, hook: Call) -> Any:
            return register(tensor, TrueView(hook, replaces=0, at_leaf=tensor.grad_fn is None))

        def of_module(register: Call, module: Any, hook: Call, *args: Any, **kwargs: Any) -> Any:
            return register(module, TrueView(hook, replaces=1, at_leaf=False), *args, **kwargs)

        def of_all(register: Call, hook: Call) -> Any:
            return register(TrueView(hook, replaces=1, at_leaf=False))

        patches.replace(Backward, "in_force", self)
        patches.wrap(torch.Tensor, "register_hook", of_tensor)
        for kind in ("full_backward_hook", "full_backward_pre_hook", "backward_hook"):
            patches.wrap(torch.nn.Module, f"register_{kind}", of_module)
            patches.wrap(module_hooks, f"register_module_{kind}", of_all)

    def _wrap(self, original: Call, replacement: Call, ended: Callable[[], None] = lambda: None) -> Call:
        @untraced
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # For a tensor subclass torch calls this function again by its name: that is still the same pass.
            if self._nesting.depth and graph_task_id() == NO_GRAPH_TASK:
                return original(*args, **kwargs)
            # A script that is left alone, as one that uses mixed precision itself, gets torch's own function.
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
        """Run ``torch.autograd.backward`` from scaled losses; leaves get true gradients."""
        # An iterator can be read only once, and both are read again below.
        roots = _as_tuple(tensors)
        if isinstance(inputs, Iterator):
            inputs = tuple(inputs)
        run_without_scale = functools.partial(
            self._torch_backward, roots, grad_tensors, retain_graph, create_graph, grad_variables, inputs
        )
        enclosing = graph_task_id()
        if enclosing != NO_GRAPH_TASK:
            # This pass starts from gradients that the outer pass has scaled, unless a hook of the script
            # began it: hooks see true gradients.
            factor = None if self.in_hook.depth else self._factor_of(enclosing)
            if factor is None:
                run_without_scale()
                return
            roots, nodes = _with_nodes(roots)
            seeds = _as_seeds(grad_tensors, len(roots))
            options = (retain_graph, create_graph, grad_variables, inputs)
            self._nested_pass(functools.partial(self._torch_backward, roots, seeds, *options), nodes, factor)
            return

        # Passes are recorded in every format, and scaled only in fp16.
        if not self._regions.called_a_module:
            self.before_modules = True
        scaled = self._scale.active
        site = ""
        loss = None
        if scaled or self._recorder.keeps_losses:
            site = call_site()
            loss = _single_number(roots)
        self._recorder.saw_backward(loss, site)
        self._observer.backward_begins(roots)
        if not scaled:
            run_without_scale()
            return

        # What the pass starts from, and what it reaches.
        roots, nodes = _with_nodes(roots)
        seeds = _as_seeds(grad_tensors, len(roots))
        leaves, runs_python = self.leaves.reached_from(nodes)
        facts = PassFacts(
            number=self._scale.next_backward(),
            factor=self._scale.value.scale,
            site=site,
            loss=loss,
            loss_version=0 if loss is None else loss._version,
        )
        self.leaves.backward_begins(leaves)
        # Gradients are unscaled together, in place, after the pass. Not where Python code or a hook may see
        # one during it, and not where a graph of the division is wanted. Passes that keep gradients in the
        # middle of the graph, or name their inputs, are rare: theirs are unscaled one by one, which is always
        # right.
        seen_early = bool(
            runs_python or _living_hooks or self._retained or inputs is not None or create_graph
        )
        if retain_graph is None:
            retain_graph = create_graph  # as torch does

        def run_pass(factor: float, keeps_graph: bool) -> PassGradients | None:
            scaled_seeds = _scaled(roots, seeds, factor)
            with (
                self._numbered(nodes, self.leaves.factors, factor),
                self._retained_unscaled(inputs, factor),
                self.leaves.unscaled(leaves, factor, seen_early) as together,
            ):
                options = (keeps_graph, create_graph, grad_variables, inputs)
                self._torch_backward(roots, scaled_seeds, *options)
            # Filled when the block ended: one entry if the gradients were unscaled together, otherwise none.
            return together[0] if together else None

        if not runs_python and self._may_run_again(leaves, retain_graph):
            left = self._until_finite(run_pass, facts, leaves, inputs, create_graph)
            if not retain_graph:
                self._free_graph(roots, inputs)
        else:
            left = run_pass(facts.factor, retain_graph)

        # Passes inside this one have left the check of their leaves to it.
        if self._nested_leaves:
            by_id = {id(leaf): leaf for leaf in [*leaves, *self._nested_leaves]}
            leaves = list(by_id.values())
            self._nested_leaves = []
        # Only now has DDP reduced what it reduces, so that every rank sees the same.
        self.leaves.backward_ended(leaves, facts, left)

    # ---- passes that are run again

    def _may_run_again(self, leaves: Sequence[torch.Tensor], retained: bool) -> bool:
        """Return whether a pass may be run again at a lower scale, if its gradients overflow.

        Only where the script may read ``p.grad`` itself, which should then be finite: before the first
        optimizer step (there may be no optimizer at all), or where it retains the graph. Never where
        checkpoints would run Python code twice that may rely on running once; the caller excludes custom
        Functions and compiled graphs.
        """
        if not self.leaves.may_run_again(leaves, retained=retained) or self._regions.checkpoints:
            return False
        if not isinstance(self._scale.value, Dynamic) or is_capturing():
            return False
        # During the pass, gradients that leaves had before are put aside; a hook could miss them.
        if _living_hooks and any(leaf.grad is not None for leaf in leaves):
            return False
        # Hooks of others, as of a library that averages gradients, must not run twice.
        for leaf in leaves:
            for hook in (leaf._backward_hooks or {}).values():
                if not isinstance(hook, TrueView) and hook != self.leaves.unscale:
                    return False
        return True

    def _until_finite(
        self,
        run_pass: Callable[[float, bool], PassGradients | None],
        facts: PassFacts,
        leaves: Sequence[torch.Tensor],
        inputs: Any,
        makes_graph: bool,
    ) -> PassGradients | None:
        """Run a pass, and repeat it at lower scales until its gradients are finite; then add earlier ones.

        If they are not finite at a scale of 1 either, they stay so, as in FP32. The scale is then left as it
        is here; it falls once, when the overflow is read or the step is skipped.
        """
        holders = [*leaves, *self._kept_in_graph(inputs)]
        earlier = _taken_from(holders)

        def gradients_at(scale: float) -> PassGradients:
            for tensor in holders:
                tensor.grad = None
            return run_pass(scale, True) or gradients_left_in(leaves)

        recording = self._regions.explainer.recording
        try:
            left = gradients_at(facts.factor)
            recording.pass_is_repeated = True
            # At a scale of 1 first: where that overflows too, a lower scale does not help.
            if not left.are_finite_after_waiting() and facts.factor > 1.0:
                left = gradients_at(1.0)
                if left.are_finite_after_waiting():
                    left = self._lowered(gradients_at, facts.number)
        finally:
            recording.pass_is_repeated = False
            add_to_earlier(earlier, makes_graph=makes_graph)
        if any(before is not None for _, before in earlier):
            return None  # leaves now hold sums, which are checked anew
        return left

    def _lowered(self, gradients_at: Callable[[float], PassGradients], number: int) -> PassGradients:
        """Lower the scale until a pass is finite, which it is at a scale of 1."""
        value = self._scale.value
        while True:
            lower = value.after_step(overflow=True)
            if lower == value or lower.scale <= 1.0:
                break  # the scale falls no further, or reaches 1, which is known to work
            # An overflow may only use up hysteresis: then the scale is the one that has just overflowed.
            falls = lower.scale < value.scale
            value = lower
            if falls:
                left = gradients_at(value.scale)
                if left.are_finite_after_waiting():
                    self._scale.lower_to(value, number)
                    return left
        self._scale.lower_to(lower, number)
        return gradients_at(1.0)

    def _free_graph(self, roots: Sequence[torch.Tensor], inputs: Any) -> None:
        """Free what the graph saved for a pass that was run with ``retain_graph=True``.

        A pass that receives no gradient visits the same nodes, computes nothing and frees them.
        """
        apply: Any = _NoGradient.apply
        with torch.enable_grad():  # a script may call ``backward`` under no_grad
            ends = [apply(root) for root in roots if root.grad_fn is not None]
        self.frees_graph = True
        try:
            self._torch_backward(ends, [torch.zeros_like(end) for end in ends], inputs=inputs)
        finally:
            self.frees_graph = False

    # ---- passes inside of others

    def _nested_pass(self, run: Callable[[], None], nodes: Sequence[Any], factor: float) -> None:
        """Run a pass that a node of an outer pass begins; the outer one checks its gradients when it ends.

        A leaf may stand in for a tensor of the outer pass: then its gradient is passed on to that tensor, and
        must stay scaled.
        """
        # If the outer pass was to unscale its leaves together, unscale now what has arrived, and the rest by
        # hooks: this pass may add to the same leaves.
        self.leaves.unscale_arrived()
        leaves, _ = self.leaves.reached_from(nodes)
        if self._regions.begins_recomputed_backward():
            # The pass of a checkpoint, whose stand-ins for its inputs are known.
            leaves = [leaf for leaf in leaves if not self._regions.is_stand_in(leaf)]
        else:
            # The pass of another custom Function, whose stand-ins are unknown. Only parameters are unscaled,
            # and leaves that an outer pass has hooked; the others are taken for stand-ins.
            leaves = [t for t in leaves if isinstance(t, torch.nn.Parameter) or self.leaves.is_hooked(t)]
        self.leaves.backward_begins(leaves)
        self.leaves.hook(leaves)
        with self._numbered(nodes, self.leaves.factors, factor):
            run()
        self._nested_leaves += leaves

    def factor_at_hook(self, at_leaf: bool) -> float | None:
        """Return the factor by which gradients that a hook gets now are scaled; None: they are not scaled."""
        # ``backward`` has unscaled a leaf's gradient before its hooks run; ``grad`` has not.
        task = graph_task_id()
        if at_leaf:
            return self._factors_of_grad.get(task)
        return self._factor_of(task)

    def _factor_of(self, task: int) -> float | None:
        if task in self.leaves.factors:
            return self.leaves.factors[task]
        return self._factors_of_grad.get(task)

    @contextmanager
    def _numbered(self, nodes: Sequence[Any], table: dict[int, float], factor: float) -> Iterator[None]:
        """While the pass from ``nodes`` runs, hold its ``factor`` in ``table`` under the engine's number."""
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
        """Run ``torch.autograd.grad`` from scaled outputs, and return true gradients.

        A scaled pass that overflows is run again without a scale, since no later step could be skipped for
        it. So the graph stays until the script drops its outputs.
        """
        # An iterator, as ``model.parameters()``, can be read only once; a pass that is run again reads them
        # all again.
        roots = _as_tuple(outputs)
        if isinstance(inputs, Iterator):
            inputs = tuple(inputs)
        if isinstance(grad_outputs, Iterator):
            grad_outputs = tuple(grad_outputs)
        run_without_scale = functools.partial(
            self._torch_grad, roots, inputs, grad_outputs, retain_graph, *rest, **options
        )
        outermost = graph_task_id() == NO_GRAPH_TASK
        if not (self._scale.active and outermost and all(map(_is_plain_result, roots))):
            return run_without_scale()
        if any(map(is_functorch_wrapped, roots)):
            self._recorder.note(_OF_TORCH_FUNC)
            return run_without_scale()

        factor = self._scale.value.scale
        seeds = _scaled(roots, _as_seeds(grad_outputs, len(roots)), factor)
        nodes = [root.grad_fn for root in roots]
        with (
            self._numbered(nodes, self._factors_of_grad, factor),
            self._retained_unscaled(None, factor) as retained,
        ):
            scaled = self._torch_grad(roots, inputs, seeds, True, *rest, **options)
            gradients = _as_tuple(scaled)  # of a dict of inputs it is a dict
            # Under vmap over this function, all rows are checked together.
            found = [without_layers(gradient) for gradient in gradients if gradient is not None]
            overflowed = any(nonfinite_flags(found).read())
            if overflowed:
                # Drop what this pass left in retained tensors: the end of the block puts back what they held
                # before, and the pass without a scale adds to that.
                for tensor in retained:
                    tensor.grad = None
        if overflowed:
            return run_without_scale()
        unscaled = tuple(_true(gradient, factor) for gradient in gradients)
        if isinstance(scaled, dict):
            return dict(zip(scaled, unscaled, strict=True))
        return unscaled

    # ---- gradients in the middle of a graph

    def _retain_grad(self, original: Call, tensor: torch.Tensor) -> None:
        if tensor.grad_fn is not None:
            self._retained[tensor] = None
        original(tensor)

    def _kept_in_graph(self, inputs: Any) -> list[torch.Tensor]:
        """Return the tensors in the middle of a graph that keep their gradients in a pass."""
        kept = {id(tensor): tensor for tensor in self._retained}
        if inputs is not None:
            for tensor in _as_tuple(inputs):
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    kept[id(tensor)] = tensor
        return list(kept.values())

    @contextmanager
    def _retained_unscaled(self, inputs: Any, factor: float) -> Iterator[list[torch.Tensor]]:
        """Unscale gradients of the tensors that keep theirs; what these held before is added afterwards."""
        if inputs is None and not self._retained:
            yield []
            return
        kept = self._kept_in_graph(inputs)
        earlier = _taken_from(kept)
        try:
            yield kept
        finally:
            for tensor, before in earlier:
                scaled = gradient_of(tensor)
                if scaled is None:
                    tensor.grad = before
                elif before is None:
                    tensor.grad = true_gradient(scaled, factor)
                else:
                    tensor.grad = before + true_gradient(scaled, factor)


class _NoGradient(torch.autograd.Function):
    """Passes on no gradient: the nodes below it are visited and compute nothing."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor) -> torch.Tensor:
        return root.view_as(root)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


def _as_tuple(tensors: Any) -> tuple[Any, ...]:
    if isinstance(tensors, torch.Tensor | torch.autograd.graph.GradientEdge):
        return (tensors,)
    if isinstance(tensors, dict):
        return tuple(tensors.values())
    return tuple(tensors)


def _as_seeds(grad_tensors: Any, count: int) -> list[Any]:
    if grad_tensors is None:
        return [None] * count
    return list(_as_tuple(grad_tensors))


def _with_nodes(roots: Sequence[Any]) -> tuple[tuple[torch.Tensor, ...], list[Any]]:
    """Return the roots of a pass and their graph nodes, for hooks. A leaf has none: a view stands for it."""
    tensors = []
    for root in roots:
        if not isinstance(root, torch.Tensor):
            raise UnsupportedError(_OF_EDGE)
        is_leaf = root.requires_grad and root.is_leaf
        with torch.enable_grad():  # a script may call ``backward`` under no_grad
            tensors.append(root.view_as(root) if is_leaf else root)
    return tuple(tensors), [root.grad_fn for root in tensors if root.grad_fn is not None]


def _is_plain_result(root: Any) -> bool:
    """Return whether a root was computed, and has data.

    A subclass may have no data: torch.compile differentiates such tensors while it traces.
    """
    return type(root) is torch.Tensor and root.grad_fn is not None


def _is_one_real_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and not tensor.is_complex()


def _single_number(roots: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the only root if it is one number, as a loss is."""
    if len(roots) == 1 and isinstance(roots[0], torch.Tensor) and _is_one_real_number(roots[0]):
        return roots[0]
    return None


def _scaled(roots: Sequence[torch.Tensor], seeds: Sequence[Any], factor: float) -> list[Any]:
    """Return the gradients of the roots that a scaled pass starts from."""
    scaled: list[Any] = []
    for root, seed in zip(roots, seeds, strict=False):  # torch ignores surplus seeds, and refuses too few
        if seed is not None:
            scaled.append(seed * factor)
        elif _is_one_real_number(root):
            scaled.append(torch.ones_like(root) * factor)  # may overflow in fp16, as any gradient
        else:
            scaled.append(None)  # torch raises
    return scaled


def _true(gradient: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    if gradient is None:
        return None
    return true_gradient(gradient, factor)


def _taken_from(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Set ``grad`` of tensors to None for the time of a pass; return each with the gradient that it had."""
    taken = []
    for tensor in tensors:
        taken.append((tensor, gradient_of(tensor)))
        tensor.grad = None
    return taken


# ---- hooks


class TrueView:
    """A hook that receives true gradients; its result is scaled like what it replaces.

    In a scaled pass low gradients come in fp32. Where they are not scaled, hook and result are left alone.

    Args:
        hook: the script's.
        replaces: index of the argument that the result replaces: 0 in a hook of a tensor, which gets only
            the gradient; 1 in a hook of a module, which gets the module first.
        at_leaf: whether it is a hook of a leaf.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        # Not in ``__init__``, since a copy of a module with hooks makes copies of them without ``__init__``.
        view = super().__new__(cls)
        _living_hooks.add(view)
        return view

    def __init__(self, hook: Call, replaces: int, at_leaf: bool) -> None:
        functools.update_wrapper(self, hook)
        # Not ``hook``: torch wraps a legacy hook of a module in an object with an attribute of that name, and
        # copies the attributes of this one into it.
        self.of_script = hook
        self.replaces = replaces
        self.at_leaf = at_leaf

    def __call__(self, *args: Any) -> Any:
        backward = Backward.in_force
        if backward is None:
            return self.of_script(*args)
        if backward.frees_graph:
            return None  # the hook was called in the pass itself; this one only frees its graph
        factor = backward.factor_at_hook(self.at_leaf)
        with backward.in_hook:
            if factor is None:
                return self.of_script(*args)
            result = self.of_script(*_true_arguments(args, factor))
        if result is None:
            return None
        return _scaled_like(result, args[self.replaces], factor)


# Hooks of the script that still exist: while there are any, gradients are seen during a pass.
_living_hooks: weakref.WeakSet[TrueView] = weakref.WeakSet()


def _true_arguments(value: Any, factor: float) -> Any:
    """Return an argument of a hook, a gradient or a sequence of them, with true gradients."""
    if isinstance(value, list | tuple):
        return tuple(_true_arguments(part, factor) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point() and value.dtype.itemsize < torch.float32.itemsize:
        value = value.float()
    return value / factor


def _scaled_like(result: Any, like: Any, factor: float) -> Any:
    """Return the result of a hook, scaled, in the dtypes of ``like``, which it replaces."""
    if isinstance(result, list | tuple) and isinstance(like, list | tuple):
        return tuple(_scaled_like(part, other, factor) for part, other in zip(result, like, strict=False))
    # A hook of a module with one input or output may return its gradient without a tuple.
    if isinstance(like, tuple) and len(like) == 1:
        return _scaled_like(result, like[0], factor)
    if isinstance(result, torch.Tensor) and isinstance(like, torch.Tensor):
        return (result * factor).to(like.dtype)
    return result
