"""The private names of torch that weights/ uses: this fails loudly when one moves or changes its meaning."""

import torch

from narrowcast.weights import _torch_internals as internals


def test_copies_round_and_sums_keep_the_format_of_the_target():
    low = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float16)]
    internals.copy_all(low, [torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8]), torch.tensor([1e6])])
    assert low[0].tolist() == [1.0, 1.0 + 2.0**-6]
    assert low[1].item() == float("inf")
    wide = [torch.tensor([1.0])]
    internals.add_all(wide, [torch.tensor([2.0**-16], dtype=torch.bfloat16)])
    assert wide[0].item() == 1.0 + 2.0**-16
    internals.copy_all([], [])
    internals.add_all([], [])


def test_a_version_counts_writes_in_place():
    tensor = torch.zeros(2)
    before = internals.version_of(tensor)
    tensor.add_(1)
    torch._foreach_add_([tensor], 1.0)
    tensor[0] = 3
    assert internals.version_of(tensor) == before + 3
    tensor.data.add_(1)
    assert internals.version_of(tensor) == before + 3


def test_memory_is_held_by_each_tensor_that_has_it():
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    assert internals.is_held_elsewhere(storage)
    view = tensor[1:]
    del tensor
    assert internals.is_held_elsewhere(storage)
    weight = torch.ones(3, requires_grad=True)
    graph = (view * weight).sum()
    del view
    assert internals.is_held_elsewhere(storage)
    del graph
    assert not internals.is_held_elsewhere(storage)
    again = torch.empty(0).set_(storage, 0, (4,), (1,))
    assert internals.is_held_elsewhere(storage)
    del again
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


def test_every_table_of_hooks_is_known():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    tables = {name for name in vars(optimizer) if internals.is_hook_table(name)}
    for name in ("step_pre", "step_post", "state_dict_pre", "load_state_dict_post"):
        assert f"_optimizer_{name}_hooks" in tables


def test_a_plain_tensor_is_its_own_local_part():
    tensor = torch.nn.Parameter(torch.ones(2))
    assert internals.local(tensor) is tensor
