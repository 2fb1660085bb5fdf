"""narrowcast in the ``Trainer`` of transformers, and those of TRL: one policy, with narrowcast's scaler."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from narrowcast.errors import OrderError, SettingError
from narrowcast.gradients import GradScaler
from narrowcast.integrations._hosts import require
from narrowcast.integrations.accelerate import Attachment
from narrowcast.policy import Policy

require("transformers", "4.57", "transformers")

if TYPE_CHECKING:
    from transformers import Trainer
else:
    # At run time the mixin has no trainer as its base: ``super()`` finds that of the class it is mixed into.
    Trainer = object

# The variable of the environment by which Accelerate is told a format. ``TrainingArguments(bf16=True)`` of
# transformers 4 sets it, and it stays set for all arguments after those.
_FORMAT = "ACCELERATE_MIXED_PRECISION"
# Its value at this import, which "accelerate launch" may have set. Arguments in bf16 or fp16 that were made
# before this import have changed it already, and the earlier value is not known.
_FORMAT_AT_IMPORT = os.environ.get(_FORMAT, "no")


class NarrowcastMixin(Trainer):
    """Train by a policy of narrowcast; name it before the trainer::

        from narrowcast.integrations.transformers import NarrowcastMixin

        class PolicyTrainer(NarrowcastMixin, Trainer): ...

        trainer = PolicyTrainer(model, TrainingArguments("out"), train_dataset=data, policy="bf16")
        trainer.train()

    It works with ``SFTTrainer`` of TRL too; write ``bf16=False`` in ``SFTConfig``, whose default is True. The
    model computes by the policy in training, evaluation and ``compute_loss``; its weights stay in fp32. A
    step with a NaN or infinite gradient is skipped, and the scheduler waits. Checkpoints hold the state of
    the scaler. The log has ``loss_scale`` and ``skipped_steps``, the number since the trainer was made, and
    ``grad_norm``, the norm of unscaled gradients before clipping.

    Args:
        policy: a preset, a ``Policy``, or the path of one.
        scaler: by default a dynamic loss scale in fp16, and in other formats only the check of gradients.
        fp32_outputs: cast fp16 and bf16 tensors in the outputs of the model to fp32, as the ``Trainer`` does
            in mixed precision. False saves their memory.
        explain_skips: run a skipped step again, and log where its first infinity or NaN arose
            (docs/stepper.md).

    All other arguments are those of the trainer.

    Raises:
        SettingError: ``bf16``, ``fp16``, ``bf16_full_eval`` or ``fp16_full_eval`` is True in the arguments,
            or a sharding engine is used.
        OrderError: the mixin stands behind the trainer.
        PolicyError: the policy does not exist, or holds the weights in a low format; in ``train``, for the
            other reasons of ``narrowcast.integrations.accelerate.prepare``.
    """

    skipped_steps = 0
    _counting: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        from transformers import Trainer as HostTrainer

        bases = cls.__mro__
        if HostTrainer in bases and bases.index(HostTrainer) < bases.index(NarrowcastMixin):
            raise OrderError(
                "expected NarrowcastMixin before the trainer, got it behind: write it first, class "
                f"{cls.__name__}(NarrowcastMixin, ...)"
            )

    def __init__(
        self,
        *args: Any,
        policy: Policy | str = "auto",
        scaler: GradScaler | None = None,
        fp32_outputs: bool = True,
        explain_skips: bool = False,
        **kwargs: Any,
    ) -> None:
        self._settings = policy, scaler
        self._options = {"fp32_outputs": fp32_outputs, "explain_skips": explain_skips}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        for switch in ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"):
            if getattr(self.args, switch):
                raise SettingError(
                    f"expected {switch}=False, since the policy decides, got {switch}=True: write "
                    f"{switch}=False in {type(self.args).__name__} (in SFTConfig bf16 is True by default)"
                )
        is_transformers_4 = not hasattr(self.args, "mixed_precision")
        if is_transformers_4:
            # Forget the format of earlier arguments.
            os.environ[_FORMAT] = _FORMAT_AT_IMPORT
        super().create_accelerator_and_postprocess()
        policy, scaler = self._settings
        self._attachment = Attachment(
            self.accelerator, policy, scaler, trains_one_model=True, **self._options
        )
        # A search of hyperparameters makes an accelerator for each trial, and may give all one scaler.
        if self._counting is not None:
            self._counting.remove()
        self._counting = self.accelerator.scaler.on_skip(self._count_skip)

    def compute_loss_context_manager(self) -> ExitStack:
        stack = super().compute_loss_context_manager()
        stack.enter_context(self._attachment.region)
        return stack

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            scaler = self._attachment.scaler
            # On a GPU the result of a step may still be on its way, and its skip is not counted yet.
            scaler.report_pending()
            logs |= {"loss_scale": scaler.get_scale(), "skipped_steps": self.skipped_steps}
        super().log(logs, *args, **kwargs)

    def _count_skip(self, _result: Any) -> None:
        self.skipped_steps += 1
