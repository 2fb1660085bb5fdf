"""The proof that a policy took effect in a host: what the layers computed in at the first step."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from narrowcast.casting import layer_formats, modules_by_path, stacklevel_outside
from narrowcast.errors import PolicyError, few
from narrowcast.policy import Policy, class_names, format_name, rules_for


class FirstStep:
    """Look at the linear and convolution layers of a model during its first step, and compare their formats.

    The integration makes it before the first forward pass, and calls ``end`` before the first step of an
    optimizer changes a weight.

    Args:
        model: the model that the host trains.
        policy: the policy that should be in force.
        formats: device type -> the format of the policy's region there.
        advice: what to change in the host if another format came, for the message.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        policy: Policy,
        formats: Mapping[str, torch.dtype],
        *,
        advice: str,
    ) -> None:
        self._advice = advice
        self._expected = layer_formats(model, policy, formats)
        self._called_with_gradients = False
        self._was_traced = False
        # Layers that a rule names; it does nothing for those that are not called.
        self._ruled: set[str] = set()
        # Layers that were called outside of torch.compile's tracing, with gradients or without.
        self._called: set[str] = set()
        self._differences: dict[str, str] = {}
        self._handles = []
        for path, module in modules_by_path(model):
            if path in self._expected:
                rules = rules_for(policy, path, class_names(type(module)))
                # A rule for an operator inside the module does not name the module itself.
                if any(rule.op is None for rule in rules):
                    self._ruled.add(path)
                look = functools.partial(self._look, path)
                self._handles.append(module.register_forward_hook(look))

    def _look(self, path: str, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        # Nothing is compared while torch.compile traces: making the message would break the graph. The region
        # that is open now is compiled into it.
        if torch.compiler.is_compiling():
            self._was_traced = True
            if torch.is_grad_enabled():
                self._called_with_gradients = True
            return

        self._called.add(path)
        # A call under torch.no_grad, as in an evaluation, proves nothing about the training.
        if not torch.is_grad_enabled():
            return
        self._called_with_gradients = True
        if not isinstance(output, torch.Tensor) or output.dtype == self._expected[path]:
            return
        expected = format_name(self._expected[path])
        reason = _why(module, self._expected[path], self._advice)
        self._differences[path] = (
            f"expected {path!r} ({type(module).__name__}) to compute in {expected} as the policy says, got "
            f"{format_name(output.dtype)}: {reason}"
        )

    def remove(self) -> None:
        """End the look without a verdict, for a host whose step failed.

        The hooks stay on a traced model; what they find is not read.
        """
        # Without its hooks torch.compile would compile the model again.
        if not self._was_traced:
            for handle in self._handles:
                handle.remove()
        self._handles.clear()

    def end(self) -> None:
        """End the look, and raise if the policy was not in force. May be called again.

        Raises:
            PolicyError: a layer computed in another format, or the model that trains is another one.
        """
        self.remove()
        if self._differences:
            first, *others = self._differences.items()
            more = f" (so did {few([path for path, _ in others])})" if others else ""
            raise PolicyError(first[1] + more)
        if self._expected and not self._called_with_gradients:
            raise PolicyError(
                f"expected the first step to call {few(list(self._expected))} of the model that has the "
                "policy, and it called none: give the policy to the model that trains, after its parts are "
                "replaced"
            )
        uncalled = [path for path in self._expected if path in self._ruled - self._called]
        if uncalled and not self._was_traced:
            warnings.warn(
                f"the rule for {few(uncalled)} did nothing in the first step, which did not call it: code "
                "that reads its weight, as a fused loss does, would compute by the rest of the policy",
                stacklevel=stacklevel_outside(_HOSTS),
            )
            # The host may call this again, as for another optimizer of the model: warn once.
            self._ruled.clear()


_HOSTS = ("narrowcast.", "torch.", "lightning", "pytorch_lightning", "accelerate.", "transformers.", "trl.")


def _why(layer: torch.nn.Module, expected: torch.dtype, advice: str) -> str:
    """Return what was seen at a layer that computed in another format, and what to change."""
    weight: Any = layer.weight
    # FSDP gathers weights in the format that they compute in.
    if weight.dtype not in (torch.float32, expected):
        return f"its weight is in {format_name(weight.dtype)}: load the model in fp32, which the policy casts"
    device = weight.device.type
    if not torch.is_autocast_enabled(device):
        return (
            "autocast was off around it, by a torch.autocast(enabled=False) or since it was called outside "
            f"of the model; {advice}"
        )
    inside = torch.get_autocast_dtype(device)
    if inside != expected:
        return f"a torch.autocast in {format_name(inside)} is open around it; {advice}"
    return advice
