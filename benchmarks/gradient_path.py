"""nc.GradScaler against torch.amp.GradScaler: a clipped step, and what a scaler costs over a bare step."""

from collections.abc import Iterator

import torch

import narrowcast as nc
from interleaved import interleaved, interleaved_all

SCALE = 2.0**10
LARGE, SMALL = (200, 100_000), (1000, 64)
Scaler = torch.amp.GradScaler


class Gradients:
    """Parameters with gradients that are the same, scaled, before every step."""

    def __init__(self, count: int, numel: int, device: str, **settings: object) -> None:
        torch.manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(numel, device=device)) for _ in range(count)]
        self.values = [torch.randn(numel, device=device) * SCALE for _ in range(count)]
        self.optimizer = torch.optim.AdamW(self.parameters, 1e-5, **settings)
        self.scalers = {
            "torch": torch.amp.GradScaler(device, init_scale=SCALE),
            "narrowcast": nc.GradScaler(device, init_scale=SCALE),
        }
        self.loss = torch.ones((), device=device)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def refill(self) -> None:
        """Begin an iteration: scale a loss, and give the gradients that it would have."""
        for scaler in self.scalers.values():
            scaler.scale(self.loss)
        gradients = [parameter.grad for parameter in self.parameters]
        torch._foreach_copy_(gradients, self.values)

    def bare(self) -> None:
        self.optimizer.step()

    def step_by(self, scaler: Scaler) -> None:
        scaler.step(self.optimizer)
        scaler.update()

    def torch_clipped(self) -> None:
        scaler = self.scalers["torch"]
        scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.step_by(scaler)

    def ours_clipped(self) -> None:
        scaler = self.scalers["narrowcast"]
        scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.step_by(scaler)


def clipped_step(device: str) -> Iterator[dict[str, object]]:
    """unscale + check + clip + fused AdamW: torch's time over ours; at least 1.25."""
    for count, numel in (LARGE, SMALL):
        gradients = Gradients(count, numel, device, fused=True)
        ours, torchs, ratio = interleaved(
            gradients.ours_clipped, gradients.torch_clipped, rounds=61, before=gradients.refill
        )
        yield {
            "case": f"{count} tensors of {numel}",
            "a": f"narrowcast {ours * 1e3:.2f} ms",
            "b": f"torch {torchs * 1e3:.2f} ms",
            "ratio": ratio,
            "limit": None,
            "at_least": 1.25,
        }


def scaler_overhead(device: str) -> Iterator[dict[str, object]]:
    """What a scaler adds to a bare step, ours over torch's, 1000 small parameters: at most 0.5 fused."""
    # Without fusion both sides spend most of it on asking each of 1000 gradients the same questions.
    for name, settings, limit in (("fused", {"fused": True}, 0.5), ("foreach", {"foreach": True}, None)):
        gradients = Gradients(*SMALL, device, **settings)
        work = {
            "bare": gradients.bare,
            "torch": lambda g=gradients: g.step_by(g.scalers["torch"]),
            "narrowcast": lambda g=gradients: g.step_by(g.scalers["narrowcast"]),
        }
        times = interleaved_all(work, rounds=61, before=gradients.refill)
        added = {side: times[side] - times["bare"] for side in ("torch", "narrowcast")}
        yield {
            "case": f"AdamW {name}, {times['bare'] * 1e3:.2f} ms bare",
            "a": f"torch adds {added['torch'] * 1e6:.0f} us",
            "b": f"narrowcast {added['narrowcast'] * 1e6:.0f} us",
            "ratio": added["narrowcast"] / added["torch"],
            "limit": limit,
        }
