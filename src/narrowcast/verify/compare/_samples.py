"""Which backward passes a step of an optimizer uses, and the samples behind their losses."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import GradientEdge

from narrowcast.attach import is_functorch_wrapped
from narrowcast.casting import tensors_inside
from narrowcast.gradients import nodes_below, parameters_of
from narrowcast.verify.runs._model_state import fingerprint, samples_in

# The key of a _Call in the metadata of the graph nodes that made a module's outputs. The nodes hold the call,
# and it goes with them; a table of ours from nodes to calls would keep the graph alive.
_CALL = "narrowcast: call"


@dataclass(frozen=True, slots=True, eq=False)
class _Gradient:
    """A parameter's ``.grad`` at one moment; its version grows when it is added to in place."""

    tensor: torch.Tensor | None
    version: int

    def is_same(self, other: _Gradient) -> bool:
        return self.tensor is other.tensor and self.version == other.version


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a module whose output is in a graph.

    Attributes:
        number: the place of the call in the order in which calls end.
        module: the module that the script called.
        batch: the fingerprint of the inputs.
        samples: how many samples are in the inputs; None: not known.
    """

    number: int
    module: torch.nn.Module
    batch: str
    samples: int | None


class _Pass(NamedTuple):
    """A backward pass: the line of the script that called it, and the calls behind its loss that count."""

    site: str
    calls: list[_Call]


class _BeforePass(NamedTuple):
    """An optimizer's gradients before a backward pass, and that pass."""

    optimizer: torch.optim.Optimizer
    gradients: list[_Gradient]
    backward: _Pass


class _ScriptThread(threading.local):
    """The module call and the backward pass that run now in one thread of the script.

    Attributes:
        inputs: the inputs of the outermost module call that runs; None if none does.
        before: what was known before the backward pass that runs, for each optimizer; empty if none does.
    """

    inputs: Any = None
    before: Sequence[_BeforePass] = ()


class _StepCounts(NamedTuple):
    """How many minibatches the gradients of a step average, and the samples in all of them, if known."""

    minibatches: int
    samples: int | None


class Minibatches:
    """Count the minibatches that the gradients of a step average, and the samples in them.

    For an optimizer, a call of a module counts if

    - its output is in the graph of the loss,
    - the module has parameters of the optimizer, and
    - no later call of which both is true uses its output. So of an encoder and its decoder only the decoder
      counts, since both see the same samples.

    Two halves of a batch add up. A batch that a module saw twice counts once. Passes that one line of the
    script calls accumulate minibatches. Those of several lines are several losses, as of a discriminator that
    sees real samples in one pass and generated ones in another: the line with the most minibatches counts.

    Args:
        optimizers: returns those of the script.
    """

    def __init__(self, optimizers: Callable[[], Iterable[torch.optim.Optimizer]]) -> None:
        self._optimizers = optimizers
        self._numbers = itertools.count()
        self._thread = _ScriptThread()
        self._largest_steps: dict[torch.optim.Optimizer, _StepCounts] = {}
        # For each optimizer, the backward passes whose sum its gradients are.
        self._passes: WeakKeyDictionary[torch.optim.Optimizer, list[_Pass]] = WeakKeyDictionary()

    # ---- events of the script

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the inputs of the outermost call that begins."""
        self._thread.inputs = [args, kwargs]

    def returned(self, module: torch.nn.Module, output: Any) -> None:
        """Mark the nodes of the graph that made the outputs of that call."""
        inputs, self._thread.inputs = self._thread.inputs, None
        nodes: list[Any] = []
        for tensor in tensors_inside(output):
            if tensor.grad_fn is not None:
                nodes.append(tensor.grad_fn)
        if inputs is None or not nodes:
            return
        # Under vmap a tensor is one slice of a batch. Under grad its graph is torch.func's own, below no loss
        # of the script.
        if any(map(is_functorch_wrapped, tensors_inside([inputs, output]))):
            return
        number = next(self._numbers)
        call = _Call(number, module, fingerprint(inputs), _samples_of(module, inputs))
        for node in nodes:
            node.metadata[_CALL] = call

    def backward_begins(self, roots: Sequence[Any], site: str) -> None:
        """Find the calls behind a loss, while its graph is whole; ``site`` is the line that goes backward."""
        nodes_of_calls = _nodes_of_calls(roots)
        before = []
        for optimizer in self._optimizers():
            passes: list[_Pass] = self._passes.setdefault(optimizer, [])
            if passes and not _holds_gradients(optimizer):
                passes.clear()  # the script has dropped them
            parameters = set(map(id, parameters_of(optimizer)))
            nodes_of_own_calls: dict[_Call, list[Any]] = {}
            for call, nodes in nodes_of_calls.items():
                if _has_one_of(call.module, parameters):
                    nodes_of_own_calls[call] = nodes
            backward = _Pass(site, _outermost(nodes_of_own_calls))
            before.append(_BeforePass(optimizer, _gradients(optimizer), backward))
        self._thread.before = before

    def backward_ended(self) -> None:
        """Note which optimizers have other gradients than before the pass."""
        before_pass, self._thread.before = self._thread.before, ()
        for optimizer, gradients, backward in before_pass:
            if not all(map(_Gradient.is_same, _gradients(optimizer), gradients)):
                self._passes[optimizer].append(backward)

    # ---- what is known of a step

    def stepped(self, optimizer: torch.optim.Optimizer) -> tuple[int, int | None]:
        """Note a step; return the most minibatches that a step so far averaged, and the samples in each.

        The samples are None if those of an optimizer are not known.
        """
        step = self._count(optimizer)
        largest = self._largest_steps.get(optimizer, _StepCounts(0, None))
        # A step as large replaces the largest one if the samples of that are not known, as its own may be.
        # The calls of a script's first step, for example, may have been made before we watched.
        may_add_samples = step.minibatches == largest.minibatches and largest.samples is None
        if step.minibatches > largest.minibatches or may_add_samples:
            self._largest_steps[optimizer] = step

        largest_steps = self._largest_steps.values()
        most = max(counts.minibatches for counts in largest_steps)
        samples = [counts.samples for counts in largest_steps if counts.samples is not None]
        if len(samples) < len(largest_steps):
            return most, None
        # A certificate has one pair of numbers for all optimizers, and takes their product for the samples of
        # a step. Dividing the fewest samples by the most minibatches, and rounding down, keeps the product
        # from being more than the step of any optimizer averaged.
        each = min(samples) // most
        return most, each or None  # 0: fewer samples than minibatches

    def _count(self, optimizer: torch.optim.Optimizer) -> _StepCounts:
        """Return how many minibatches, and samples, the gradients of ``optimizer`` average.

        Where the calls behind a backward pass are not known, every pass counts as a minibatch.
        """
        passes = self._passes.get(optimizer, [])
        calls_of_lines: dict[str, list[list[_Call]]] = {}
        for backward in passes:
            calls_of_lines.setdefault(backward.site, []).append(backward.calls)
        if not passes or not all(backward.calls for backward in passes):
            most = max(map(len, calls_of_lines.values()), default=1)
            return _StepCounts(most, None)
        most = max(map(_count_minibatches, calls_of_lines.values()))
        return _StepCounts(most, _count_samples([backward.calls for backward in passes]))


def _count_minibatches(passes: Sequence[Sequence[_Call]]) -> int:
    """Return how many different minibatches the passes used.

    A minibatch of a module is the set of batches that it saw in one pass. Passes with the same set, as those
    of two losses, used one minibatch. The module with the most minibatches counts.
    """
    batch_sets: dict[torch.nn.Module, set[frozenset[str]]] = {}
    for calls in passes:
        batches_of_pass: dict[torch.nn.Module, set[str]] = {}
        for call in calls:
            batches_of_pass.setdefault(call.module, set()).add(call.batch)
        for module, batches in batches_of_pass.items():
            batch_sets.setdefault(module, set()).add(frozenset(batches))
    # Modules do not add up: an actor and a critic may see the same batch side by side.
    return max(map(len, batch_sets.values()))


def _count_samples(passes: Sequence[Sequence[_Call]]) -> int | None:
    """Return the samples in all batches of a module; None: not known, or not the same for all modules."""
    samples_by_batch: dict[torch.nn.Module, dict[str, int | None]] = {}
    for call in itertools.chain.from_iterable(passes):
        samples_by_batch.setdefault(call.module, {})[call.batch] = call.samples
    totals: set[int] = set()
    for samples_of_batches in samples_by_batch.values():
        total = 0
        for samples in samples_of_batches.values():
            if samples is None:
                return None
            total += samples
        totals.add(total)
    if len(totals) != 1:
        return None
    return totals.pop()


def _nodes_of_calls(roots: Sequence[Any]) -> dict[_Call, list[Any]]:
    """Return the calls whose outputs are in the graph of a loss, each with the nodes that made them."""
    starts = []
    for root in roots:
        node = root.node if isinstance(root, GradientEdge) else root.grad_fn
        if node is not None:
            starts.append(node)
    nodes_of_calls: dict[_Call, list[Any]] = {}
    for node in nodes_below(starts):
        call = node.metadata.get(_CALL)
        if call is not None:
            nodes_of_calls.setdefault(call, []).append(node)
    return nodes_of_calls


def _samples_of(module: torch.nn.Module, inputs: Any) -> int | None:
    """Return the first dimension of all inputs, unless it may be something else than the batch."""
    # Recurrent layers and attention take the sequence first by default; the module may or may not turn it.
    if any(getattr(part, "batch_first", True) is False for part in module.modules()):
        return None
    # A vector of floats may be one sample, as the state of an agent is.
    with_dimensions = [tensor for tensor in tensors_inside(inputs) if tensor.ndim]
    are_vectors = all(tensor.ndim == 1 for tensor in with_dimensions)
    if are_vectors and any(tensor.is_floating_point() for tensor in with_dimensions):
        return None
    return samples_in(inputs)


def _outermost(nodes_of_calls: dict[_Call, list[Any]]) -> list[_Call]:
    """Return the calls on which no later one builds, given the nodes of each call's outputs."""
    outermost = []
    covered: set[Any] = set()
    # A call builds only on earlier ones.
    for call in sorted(nodes_of_calls, key=lambda call: call.number, reverse=True):
        if covered.isdisjoint(nodes_of_calls[call]):
            outermost.append(call)
        waiting = list(nodes_of_calls[call])
        while waiting:
            for below, _ in waiting.pop().next_functions:
                if below is not None and below not in covered:
                    covered.add(below)
                    waiting.append(below)
    return outermost


def _has_one_of(module: torch.nn.Module, parameters: set[int]) -> bool:
    """Return whether a parameter of ``module`` is among those with these ``id``."""
    return not parameters.isdisjoint(map(id, module.parameters()))


def _gradients(optimizer: torch.optim.Optimizer) -> list[_Gradient]:
    gradients = []
    for parameter in parameters_of(optimizer):
        tensor = parameter.grad
        version = 0 if tensor is None else tensor._version
        gradients.append(_Gradient(tensor, version))
    return gradients


def _holds_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient is not zero."""
    for parameter in parameters_of(optimizer):
        values = parameter.grad
        if values is None:
            continue
        if values.layout == torch.sparse_coo:
            values = values.coalesce().values()
        if bool(values.count_nonzero()):
            return True
    return False
