"""Private names of torch that attach/ uses, where a behaviour test would not point at the name that moved.

The numbers of nested passes and of threads, and ``torch.func``, are in test_reach and test_hard_scripts.
"""

import torch

from narrowcast.attach import _torch_internals as internals


def test_a_hook_registered_first_runs_first():
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


def test_torch_wraps_steps_where_it_did():
    """``profile_hook_step`` makes the wrapper, ``hooked`` on the class's step says that it is there."""

    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    assert not hasattr(Mine.step, "hooked")
    Mine([torch.ones(1, requires_grad=True)], 0.1)
    assert Mine.step.hooked
    assert isinstance(vars(torch.optim.Optimizer)["profile_hook_step"], staticmethod)
