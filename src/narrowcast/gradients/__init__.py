"""Gradients: scaled, unscaled, checked, clipped, and stepped on if they are finite."""

from narrowcast.gradients._check import unscale_by
from narrowcast.gradients._optimizer_gradients import (
    NonfiniteFlags,
    check_apart,
    lost_eps,
    nonfinite_flags,
    parameters_of,
)
from narrowcast.gradients._scaler import GradScaler
from narrowcast.gradients._scales import multiplied
from narrowcast.gradients._steps import (
    SkipsInARow,
    SkipStep,
    StepResult,
    closure_of,
    collapse_message,
    step_or_restore,
)
from narrowcast.gradients._torch_internals import (
    ACCUMULATE_GRAD,
    ASKED_BY_SCALERS,
    by_device_and_dtype,
    is_capturing,
    leaf_of,
    mark_as_stepped,
    multiply_and_check,
    needs_closure,
    nodes_below,
    steps_twice,
    untraced,
)

__all__ = [
    "ACCUMULATE_GRAD",
    "ASKED_BY_SCALERS",
    "GradScaler",
    "NonfiniteFlags",
    "SkipStep",
    "SkipsInARow",
    "StepResult",
    "by_device_and_dtype",
    "check_apart",
    "closure_of",
    "collapse_message",
    "is_capturing",
    "leaf_of",
    "lost_eps",
    "mark_as_stepped",
    "multiplied",
    "multiply_and_check",
    "needs_closure",
    "nodes_below",
    "nonfinite_flags",
    "parameters_of",
    "step_or_restore",
    "steps_twice",
    "unscale_by",
    "untraced",
]
