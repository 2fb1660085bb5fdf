"""``custom_fwd`` and ``custom_bwd``: the backward of a custom function in the region of its forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from narrowcast.casting._autocast import PlacedRegion, check_device
from narrowcast.casting._places import place_on
from narrowcast.casting._tree import cast_where
from narrowcast.errors import OrderError, PolicyError

_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def custom_fwd(fwd: _F, *, device_type: str, cast_inputs: torch.dtype | None = None) -> _F: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[[_F], _F]: ...
def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorator of the ``forward(ctx, ...)`` of a ``torch.autograd.Function``; drop-in for ``torch.amp``'s.

    Records on ``ctx`` the region that ``forward`` runs in, under the names that ``torch.amp`` uses, so that
    either library's ``custom_bwd`` can bring it back.

    Args:
        fwd: the function; without it, the decorator is returned.
        device_type: type of device whose region and tensors are meant.
        cast_inputs: without it ``forward`` runs in the region as it is. With it, and inside a region, the
            floating tensors of that device, fp64 aside, are cast to this format wherever they are in the
            arguments (lists, dicts, sets, named and other tuples, dataclasses: see ``cast_floating``), and
            ``forward`` runs with casting off. Outside a region it has no effect.

    Casts are not seen by autograd, which is off in a forward: gradients come back in the format of the
    inputs. Overflow and NaN are as in ``Tensor.to``. Source:
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html, "Functions with multiple inputs".

    Raises:
        ValueError: ``device_type`` is not a str.
        DeviceError: torch has no autocast for the device.
        PolicyError: ``cast_inputs`` is not a floating format.
    """
    check_device(device_type, enabled=False)
    if cast_inputs is not None and not (
        isinstance(cast_inputs, torch.dtype) and cast_inputs.is_floating_point
    ):
        raise PolicyError(f"expected cast_inputs to be a floating torch.dtype or None, got {cast_inputs!r}")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    def wants(tensor: torch.Tensor) -> bool:
        its = tensor.dtype
        castable = its.is_floating_point and its not in (torch.float64, cast_inputs)
        return castable and tensor.device.type == device_type

    @functools.wraps(fwd)
    def decorate_fwd(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        inside = torch.is_autocast_enabled(device_type)
        ctx._dtype = torch.get_autocast_dtype(device_type)
        ctx._fwd_used_autocast = inside and cast_inputs is None
        if not torch.compiler.is_compiling():
            ctx._narrowcast_place = place_on(device_type)
        if cast_inputs is None or not inside:
            return fwd(ctx, *args, **kwargs)
        with PlacedRegion(device_type, ctx._dtype, enabled=False):
            return fwd(ctx, *cast_where(args, cast_inputs, wants), **cast_where(kwargs, cast_inputs, wants))

    return decorate_fwd


@overload
def custom_bwd(bwd: _F, *, device_type: str) -> _F: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[_F], _F]: ...
def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorator of the ``backward(ctx, ...)``: runs it in the forward's region; drop-in for ``torch.amp``'s.

    The forward is decorated with ``custom_fwd``, of this library or of ``torch.amp``. A region in
    ``torch.float32`` is brought back too. Works in whatever thread runs the backward.

    Args:
        bwd: the function; without it, the decorator is returned.
        device_type: type of device whose region is meant, as given to ``custom_fwd``.

    Raises:
        ValueError: ``device_type`` is not a str.
        DeviceError: torch has no autocast for the device.
        OrderError: in the backward, if the forward recorded no region.
    """
    check_device(device_type, enabled=False)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorate_bwd(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(ctx, "_fwd_used_autocast"):
            raise OrderError(
                f"expected the forward of {type(ctx).__name__.removesuffix('Backward')} to be decorated with "
                f"custom_fwd, got one that recorded no region; decorate it with "
                f'@nc.custom_fwd(device_type="{device_type}")'
            )
        # A forward of torch.amp's custom_fwd recorded no rules, and runs backward by PyTorch's own table.
        place = getattr(ctx, "_narrowcast_place", None)
        with PlacedRegion(device_type, ctx._dtype, ctx._fwd_used_autocast, place=place):
            return bwd(ctx, *args, **kwargs)

    return decorate_bwd
