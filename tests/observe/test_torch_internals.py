"""The private names of torch that observe/ uses: this fails loudly when one moves or changes its meaning."""

import torch

from narrowcast.observe import _torch_internals as internals


def test_nodes_of_a_graph_are_numbered_in_the_order_in_which_they_are_made():
    x = torch.ones(2, requires_grad=True)
    before = internals.next_node_number()
    y = x * 2
    between = internals.next_node_number()
    z = y + 1
    assert before <= y.grad_fn._sequence_nr() < between <= z.grad_fn._sequence_nr()


def test_backward_knows_its_node_and_its_number():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    seen = []
    y.register_hook(lambda _: seen.append((internals.graph_task_id(), internals.backward_node())))
    assert (internals.graph_task_id(), internals.backward_node()) == (internals.NO_GRAPH_TASK, None)
    (y * 3).sum().backward()
    ((task, node),) = seen
    assert task != internals.NO_GRAPH_TASK
    assert node._sequence_nr() == y.grad_fn._sequence_nr()


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
