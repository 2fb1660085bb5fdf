"""The attributes of ``torch.amp.GradScaler`` that other libraries read and write, though none is promised.

Accelerate puts a scale on its device by ``_lazy_init_scale_growth_tracker``; training scripts write a floor
into ``_scale`` and overwrite flags in ``_per_optimizer_states``. Each answers, and obeys, as torch's does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from narrowcast.errors import UnsupportedError
from narrowcast.gradients import _settings
from narrowcast.gradients._iteration import Iteration, State, fresh_state
from narrowcast.gradients._scales import Scales
from narrowcast.scaling import Dynamic


def _setting(name: str) -> Any:
    def read(scaler: TorchNames) -> Any:
        return getattr(scaler._scales.first, name)

    def write(scaler: TorchNames, value: Any) -> None:
        scaler._scales.change(**{name: value})

    return property(read, write)


class TorchNames:
    """What a scaler is asked by torch's private names."""

    _scales: Scales
    _iteration: Iteration
    _enabled: bool

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        unused = [name for name in ("_maybe_opt_step", "_unscale_grads_") if name in vars(cls)]
        if unused:
            raise UnsupportedError(
                f"{cls.__name__} overrides {' and '.join(unused)} of torch.amp.GradScaler, which ours does "
                "not call: override unscale_ or step, or listen with on_step and on_skip"
            )

    _growth_factor = _setting("growth_factor")
    _backoff_factor = _setting("backoff_factor")
    _growth_interval = _setting("growth_interval")

    @property
    def _scale(self) -> torch.Tensor | None:
        return self._scales.only.shared_factor()

    @_scale.setter
    def _scale(self, value: torch.Tensor | None) -> None:
        if value is not None:
            scale = self._scales.only
            scale.place(value.device)
            scale.set(_settings.changed(scale.read(), scale=_settings.one_number(value)))

    @property
    def _growth_tracker(self) -> torch.Tensor | None:
        return self._scales.only.good_steps

    @property
    def _init_scale(self) -> float:
        return float(self._scales.only.settings.scale)

    @property
    def _init_growth_tracker(self) -> int:
        value = self._scales.only.settings
        return value.good_steps if isinstance(value, Dynamic) else 0

    @property
    def _per_optimizer_states(self) -> dict[int, State]:
        return self._iteration.states

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: Mapping[int, State]) -> None:
        self._iteration.states = defaultdict(fresh_state)
        for key, state in states.items():
            self._iteration.states[key] = fresh_state() | state

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        self._scales.only.place(torch.device(dev))

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        factor = self._scales.factor(funcname)
        tracker = next(scale.good_steps for scale in self._scales.by_name.values() if scale.factor is factor)
        assert tracker is not None
        return factor, tracker

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        value = self._scales.only.read()
        return value.good_steps if isinstance(value, Dynamic) and self._enabled else 0
