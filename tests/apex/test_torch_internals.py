"""The private names of torch that apex/ uses: this fails loudly when one moves or changes its meaning."""

import torch

from narrowcast.apex import _torch_internals as internals


def test_a_part_of_another_tensor_is_known_as_a_view():
    whole = torch.zeros(4)
    assert internals.is_view(whole[:2])
    assert internals.is_view(whole.view(2, 2))
    assert not internals.is_view(whole)
    assert not internals.is_view(whole.clone())


def test_a_version_counts_writes_in_place():
    tensor = torch.zeros(2)
    before = internals.version_of(tensor)
    tensor.add_(1)
    assert internals.version_of(tensor) == before + 1
