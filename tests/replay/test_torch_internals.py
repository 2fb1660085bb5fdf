"""The private names of torch that a replay uses."""

import pytest
import torch

from narrowcast.replay._torch_internals import (
    NO_GRAPH_TASK,
    TRACEBACK,
    current_node,
    graph_task_id,
    sequence_number,
    set_version,
)


def test_a_hook_sees_the_number_of_its_pass_and_the_node_that_runs():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.grad_fn.register_prehook(lambda gradients: seen.append((graph_task_id(), current_node())))
    assert graph_task_id() == NO_GRAPH_TASK
    y.sum().backward()
    ((number, _),) = seen
    assert number != NO_GRAPH_TASK


def test_an_operator_of_a_backward_pass_sees_its_node():
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            seen.append(current_node().name())
            return gradient

    x = torch.ones(2, requires_grad=True)
    Function.apply(x).sum().backward()
    assert seen == ["FunctionBackward"]


def test_nodes_are_numbered_in_the_order_in_which_they_are_made():
    first = torch.ones(2, requires_grad=True) * 2
    second = first * 2
    assert sequence_number(first.grad_fn) < sequence_number(second.grad_fn)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode_keeps_the_stack_of_a_node():
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        y = torch.ones(2, requires_grad=True) * 2
    assert __file__ in y.grad_fn.metadata[TRACEBACK][-1]


def test_a_saved_tensor_whose_version_is_put_back_goes_backward():
    x = torch.ones(2, requires_grad=True)
    saved = torch.ones(2)
    y = x * saved
    saved.mul_(2)
    set_version(saved, 0)
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
