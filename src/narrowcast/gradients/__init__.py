"""Scale losses; unscale, check and clip gradients; and step optimizers if the gradients are finite."""

from narrowcast.gradients._check import GradientCheck, check_gradients, known_to_be_finite, unscale_by
from narrowcast.gradients._devices import on_device
from narrowcast.gradients._iteration import some_scaler_steps
from narrowcast.gradients._norms import norm_of_gradients
from narrowcast.gradients._optimizer_gradients import (
    check_apart,
    lost_eps,
    nonfinite_flags,
    parameters_of,
)
from narrowcast.gradients._scaler import GradScaler
from narrowcast.gradients._scales import multiplied
from narrowcast.gradients._steps import (
    HostCopies,
    HostCopy,
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
    is_torchs_own,
    leaf_of,
    mark_as_stepped,
    multiply_and_check,
    needs_closure,
    nodes_below,
    starts_momentum,
    steps_twice,
    takes_grad_scale,
    untraced,
)

__all__ = [
    "ACCUMULATE_GRAD",
    "ASKED_BY_SCALERS",
    "GradScaler",
    "GradientCheck",
    "HostCopies",
    "HostCopy",
    "SkipStep",
    "SkipsInARow",
    "StepResult",
    "by_device_and_dtype",
    "check_apart",
    "check_gradients",
    "closure_of",
    "collapse_message",
    "is_capturing",
    "is_torchs_own",
    "known_to_be_finite",
    "leaf_of",
    "lost_eps",
    "mark_as_stepped",
    "multiplied",
    "multiply_and_check",
    "needs_closure",
    "nodes_below",
    "nonfinite_flags",
    "norm_of_gradients",
    "on_device",
    "parameters_of",
    "some_scaler_steps",
    "starts_momentum",
    "step_or_restore",
    "steps_twice",
    "takes_grad_scale",
    "unscale_by",
    "untraced",
]
