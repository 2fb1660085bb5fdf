"""Parameters held in a low format, what keeps their updates, and a meter of those that are swallowed."""

from narrowcast.weights._fits import check_state
from narrowcast.weights._held import HeldWeights, held_by, hold
from narrowcast.weights._lower import is_batch_or_instance_norm, lost_eps, lower
from narrowcast.weights._meter import SurvivingUpdates, UpdateMeter
from narrowcast.weights._rounding import round_stochastically
from narrowcast.weights._scalers import refuse_scalers
from narrowcast.weights._values import set_values

__all__ = [
    "HeldWeights",
    "SurvivingUpdates",
    "UpdateMeter",
    "check_state",
    "held_by",
    "hold",
    "is_batch_or_instance_norm",
    "lost_eps",
    "lower",
    "refuse_scalers",
    "round_stochastically",
    "set_values",
]
