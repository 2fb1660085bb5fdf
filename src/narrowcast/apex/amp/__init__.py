"""apex's ``apex.amp``: ``from narrowcast.apex import amp``."""

from narrowcast.apex._casts import disable_casts
from narrowcast.apex._checkpoints import load_state_dict, master_params, state_dict
from narrowcast.apex._functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from narrowcast.apex._initialize import initialize, shutdown
from narrowcast.apex._old_handle import init
from narrowcast.apex._scale_loss import scale_loss
from narrowcast.apex.amp import lists
from narrowcast.apex.amp._amp_state import _amp_state

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "shutdown",
    "state_dict",
]
