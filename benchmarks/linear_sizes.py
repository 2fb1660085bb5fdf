"""From which size on a linear layer repays its casts: forward and backward, bf16 against fp32."""

from collections.abc import Callable, Iterator

import torch

from interleaved import interleaved
from narrowcast.casting import autocast

# Rows of the input, and features in and out.
SIZES = [(64, 64), (256, 64), (256, 128), (1024, 128), (1024, 512)]


def linear_sizes(device: str) -> Iterator[dict[str, object]]:
    """Speed of a linear layer in a bf16 region against fp32; above 1 the casts are repaid."""
    for rows, features in SIZES:
        layer = torch.nn.Linear(features, features, device=device)
        x = torch.randn(rows, features, device=device, requires_grad=True)
        repeats = max(3, 2**22 // (rows * features))

        def one(layer: torch.nn.Linear = layer, x: torch.Tensor = x) -> None:
            out = layer(x)
            out.backward(torch.ones_like(out))

        def fp32(one: Callable[[], None] = one, repeats: int = repeats) -> None:
            for _ in range(repeats):
                one()

        def bf16(layer: torch.nn.Linear = layer, x: torch.Tensor = x, repeats: int = repeats) -> None:
            for _ in range(repeats):
                with autocast(device, policy="bf16"):
                    out = layer(x)
                out.backward(torch.ones_like(out))

        a, b, ratio = interleaved(bf16, fp32, rounds=9)
        yield {
            "case": f"linear, {rows} rows of {features}",
            "a": f"bf16 {a / repeats * 1e6:.0f} us",
            "b": f"fp32 {b / repeats * 1e6:.0f} us",
            "ratio": ratio,
            "limit": None,
        }
