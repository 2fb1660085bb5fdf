"""The private names of torch that apex/ uses: this fails loudly when one moves or changes its meaning."""

import torch

from narrowcast.apex import _torch_internals as internals


def test_a_part_of_another_tensor_is_known_as_a_view():
    whole = torch.zeros(4)
    assert internals.is_view(whole[:2])
    assert internals.is_view(whole.view(2, 2))
    assert not internals.is_view(whole)
    assert not internals.is_view(whole.clone())


def test_terms_are_added_in_place():
    targets = [torch.ones(2), torch.ones(1, dtype=torch.float16)]
    internals.add_all(targets, [torch.full((2,), 2.0), torch.tensor([3.0], dtype=torch.float16)])
    assert [target.tolist() for target in targets] == [[3.0, 3.0], [4.0]]
    internals.add_all([], [])


def test_a_version_counts_writes_in_place():
    tensor = torch.zeros(2)
    before = internals.version_of(tensor)
    tensor.add_(1)
    assert internals.version_of(tensor) == before + 1
