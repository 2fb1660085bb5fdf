"""The private names of torch that attach/ uses: this fails loudly when one moves or changes its meaning."""

import threading

import torch

from narrowcast.attach import _torch_internals as internals


def test_each_pass_of_the_engine_has_its_own_number():
    seen = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            outer = internals.graph_task_id()
            leaf = torch.ones(1, requires_grad=True)
            leaf.register_hook(lambda g: seen.append((outer, internals.graph_task_id())))
            with torch.enable_grad():
                (leaf * 3).backward()
            assert internals.graph_task_id() == outer
            return gradient * 2

    assert internals.graph_task_id() == internals.NO_GRAPH_TASK
    for _ in range(2):
        Nested.apply(torch.ones(1, requires_grad=True)).backward()
    assert len({number for pair in seen for number in pair}) == 4
    assert internals.NO_GRAPH_TASK not in {number for pair in seen for number in pair}
    other = []
    thread = threading.Thread(target=lambda: other.append(internals.graph_task_id()))
    thread.start()
    thread.join()
    assert other == [internals.NO_GRAPH_TASK]


def test_a_prehook_of_the_root_runs_before_hooks_of_leaves():
    order = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda g: order.append("leaf"))
    loss = (leaf * 2).sum()
    loss.grad_fn.register_prehook(lambda g: order.append("root"))
    loss.backward()
    assert order == ["root", "leaf"]


def test_a_hook_registered_first_runs_first_and_handles_keep_working():
    leaf, order = torch.ones(1, requires_grad=True), []
    early = leaf.register_hook(lambda g: order.append("early"))
    leaf.register_hook(lambda g: order.append("late"))
    internals.register_hook_first(leaf, lambda g: order.append("first"))
    (leaf * 2).backward()
    assert order == ["first", "early", "late"]
    early.remove()
    order.clear()
    (leaf * 2).backward()
    assert order == ["first", "late"]


def test_functorch_tensors_are_told_apart():
    seen = []
    torch.func.grad(lambda x: seen.append(internals.is_functorch_wrapped(x)) or x.sum())(torch.ones(2))
    assert seen == [True]
    assert not internals.is_functorch_wrapped(torch.ones(2))


def test_torch_wraps_steps_where_it_did():
    """``profile_hook_step`` makes the wrapper, ``hooked`` on the class's step says that it is there."""

    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    assert not hasattr(Mine.step, "hooked")
    Mine([torch.ones(1, requires_grad=True)], 0.1)
    assert Mine.step.hooked
    assert isinstance(vars(torch.optim.Optimizer)["profile_hook_step"], staticmethod)


def test_module_calls_and_backward_go_by_the_names_that_are_replaced(monkeypatch):
    calls = []
    original = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd, "backward", lambda *a, **k: calls.append("backward") or original(*a, **k)
    )
    torch.ones(1, requires_grad=True).mul(2).backward()
    call = torch.nn.Module.__call__
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *a, **k: calls.append("call") or call(*a, **k))
    torch.nn.Identity()(torch.ones(1))
    assert calls == ["backward", "call"]
