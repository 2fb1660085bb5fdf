"""The loss scales of one scaler: one for all losses, or one for each name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from narrowcast.errors import OrderError, ScaleError, near_names
from narrowcast.gradients import _settings
from narrowcast.gradients._device_scale import DeviceScale
from narrowcast.gradients._named import NamedPasses
from narrowcast.scaling import LossScale

_NO_SCALE = (
    "Attempted {method} but no loss was scaled yet: the scale is on no device. Call "
    "scaler.scale(loss).backward() earlier in the iteration"
)


Found = tuple[set[str], list[torch.Tensor]]
"""Of one optimizer: the names of the losses whose gradients it held, and the overflow flags."""


class Scales:
    """Loss scales by name; the only one of a scaler without names is that of None."""

    def __init__(self, first: LossScale) -> None:
        self.first = first
        self.by_name: dict[str | None, DeviceScale] = {None: DeviceScale(first)}
        self.passes: NamedPasses | None = None

    @property
    def only(self) -> DeviceScale:
        """The scale without a name.

        Raises:
            ScaleError: this scaler's losses have names.
        """
        if self.passes is None:
            return self.by_name[None]
        raise ScaleError(f"expected the name of a loss scale: {self._names()}")

    def get(self, name: str | None) -> DeviceScale:
        if name is None:
            return self.only
        if name not in self.by_name:
            raise ScaleError(f"no loss was scaled by the name {name!r}. {near_names(name, self._names())}")
        return self.by_name[name]

    def _names(self) -> list[str]:
        return [name for name in self.by_name if name is not None]

    def change(self, **settings: Any) -> None:
        """Go on with other settings, every scale; waits for the device."""
        for scale in self.by_name.values():
            scale.set(_settings.changed(scale.read(), **settings))
        self.first = _settings.changed(self.first, **settings)

    def factor(self, method: str) -> torch.Tensor:
        """The first factor that is on a device.

        Raises:
            OrderError: none is, so ``method`` was called too early.
        """
        for scale in self.by_name.values():
            if scale.factor is not None:
                return scale.factor
        raise OrderError(_NO_SCALE.format(method=method))

    def any_factor(self) -> torch.Tensor:
        """The first factor that is on a device, else the scale to begin with; nothing is put on a device."""
        placed = [scale.factor for scale in self.by_name.values() if scale.factor is not None]
        return placed[0] if placed else torch.tensor(self.first.scale, dtype=torch.float32)

    def copied(self) -> float | torch.Tensor | dict[str, torch.Tensor]:
        """The factors now, copied on their devices, by name where there are names."""
        if self.passes is None:
            factor = self.by_name[None].factor
            return self.by_name[None].settings.scale if factor is None else factor.clone()
        scales = ((name, scale.factor) for name, scale in sorted(self.by_name.items(), key=str))
        return {name: f.clone() for name, f in scales if f is not None and name is not None}

    def times(self, outputs: Any, name: str | None) -> Any:
        """``outputs``, a tensor or a nesting of them, times a scale."""
        if name is None and self.passes is None:
            return _mapped(outputs, self._times_only)
        scale, passes = self._named(name)

        def times_named(output: torch.Tensor) -> torch.Tensor:
            assert name is not None
            return passes.scaled(output, name, scale.place(output.device))

        return _mapped(outputs, times_named)

    def _times_only(self, output: torch.Tensor) -> torch.Tensor:
        factor = self.by_name[None].place(output.device)
        if output.dtype in (torch.float16, torch.bfloat16):
            output = output.float()
        return output * factor.to(device=output.device, non_blocking=True)

    def _named(self, name: str | None) -> tuple[DeviceScale, NamedPasses]:
        if name is None or (self.passes is None and self.by_name[None].factor is not None):
            raise ScaleError(
                "expected a name for every loss of this scaler or for none, got both: gradients of a named "
                "loss are unscaled where they accumulate, those of an unnamed one by step"
            )
        if not isinstance(name, str):
            raise TypeError(f"expected the name of a loss scale, got {name!r}")
        if self.passes is None:
            self.passes = NamedPasses()
            del self.by_name[None]
        if name not in self.by_name:
            self.by_name[name] = DeviceScale(self.first)
        return self.by_name[name], self.passes

    def move(self, steps: Sequence[Found]) -> None:
        """Move each scale once, by what was found in the gradients that its losses reached."""
        for name, scale in self.by_name.items():
            if scale.factor is None:
                continue
            concerned = [step for step in steps if name is None or name in step[0]]
            where = scale.factor.device
            flags = [flag.to(where, non_blocking=True) for _, found in concerned for flag in found]
            if not flags:
                continue  # no step used this loss
            scale.move(flags[0] if len(flags) == 1 else torch.stack(flags).amax())
        if self.passes is not None:
            self.passes.forget()

    def read(self) -> LossScale | dict[str, LossScale]:
        """Every loss scale as a value; waits for the device."""
        if self.passes is None:
            return self.by_name[None].read()
        return {name: scale.read() for name, scale in self.by_name.items() if name is not None}

    def set(self, values: LossScale | Mapping[str, LossScale]) -> None:
        """Go on from ``values``: one loss scale, or one for each name."""
        if not isinstance(values, Mapping):
            if self.passes is not None:
                raise ScaleError(f"expected a loss scale for each of {self._names()}, got one without a name")
            self.by_name[None].set(values)
            return
        if self.passes is None:
            if self.by_name[None].factor is not None:
                raise ScaleError(f"expected one loss scale without a name, got {list(values)}")
            self.passes = NamedPasses()
            del self.by_name[None]
        for name, value in values.items():
            self.by_name.setdefault(name, DeviceScale(value)).set(value)


def _mapped(outputs: Any, times: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(outputs, torch.Tensor):
        return times(outputs)
    if isinstance(outputs, Mapping):
        return {key: _mapped(item, times) for key, item in outputs.items()}
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*(_mapped(item, times) for item in outputs))
    if isinstance(outputs, list | tuple):
        return type(outputs)(_mapped(item, times) for item in outputs)
    if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
        return (_mapped(item, times) for item in outputs)
    raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}")
