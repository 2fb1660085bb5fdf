"""Four ways to a parameter update with clipping: in fp32, by torch.amp, by apex's calls, by narrowcast.

Each keeps the parameters that the optimizer updates, the masters, in fp32, and clips their gradients.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import narrowcast as nc
from narrowcast.apex import amp

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Fp32Updates:
    """No mixed precision."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any, max_norm: float) -> None:
        self.model, self.optimizer, self.scheduler, self.max_norm = model, optimizer, scheduler, max_norm

    def region(self) -> AbstractContextManager[Any]:
        """Around the forward pass and the loss."""
        return nullcontext()

    def update(self, loss: torch.Tensor) -> Any:
        """Go backward and update; return the norm of the gradients before they were clipped."""
        loss.backward()
        norm = clip_grad_norm_(self.masters(), self.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm

    def masters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def taken(self) -> int:
        """How many updates were not skipped; reads it from the device."""
        states = iter(self.optimizer.state.values())
        return int(next(states, {"step": 0})["step"])

    def loss_scale(self) -> float:
        return 1.0

    def saved(self) -> dict[str, Any]:
        """What a checkpoint needs, by the names of its arguments."""
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}


class TorchUpdates(Fp32Updates):
    """``torch.autocast`` and ``torch.amp.GradScaler``, in the order that its documentation asks for."""

    def __init__(
        self, model: nn.Module, optimizer: Any, scheduler: Any, max_norm: float, format_name: str
    ) -> None:
        super().__init__(model, optimizer, scheduler, max_norm)
        self.device_type = next(model.parameters()).device.type
        self.dtype = DTYPES[format_name]
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=format_name == "fp16")

    def region(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, self.dtype)

    def update(self, loss: torch.Tensor) -> Any:
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.masters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # After a skipped update too: torch does not say that it was one.
        self.scheduler.step()  # narrowcast: ignore[scheduler-on-skip]
        self.optimizer.zero_grad()
        return norm

    def loss_scale(self) -> float:
        return self.scaler.get_scale()

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"scaler": self.scaler}


class ApexUpdates(Fp32Updates):
    """apex's calls, after ``amp.initialize`` of model and optimizer; ``narrowcast.apex`` answers them."""

    def update(self, loss: torch.Tensor) -> Any:
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        norm = clip_grad_norm_(amp.master_params(self.optimizer), self.max_norm)
        self.optimizer.step()  # does nothing after an overflow, and says so
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm

    def loss_scale(self) -> float:
        return amp.state_dict()["loss_scaler0"]["loss_scale"]

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"scaler": amp}  # which has state_dict and load_state_dict, as a scaler has


class NarrowcastUpdates(Fp32Updates):
    """``nc.Stepper``, which knows the order; a skipped update leaves the scheduler where it was.

    With ``master_weights`` the model's own weights are in the low format, and the masters apart from them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        max_norm: float,
        format_name: str,
        *,
        master_weights: bool,
    ) -> None:
        super().__init__(model, optimizer, scheduler, max_norm)
        policy = nc.Policy(compute=format_name, master_weights=master_weights)
        self.stepper = nc.Stepper(model, optimizer, policy, max_norm=max_norm, scheduler=scheduler)

    def region(self) -> AbstractContextManager[Any]:
        return self.stepper.autocast()

    def update(self, loss: torch.Tensor) -> Any:
        return self.stepper.step(loss)

    def loss_scale(self) -> float:
        return self.stepper.scaler.get_scale()

    def saved(self) -> dict[str, Any]:
        return {"stepper": self.stepper}
