"""Train a decoder-only transformer in FP32 on text that a rule makes; 98 million parameters on a GPU.

The next token depends on the two before it, so that the loss falls from log(vocabulary) within a few steps.

    narrowcast compare --policy bf16 benchmarks/gpu/language_model.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

HEAD_WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, HEAD_WIDTH)
        attended = F.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, blocks: int, tokens: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.embedding.weight.T


def batch_of_text(batch: int, tokens: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return (batch, tokens + 1) tokens; each follows from the two before it, but for one in ten."""
    text = torch.randint(vocabulary, (batch, tokens + 1))
    free = torch.rand(batch, tokens + 1) < 0.1
    for at in range(2, tokens + 1):
        follows = (text[:, at - 1] * 31 + text[:, at - 2] * 17 + 7) % vocabulary
        text[:, at] = torch.where(free[:, at], text[:, at], follows)
    return text.to(device)


def main() -> None:
    large = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24 if large else 6)
    parser.add_argument("--blocks", type=int, default=12 if large else 1)
    parser.add_argument("--width", type=int, default=768 if large else 64)
    parser.add_argument("--vocabulary", type=int, default=16384 if large else 64)
    parser.add_argument("--batch", type=int, default=16 if large else 2)
    parser.add_argument("--tokens", type=int, default=512 if large else 16)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if large else "cpu")
    model = LanguageModel(options.vocabulary, options.width, options.blocks, options.tokens).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=large)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")
    for step in range(1, options.steps + 1):
        text = batch_of_text(options.batch, options.tokens, options.vocabulary, device)
        scores = model(text[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, options.steps // 4) == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
