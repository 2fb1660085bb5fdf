"""apex's launcher of its own CUDA kernels, which scripts import and then ask whether it is there."""

from __future__ import annotations

from typing import Any

from narrowcast.errors import UnsupportedError

_CHUNK_SIZE = 2048 * 32


class MultiTensorApply:
    """As where apex was built without CUDA extensions: ``available`` is False, and calls are refused.

    Args:
        chunk_size: elements of a tensor that one block of threads took; without effect.

    Source: apex ``multi_tensor_apply/multi_tensor_apply.py``.
    """

    available = False
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "apex's kernels for many tensors at once (amp_C) are not there: ask "
            "multi_tensor_applier.available first, or use torch's optimizers with fused=True and "
            "torch.nn.utils.clip_grad_norm_, which take many tensors at once by themselves"
        )

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        """As ``check_avail``."""
        self.check_avail()


multi_tensor_applier = MultiTensorApply(_CHUNK_SIZE)
"""The one that scripts of apex ask: ``multi_tensor_applier.available`` is False."""
