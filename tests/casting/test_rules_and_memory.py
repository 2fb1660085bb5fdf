"""What a rule's output format saves: norms that compute wide and hand on narrow keep fewer bytes."""

import torch
from torch import nn

import narrowcast as nc

rule = nc.rule


def saved_bytes(model, x):
    """Bytes of the storages that autograd keeps for the backward pass, each once, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    total = sum(size for size, _ in kept.values())
    out.float().sum().backward()
    return total, out


def test_a_layer_norm_that_hands_on_bf16_saves_fewer_bytes():
    torch.manual_seed(0)
    width, rows = 64, 128
    parts = [part for _ in range(3) for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    model = nn.Sequential(*parts)
    x = torch.randn(rows, width)
    as_cuda = nc.Policy(compute="bf16", tables="cuda")
    by_rule = as_cuda.with_rules(rule.module_type(nn.LayerNorm, compute="fp32", output="bf16"))
    with nc.apply(model, as_cuda):
        before, plain = saved_bytes(model, x)
    with nc.apply(model, by_rule):
        after, ruled = saved_bytes(model, x)
    # Each GELU keeps what its norm handed on, in 2 bytes a number instead of 4; the next layer's cast of what
    # the GELU handed on is no other tensor any more, which is kept either way.
    assert before - after == 3 * x.numel() * 2
    # Three layers of numbers below 4, a rounding of 2**-9 more in each.
    assert torch.allclose(ruled.float(), plain.float(), atol=3 * 4 * 2.0**-8)
