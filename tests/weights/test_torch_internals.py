"""The private names of torch that weights/ uses: this fails loudly when one moves or changes its meaning."""

import torch

from narrowcast.weights import _torch_internals as internals


def test_a_version_counts_writes_in_place():
    tensor = torch.zeros(2)
    before = internals.version_of(tensor)
    tensor.add_(1)
    torch._foreach_add_([tensor], 1.0)
    tensor[0] = 3
    assert internals.version_of(tensor) == before + 3
    tensor.data.add_(1)
    assert internals.version_of(tensor) == before + 3


def test_memory_is_held_by_each_tensor_view_and_graph():
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    weight = torch.ones(3, requires_grad=True)
    holders = [tensor, tensor[1:], (tensor[1:] * weight).sum()]
    del tensor
    while holders:
        assert internals.is_held_elsewhere(storage)
        holders.pop(0)
    assert not internals.is_held_elsewhere(storage)


class Outer(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        if self.raises:
            raise KeyError


def test_the_outermost_step_is_known_after_one_that_raised_too():
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    optimizer = Outer([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    seen = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda o, a, k: seen.append(internals.is_outermost_step(o)))
    for raises in (True, False):
        optimizer.raises = raises
        seen.clear()
        try:
            optimizer.step()
        except KeyError as error:
            kept = error  # and with it the frames of the step
        assert seen == [True, False, False] + ([] if raises else [True])
    assert kept is not None


def test_an_optimizer_inside_another_is_outermost():
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    outer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    seen = []
    inner.register_step_pre_hook(lambda o, a, k: seen.append(internals.is_outermost_step(o)))
    outer.step(inner.step)
    assert seen == [True]


def test_the_step_without_hooks_calls_none_and_does_the_rest():
    for kind in (torch.optim.SGD, Outer):
        optimizer = kind([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        optimizer.raises = False
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = torch.ones(1)
        called = []
        if kind is torch.optim.SGD:
            optimizer.register_step_pre_hook(lambda *_, seen=called: seen.append("pre"))
        internals.step_without_hooks(optimizer)(optimizer)
        assert called == []
        assert parameter.item() == 0.5
