"""What ``_model_state`` reads of tensors. Tests of ``certify`` and of probes check that it restores them."""

import torch

from narrowcast.verify.runs._model_state import some_values


class _WithoutFloat64(torch.Tensor):
    """A tensor on a device without float64, as MPS."""

    def double(self):
        raise TypeError("this device has no float64")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_values_are_read_from_a_device_without_float64():
    tensor = torch.tensor([1.0, 2.5]).as_subclass(_WithoutFloat64)
    assert some_values(tensor) == [[1.0, 2.5]]
