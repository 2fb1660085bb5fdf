"""The lists of functions that O1 casts. Edit them before ``amp.initialize``.

FP16_FUNCS run in half, FP32_FUNCS in float32, CASTS and SEQUENCE_CASTS in the widest type among their inputs,
and BANNED_FUNCS refuse half tensors. An entry is the name of a function of the list's ``MODULE``.
"""

from narrowcast.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
