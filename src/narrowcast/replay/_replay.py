"""Run a skipped step again, and say where the first value that is not finite arose."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

_LOW_FORMATS = {torch.float16, torch.bfloat16}
# Hooks that are defined in these packages keep nothing of what they see.
_HARMLESS_PACKAGES = {"torch", "narrowcast", "functools"}
# Looked up at import, because ``narrowcast run`` replaces it while a script runs.
_torch_grad = torch.autograd.grad

Caller = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a module with its arguments and keyword arguments, in an autocast region or outside of any."""


@dataclass(frozen=True)
class Surroundings:
    """How the calls of a step are made again.

    Attributes:
        mixed: makes a call under the policy of the training.
        bare: returns a context in which calls of modules open no region.
        formats: the format that is computed in on each device type.
    """

    mixed: Caller
    bare: Callable[[], AbstractContextManager[Any]]
    formats: Mapping[str, torch.dtype]

    def fp32(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call without any policy."""
        with self.bare(), unapplied(module):
            return module(*args, **kwargs)

    def under(self, policy: Policy, formats: Mapping[str, torch.dtype], model: nn.Module) -> Caller:
        """Return a caller for another policy; paths in its rules start at ``model``."""

        def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with self.bare(), unapplied(model):
                region = ModelRegion(policy, formats, say=lambda _: None, model=model, warns=False)
                try:
                    with region:
                        output = module(*args, **kwargs)
                finally:
                    region.remove()
            return cast_floating(output, torch.float32)

        return call


@dataclass(frozen=True)
class Observation:
    """What was seen while one call of a module was repeated, forward and backward.

    Attributes:
        finite_outputs: whether all outputs were finite. Infinities written on purpose (a mask) are allowed.
        finite_arrivals: whether all gradients that arrived at the outputs were finite.
        finite_gradients: whether all gradients of parameters and inputs were finite; True if none arrived.
        origin: the operation that made the first value that is not finite; None if there was none.
        largest_results: for each place, the largest absolute value among the finite results there.
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
        call: the call that went wrong; None if it is not known.
        outputs_are_finite: whether the call's outputs were finite, so that only its backward pass went wrong.
        origin: the operation that made the first value that is not finite.
        in_fp32: for the verdict "precision", the largest absolute result of that operator in fp32, if known.
        which_call: the number of ``call``, as ", call 3 of 4 in the step"; empty if the step has only one.
        argument: for the verdict "data", the name of the input that is not finite, as " 'mask'"; empty if the
            module has only one input.
        samples: for the verdict "data", the samples of the batch that are not finite.
        bad_weights: for the verdict "model", the parameters that are not finite.
        reason: for the verdict "undecided", why.
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

    Weights, buffers, gradients and random states are put back afterwards.
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
    except Exception as error:  # of any kind: the training must go on
        return _undecided(f"running the step again raised {first_line(error)}")


def _undecided(reason: str) -> Finding:
    return Finding("undecided", reason=reason)


def _find_origin(step: RecordedStep, surroundings: Surroundings, time_limit: TimeLimit) -> Finding:
    observations = []
    for call in step.calls:
        observation = observe(call, surroundings.mixed, time_limit, backward=step.has_gradients)
        observations.append((call, observation))
        # Later calls may compute from these outputs, so the first call that goes wrong is to blame.
        if not observation.finite_outputs:
            return _judged(call, observation, surroundings, time_limit)
    if not step.has_gradients:
        return Finding("backward")

    # Backward passes run from the last call to the first. Again, the first that goes wrong is to blame.
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
    """Repeat the call at fault in fp32, to see whether precision is to blame.

    ``mixed`` is what was seen under the policy.
    """
    only_backward = mixed.finite_outputs
    # Weights in a low format have lost precision already, and fp8 layers multiply in fp8 without a policy
    # too: then a run without a policy does not show what fp32 would give.
    reason = ""
    if any(parameter.dtype in _LOW_FORMATS for parameter in call.module.parameters()):
        reason = "the weights are not kept in fp32"
    elif any(map(is_fp8, call.module.modules())):
        reason = "layers multiply in fp8"
    if reason:
        return Finding("undecided", call, only_backward, mixed.origin, reason=reason)

    # If outputs were not finite, the gradients that arrived at them were computed from such values, and would
    # not be finite in fp32 either: then only the forward pass is repeated.
    in_fp32 = observe(_in_fp32(call), surroundings.fp32, time_limit, backward=only_backward)
    if in_fp32.is_sound:
        largest_result = None
        if mixed.origin is not None:
            largest_result = in_fp32.largest_results.get(mixed.origin.place)
        return Finding("precision", call, only_backward, mixed.origin, in_fp32=largest_result)

    # In fp32 it is not finite either: the model casts by itself, or its input or the model is at fault.
    origin = in_fp32.origin
    if origin is not None and origin.dtype in _LOW_FORMATS:
        reason = "the model casts to a low format itself"
        return Finding("undecided", call, only_backward, origin, reason=reason)
    if origin is not None and origin.name == INPUT:
        computed = [tensor for tensor in _floating(call.inputs) if id(tensor) in call.had_graph]
        if not all(map(is_finite, computed)):
            reason = "its input was computed by something else, and is not finite"
            return Finding("undecided", call, only_backward, origin, reason=reason)
        argument, samples = _bad_input(call)
        return Finding("data", call, only_backward, origin, argument=argument, samples=samples)
    named = call.module.named_parameters()
    bad_weights = tuple(name for name, parameter in named if not is_finite(parameter))
    return Finding("model", call, only_backward, origin, bad_weights=bad_weights)


def _bad_input(call: RecordedCall) -> tuple[str, tuple[int, ...]]:
    """Return which argument is not finite, and which samples in it: rows of a tensor, or of those in a dict.

    The argument is given as in ``Finding.argument``.
    """
    signature = inspect.signature(without_ddp(call.module).forward)
    arguments = signature.bind(*call.args, **call.kwargs).arguments
    for name, value in arguments.items():
        if all(map(is_finite, _floating(tensors_inside(value)))):
            continue
        argument = f" {name!r}" if len(arguments) > 1 else ""
        parts = list(value.values()) if isinstance(value, dict) else [value]
        batches = [part for part in parts if isinstance(part, torch.Tensor) and part.dim()]
        samples: set[int] = set()
        for batch in _floating(batches):
            is_finite_sample = batch.detach().isfinite().reshape(len(batch), -1).all(1)
            samples.update((~is_finite_sample).nonzero().flatten().tolist())
        return argument, tuple(sorted(samples))
    return "", ()


# ---- one call


def observe(
    call: RecordedCall, caller: Caller, time_limit: TimeLimit, *, backward: bool, factor: float = 1.0
) -> Observation:
    """Make a call again, and watch it.

    Args:
        call: a recorded call.
        caller: makes the call.
        time_limit: the time limit of the whole replay.
        backward: whether to run the backward pass too, from the gradients that arrived.
        factor: multiplies the gradients that arrived, as another loss scale would.

    Raises:
        ReplayError: if the call cannot be repeated as it was.
    """
    if call.had_several_passes:
        raise ReplayError("several backward passes went through one output of the model")
    if call.changed():
        raise ReplayError("an input of the model was changed in place after the call")
    module = without_ddp(call.module)
    _refuse_collectives(module)
    _refuse_hooks(module, backward=backward)

    again = functools.partial(_input_again, call)
    args, kwargs = on_tensors(again, (call.args, call.kwargs))
    inputs = tensors_inside((args, kwargs))
    leaves: list[torch.Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    leaves += [tensor for tensor in inputs if tensor.requires_grad]

    set_random_state(call.random_state)
    watch = Watch(module, time_limit)
    with ExitStack() as stack:
        # Cast weights anew, so that these casts are watched too, and keep no cast of the replay.
        drop_casts()
        stack.callback(drop_casts)
        stack.enter_context(watch.watching(backward=backward))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        watch.begins_with(INPUT, inputs)
        watch.begins_with(BUFFER, module.buffers())
        stack.enter_context(watch)
        output = caller(module, args, kwargs)
        outputs = tensors_inside(output) + written_tensors(args, kwargs, inputs)

        roots: list[torch.Tensor] = []
        arrived: list[torch.Tensor] = []
        if backward:
            # ``call.arrived`` has an item for each output that has a node, in the order of the outputs.
            differentiable = [tensor for tensor in outputs if tensor.grad_fn is not None]
            for tensor, gradient in _roots(zip(differentiable, call.arrived, strict=False)):
                roots.append(tensor)
                arrived.append(gradient.to(tensor.dtype) * factor)
        gradients: list[torch.Tensor] = []
        if roots:
            found = _torch_grad(roots, leaves, arrived, allow_unused=True)
            gradients = [gradient for gradient in found if gradient is not None]

    origin = None
    finite_outputs = all(map(is_finite, _floating(outputs)))
    if not finite_outputs:
        origin = watch.origin_of(_floating(outputs))
        if _is_meant(origin, outputs):
            finite_outputs = True
            origin = None
    finite_arrivals = all(map(is_finite, arrived))
    finite_gradients = all(map(is_finite, _strided(gradients)))
    # Gradients that are not finite have an origin of their own only if nothing before them went wrong.
    if finite_outputs and finite_arrivals and not finite_gradients:
        origin = watch.origin_of(gradients)
    return Observation(finite_outputs, finite_arrivals, finite_gradients, origin, watch.largest_results)


def _refuse_hooks(module: nn.Module, *, backward: bool) -> None:
    """Refuse hooks of the script, which may keep what they see, as in a list that the script reads later."""
    for path, part in module.named_modules():
        hooks: list[Any] = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        if backward:
            hooks += [*part._backward_hooks.values(), *part._backward_pre_hooks.values()]
        for hook in hooks:
            function = getattr(hook, "func", hook)  # the function of a partial
            defined_in = str(getattr(function, "__module__", type(function).__module__))
            package, _, _ = defined_in.partition(".")
            if package not in _HARMLESS_PACKAGES:
                raise ReplayError(f"{path or 'the model'} ({type(part).__name__}) has hooks of the script")


def _roots(
    outputs: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the outputs from which a backward pass starts, each with the gradient that arrived at it.

    An output from which another one was computed is left out: the gradient that arrived at it includes what
    came through the other one, which would count twice. An output that was returned twice comes once.
    """
    # By node and number, since one node may have several results, as that of ``chunk``.
    roots: dict[tuple[Any, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for tensor, gradient in outputs:
        if gradient is not None:
            roots[tensor.grad_fn, tensor.output_nr] = (tensor, gradient)

    # Walk from all outputs towards the inputs, and leave out each output that is reached.
    nodes: list[Any] = [node for node, _ in roots]
    walked: set[Any] = set()
    for node in nodes:  # grows in the loop
        if node in walked:
            continue
        walked.add(node)
        for edge in node.next_functions:
            roots.pop(edge, None)
            next_node, _ = edge
            if next_node is not None:
                nodes.append(next_node)
    return list(roots.values())


def _is_meant(origin: Operation | None, outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether ``outputs``, which are not finite, hold only infinities of a mask."""
    if origin is None or any(bool(tensor.isnan().any()) for tensor in _floating(outputs)):
        return False
    # An input that holds only negative infinities is taken for a mask.
    all_negative = not any(bool((tensor == torch.inf).any()) for tensor in _floating(outputs))
    return origin.name in MEANT or (origin.name == INPUT and all_negative)


def without_ddp(module: nn.Module) -> nn.Module:
    """Return the module inside of DDP, which would wait for other ranks: they do not repeat the step."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def _refuse_collectives(module: nn.Module) -> None:
    for path, part in module.named_modules():
        sharded = any(hasattr(parameter, "device_mesh") for parameter in part.parameters(recurse=False))
        if isinstance(part, nn.SyncBatchNorm) or sharded:
            raise ReplayError(f"{path or 'the model'} ({type(part).__name__}) talks to other ranks")


def _input_again(call: RecordedCall, tensor: torch.Tensor) -> torch.Tensor:
    """Return an input for the repeated call.

    It requires a gradient, and has a node in a graph, if the recorded input did.
    """
    if tensor.is_inference():
        return tensor.clone()  # autograd refuses to save an inference tensor
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    if id(tensor) not in call.had_graph or leaf.layout != torch.strided:
        return leaf
    # A module may return an input as it is. Then this output needs a node, because the gradients that arrived
    # are matched with the outputs that have one.
    with torch.enable_grad():
        return leaf.view_as(leaf)


def _in_fp32(call: RecordedCall) -> RecordedCall:
    """Return a call with its inputs in fp32; they may be low-precision outputs of another model."""
    if not any(tensor.dtype in _LOW_FORMATS for tensor in call.inputs):
        return call
    args, kwargs = on_tensors(_as_fp32, (call.args, call.kwargs))
    in_fp32 = RecordedCall(call.module, args, kwargs, call.random_state)
    in_fp32.arrived = call.arrived
    pairs = zip(call.inputs, in_fp32.inputs, strict=True)
    in_fp32.had_graph = {id(wide) for tensor, wide in pairs if id(tensor) in call.had_graph}
    return in_fp32


def _as_fp32(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in _LOW_FORMATS:
        return tensor
    return tensor.detach().float().requires_grad_(tensor.requires_grad)


def _floating(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _strided([tensor for tensor in tensors if tensor.is_floating_point()])


def _strided(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that are not sparse; sparse gradients count as finite."""
    return [tensor for tensor in tensors if tensor.layout == torch.strided]


# ---- what is put back


@contextmanager
def everything_restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put back random states, parameters, gradients, buffers and attributes, also if the block raises."""
    states = random_states()
    # In the order of first occurrence, as a dict keeps it.
    parts: dict[nn.Module, None] = {}
    for module in modules:
        parts.update(dict.fromkeys(module.modules()))
    attributes = [_Attributes(part) for part in parts]
    tensors = []
    gradients = []
    for part in parts:
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensors.append((tensor, _version(tensor), tensor.detach().clone()))
        for parameter in part.parameters(recurse=False):
            gradients.append((parameter, parameter.grad))
    try:
        yield
    finally:
        set_random_states(states)
        # Attributes first: they say which tensors the module has. Then the values of these tensors.
        for attributes_of_part in attributes:
            attributes_of_part.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for tensor, version, value in tensors:
            _restore_value(tensor, version, value)


@torch.no_grad()
def _restore_value(tensor: torch.Tensor, version: int, value: torch.Tensor) -> None:
    """Put back the values of a tensor, and its version.

    A graph of the script may have saved the tensor, and its backward pass raises if the version has changed.
    Batch norms save their statistics so, and a GAN runs backward through its generator after the step of its
    discriminator.
    """
    if tensor.layout == torch.strided:
        # Versions do not tell: the kernels of batch norms write to statistics without counting it.
        is_unchanged = torch.equal(tensor, value)
        if not is_unchanged:  # NaN is not equal to itself
            is_same_element = (tensor == value) | (tensor.isnan() & value.isnan())
            is_unchanged = bool(is_same_element.all())
    else:
        is_unchanged = _version(tensor) == version
    if not is_unchanged:
        tensor.copy_(value)
    if _version(tensor) != version:
        set_version(tensor, version)


class _Attributes:
    """Remembers the attributes of a module, and the contents of lists, dicts and sets among them.

    Of random generators among them it remembers the state.
    """

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
            elif hasattr(value, "bit_generator"):  # a generator of NumPy
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
