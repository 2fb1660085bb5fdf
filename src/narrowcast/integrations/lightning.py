"""narrowcast in Lightning's ``Trainer`` and in Fabric.

``narrowcast.integrations.pytorch_lightning`` has the same classes for the package ``pytorch_lightning``,
which refuses a plugin that is built on ``lightning``.
"""

from __future__ import annotations

from narrowcast.integrations._hosts import require
from narrowcast.integrations._lightning import FabricPlugin, TrainerPlugin

require("lightning", "2.5", "lightning")

from lightning.fabric.plugins import Precision as _FabricPrecision  # noqa: E402
from lightning.pytorch.plugins import Precision as _TrainerPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402

__all__ = ["FabricPrecision", "NarrowcastPrecision"]


# The ignore: the Trainer's Precision derives from Fabric's, whose ``optimizer_step`` takes fewer arguments.
class NarrowcastPrecision(TrainerPlugin, _TrainerPrecision):  # type: ignore[misc]
    """Train a ``LightningModule`` with a policy of narrowcast::

        from lightning import Trainer
        from narrowcast.integrations.lightning import NarrowcastPrecision

        trainer = Trainer(plugins=[NarrowcastPrecision("fp16")])
        trainer.fit(model, loader)

    The steps for training, validation, test and prediction run in the region of the policy; paths in its
    rules start at the ``LightningModule``. Weights stay in fp32. Before ``on_before_optimizer_step`` and
    before clipping, gradients are unscaled and checked. If one is NaN or infinite, the step is skipped: the
    weights, the optimizer's state and every scheduler with ``interval="step"`` and ``frequency=1`` stay as
    they are. (``trainer.global_step`` counts the step. With a fused optimizer on a GPU, a scheduler that may
    be held waits for the device.) Checkpoints hold the loss scale, and one of Lightning's ``MixedPrecision``
    continues.

    Manual optimization holds the schedulers with ``interval="step"`` too. The loss scale moves at the first
    backward pass after a step; the gradients that another optimizer still accumulates follow it.

    Args:
        policy: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"auto"``, a ``Policy``, or the path of one.
        scaler: an ``nc.GradScaler``. Default: a dynamic scale in fp16, and in other formats only the check
            for NaN and infinities.
        explain_skips: run a skipped step again, and log where its first infinity or NaN arose
            (docs/stepper.md).

    Attributes:
        scaler: the scaler, from ``fit`` on.
        last_result: the ``StepResult`` of the last step: ``.skipped``, ``.scale``, ``.nonfinite``.
        skipped_steps: how many steps were skipped since the plugin was made.

    Raises:
        PolicyError: the policy does not exist or does not fit the model. At the first step: a linear or
            convolution layer computed in another format than the policy says.
        OrderError: the plugin was put in place after ``trainer.fit`` had begun.
        UnsupportedError: a strategy other than one device and DDP.
        SettingError: a scaler of torch.
        ScaleCollapseError: too many skipped steps in a row.

    Lightning itself refuses ``precision=`` and a second precision plugin beside it, and ``FSDPStrategy``.
    """

    _strategies = (SingleDeviceStrategy, DDPStrategy)


class FabricPrecision(FabricPlugin, _FabricPrecision):
    """Train with a policy of narrowcast in Fabric::

        from lightning import Fabric
        from narrowcast.integrations.lightning import FabricPrecision

        plugin = FabricPrecision("fp16")
        fabric = Fabric(plugins=[plugin])
        model, optimizer = fabric.setup(model, optimizer)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            if not plugin.last_result.skipped:
                scheduler.step()
        fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "precision": plugin})

    Calls of the model, and what runs in ``fabric.autocast()``, are in the region of the policy. Weights stay
    in fp32, and inputs as they are: the operators cast them. A step with a NaN or infinite gradient is
    skipped: weights and optimizer state stay as they are. ``fabric.clip_gradients`` clips unscaled gradients,
    those of fused optimizers too; give it ``error_if_nonfinite=False``, or it raises where a step would be
    skipped. If several models are set up, one of them needs the module that a rule names.

    Args:
        policy: ``"bf16"``, ``"fp16"``, ``"fp32"``, ``"auto"``, a ``Policy``, or the path of one.
        scaler: an ``nc.GradScaler``. Default: a dynamic scale in fp16, and in other formats only the check
            for NaN and infinities.
        fp32_outputs: whether models return fp16 and bf16 outputs in fp32, as with Fabric's own precision.
        explain_skips: run a skipped step again, and log where its first infinity or NaN arose
            (docs/stepper.md).

    Attributes:
        scaler: the scaler, from the first call of a model on.
        last_result: the ``StepResult`` of the last step: ``.skipped``, ``.scale``, ``.nonfinite``.
        skipped_steps: how many steps were skipped since the plugin was made.

    Raises:
        PolicyError: the policy does not exist or does not fit the model. At the first step: a linear or
            convolution layer computed in another format than the policy says.
        OrderError: no model was set up.
        SettingError: a scaler of torch.
        ScaleCollapseError: too many skipped steps in a row.

    Fabric itself refuses ``precision=`` and a second precision plugin beside it, and ``FSDPStrategy``.
    """
