"""Gradients as numbers: unscaled, checked, clipped, and a step that is taken only on finite ones."""

from narrowcast.gradients._closures import Snapshot, closure_of, with_closure
from narrowcast.gradients._finite import NonfiniteFlags, nonfinite_flags
from narrowcast.gradients._graph import leaf_of, nodes_below
from narrowcast.gradients._held import check_apart
from narrowcast.gradients._result import StepResult
from narrowcast.gradients._scaler import GradScaler
from narrowcast.gradients._torch_internals import ASKED_BY_SCALERS, mark_as_stepped, needs_closure
from narrowcast.gradients._unscaled import unscale_by

__all__ = [
    "ASKED_BY_SCALERS",
    "GradScaler",
    "NonfiniteFlags",
    "Snapshot",
    "StepResult",
    "check_apart",
    "closure_of",
    "leaf_of",
    "mark_as_stepped",
    "needs_closure",
    "nodes_below",
    "nonfinite_flags",
    "unscale_by",
    "with_closure",
]
