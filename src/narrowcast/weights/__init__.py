"""Parameters in a low format: ways to keep small updates, and a meter of those that are lost."""

from narrowcast.weights._held import HeldWeights, hold
from narrowcast.weights._held import held_by as held_by
from narrowcast.weights._lower import LOW_DTYPES as LOW_DTYPES
from narrowcast.weights._lower import is_batch_or_instance_norm as is_batch_or_instance_norm
from narrowcast.weights._lower import lower
from narrowcast.weights._meter import UpdateMeter
from narrowcast.weights._meter import take_swallowed_share as take_swallowed_share
from narrowcast.weights._torch_internals import version_of as version_of

__all__ = ["HeldWeights", "UpdateMeter", "hold", "lower"]
