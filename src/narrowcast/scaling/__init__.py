"""Loss scales as frozen values, and the scaler states that torch and apex save."""

# "NAME as NAME" marks names for other packages of narrowcast, which are not public.
from narrowcast.scaling._loss_scales import RULES as RULES
from narrowcast.scaling._loss_scales import Dynamic, LossScale, Off, Static
from narrowcast.scaling._loss_scales import check_loss_scale as check_loss_scale
from narrowcast.scaling._loss_scales import parse as parse
from narrowcast.scaling._states import from_apex, from_state, from_torch
from narrowcast.scaling._states import scale_in as scale_in
from narrowcast.scaling._states import state_of as state_of

__all__ = [
    "Dynamic",
    "LossScale",
    "Off",
    "Static",
    "from_apex",
    "from_state",
    "from_torch",
]
