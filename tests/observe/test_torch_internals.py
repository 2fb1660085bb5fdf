"""The private names of torch that observe/ uses: this fails loudly when one moves or changes its meaning."""

import torch

from narrowcast.observe import _torch_internals as internals


def test_a_backward_pass_has_a_number():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    seen = []
    y.register_hook(lambda _: seen.append(internals.graph_task_id()))
    assert internals.graph_task_id() == internals.NO_GRAPH_TASK
    y.sum().backward()
    assert seen[0] != internals.NO_GRAPH_TASK


def test_a_profiler_is_noticed():
    assert not internals.profiler_is_on()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert internals.profiler_is_on()


def test_what_waits_for_the_end_of_a_backward_pass_goes_in_the_order_asked():
    x = torch.ones(2, requires_grad=True)
    seen = []

    def ask(_):
        internals.at_the_end_of_backward(
            lambda: internals.at_the_end_of_backward(lambda: seen.append("last"))
        )
        internals.at_the_end_of_backward(lambda: seen.append(x.grad.tolist()))

    y = x * 3
    y.register_hook(ask)
    y.sum().backward()
    assert seen == [[3.0, 3.0], "last"]
