"""apex's lists of functions, to be edited before ``amp.initialize``."""

from narrowcast.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
