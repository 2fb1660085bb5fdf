"""Scales by name, one a loss: gradients are unscaled where they accumulate, so losses may share parameters.

Two losses with two scales may reach the same parameter. Their gradients add up right only if each is divided
by its own scale before it accumulates. So a pass notes its name when it starts, at the multiplication by the
scale, and every leaf that it reaches has a hook that asks the engine which pass it is working for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from narrowcast.errors import ScaleError, UnsupportedError
from narrowcast.gradients._graph import leaf_of, nodes_below
from narrowcast.gradients._torch_internals import graph_task_id

_PASSES_KEPT = 64  # backward passes that may run at once, or be remembered after they ended


class NamedPasses:
    """Which named loss each backward pass belongs to, and which names each parameter's gradient holds."""

    def __init__(self) -> None:
        self._names_of_passes: dict[int, tuple[str, torch.Tensor]] = {}
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._names_of_leaves: dict[int, set[str]] = {}

    def scaled(self, output: torch.Tensor, name: str, factor: torch.Tensor) -> torch.Tensor:
        """``output`` times ``factor``, whose backward unscales at every leaf."""
        if output.grad_fn is None:
            raise ScaleError(
                f"expected a loss with a graph for the scale {name!r}, got a tensor without: no backward can "
                "start from it"
            )
        for node in nodes_below([output.grad_fn]):
            leaf = leaf_of(node)
            if leaf is not None:
                self._hook(leaf)
            elif type(node).__name__ == "CheckpointFunctionBackward":
                raise UnsupportedError(
                    f"the loss {name!r} goes through a reentrant checkpoint, whose own backward pass hides "
                    "from named scales: write checkpoint(..., use_reentrant=False), or scale without a name"
                )
        scaled: torch.Tensor = _Scaled.apply(output, factor, self, name)  # type: ignore[no-untyped-call]
        return scaled

    def begin(self, name: str, factor: torch.Tensor) -> None:
        """The backward pass that this thread works for is that of ``name``."""
        task = graph_task_id()
        other, _ = self._names_of_passes.setdefault(task, (name, factor))
        if other != name:
            raise ScaleError(
                f"expected one named loss in a backward pass, got {other!r} and {name!r}: call backward on "
                "each of them (retain_graph=True for the first), or add them before scaling and name the sum"
            )
        while len(self._names_of_passes) > _PASSES_KEPT:
            del self._names_of_passes[min(self._names_of_passes)]

    def _hook(self, leaf: torch.Tensor) -> None:
        known = self._hooked.get(id(leaf))
        if known is not None and known() is leaf:
            return
        reference = weakref.ref(leaf)

        # torch.autograd.grad(allow_unused=True) calls it without a gradient where the pass does not come by.
        def unscale(gradient: torch.Tensor | None) -> torch.Tensor | None:
            found = self._names_of_passes.get(graph_task_id())
            tensor = reference()
            if gradient is None or found is None or tensor is None:
                return None
            name, factor = found
            if tensor.grad is None:
                self._names_of_leaves[id(tensor)] = {name}
            else:
                self._names_of_leaves.setdefault(id(tensor), set()).add(name)
            inverse = factor.to(gradient.device, non_blocking=True).reciprocal()
            return (gradient * inverse).to(gradient.dtype)

        self._hooked[id(leaf)] = reference
        leaf.register_hook(unscale)  # type: ignore[no-untyped-call]

    def names_in(self, parameters: Iterable[torch.Tensor]) -> set[str]:
        """The names of the losses whose gradients these parameters hold.

        Raises:
            UnsupportedError: a distributed tensor holds a gradient that no hook has seen, and so scaled.
        """
        names: set[str] = set()
        for parameter in parameters:
            found = self._names_of_leaves.get(id(parameter))
            if found:
                names |= found
            elif type(parameter) not in (torch.Tensor, torch.nn.Parameter) and hasattr(
                parameter, "device_mesh"
            ):
                raise UnsupportedError(
                    "named scales unscale in hooks of the parameters, which fully_shard does not call: "
                    "scale without a name, with one GradScaler for each loss"
                )
        return names

    def forget(self) -> None:
        """An iteration ended: whose gradients are kept is known by their parameters from now on."""
        self._hooked = {key: ref for key, ref in self._hooked.items() if ref() is not None}
        self._names_of_leaves = {
            key: names for key, names in self._names_of_leaves.items() if key in self._hooked
        }


class _Scaled(torch.autograd.Function):
    """Multiplication by the scale; its backward is the first thing that a pass from the loss runs."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, factor: torch.Tensor, passes: NamedPasses, name: str) -> Any:
        ctx.passes, ctx.name, ctx.factor, ctx.dtype = passes, name, factor, output.dtype
        wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        return wide * factor.to(output.device, non_blocking=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.passes.begin(ctx.name, ctx.factor)
        factor = ctx.factor.to(gradient.device, non_blocking=True)
        return (gradient * factor).to(ctx.dtype), None, None, None
