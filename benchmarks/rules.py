"""What a rule costs: a call of the operator that it is for, and an empty region of a policy that has it."""

from collections.abc import Iterator

import torch

import narrowcast as nc
from interleaved import interleaved

CALLS = 5000


def rules(device: str) -> Iterator[dict[str, object]]:
    """An operator under a rule against the operator alone: at most 8 us more; a region: at most 3 times."""
    policy = nc.Policy(compute="bf16").with_rules(nc.rule.op("softmax", compute="fp16"))
    for format_name, x in (
        ("fp16, no cast needed", torch.randn(4, 4, device=device).half()),
        ("fp32, cast to fp16", torch.randn(4, 4, device=device)),
    ):

        def alone(x: torch.Tensor = x) -> None:
            for _ in range(CALLS):
                torch.softmax(x, -1)

        def ruled(x: torch.Tensor = x) -> None:
            with nc.autocast(device, policy=policy):
                for _ in range(CALLS):
                    torch.softmax(x, -1)

        a, b, _ = interleaved(alone, ruled, rounds=15)
        yield {
            "case": f"softmax of {format_name}",
            "a": f"alone {a / CALLS * 1e6:.2f} us",
            "b": f"under a rule {b / CALLS * 1e6:.2f} us",
            # Microseconds, unlike the others: what a rule adds does not grow with the operator.
            "ratio": (b - a) / CALLS * 1e6,
            "limit": 8.0,
        }

    def theirs() -> None:
        for _ in range(CALLS):
            with torch.autocast(device, torch.bfloat16):
                pass

    def ours() -> None:
        for _ in range(CALLS):
            with nc.autocast(device, policy=policy):
                pass

    a, b, ratio = interleaved(theirs, ours, rounds=15)
    yield {
        "case": "an empty region with a rule",
        "a": f"torch {a / CALLS * 1e6:.2f} us",
        "b": f"narrowcast {b / CALLS * 1e6:.2f} us",
        "ratio": ratio,
        "limit": 3.0,
    }
