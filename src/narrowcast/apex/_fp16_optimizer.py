"""``apex.fp16_utils.FP16_Optimizer``: an optimizer with float32 masters and a loss scale of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from narrowcast.apex._accumulation import Accumulation
from narrowcast.apex._fp16_scalers import DynamicLossScaler, LossScaler
from narrowcast.apex._masters import Masters
from narrowcast.apex._state import say
from narrowcast.errors import CheckpointError, OrderError, ScaleCollapseError
from narrowcast.weights import HeldWeights, hold, set_values

_LOW = (torch.float16, torch.bfloat16)


class FP16_Optimizer:  # noqa: N801 - apex's name
    """Takes over ``init_optimizer``: it then updates float32 masters of the float16 and bfloat16 parameters.

    In place of ``loss.backward()`` stands ``optimizer.backward(loss)``. ``step`` is left out, and says so,
    where a gradient was NaN or infinite, under a fixed scale too, where apex wrote it into the weights.

    Args:
        init_optimizer: any that ``narrowcast.weights.hold`` takes; parameters in float32 stay as they are.
        static_loss_scale: the scale that stays.
        dynamic_loss_scale: move the scale, from 2**32 on, instead.
        dynamic_loss_args: for ``DynamicLossScaler``.
        verbose: say what was left out, on standard error.

    Attributes:
        optimizer: ``init_optimizer``, for learning rate schedules.
        loss_scaler: a ``LossScaler`` or ``DynamicLossScaler``.
        overflow: whether the latest gradients were not all finite.

    Raises:
        ScaleError: a scale or setting out of range.
        SettingError, UnsupportedError: as ``narrowcast.weights.hold``.

    Source: apex ``fp16_utils/fp16_optimizer.py``.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.loss_scaler: LossScaler = (
            DynamicLossScaler(**(dynamic_loss_args or {}))
            if dynamic_loss_scale
            else LossScaler(static_loss_scale)
        )
        self.dynamic_loss_scale = dynamic_loss_scale
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.overflow = False
        self._held: HeldWeights | None = None
        self._gradients = Accumulation(init_optimizer)
        if any(p.dtype in _LOW for group in init_optimizer.param_groups for p in group["params"]):
            self._held = hold(init_optimizer)
            self._gradients.masters = Masters(self._held)
            self._gradients.masters.refresh()

    # ---- one iteration

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803 - apex's name
        """Zero the gradients of the model's parameters and of the masters, or set them to None."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        self._gradients.scaled_by = None

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Scale ``loss``, in float32, go backward, and bring true gradients to the masters.

        Gradients add up over calls until ``zero_grad``. Those of the model's low parameters stay scaled.

        Args:
            loss: of one element, in any floating format.
            update_master_grads: False: leave all gradients scaled, to be added to by other losses;
                ``update_master_grads()`` is then to be called before ``step``.
            retain_graph: as in torch.
        """
        if self._gradients.masters is not None:
            self._gradients.masters.refresh()
        delayed = not update_master_grads
        self._gradients.begin(self.loss_scale, delayed=delayed)
        try:
            self.loss_scaler.backward(loss.float(), retain_graph)
        except BaseException:
            self._gradients.abandon(delayed=delayed)
            raise
        if update_master_grads:
            self._end()

    def update_master_grads(self) -> None:
        """Bring gradients that ``backward(..., update_master_grads=False)`` left scaled to the masters."""
        if self._gradients.scaled_by is not None:
            self._gradients.begin(self.loss_scale, delayed=False)
            self._end()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor | int:
        """Clip the norm of the true gradients, after ``backward`` and before ``step``.

        Returns:
            Their norm before, 0-dim; -1 where they are not all finite, and left as they are.
        """
        if self.overflow:
            return -1
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters and round them into the model's parameters, or leave it out at an overflow.

        A ``closure`` calls ``zero_grad`` and ``backward`` of this object and returns the loss. It is
        evaluated again, at lower scales, while gradients overflow.

        Returns:
            What the optimizer's ``step`` returns; None where it was left out.

        Raises:
            OrderError: gradients that are still scaled.
            ScaleCollapseError: a closure overflows at the lowest scale.
        """
        returned: Any
        if closure is not None:
            returned = self.optimizer.step(self._evaluated(closure))
            self.loss_scaler.update_scale(False)
            return returned
        if self._gradients.scaled_by is not None:
            raise OrderError(
                "gradients are still scaled, by backward(..., update_master_grads=False): call "
                "update_master_grads() before step()"
            )
        scale = self.loss_scale
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            self._say_overflow("step left out", scale)
            return None
        with self._gradients.what_is_left_hidden():
            returned = self.optimizer.step()
        return returned

    def _end(self) -> None:
        found = self._gradients.end(self.loss_scale, delayed=False)
        self.overflow = found is not None and bool((found > 0).any())

    def _evaluated(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            while self.overflow:
                scale = self.loss_scale
                self.loss_scaler.update_scale(True)
                if self.loss_scale == scale:
                    raise ScaleCollapseError(
                        f"gradients of the closure are not finite at the lowest loss scale, {scale:g}: look "
                        "for the operation that gives NaN or infinity, or use a lower static_loss_scale"
                    )
                self._say_overflow("closure evaluated again", scale)
                self.zero_grad(set_grads_to_None=True)
                loss = closure()
            # The masters have them; a step would add what it finds on the model's parameters.
            self._gradients.forget_what_is_left()
            return loss

        return evaluate

    def _say_overflow(self, consequence: str, scale: float) -> None:
        if self.verbose:
            say(
                f"FP16_Optimizer: gradients overflowed at loss scale {scale:g}: {consequence}, scale now "
                f"{self.loss_scale:g}"
            )

    # ---- what scripts look at

    @property
    def loss_scale(self) -> float:
        """The scale now; may be set."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    @property
    def state(self) -> Any:
        """The optimizer's state, by master."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with masters for low parameters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        """The model's low parameters, by group."""
        low_of = self._low_of()
        return [[low_of[p] for p in group["params"] if p in low_of] for group in self.param_groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[torch.Tensor]]:
        """The masters of ``fp16_groups``."""
        low_of = self._low_of()
        return [[p for p in group["params"] if p in low_of] for group in self.param_groups]

    @property
    def fp32_from_fp32_groups(self) -> list[list[torch.Tensor]]:
        """The parameters that are in float32 themselves, by group."""
        low_of = self._low_of()
        return [[p for p in group["params"] if p not in low_of] for group in self.param_groups]

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """The true gradients, float32, by group and parameter; None where they are not all finite."""
        if self.overflow:
            return None
        return [
            [None if p.grad is None else p.grad.detach() for p in group["params"]]
            for group in self.param_groups
        ]

    def _low_of(self) -> dict[torch.Tensor, torch.Tensor]:
        return {} if self._held is None else {master: low for low, master in self._held.parameters}

    # ---- saving

    def state_dict(self) -> dict[str, Any]:
        """apex's entries, with the scaler as a dict of numbers, for ``torch.load(weights_only=True)``."""
        return {
            "loss_scaler": self.loss_scaler.__getstate__(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[m.detach() for m in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """A state of this class or of apex's, into an object made in the same way.

        Masters are written into the model's parameters too, before or after the model's own state loads.

        Raises:
            CheckpointError: masters of other numbers or shapes, or an entry is missing. Nothing was changed.
        """
        masters = [master for group in self.fp32_from_fp16_groups for master in group]
        try:
            saved = [master for group in state_dict["fp32_from_fp16"] for master in group]
            scaler, dynamic = state_dict["loss_scaler"], bool(state_dict["dynamic_loss_scale"])
            inner, overflow = state_dict["optimizer_state_dict"], bool(state_dict["overflow"])
        except KeyError as error:
            raise CheckpointError(f"the saved state of an FP16_Optimizer has no {error}") from None
        shapes, came = ([tuple(m.shape) for m in found] for found in (masters, saved))
        if shapes != came:
            raise CheckpointError(
                f"expected masters of shapes {shapes}, got {came}: make the optimizer for the parameters "
                "that the state was saved of"
            )
        loaded: LossScaler = DynamicLossScaler() if dynamic else LossScaler()
        loaded.__setstate__(scaler if isinstance(scaler, Mapping) else scaler.__getstate__())
        self.optimizer.load_state_dict(inner)
        self.loss_scaler, self.dynamic_loss_scale, self.overflow = loaded, dynamic, overflow
        if self._held is not None:
            places: dict[torch.Tensor, int] = {
                master: place for place, (_, master) in enumerate(self._held.parameters)
            }
            set_values(self._held, {places[m]: value for m, value in zip(masters, saved, strict=True)})

    def __getstate__(self) -> NoReturn:
        raise CheckpointError("FP16_Optimizer is saved by its state_dict(), not pickled or copied")
