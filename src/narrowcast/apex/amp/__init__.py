"""The ``apex.amp`` package: ``from narrowcast.apex import amp``."""

from typing import Any, NoReturn

from narrowcast.apex.amp import lists
from narrowcast.apex.amp._amp_state import _amp_state
from narrowcast.apex.amp._casts import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from narrowcast.apex.amp._initialize import initialize
from narrowcast.apex.amp._scale_loss import load_state_dict, master_params, scale_loss, state_dict
from narrowcast.errors import UnsupportedError

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
    "state_dict",
]


def init(*args: object, **kwargs: object) -> NoReturn:
    """Raise ``UnsupportedError``: this is the first interface of apex, from before ``initialize``."""
    raise UnsupportedError(
        "amp.init and the handle that it returned are not supported: call "
        "model, optimizer = amp.initialize(model, optimizer, opt_level='O1'), and "
        "with amp.scale_loss(loss, optimizer) as scaled_loss in place of optimizer.scale_loss(loss)"
    )


def __getattr__(name: str) -> Any:
    if name == "shutdown":
        raise AttributeError(
            "amp.shutdown was removed, which apex never had: amp._amp_state.handle._deactivate() ends the "
            "casts of O1, and models and optimizers stay as amp.initialize made them"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
