"""What ``scale_loss`` blocks find in gradients: on the device until it is asked for, then acted on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from narrowcast.apex._loss_scaler import LossScaler


class Stepping(Protocol):
    """An optimizer whose next step may be left out.

    Attributes:
        findings: of blocks whose gradients were looked at, and nobody has read the answer yet.
        skip: why the next step is left out, in one line; None: it is not.
    """

    findings: list[Finding]
    skip: str | None


class Finding:
    """What one ``scale_loss`` block found in gradients, not yet read from the device.

    Args:
        found: for each optimizer what ``Accumulation.end`` returned.
    """

    def __init__(
        self,
        scaler: LossScaler,
        loss_id: int,
        optimizers: Sequence[Stepping],
        found: Sequence[torch.Tensor],
    ) -> None:
        self.scaler, self.loss_id, self.optimizers = scaler, loss_id, list(optimizers)
        self.flags = torch.stack([pair.to(found[0].device) for pair in found]).flatten()
        for one in self.optimizers:
            one.findings.append(self)

    def act(self, flags: Sequence[float]) -> None:
        """Move the scale, and have the next step of each optimizer left out where it must be."""
        overflow = any(new > 0 for new in flags[0::2])
        before = self.scaler.loss_scale()
        self.scaler.after_block(overflow=overflow)
        after = self.scaler.loss_scale()
        for one, total in zip(self.optimizers, flags[1::2], strict=True):
            one.findings.remove(self)
            if overflow:
                scale = f"stays at {after}" if after == before else f"reducing loss scale to {after}"
                one.skip = f"Gradient overflow.  Skipping step, loss scaler {self.loss_id} {scale}"
            elif total > 0 and one.skip is None:
                one.skip = (
                    "Skipping step, gradients from before the scale_loss block are not finite: clear them "
                    "with zero_grad()"
                )


def settle(findings: Sequence[Finding]) -> None:
    """Read what was found, in one wait for the device, and act on it."""
    waiting = list(findings)
    if waiting:
        device = waiting[0].flags.device
        flags = torch.cat([finding.flags.to(device) for finding in waiting]).tolist()
        for finding in waiting:
            count = len(finding.flags)
            finding.act(flags[:count])
            del flags[:count]
