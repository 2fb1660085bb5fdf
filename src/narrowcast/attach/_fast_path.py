"""The fast path of ``nn.TransformerEncoder`` in evaluation: turned off, while zeros in padding are kept.

Its fused layers compute in fp32 inside a region too, and raise where two formats meet. But the fast path also
changes results: the encoder removes padding before the layers, and fills it with zeros after them.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.attach._run import AttachedRun, Call, Patches

_DEVICES = ("cpu", "cuda", "xpu")


class FastPath:
    """Turn torch's fast path off while regions are opened, and write the zeros that it would write."""

    def __init__(self, run: AttachedRun) -> None:
        self._recorder = run.recorder
        self._is_off = False

    def install(self, patches: Patches) -> None:
        original, replacement = nn.TransformerEncoder.forward, self._encoder_forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        # torch.jit.script finds the source through __wrapped__, but looks names up in the globals of the
        # function it is given: give it the original's.
        made = types.FunctionType(forward.__code__, original.__globals__, closure=forward.__closure__)
        patches.replace(nn.TransformerEncoder, "forward", functools.update_wrapper(made, original))

    def turn_off(self) -> None:
        """Turn the fast path off, unless the script has done so."""
        if torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(False)
            self._is_off = True

    def restore(self) -> None:
        """Turn it on again if ``turn_off`` turned it off."""
        if self._is_off:
            torch.backends.mha.set_fastpath_enabled(True)
            self._is_off = False

    def _encoder_forward(
        self,
        original: Call,
        encoder: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Any:
        # torch's forward takes no fast path inside autocast; like this, it asks about CUDA only. The script's
        # own autocast counts, and a region of narrowcast does not: in FP32 there would be none.
        left_in_autocast = self._recorder.left_alone is not None and torch.is_autocast_enabled()
        takes_fast_path = self._is_off and mask is None and not left_in_autocast
        if not (takes_fast_path and _packs(encoder, src, src_key_padding_mask)):
            return original(encoder, src, mask, src_key_padding_mask, is_causal)

        # As in torch's forward, with plain layers in place of fused ones on packed sequences. is_causal is
        # dropped: without a mask torch's fused layers ignore it, and plain ones raise.
        output = src
        for layer in encoder.layers:
            output = layer(output, src_key_padding_mask=src_key_padding_mask)
        assert src_key_padding_mask is not None
        padded = src_key_padding_mask.to(torch.bool)  # minus infinity too, in a mask of numbers
        output = output.masked_fill(padded.unsqueeze(-1), 0.0)
        if encoder.norm is not None:
            output = encoder.norm(output)
        return output


def _packs(encoder: Any, src: Tensor, padding: Tensor | None) -> bool:
    """Return whether ``encoder`` packs the sequences of ``src`` in FP32, by the conditions in its forward.

    Two conditions differ: this looks at all parameters of the first layer, and excludes privateuse1 devices.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/transformer.py
    first = encoder.layers[0]
    if padding is None or not getattr(encoder, "use_nested_tensor", False) or first.training:
        return False
    if src.dim() != 3 or src.is_nested or src.device.type not in _DEVICES:
        return False
    tensors = (src, *first.parameters())
    if torch.overrides.has_torch_function(tensors):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    if not getattr(encoder, "mask_check", True):
        return True
    return not torch.compiler.is_compiling() and _is_left_aligned(padding)


def _is_left_aligned(padding: Tensor) -> bool:
    """Return whether, in each row of a mask, every position after the first padded one is padded."""
    padded = padding.to(torch.bool)
    return bool((padded[:, 1:] >= padded[:, :-1]).all())
