"""Run a skipped step again, and say where the first value that is not finite arose."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.casting import drop_casts, tensors_inside
from narrowcast.machine import first_line
from narrowcast.replay._random_states import random_states, set_random_states
from narrowcast.replay._recording import RecordedCall, RecordedStep, set_random_state
from narrowcast.replay._watch import Operation, Place, Watch, is_finite

LONGEST_S = 60.0

Region = Callable[[], AbstractContextManager[Any]]
"""Opens the region in which a step is run again."""


class ReplayError(Exception):
    """Why a step cannot be run again exactly."""


@dataclass(frozen=True)
class Observation:
    """One call of a module that was run again, forward and backward.

    Attributes:
        finite_inputs: whether all that went in was finite.
        finite_outputs: whether all that came out was.
        finite_arrivals: whether the gradients that arrived at the outputs were.
        finite_gradients: whether those of its parameters and inputs were; True if none arrived.
        origin: the operation that made the first value that is not finite; None if there was none.
        largest_results: the largest absolute value of the finite results of an operator in one place.
    """

    finite_inputs: bool
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
        samples: the samples of the batch that are not finite, for the verdict "data".
        bad_weights: the parameters that are not finite, for the verdict "model".
        reason: why it is undecided.
    """

    verdict: str
    call: RecordedCall | None = None
    outputs_are_finite: bool = False
    origin: Operation | None = None
    in_fp32: float | None = None
    samples: tuple[int, ...] = ()
    bad_weights: tuple[str, ...] = ()
    reason: str = ""


def find_origin(step: RecordedStep, region: Region, *, can_run_in_fp32: bool) -> Finding:
    """Run a recorded step again, and return where the first value that is not finite arose.

    Weights, buffers, gradients and random states are as before afterwards.
    """
    if step.is_past_limit:
        return _undecided("the inputs and gradients of the step were too large to be held")
    if not step.calls:
        return _undecided("no call of the model was seen: it may be called from compiled code")
    deadline = time.monotonic() + LONGEST_S
    try:
        with everything_restored([call.module for call in step.calls]):
            return _find_origin(step, region, deadline, can_run_in_fp32)
    except ReplayError as reason:
        return _undecided(str(reason))
    except torch.OutOfMemoryError:
        return _undecided("there is not enough memory to run the step again")
    except Exception as error:  # whatever it is, the training goes on
        return _undecided(f"running the step again raised {first_line(error)}")


def _undecided(reason: str) -> Finding:
    return Finding("undecided", reason=reason)


def _find_origin(step: RecordedStep, region: Region, deadline: float, can_run_in_fp32: bool) -> Finding:
    def in_time(call: RecordedCall, its_region: Region | None, *, backward: bool) -> Observation:
        if time.monotonic() > deadline:
            raise ReplayError(f"running the step again took more than {LONGEST_S:.0f} s")
        return observe(call, its_region, backward=backward)

    # The forward passes first, in their order: what is not finite there goes into all that follows.
    observations: list[tuple[RecordedCall, Observation]] = []
    at_fault = None
    for call in step.calls:
        observation = in_time(call, region, backward=step.has_gradients)
        observations.append((call, observation))
        if not observation.finite_outputs:
            at_fault = call, observation
            break
    # Then the backward passes, in theirs.
    if at_fault is None and not step.has_gradients:
        return Finding("backward")
    if at_fault is None:
        for call, observation in reversed(observations):
            if observation.finite_arrivals and not observation.finite_gradients:
                at_fault = call, observation
                break
    if at_fault is None:
        if all(observation.finite_arrivals for _, observation in observations):
            raise ReplayError(
                "run again, the step is finite: it depends on something that is not held, such as random "
                "numbers of Python or NumPy"
            )
        return Finding("outside")

    call, observation = at_fault
    only_backward = observation.finite_outputs
    if not can_run_in_fp32:
        reason = "the weights are not kept in fp32"
        return Finding("undecided", call, only_backward, observation.origin, reason=reason)
    # What arrived at outputs that are not finite says nothing of fp32.
    in_fp32 = in_time(call, None, backward=only_backward)
    if in_fp32.is_sound:
        result = None
        if observation.origin is not None:
            result = in_fp32.largest_results.get(observation.origin.place)
        return Finding("precision", call, only_backward, observation.origin, in_fp32=result)
    if not observation.finite_inputs:
        return Finding("data", call, only_backward, in_fp32.origin, samples=_bad_samples(call))
    named = call.module.named_parameters()
    bad_weights = tuple(name for name, parameter in named if not is_finite(parameter))
    return Finding("model", call, only_backward, in_fp32.origin, bad_weights=bad_weights)


def _bad_samples(call: RecordedCall) -> tuple[int, ...]:
    samples: set[int] = set()
    for tensor in call.inputs:
        if tensor.is_floating_point() and tensor.dim():
            flags = tensor.detach().isfinite().reshape(len(tensor), -1).all(1)
            samples.update((~flags).nonzero().flatten().tolist())
    return tuple(sorted(samples))


# ---- one call


def observe(call: RecordedCall, region: Region | None, *, backward: bool, factor: float = 1.0) -> Observation:
    """Run a call again in ``region``.

    Args:
        call: a recorded call.
        region: opens the region to run it in; None: in fp32, with inputs in a low format cast to it.
        backward: also run the backward pass, from the gradients that arrived.
        factor: the gradients that arrived are multiplied by it, as by another loss scale.
    """
    if call.changed():
        raise ReplayError("an input of the model was changed in place after the call")
    module = _with_parameters(call.module)
    _refuse_collectives(module)
    leaf = _leaf if region is not None else _fp32_leaf
    args = tuple(map(leaf, call.args))
    kwargs = {name: leaf(value) for name, value in call.kwargs.items()}
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    leaves: list[torch.Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    leaves += [tensor for tensor in inputs if tensor.requires_grad]

    set_random_state(call.random_state)
    watch = Watch(module)
    with ExitStack() as stack:
        stack.callback(drop_casts)
        drop_casts()  # so that the casts of weights are watched too
        stack.enter_context(watch.watching())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(watch)
        with region() if region is not None else contextlib.nullcontext():
            output = module(*args, **kwargs)
        outputs = tensors_inside(output)
        differentiable = [tensor for tensor in outputs if tensor.grad_fn is not None]
        arrived: list[torch.Tensor] = []
        ends: list[torch.Tensor] = []
        for tensor, gradient in zip(differentiable, call.arrived, strict=False):
            if backward and gradient is not None:
                ends.append(tensor)
                arrived.append(gradient.to(tensor.dtype) * factor)
        gradients: list[torch.Tensor] = []
        if ends:
            found = torch.autograd.grad(ends, leaves, arrived, allow_unused=True)
            gradients = [gradient for gradient in found if gradient is not None]

    finite_inputs = all(map(is_finite, _floating(inputs)))
    finite_outputs = all(map(is_finite, _floating(outputs)))
    finite_arrivals = all(map(is_finite, arrived))
    finite_gradients = all(map(is_finite, gradients))
    origin = None
    if not finite_outputs:
        origin = watch.origin_of(_floating(outputs))
    elif finite_arrivals and not finite_gradients:
        origin = watch.origin_of(gradients)
    return Observation(
        finite_inputs, finite_outputs, finite_arrivals, finite_gradients, origin, watch.largest_results
    )


def _with_parameters(module: nn.Module) -> nn.Module:
    """Return the module inside of DDP: the ranks do not run the step again together."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def _refuse_collectives(module: nn.Module) -> None:
    for path, part in module.named_modules():
        sharded = any(hasattr(parameter, "device_mesh") for parameter in part.parameters(recurse=False))
        if isinstance(part, nn.SyncBatchNorm) or sharded:
            raise ReplayError(f"{path or 'the model'} ({type(part).__name__}) talks to other ranks")


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


def _fp32_leaf(value: Any) -> Any:
    """Do the same in fp32: another model may have given its output in a low format."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.detach().float().requires_grad_(value.requires_grad)
    return _leaf(value)


def _floating(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.is_floating_point() and tensor.layout == torch.strided]


# ---- what is put back


@contextmanager
def everything_restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put back random states, buffers and gradients, whatever happens inside."""
    states = random_states()
    every = {id(part): part for module in modules for part in module.modules()}.values()
    buffers = [(buffer, buffer.detach().clone()) for part in every for buffer in part.buffers(recurse=False)]
    parameters = [parameter for part in every for parameter in part.parameters(recurse=False)]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    try:
        yield
    finally:
        set_random_states(states)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
