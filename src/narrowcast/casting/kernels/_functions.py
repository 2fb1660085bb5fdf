"""Run the backward pass of a custom ``autograd.Function`` in the region that its forward ran in.

Such a Function may save its inputs as they come, an fp32 weight and a bf16 activation, and multiply them by a
bf16 gradient in ``backward``, which runs outside of all regions: PyTorch casts nothing there, and may raise.
In regions that promote, the Function's context keeps the state of autocast, and ``backward`` runs in it.

``custom_fwd`` and ``custom_bwd`` of ``torch.amp`` and of this package open their own region inside this one.
PyTorch's own Functions are left alone, except those in the modules ``_IN_REGIONS``. While a promotion lives,
``__init__`` and ``apply`` of the base class of all contexts are replaced. Only custom Functions call the two,
so that other code does not become slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from narrowcast.casting._torch_internals import (
    NODE_OF_FUNCTION,
    Replacements,
    gradient_dtypes,
    traced_only_inline,
)
from narrowcast.casting.kernels._operators import LOW
from narrowcast.casting.kernels._promotion import living
from narrowcast.casting.regions._regions import state_here
from narrowcast.casting.regions._scopes import is_promoting, promotion_here

# Modules of PyTorch whose Functions run in the kept region too: those of torch.func and Dynamo call the
# script's Functions, and that of the Dirichlet distribution calls an operator that has no low kernel.
_IN_REGIONS = ("torch._functorch.autograd_function", "torch.distributions.dirichlet")
_STATE = "_narrowcast_state"


def _tell_all(op: str, what: str) -> None:
    """Tell every living promotion, since a compiled graph does not say whose region it entered."""
    for promotion in list(living):
        promotion(op, what)


def _keeping_state(below: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that keeps the state of a region that promotes in the Function's context."""

    @traced_only_inline
    @functools.wraps(below)
    def __init__(node: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        below(node, *args, **kwargs)
        if not is_promoting():
            return
        module = node._forward_cls.__module__
        if module.startswith("torch.") and module not in _IN_REGIONS:
            return
        # None keeps the promotion of the region. A compiled graph enters a region without its promotion.
        promotion = _tell_all if promotion_here() is None else None
        setattr(node, _STATE, state_here(promotion))

    return __init__


def _in_kept_state(below: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``apply`` that runs the backward in the kept state if a gradient has a low format."""

    @traced_only_inline
    @functools.wraps(below)
    def apply(node: Any, *gradients: Any) -> Any:
        state = getattr(node, _STATE, None)
        if state is None or gradient_dtypes(node).isdisjoint(LOW):
            return below(node, *gradients)
        with state():
            return below(node, *gradients)

    return apply


FUNCTIONS = Replacements(
    (NODE_OF_FUNCTION, "__init__", _keeping_state), (NODE_OF_FUNCTION, "apply", _in_kept_state)
)
"""The two methods of contexts that are replaced while a promotion lives."""
