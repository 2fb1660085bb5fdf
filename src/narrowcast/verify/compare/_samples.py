"""Which backward passes a step of an optimizer uses, and the samples behind their losses."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import GradientEdge

from narrowcast.attach import is_functorch_wrapped
from narrowcast.casting import tensors_inside
from narrowcast.gradients import nodes_below, parameters_of
from narrowcast.verify._model_state import fingerprint, samples_in

# In the metadata of the graph nodes that made the outputs of a call: it lives as long as they do, where a
# reference to a node would keep the graph.
_CALL = "narrowcast: call"


_Gradient = tuple[torch.Tensor | None, int]
"""A gradient, and its version, which grows when it is added to in place."""


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a module whose output is in a graph.

    Attributes:
        number: in the order in which calls end.
        module: the outermost one.
        batch: fingerprint of its inputs.
        samples: in them; None: not known.
    """

    number: int
    module: torch.nn.Module
    batch: str
    samples: int | None


class _Thread(threading.local):
    """What a thread of the script is in.

    Attributes:
        inputs: of the outermost call.
        before: for each optimizer, its gradients before the backward pass, and the calls behind the loss.
    """

    inputs: Any = None
    before: Sequence[tuple[torch.optim.Optimizer, list[_Gradient], list[_Call]]] = ()


class Minibatches:
    """Count the minibatches, and the samples, whose mean the gradients of a step are.

    Of the calls in the graph of a loss those count that use parameters of the optimizer and that no later
    one of these builds on: an encoder and its decoder see the same samples. Two halves of a batch add up, and
    a batch that a module saw twice counts once. Calls without gradients, or whose output is not in the graph,
    count nowhere.

    Args:
        optimizers: returns those of the script.
    """

    def __init__(self, optimizers: Callable[[], Iterable[torch.optim.Optimizer]]) -> None:
        self._optimizers = optimizers
        self._numbers = itertools.count()
        self._thread = _Thread()
        self._steps: dict[torch.optim.Optimizer, tuple[int, int | None]] = {}
        self._passes: WeakKeyDictionary[torch.optim.Optimizer, list[list[_Call]]] = WeakKeyDictionary()

    # ---- events of the script

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the inputs of the outermost call that begins."""
        self._thread.inputs = [args, kwargs]

    def returned(self, module: torch.nn.Module, output: Any) -> None:
        """Mark the nodes of the graph that made the outputs of that call."""
        inputs, self._thread.inputs = self._thread.inputs, None
        made = [tensor.grad_fn for tensor in tensors_inside(output)]
        nodes: list[Any] = [node for node in made if node is not None]
        if inputs is None or not nodes:
            return
        # Inside torch.func a tensor is one of many, or its graph is not that of any loss.
        if any(map(is_functorch_wrapped, tensors_inside([inputs, output]))):
            return
        number = next(self._numbers)
        call = _Call(number, module, fingerprint(inputs), _samples_of(module, inputs))
        for node in nodes:
            node.metadata[_CALL] = call

    def backward_begins(self, roots: Sequence[Any]) -> None:
        """Find the calls behind a loss, while its graph is whole."""
        starts = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
        nodes = nodes_below([node for node in starts if node is not None])
        made_by: dict[_Call, list[Any]] = {}
        for node in nodes:
            call = node.metadata.get(_CALL)
            if call is not None:
                made_by.setdefault(call, []).append(node)
        before = []
        for optimizer in self._optimizers():
            passes: list[list[_Call]] = self._passes.setdefault(optimizer, [])
            if passes and not _holds_gradients(optimizer):
                passes.clear()  # the script has dropped them
            parameters = set(map(id, parameters_of(optimizer)))
            own = {call: at for call, at in made_by.items() if _uses(call.module, parameters)}
            before.append((optimizer, _gradients(optimizer), _outermost(own)))
        self._thread.before = before

    def backward_ended(self) -> None:
        """Note which optimizers have other gradients than before the pass."""
        before, self._thread.before = self._thread.before, ()
        for optimizer, gradients, calls in before:
            pairs = zip(_gradients(optimizer), gradients, strict=True)
            if any(now is not old or version != old_version for (now, version), (old, old_version) in pairs):
                self._passes[optimizer].append(calls)

    # ---- what is known of a step

    def stepped(self, optimizer: torch.optim.Optimizer) -> tuple[int, int | None]:
        """Note a step; return the most minibatches that a step so far averaged, and the samples in each.

        The samples are those of the optimizer whose steps see the fewest; None: not known of each.
        """
        count, total = self._of_step(optimizer)
        most_so_far, known_total = self._steps.get(optimizer, (0, None))
        # The calls of a first step may be from before they were watched.
        if count > most_so_far or (count == most_so_far and known_total is None):
            self._steps[optimizer] = count, total
        most = max(count for count, _ in self._steps.values())
        totals = [total for _, total in self._steps.values()]
        known = [total for total in totals if total is not None]
        if len(known) < len(totals):
            return most, None
        return most, min(known) // most or None

    def _of_step(self, optimizer: torch.optim.Optimizer) -> tuple[int, int | None]:
        """Return of how many minibatches and samples the gradients of ``optimizer`` are the mean.

        Where the samples are not known (None), every backward pass counts as a minibatch.
        """
        passes = self._passes.get(optimizer, [])
        if not passes or not all(passes):
            return max(1, len(passes)), None
        batches: dict[torch.nn.Module, dict[str, int | None]] = {}
        passes_of: dict[torch.nn.Module, set[frozenset[str]]] = {}
        for calls in passes:
            seen: dict[torch.nn.Module, set[str]] = {}
            for call in calls:
                batches.setdefault(call.module, {})[call.batch] = call.samples
                seen.setdefault(call.module, set()).add(call.batch)
            for module, of_pass in seen.items():
                passes_of.setdefault(module, set()).add(frozenset(of_pass))

        # Modules may see a batch side by side, as an actor and a critic do: it is the same samples.
        count = max(map(len, passes_of.values()))
        totals = set()
        for sizes in batches.values():
            known = [size for size in sizes.values() if size is not None]
            totals.add(sum(known) if len(known) == len(sizes) else None)
        return count, totals.pop() if len(totals) == 1 else None


def _samples_of(module: torch.nn.Module, inputs: Any) -> int | None:
    """Return the first dimension of all inputs, unless it may be something else than the batch."""
    # Recurrent layers and attention take the sequence first by default; the module may or may not turn it.
    if any(getattr(part, "batch_first", True) is False for part in module.modules()):
        return None
    # A vector of floats may be one sample, as the state of an agent is.
    with_dimensions = [tensor for tensor in tensors_inside(inputs) if tensor.ndim]
    if all(t.ndim == 1 for t in with_dimensions) and any(t.is_floating_point() for t in with_dimensions):
        return None
    return samples_in(inputs)


def _outermost(made_by: dict[_Call, list[Any]]) -> list[_Call]:
    """Return the calls on which no later one builds.

    Args:
        made_by: the nodes of each call's outputs.
    """
    found = []
    covered: set[Any] = set()
    # A call builds only on earlier ones.
    for call in sorted(made_by, key=lambda call: call.number, reverse=True):
        if covered.isdisjoint(made_by[call]):
            found.append(call)
        waiting = list(made_by[call])
        while waiting:
            for below, _ in waiting.pop().next_functions:
                if below is not None and below not in covered:
                    covered.add(below)
                    waiting.append(below)
    return found


def _uses(module: torch.nn.Module, parameters: set[int]) -> bool:
    return any(id(parameter) in parameters for parameter in module.parameters())


def _gradients(optimizer: torch.optim.Optimizer) -> list[_Gradient]:
    gradients = [parameter.grad for parameter in parameters_of(optimizer)]
    return [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]


def _holds_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient is not zero."""
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is None:
            continue
        values = gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient
        if bool(values.count_nonzero()):
            return True
    return False
