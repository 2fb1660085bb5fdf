"""A compiled training step: nc.compile against torch.compile under torch.autocast."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from interleaved import interleaved

WIDTH, HEADS, BLOCKS = 768, 8, 2


class Block(nn.Module):
    """A transformer's block, norms first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        heads = self.qkv(self.norm(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(batch, tokens, WIDTH)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def compiled_step(device: str) -> Iterator[dict[str, object]]:
    """torch.compile under torch.autocast over nc.compile, which is the same compiler: at least 0.95."""
    batch, tokens = (16, 512) if device == "cuda" else (1, 64)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    x = torch.randn(batch, tokens, WIDTH, device=device)
    theirs, ours = torch.compile(model), nc.compile(model, "bf16")

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def torchs() -> None:
        with torch.autocast(device, torch.bfloat16):
            output = theirs(x)
        step(output.float().square().mean())

    def narrowcasts() -> None:
        step(ours(x).float().square().mean())

    a, b, ratio = interleaved(torchs, narrowcasts, rounds=41, warm_up=4)
    yield {
        "case": f"{BLOCKS} blocks of {WIDTH}, {batch} x {tokens} tokens",
        "a": f"torch {a * 1e3:.1f} ms",
        "b": f"narrowcast {b * 1e3:.1f} ms",
        "ratio": 1 / ratio,
        "at_least": 0.95,
    }
