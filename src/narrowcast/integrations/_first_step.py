"""The proof that a policy took effect in a host: what the layers computed in at the first step."""

from __future__ import annotations

import functools
import logging
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from narrowcast.casting import layer_formats, modules_by_path, stacklevel_outside
from narrowcast.errors import PolicyError, few
from narrowcast.policy import Policy, Rule, class_names, format_name, rules_for

HOSTS = ("narrowcast.", "torch.", "lightning", "pytorch_lightning", "accelerate.", "transformers.", "trl.")
"""Prefixes of the modules that warnings pass over, to name a line of the user's own code."""


class FirstStep:
    """Look at the linear and convolution layers of a model during its first step, and compare their formats.

    The integration makes it before the first forward pass, and calls ``end`` before the first step of an
    optimizer changes a weight.

    Args:
        model: the model that the host trains.
        policy: the policy that should be in force.
        formats: device type -> the format of the policy's region there.
        advice: what to change in the host if another format came, for the message.

    Attributes:
        has_ended: whether the first step is over.
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
        self._formats = formats
        self._model_name = type(model).__name__
        self._expected = layer_formats(model, policy, formats)
        self._called_with_gradients = False
        self._was_traced = False
        self.has_ended = False
        # The paths of the modules that each rule names. If none of these is called, the rule has no effect.
        self._paths_of_rule: dict[Rule, list[str]] = {}
        # The paths that were called outside of torch.compile's tracing, with gradients or without.
        self._called: set[str] = set()
        self._differences: dict[str, str] = {}
        self._handles = []
        for path, module in modules_by_path(model):
            # A rule for an operator inside the module does not name the module itself.
            rules = [rule for rule in rules_for(policy, path, class_names(type(module))) if rule.op is None]
            for rule in rules:
                self._paths_of_rule.setdefault(rule, []).append(path)
            if path in self._expected:
                self._handles.append(
                    module.register_forward_hook(functools.partial(self._compare_format, path))
                )
            elif rules:
                self._handles.append(module.register_forward_hook(functools.partial(self._note_call, path)))

    def _note_call(self, path: str, _module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            self._was_traced = True
            return
        self._called.add(path)

    def _compare_format(self, path: str, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
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
        reason = self._why(path, module)
        self._differences[path] = (
            f"expected {path!r} ({type(module).__name__}) to compute in {expected} as the policy says, got "
            f"{format_name(output.dtype)}: {reason}"
        )

    def _why(self, path: str, layer: torch.nn.Module) -> str:
        """Return, for a message, why a layer computed in another format, and what to change."""
        expected = self._expected[path]
        weight: Any = layer.weight
        # FSDP gathers weights in the format that they compute in.
        if weight.dtype not in (torch.float32, expected):
            held_in = format_name(weight.dtype)
            return f"its weight is in {held_in}: load the model in fp32, which the policy casts"
        device = weight.device.type
        if not torch.is_autocast_enabled(device):
            return (
                "autocast was off around it, by a torch.autocast(enabled=False) or since it was called "
                f"outside of the model; {self._advice}"
            )
        inside = torch.get_autocast_dtype(device)
        if inside == expected:
            return self._advice
        container = self._ruled_container_of(path)
        if inside == self._formats.get(device) and container is not None:
            return (
                f"the rule for {container!r} holds in calls of that module, and {path!r} was called outside "
                f'of one, as by a loop over the layers in it: name these, as "{container}.*"'
            )
        return f"a torch.autocast in {format_name(inside)} is open around it; {self._advice}"

    def _ruled_container_of(self, path: str) -> str | None:
        """Return the path of the innermost module around ``path`` that a rule names."""
        ruled = set().union(*self._paths_of_rule.values())
        container = path.rpartition(".")[0]
        while container and container not in ruled:
            container = container.rpartition(".")[0]
        return container or None

    def remove(self) -> None:
        """Stop comparing without a verdict, for a host whose step failed."""
        # A traced model keeps its hooks: without them torch.compile would compile it again.
        if not self._was_traced:
            for handle in self._handles:
                handle.remove()
        self._handles.clear()

    def end(self) -> None:
        """Stop comparing, and raise if the policy was not in force. May be called again.

        What was seen is logged once.

        Raises:
            PolicyError: a layer computed in another format, or the model that trains is another one.
        """
        self.remove()
        if self._differences:
            first, *others = self._differences
            more = f" (so did {few(others)})" if others else ""
            raise PolicyError(self._differences[first] + more)
        if self._expected and not self._called_with_gradients:
            raise PolicyError(
                f"expected the first step to call {few(list(self._expected))} of the model that has the "
                "policy, and it called none: give the policy to the model that trains, after its parts are "
                "replaced"
            )
        # The host may call this again, as for another optimizer of the model.
        if not self.has_ended and not self._was_traced:
            self._warn_of_uncalled()
            self._log_formats()
        self.has_ended = True

    def _warn_of_uncalled(self) -> None:
        """Warn of rules whose modules were not called, and of single layers under a rule that were not."""
        uncalled: list[str] = []
        for paths in self._paths_of_rule.values():
            layers = [path for path in paths if path in self._expected]
            if self._called.isdisjoint(paths):
                # A rule that names no layers names containers: list these.
                uncalled += layers or paths
            else:
                uncalled += [path for path in layers if path not in self._called]
        if uncalled:
            warnings.warn(
                f"the rule for {few(list(dict.fromkeys(uncalled)))} did nothing in the first step, which did "
                "not call it: code that reads its weight, as a fused loss does, would compute by the rest of "
                "the policy",
                stacklevel=stacklevel_outside(HOSTS),
            )

    def _log_formats(self) -> None:
        counts = Counter(format_name(dtype) for path, dtype in self._expected.items() if path in self._called)
        if counts:
            formats = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
            logging.getLogger("narrowcast").info(
                "narrowcast: the first step of %s computed as the policy says; linear and convolution "
                "layers: %s",
                self._model_name,
                formats,
            )
