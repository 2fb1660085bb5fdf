"""apex's ``apex.amp._amp_state``: what the latest ``initialize`` left in the process."""

from narrowcast.apex._checkpoints import master_params
from narrowcast.apex._state import AmpState, maybe_print
from narrowcast.apex._state import amp_state as _amp_state

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print"]
