"""Functions of the user's that run in half, float32 or the widest type: decorated, or registered by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from narrowcast.apex._casts import WholeCast, call_cast, casts_here
from narrowcast.apex._operators import MODULES, is_known
from narrowcast.apex._patches import Target
from narrowcast.apex._rules import FLOAT, HALF, WIDEST, Key
from narrowcast.apex._state import amp_state
from narrowcast.errors import AmpError

_F = TypeVar("_F", bound=Callable[..., Any])
_registered: dict[Target, str] = {}


def half_function(fn: _F) -> _F:
    """Decorator: under O1, ``fn`` is called with its floating tensors in half, wherever they are nested.

    Those of the models' types of device in float32, float16 and bfloat16 are cast; what overflows becomes an
    infinity. What ``fn`` calls is cast as usual. Without O1 in force in the calling thread, and inside
    ``disable_casts``, nothing is cast.
    """
    return _decorated(fn, HALF)


def float_function(fn: _F) -> _F:
    """Decorator: as ``half_function``, in float32."""
    return _decorated(fn, FLOAT)


def promote_function(fn: _F) -> _F:
    """Decorator: as ``half_function``, in the widest type among the floating tensors given."""
    return _decorated(fn, WIDEST)


def register_half_function(module: Any, name: str) -> None:
    """Have ``module.name`` run in half under O1, as if decorated with ``half_function``.

    Comes before the lists. For each ``amp.initialize`` from now on, until ``amp.shutdown``; a function of
    ``torch``, ``torch.nn.functional`` or ``torch.Tensor`` is cast wherever its operator is called, others
    where they are called by that name.

    Args:
        module: a module or a class.
        name: of a function in it.

    Raises:
        ValueError: there is no such function.
        AmpError: O1 is in force already.
    """
    _register(module, name, HALF)


def register_float_function(module: Any, name: str) -> None:
    """As ``register_half_function``, in float32."""
    _register(module, name, FLOAT)


def register_promote_function(module: Any, name: str) -> None:
    """As ``register_half_function``, in the widest type among the floating tensors given."""
    _register(module, name, WIDEST)


def forget_registered() -> None:
    """As before any registration."""
    _registered.clear()


def registered_operators() -> dict[Key, str]:
    """What was registered of PyTorch's own modules, for the lists."""
    names = {id(module): name for name, module in MODULES.items()}
    return {
        (names[id(module)], name): kind
        for (module, name), kind in _registered.items()
        if _is_operator((module, name))
    }


def registered_functions() -> dict[Target, WholeCast]:
    """What else was registered."""
    return {target: WholeCast(kind) for target, kind in _registered.items() if not _is_operator(target)}


def cast_by_name(target: Target, below: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in front of ``below``: it does as what casts in the calling thread has it."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        found = casts_here()
        how = None if found is None else found[0].whole.get(target)
        if found is None or how is None:
            return below(*args, **kwargs)
        return call_cast(how, below, args, kwargs, *found)

    return cast


def _decorated(fn: _F, kind: str) -> _F:
    how = WholeCast(kind)

    @functools.wraps(fn)
    def cast(*args: Any, **kwargs: Any) -> Any:
        found = casts_here()
        return fn(*args, **kwargs) if found is None else call_cast(how, fn, args, kwargs, *found)

    return cast  # type: ignore[return-value]


def _register(module: Any, name: str, kind: str) -> None:
    if not callable(getattr(module, name, None)):
        raise ValueError(
            f"expected the name of a function of {getattr(module, '__name__', module)!r}, got {name!r}"
        )
    if amp_state.handle is not None and amp_state.handle.is_active():
        raise AmpError(
            f"{name!r} was registered after amp.initialize, which has made its casts: register it before, or "
            "decorate it with amp.half_function, amp.float_function or amp.promote_function"
        )
    _registered[module, name] = kind


def _is_operator(target: Target) -> bool:
    module, name = target
    return any(module is one for one in MODULES.values()) and is_known(name)
