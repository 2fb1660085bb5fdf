"""Run a skipped step again, and say where the first value that is not finite arose."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.casting import ModelRegion, cast_floating, drop_casts, is_fp8, tensors_inside, unapplied
from narrowcast.machine import first_line
from narrowcast.policy import Policy
from narrowcast.replay._random_states import random_states, set_random_states
from narrowcast.replay._recording import (
    RecordedCall,
    RecordedStep,
    on_tensors,
    set_random_state,
    written_tensors,
)
from narrowcast.replay._recording import version_of as _version
from narrowcast.replay._torch_internals import set_version
from narrowcast.replay._watch import (
    BUFFER,
    INPUT,
    MEANT,
    Operation,
    Place,
    ReplayError,
    TimeLimit,
    Watch,
    is_finite,
)

_LOW = {torch.float16, torch.bfloat16}
# Packages whose hooks keep nothing of what they see.
_HARMLESS_PACKAGES = {"torch", "narrowcast", "functools"}
# Taken at import: ``narrowcast run`` replaces it while a script runs.
_GRAD = torch.autograd.grad

Caller = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a module with its arguments, in a region or not."""


@dataclass(frozen=True)
class Surroundings:
    """How the calls of a step are made again.

    Attributes:
        mixed: by the policy of the training.
        bare: returns a context in which no region is opened.
        formats: device type -> the format computed in.
    """

    mixed: Caller
    bare: Callable[[], AbstractContextManager[Any]]
    formats: Mapping[str, torch.dtype]

    def fp32(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call without a policy."""
        with self.bare(), unapplied(module):
            return module(*args, **kwargs)

    def under(self, policy: Policy, formats: Mapping[str, torch.dtype], model: nn.Module) -> Caller:
        """Return a caller under another policy, whose rules the modules of ``model`` follow meanwhile."""

        def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with self.bare(), unapplied(model):
                region = ModelRegion(policy, formats, lambda _: None, model=model, warns=False)
                try:
                    with region:
                        output = module(*args, **kwargs)
                finally:
                    region.remove()
            return cast_floating(output, torch.float32)

        return call


@dataclass(frozen=True)
class Observation:
    """One call of a module that was run again, forward and backward.

    Attributes:
        finite_outputs: whether all that came out was finite, but for infinities that were meant (a mask).
        finite_arrivals: whether the gradients that arrived at the outputs were.
        finite_gradients: whether those of its parameters and inputs were; True if none arrived.
        origin: the operation that made the first value that is not finite; None if there was none.
        largest_results: the largest absolute value of the finite results of an operator in one place.
    """

    finite_outputs: bool
    finite_arrivals: bool
    finite_gradients: bool
    origin: Operation | None
    largest_results: Mapping[Place, float]

    @property
    def is_sound(self) -> bool:
        return self.finite_outputs and self.finite_gradients


@dataclass(frozen=True)
class Finding:
    """Where a step went wrong.

    Attributes:
        verdict: "precision" (in fp32 it is finite), "model" (it is not), "data" or "undecided";
            "backward" if the forward passes are finite and no gradients were held; "outside" if outputs are
            finite and the gradients that arrived at them are not.
        call: the call in which it did; None if that is not known.
        outputs_are_finite: whether the call's outputs were finite, so that only its backward pass went wrong.
        origin: the operation that made the first value that is not finite.
        in_fp32: for the verdict "precision", the largest absolute result of that operator in fp32, if known.
        which_call: which call of the step it is, if it has several: ", call 3 of 4 in the step".
        argument: the name of the input that is not finite, in quotes, for the verdict "data"; empty if the
            module has only one.
        samples: the samples of the batch that are not finite, for the verdict "data".
        bad_weights: the parameters that are not finite, for the verdict "model".
        reason: why it is undecided.
    """

    verdict: str
    call: RecordedCall | None = None
    outputs_are_finite: bool = False
    origin: Operation | None = None
    in_fp32: float | None = None
    which_call: str = ""
    argument: str = ""
    samples: tuple[int, ...] = ()
    bad_weights: tuple[str, ...] = ()
    reason: str = ""


def find_origin(step: RecordedStep, surroundings: Surroundings, time_limit: TimeLimit) -> Finding:
    """Run a recorded step again, and return where the first value that is not finite arose.

    Weights, buffers, gradients and random states are as before afterwards.
    """
    if step.why_not_held:
        return _undecided(step.why_not_held)
    if not step.calls:
        return _undecided("no call of the model was seen: it may be called from compiled code")
    try:
        with everything_restored([call.module for call in step.calls]):
            finding = _find_origin(step, surroundings, time_limit)
        if finding.call is not None and len(step.calls) > 1:
            number = step.calls.index(finding.call) + 1
            finding = replace(finding, which_call=f", call {number} of {len(step.calls)} in the step")
        return finding
    except ReplayError as reason:
        return _undecided(str(reason))
    except torch.OutOfMemoryError:
        return _undecided("there is not enough memory to run the step again")
    except Exception as error:  # whatever it is, the training goes on
        return _undecided(f"running the step again raised {first_line(error)}")


def _undecided(reason: str) -> Finding:
    return Finding("undecided", reason=reason)


def _find_origin(step: RecordedStep, surroundings: Surroundings, time_limit: TimeLimit) -> Finding:
    observations = []
    for call in step.calls:
        observation = observe(call, surroundings.mixed, time_limit, backward=step.has_gradients)
        observations.append((call, observation))
        # What is not finite in a forward pass goes into what follows it.
        if not observation.finite_outputs:
            return _judged(call, observation, surroundings, time_limit)
    if not step.has_gradients:
        return Finding("backward")

    # The backward passes, in their order.
    for call, observation in reversed(observations):
        if observation.finite_arrivals and not observation.finite_gradients:
            return _judged(call, observation, surroundings, time_limit)
    if all(observation.finite_arrivals for _, observation in observations):
        raise ReplayError(
            "run again, each call of the model is finite: it arose in the sum of their gradients, outside of "
            "them, or in something that is not held, as random numbers of Python"
        )
    return Finding("outside")


def _judged(
    call: RecordedCall, mixed: Observation, surroundings: Surroundings, time_limit: TimeLimit
) -> Finding:
    """Make the call at fault again in fp32, and judge by that."""
    only_backward = mixed.finite_outputs
    reason = ""
    if any(parameter.dtype in _LOW for parameter in call.module.parameters()):
        reason = "the weights are not kept in fp32"
    elif any(map(is_fp8, call.module.modules())):
        reason = "layers multiply in fp8"
    if reason:
        return Finding("undecided", call, only_backward, mixed.origin, reason=reason)
    # What arrived at outputs that are not finite says nothing of fp32.
    in_fp32 = observe(_in_fp32(call), surroundings.fp32, time_limit, backward=only_backward)
    if in_fp32.is_sound:
        result = None
        if mixed.origin is not None:
            result = in_fp32.largest_results.get(mixed.origin.place)
        return Finding("precision", call, only_backward, mixed.origin, in_fp32=result)

    origin = in_fp32.origin
    if origin is not None and origin.dtype in _LOW:
        reason = "the model casts to a low format itself"
        return Finding("undecided", call, only_backward, origin, reason=reason)
    if origin is not None and origin.name == INPUT:
        if any(id(tensor) in call.had_graph and not is_finite(tensor) for tensor in _floating(call.inputs)):
            reason = "its input was computed by something else, and is not finite"
            return Finding("undecided", call, only_backward, origin, reason=reason)
        argument, samples = _bad_input(call)
        return Finding("data", call, only_backward, origin, argument=argument, samples=samples)
    named = call.module.named_parameters()
    bad_weights = tuple(name for name, parameter in named if not is_finite(parameter))
    return Finding("model", call, only_backward, origin, bad_weights=bad_weights)


def _bad_input(call: RecordedCall) -> tuple[str, tuple[int, ...]]:
    """Return the name of the first argument that is not finite, if there are several, and which rows are not.

    Rows are those of a tensor, or of the tensors in a dict.
    """
    arguments = inspect.signature(without_ddp(call.module).forward).bind(*call.args, **call.kwargs).arguments
    for name, value in arguments.items():
        if all(map(is_finite, _floating(tensors_inside(value)))):
            continue
        text = f" {name!r}" if len(arguments) > 1 else ""
        batches = list(value.values()) if isinstance(value, dict) else [value]
        samples: set[int] = set()
        for batch in _floating([batch for batch in batches if isinstance(batch, torch.Tensor)]):
            if batch.dim():
                flags = batch.detach().isfinite().reshape(len(batch), -1).all(1)
                samples.update((~flags).nonzero().flatten().tolist())
        return text, tuple(sorted(samples))
    return "", ()


# ---- one call


def observe(
    call: RecordedCall, caller: Caller, time_limit: TimeLimit, *, backward: bool, factor: float = 1.0
) -> Observation:
    """Make a call again, and watch it.

    Args:
        call: a recorded call.
        caller: makes it.
        time_limit: of the replay.
        backward: also run the backward pass, from the gradients that arrived.
        factor: the gradients that arrived are multiplied by it, as by another loss scale.
    """
    if call.had_several_passes:
        raise ReplayError("several backward passes went through one output of the model")
    if call.changed():
        raise ReplayError("an input of the model was changed in place after the call")
    module = without_ddp(call.module)
    _refuse_collectives(module)
    _refuse_hooks(module)
    again = functools.partial(_input_again, call)
    args, kwargs = on_tensors(again, (call.args, call.kwargs))
    inputs = tensors_inside((args, kwargs))
    leaves: list[torch.Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    leaves += [tensor for tensor in inputs if tensor.requires_grad]

    set_random_state(call.random_state)
    watch = Watch(module, time_limit)
    with ExitStack() as stack:
        stack.callback(drop_casts)
        drop_casts()  # so that the casts of weights are watched too
        stack.enter_context(watch.watching(backward=backward))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        watch.begins_with(INPUT, inputs)
        watch.begins_with(BUFFER, module.buffers())
        stack.enter_context(watch)
        output = caller(module, args, kwargs)
        outputs = tensors_inside(output) + written_tensors(args, kwargs, inputs)
        differentiable = [tensor for tensor in outputs if tensor.grad_fn is not None]
        arrived: list[torch.Tensor] = []
        ends: list[torch.Tensor] = []
        pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if backward:
            pairs = list(zip(differentiable, call.arrived, strict=False))
        inner = _inner_ends([tensor for tensor, gradient in pairs if gradient is not None])
        for tensor, gradient in pairs:
            if gradient is not None and id(tensor) not in inner:
                ends.append(tensor)
                arrived.append(gradient.to(tensor.dtype) * factor)
        gradients: list[torch.Tensor] = []
        if ends:
            found = _GRAD(ends, leaves, arrived, allow_unused=True)
            gradients = [gradient for gradient in found if gradient is not None]

    origin = watch.origin_of(_floating(outputs))
    finite_outputs = all(map(is_finite, _floating(outputs))) or _is_meant(origin, outputs)
    finite_arrivals = all(map(is_finite, arrived))
    finite_gradients = all(map(is_finite, _strided(gradients)))
    if finite_outputs:
        origin = None
    if finite_outputs and finite_arrivals and not finite_gradients:
        origin = watch.origin_of(gradients)
    return Observation(finite_outputs, finite_arrivals, finite_gradients, origin, watch.largest_results)


def _refuse_hooks(module: nn.Module) -> None:
    """Refuse hooks of the script, which may keep what they see: as in a list that its loss reads."""
    for path, part in module.named_modules():
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
            function = getattr(hook, "func", hook)  # of a partial
            package, _, _ = str(getattr(function, "__module__", type(function).__module__)).partition(".")
            if package not in _HARMLESS_PACKAGES:
                raise ReplayError(f"{path or 'the model'} ({type(part).__name__}) has hooks of the script")


def _inner_ends(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the ids of the outputs from which other outputs were computed, or that come twice.

    What arrived at them holds what came through the others, and would be counted twice.
    """
    node_of = {id(tensor): tensor.grad_fn for tensor in tensors}
    inner: set[int] = set()
    nodes: set[Any] = set()
    for tensor in tensors:
        if tensor.grad_fn in nodes:
            inner.add(id(tensor))
        nodes.add(tensor.grad_fn)
    # An output is inner if its node is below that of another one.
    for end in {node for node in node_of.values() if node is not None}:
        below: list[Any] = [node for node, _ in end.next_functions if node is not None]
        seen: set[Any] = set()
        for node in below:  # which grows meanwhile
            if node in seen:
                continue
            seen.add(node)
            below += [next_node for next_node, _ in node.next_functions if next_node is not None]
        inner.update(key for key, node in node_of.items() if node in seen)
    return inner


def _is_meant(origin: Operation | None, outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether the infinities in outputs are those of a mask."""
    if origin is None or any(bool(tensor.isnan().any()) for tensor in _floating(outputs)):
        return False
    all_negative = not any(bool((tensor == torch.inf).any()) for tensor in _floating(outputs))
    return origin.name in MEANT or (origin.name == INPUT and all_negative)


def without_ddp(module: nn.Module) -> nn.Module:
    """Return the module inside of DDP: the ranks do not run the step again together."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def _refuse_collectives(module: nn.Module) -> None:
    for path, part in module.named_modules():
        sharded = any(hasattr(parameter, "device_mesh") for parameter in part.parameters(recurse=False))
        if isinstance(part, nn.SyncBatchNorm) or sharded:
            raise ReplayError(f"{path or 'the model'} ({type(part).__name__}) talks to other ranks")


def _input_again(call: RecordedCall, tensor: torch.Tensor) -> torch.Tensor:
    """Return an input for the repeated call, which requires a gradient and has a node if it had them."""
    if tensor.is_inference():
        return tensor.clone()  # which autograd may save
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    if id(tensor) not in call.had_graph or leaf.layout != torch.strided:
        return leaf
    # A module may return an input as it is. The gradients that arrived are matched with the outputs that have
    # a node, so that this output needs a node again.
    with torch.enable_grad():
        return leaf.view_as(leaf)


def _in_fp32(call: RecordedCall) -> RecordedCall:
    """Return a call with inputs in fp32: another model may have given its output in a low format."""
    if not any(tensor.dtype in _LOW for tensor in call.inputs):
        return call
    args, kwargs = on_tensors(_as_fp32, (call.args, call.kwargs))
    in_fp32 = RecordedCall(call.module, args, kwargs, call.random_state)
    in_fp32.arrived = call.arrived
    pairs = zip(call.inputs, in_fp32.inputs, strict=True)
    in_fp32.had_graph = {id(wide) for tensor, wide in pairs if id(tensor) in call.had_graph}
    return in_fp32


def _as_fp32(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in _LOW:
        return tensor
    return tensor.detach().float().requires_grad_(tensor.requires_grad)


def _floating(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _strided([tensor for tensor in tensors if tensor.is_floating_point()])


def _strided(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors whose values are all there; a sparse gradient counts as finite."""
    return [tensor for tensor in tensors if tensor.layout == torch.strided]


# ---- what is put back


@contextmanager
def everything_restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put back random states, parameters, gradients, buffers and attributes, whatever happens inside."""
    states = random_states()
    every = list({id(part): part for module in modules for part in module.modules()}.values())
    attributes = [_Attributes(part) for part in every]
    tensors = []
    gradients = []
    for part in every:
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensors.append((tensor, _version(tensor), tensor.detach().clone()))
        for parameter in part.parameters(recurse=False):
            gradients.append((parameter, parameter.grad))
    try:
        yield
    finally:
        set_random_states(states)
        for of_part in attributes:
            of_part.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for tensor, version, value in tensors:
            _restore_value(tensor, version, value)


@torch.no_grad()
def _restore_value(tensor: torch.Tensor, version: int, value: torch.Tensor) -> None:
    """Put back what a tensor held, and its version.

    A graph of the script may have saved it, as that of a batch norm saves the statistics: a GAN goes backward
    through its generator after a step of its discriminator. That pass would refuse another version.
    """
    if tensor.layout == torch.strided:
        # By value: the kernels of batch norms write to statistics without counting a version.
        same = torch.equal(tensor, value)
        if not same:  # NaN is not equal to itself
            is_same = (tensor == value) | (tensor.isnan() & value.isnan())
            same = bool(is_same.all())
    else:
        same = _version(tensor) == version
    if not same:
        tensor.copy_(value)
    if _version(tensor) != version:
        set_version(tensor, version)


class _Attributes:
    """The attributes of a module, what its lists, dicts and sets hold, and the states of its generators."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = dict(vars(module))
        self._contents: list[tuple[Any, Any]] = []
        self._states: list[tuple[Callable[[Any], Any], Any]] = []
        for value in self._values.values():
            if isinstance(value, list | dict | set):
                self._contents.append((value, copy.copy(value)))
            elif isinstance(value, torch.Generator):
                self._states.append((value.set_state, value.get_state()))
            elif hasattr(value, "bit_generator"):  # NumPy's
                set_state = functools.partial(setattr, value.bit_generator, "state")
                self._states.append((set_state, value.bit_generator.state))

    def restore(self) -> None:
        attributes = vars(self._module)
        if not _is_same(attributes, self._values):
            attributes.clear()
            attributes.update(self._values)
        for container, before in self._contents:
            if _is_same(container, before):
                continue
            container.clear()
            if isinstance(container, list):
                container.extend(before)
            else:
                container.update(before)
        for set_state, state in self._states:
            set_state(state)


def _is_same(container: Any, before: Any) -> bool:
    """Return whether two lists, dicts or sets hold the same objects."""
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(
            key is old_key and value is old_value
            for (key, value), (old_key, old_value) in zip(container.items(), before.items(), strict=True)
        )
    return all(value is old for value, old in zip(container, before, strict=True))
