"""`narrowcast run` against the same loop written by hand with torch.autocast (and GradScaler in fp16)."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from interleaved import interleaved
from narrowcast.attach import Attachment
from narrowcast.capture import CaptureWriter
from narrowcast.scaling import Dynamic

STEPS = 2  # a turn of each side
# fp16 has no instructions on most CPUs; what scaling costs there is measured in bf16.
SPELLINGS = {
    "cpu": [("bf16", torch.bfloat16, False), ("bf16", torch.bfloat16, True)],
    "cuda": [("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)],
}


class Convolutional(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(4):
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


def transformer(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(64, width), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))


class Loop:
    """One training loop and its model, in both spellings."""

    def __init__(
        self, model: nn.Module, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype, scaled: bool
    ) -> None:
        self.model, self.x, self.y, self.dtype = model, x, y, dtype
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
        self.scaler = torch.amp.GradScaler(x.device.type) if scaled else None

    def loss(self) -> torch.Tensor:
        out = self.model(self.x)
        return F.cross_entropy(out, self.y) if self.y.dtype == torch.long else F.mse_loss(out, self.y)

    def plain(self) -> None:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()

    def by_hand(self) -> None:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            with torch.autocast(self.x.device.type, self.dtype):
                loss = self.loss()
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()


def cases(device: str) -> Iterator[tuple[str, nn.Module, torch.Tensor, torch.Tensor]]:
    large = device == "cuda"
    images, width = (256, 256) if large else (32, 64)
    pixels = 64 if large else 16
    yield (
        "convolutions",
        Convolutional(width),
        torch.randn(images, 3, pixels, pixels),
        torch.randint(0, 10, (images,)),
    )
    batch, width = (64, 1024) if large else (8, 128)
    yield "transformer", transformer(width), torch.randn(batch, 128, 64), torch.randn(batch, 128, width)


def overhead_of_run(device: str) -> Iterator[dict[str, object]]:
    """run over a hand-written autocast loop of the same script: at most 1.05 above 20 ms a step."""
    for policy, dtype, scaled in SPELLINGS[device]:
        for name, model, x, y in cases(device):
            torch.manual_seed(0)
            loop = Loop(model.to(device), x.to(device), y.to(device), dtype, scaled)
            scale = Dynamic() if scaled else None
            with tempfile.TemporaryDirectory() as folder:
                capture = Path(folder) / "capture.jsonl"

                @contextmanager
                def attached(
                    policy: str = policy,
                    scale: Dynamic | None = scale,
                    capture: Path = capture,
                    loop: Loop = loop,
                ) -> Iterator[None]:
                    with Attachment(policy, scale, writer=CaptureWriter(capture)):
                        loop.plain()  # `run` attaches once for all steps: what the first ones cost is no part
                        yield

                by_hand, run, ratio = interleaved(loop.by_hand, loop.plain, rounds=31, around_b=attached)
            step_s = by_hand / STEPS
            yield {
                "case": f"{name}, {policy}{' scaled' if scaled else ''}",
                "a": f"by hand {step_s * 1e3:.1f} ms a step",
                "b": f"run {run / STEPS * 1e3:.1f} ms",
                "ratio": ratio,
                "limit": 1.05 if step_s > 0.02 else None,
            }
