"""Inference with weights stored in the format of their ops: nc.bake against a region, and all in bf16."""

import copy
from collections.abc import Callable, Iterator

import torch

import narrowcast as nc
from interleaved import interleaved

WIDTH, HEADS, BLOCKS = 768, 12, 4
CALLS = 5


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = torch.nn.LayerNorm(WIDTH)
        self.in_projection = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out_projection = torch.nn.Linear(WIDTH, WIDTH)
        self.before_mlp = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        projected = self.in_projection(self.before_attention(x))
        query, key, value = projected.view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out_projection(seen.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(torch.nn.functional.gelu(self.up(self.before_mlp(x))))


def baked_inference(device: str) -> Iterator[dict[str, object]]:
    """A transformer of 4 blocks, d = 768, at batch 1 x 1 token: baked against all bf16 and torch.autocast."""
    model = torch.nn.Sequential(*(Block() for _ in range(BLOCKS))).eval().to(device)
    x = torch.randn(1, 1, WIDTH, device=device)
    low_model, low_x = copy.deepcopy(model).bfloat16(), x.bfloat16()
    baked_model = copy.deepcopy(model)
    handle = nc.bake(baked_model, "bf16")

    def in_region() -> None:
        for _ in range(CALLS):
            with torch.autocast(device, torch.bfloat16):
                model(x)

    def calls(of: torch.nn.Module, given: torch.Tensor) -> Callable[[], None]:
        def work() -> None:
            for _ in range(CALLS):
                of(given)

        return work

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            ours = calls(baked_model, x)
            low, baked_s, ratio = interleaved(calls(low_model, low_x), ours, rounds=21)
            yield _row(f"{mode.__name__}, over all in bf16", low, baked_s, ratio) | {"limit": 1.35}
            # Under no_grad a region keeps its casts to its end. In inference mode it keeps none: each is made
            # in the same memory, near the processor, and even all in bf16 is less than twice as fast.
            at_least = 3.5 if mode is torch.no_grad else None
            baked_s, region, ratio = interleaved(ours, in_region, rounds=11)
            yield _row(f"{mode.__name__}, torch.autocast over it", baked_s, region, ratio) | {
                "at_least": at_least
            }
    handle.restore()


def _row(case: str, a: float, b: float, ratio: float) -> dict[str, object]:
    sides = ("all bf16", "baked") if "all in" in case else ("baked", "torch.autocast")
    times = [f"{side} {seconds / CALLS * 1e3:.2f} ms" for side, seconds in zip(sides, (a, b), strict=True)]
    return {"case": case, "a": times[0], "b": times[1], "ratio": ratio}
