"""Loss scales as frozen values: a transition returns a new value, and off is a value too."""

from narrowcast.scaling._dynamic import RULES, Dynamic
from narrowcast.scaling._exported import to_apex, to_deepspeed, to_megatron, to_torch
from narrowcast.scaling._fixed import LossScale, Off, Static
from narrowcast.scaling._log_max import LogMax
from narrowcast.scaling._states import (
    from_apex,
    from_deepspeed,
    from_megatron,
    from_state,
    from_torch,
    recognise,
)
from narrowcast.scaling._words import parse

__all__ = [
    "RULES",
    "Dynamic",
    "LogMax",
    "LossScale",
    "Off",
    "Static",
    "from_apex",
    "from_deepspeed",
    "from_megatron",
    "from_state",
    "from_torch",
    "parse",
    "recognise",
    "to_apex",
    "to_deepspeed",
    "to_megatron",
    "to_torch",
]
