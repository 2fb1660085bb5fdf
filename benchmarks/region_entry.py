"""Entering and leaving a region: nc.autocast against torch.autocast."""

from collections.abc import Iterator

import torch

import narrowcast as nc
from interleaved import interleaved

ENTRIES = 5000


def region_entry(device: str) -> Iterator[dict[str, object]]:
    """nc.autocast over torch.autocast, an empty region made and entered each time; with a rule at most 3."""
    with_rule = nc.Policy(compute="bf16").with_rules(nc.rule.op("softmax", compute="fp16"))

    def theirs() -> None:
        for _ in range(ENTRIES):
            with torch.autocast(device, torch.bfloat16):
                pass

    def ours() -> None:
        for _ in range(ENTRIES):
            with nc.autocast(device, torch.bfloat16):
                pass

    def ours_with_rule() -> None:
        for _ in range(ENTRIES):
            with nc.autocast(device, policy=with_rule):
                pass

    cases = (("an empty region", ours, None), ("an empty region with a rule", ours_with_rule, 3.0))
    for case, region, limit in cases:
        torchs, narrowcasts, ratio = interleaved(theirs, region, rounds=15)
        yield {
            "case": case,
            "a": f"torch {torchs / ENTRIES * 1e6:.2f} us",
            "b": f"narrowcast {narrowcasts / ENTRIES * 1e6:.2f} us",
            "ratio": ratio,
            "limit": limit,
        }
