"""apex's ``apex.amp._amp_state``: what the latest ``initialize`` left in the process."""

from narrowcast.apex._state import AmpState
from narrowcast.apex._state import amp_state as _amp_state
from narrowcast.apex._state import say as maybe_print

__all__ = ["AmpState", "_amp_state", "maybe_print"]
