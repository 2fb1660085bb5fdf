"""apex's name for ``_process_state``: scripts say ``from apex.amp._amp_state import _amp_state``."""

from narrowcast.apex.amp._process_state import AmpState, maybe_print
from narrowcast.apex.amp._process_state import process_state as _amp_state

__all__ = ["AmpState", "_amp_state", "maybe_print"]
