"""A training step under apex's O1 and O2 levels against torch.autocast with torch.amp.GradScaler."""

import copy
from collections.abc import Iterator

import torch
from torch import nn

from compiled_step import WIDTH, Block
from interleaved import interleaved
from narrowcast.apex import amp

BLOCKS = 4


class Training:
    """A copy of the model, its optimizer, and a step of each kind."""

    def __init__(self, model: nn.Module, x: torch.Tensor, half: torch.dtype) -> None:
        self.model, self.x, self.half = copy.deepcopy(model), x, half
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-5, fused=True)
        self.scaler = torch.amp.GradScaler(x.device.type)

    def by_torch(self) -> None:
        with torch.autocast(self.x.device.type, self.half):
            output = self.model(self.x)
        self.scaler.scale(output.float().square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def by_apex(self) -> None:
        loss = self.model(self.x).float().square().mean()
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def apex_levels(device: str) -> Iterator[dict[str, object]]:
    """A step of amp O1 over torch.autocast with GradScaler: at most 1.05; of O2: at most 1."""
    batch, tokens = (16, 512) if device == "cuda" else (4, 64)
    # On CPUs without fp16 arithmetic its products take many times as long.
    half = torch.float16 if device == "cuda" else torch.bfloat16
    name = str(half).removeprefix("torch.")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device)
    x = torch.randn(batch, tokens, WIDTH, device=device)
    for level, limit in (("O1", 1.05), ("O2", 1.0)):
        torchs, ours = Training(model, x, half), Training(model, x, half)
        amp.initialize(ours.model, ours.optimizer, opt_level=level, half_type=half, verbosity=0)
        # O1's casts reach calls outside of the model too: not those of the other side.
        a, b, ratio = interleaved(ours.by_apex, torchs.by_torch, rounds=31, around_b=amp.disable_casts)
        if amp._amp_state.handle is not None:
            amp._amp_state.handle._deactivate()
        yield {
            "case": f"{level} in {name}, {BLOCKS} blocks of {WIDTH}",
            "a": f"torch {b * 1e3:.1f} ms",
            "b": f"narrowcast {a * 1e3:.1f} ms",
            "ratio": 1 / ratio,
            "limit": limit,
        }
