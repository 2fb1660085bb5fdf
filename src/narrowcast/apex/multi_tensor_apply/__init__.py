"""apex's launcher of CUDA kernels, which says that it has none."""

from narrowcast.apex._multi_tensor import MultiTensorApply, multi_tensor_applier

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
