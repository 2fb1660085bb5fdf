"""narrowcast in the ``Trainer`` of ``pytorch_lightning`` and in the Fabric of ``lightning_fabric``.

The classes of ``narrowcast.integrations.lightning`` again, for packages that refuse plugins built on
``lightning``.
"""

from __future__ import annotations

from narrowcast.integrations._hosts import require
from narrowcast.integrations._lightning import FabricPlugin, TrainerPlugin

require("pytorch-lightning", "2.5", "pytorch-lightning")

from lightning_fabric.plugins import Precision as _FabricPrecision  # noqa: E402
from pytorch_lightning.plugins import Precision as _TrainerPrecision  # noqa: E402
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402

__all__ = ["FabricPrecision", "NarrowcastPrecision"]


# The ignore: the Trainer's Precision derives from Fabric's, whose ``optimizer_step`` takes fewer arguments.
class NarrowcastPrecision(TrainerPlugin, _TrainerPrecision):  # type: ignore[misc]
    """Train a ``LightningModule`` of ``pytorch_lightning`` with a policy of narrowcast::

        from pytorch_lightning import Trainer
        from narrowcast.integrations.pytorch_lightning import NarrowcastPrecision

        trainer = Trainer(plugins=[NarrowcastPrecision("fp16")])
        trainer.fit(model, loader)

    See ``narrowcast.integrations.lightning.NarrowcastPrecision``.
    """

    _strategies = (SingleDeviceStrategy, DDPStrategy)


class FabricPrecision(FabricPlugin, _FabricPrecision):
    """Train with a policy of narrowcast in the Fabric of ``lightning_fabric``::

        from lightning_fabric import Fabric
        from narrowcast.integrations.pytorch_lightning import FabricPrecision

        fabric = Fabric(plugins=[FabricPrecision("fp16")])

    See ``narrowcast.integrations.lightning.FabricPrecision``.
    """
